"""``dcgnn train``: train on one graph over seeds and splits."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from dcgnn.checkpoint import CheckpointError, atomic_write, check_writable, load_checkpoint
from dcgnn.cli import options
from dcgnn.cli.checks import find_device
from dcgnn.cli.graphs import describe_graphs
from dcgnn.cli.info import environment
from dcgnn.data import DATA_ROOT_VARIABLE, load_graph, num_splits
from dcgnn.distributed import launch
from dcgnn.distributed.launch import DEFAULT_TIMEOUT, MAX_TIMEOUT, RankLost, Ranks, process_group
from dcgnn.engines import BatchConfig, GraphShare
from dcgnn.partition import METHODS
from dcgnn.presets import load_preset, recipe_for
from dcgnn.recipe import MODELS, build_model
from dcgnn.training import TrainingInterrupted, TrainResult, train

#: More than that is a slip of the finger, and would not fit into memory.
_MOST_SPLITS = 100_000

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "train",
        help="train DC-GNN, or a model to compare it with, on a graph",
        description="Train DC-GNN, or a model to compare it with, for node classification on one graph.",
        epilog=describe_graphs().replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("graph", metavar="GRAPH", help="graph to train on, see below")
    parser.add_argument(
        "--data-root",
        metavar="DIR",
        help=f"folder of the raw files (default: {DATA_ROOT_VARIABLE})",
    )
    parser.add_argument(
        "--model", choices=MODELS, default="dcgnn", help="which model to train (default: %(default)s)"
    )
    parser.add_argument(
        "--preset",
        nargs="?",
        const="",
        metavar="NAME",
        help="settings found for this graph (else those for any), or for the named one, or a file (.json); "
        "options given win",
    )
    parser.add_argument("--split", default="0", metavar="SPLITS", help="0, 0-9, 0,3,5 or all (default: 0)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed (default: 0)")
    parser.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="run N seeds, from --seed on (default: 1)"
    )
    parser.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)"
    )
    parser.add_argument(
        "--dtype",
        choices=list(_DTYPES),
        default="float32",
        help="numbers to compute in; float64 is slower and shows that runs are equal (default: float32)",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="FILE",
        help="file for checkpoints; without it one is written to "
        "the current folder when training is interrupted",
    )
    parser.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="N",
        help="write it every N epochs and at the end (default: 50 with --checkpoint)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--json", metavar="FILE", help="write results as JSON; -: to stdout")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, results only")
    _add_scaling_options(parser.add_argument_group("scaling", "for large graphs; see docs/scaling.md"))
    options.add_train_options(parser.add_argument_group("training"))
    options.add_model_options(parser.add_argument_group("model", "the skeleton's serve the baselines, too"))
    options.add_baseline_options(parser.add_argument_group("baselines"))
    parser.set_defaults(run=run)


def _add_scaling_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--loader",
        choices=["neighbor"],
        help="train on mini-batches of sampled neighbourhoods; under torchrun by data parallelism",
    )
    group.add_argument(
        "--num-neighbors",
        type=_numbers,
        metavar="N,N,...",
        help="neighbours to sample, one number for each hop; all: --num-neighbors=-1,-1 (default: 10,10)",
    )
    group.add_argument(
        "--batch-size", type=int, metavar="N", help="training nodes of a batch (default: 1024)"
    )
    group.add_argument(
        "--partition",
        nargs="?",
        const="auto",
        choices=METHODS,
        help="under torchrun: spread the graph over the ranks, cut by METIS where pymetis is installed, "
        "else in ranges",
    )
    group.add_argument(
        "--rank-timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="SECONDS",
        help=f"under torchrun: a rank that is not heard of for so long is lost (default: {DEFAULT_TIMEOUT})",
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def run(arguments: argparse.Namespace) -> None:
    """Train every split and seed that was asked for, and report."""
    preset = None
    if arguments.preset is not None:
        find = load_preset if arguments.preset else recipe_for
        preset = find(arguments.preset or arguments.graph, arguments.model)
    options.fill(arguments, preset)
    if arguments.model != "dcgnn":
        for name in ("loader", "partition", "ortho_weight", "sim_weight", "objective_every"):
            if getattr(arguments, name):
                raise ValueError(f"--{name.replace('_', '-')} is for dcgnn, not for {arguments.model}")
    for name in ("num_neighbors", "batch_size"):
        if getattr(arguments, name) is not None and not arguments.loader:
            raise ValueError(f"--{name.replace('_', '-')} is for mini-batches: add --loader neighbor")
    ranks = Ranks.of_environment()
    if arguments.partition and arguments.loader:
        raise ValueError("--partition trains on the whole graph: it cannot be joined with --loader")
    if arguments.partition and not ranks.launched:
        raise ValueError("--partition needs several ranks: torchrun --nproc-per-node 2 -m dcgnn train ...")
    if ranks.world > 1 and not (arguments.partition or arguments.loader):
        raise ValueError("with several ranks choose --loader neighbor (data parallel) or --partition")
    device = find_device(arguments.device)
    if ranks.launched and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", ranks.local_rank)
    if not 0 < arguments.rank_timeout <= MAX_TIMEOUT:
        raise ValueError(
            f"--rank-timeout must be positive and at most {MAX_TIMEOUT}, got {arguments.rank_timeout:g}"
        )
    splits = parse_splits(arguments.split, num_splits(arguments.graph))
    if arguments.seeds < 1:
        raise ValueError(f"--seeds must be positive, got {arguments.seeds}")
    seeds = range(arguments.seed, arguments.seed + arguments.seeds)
    paths = _checkpoint_paths(arguments, [(split, seed) for split in splits for seed in seeds])
    job: frozenset[str] = frozenset()
    try:
        with process_group(ranks, device, arguments.rank_timeout) as job:
            _run(arguments, ranks, device, paths, job)
    except RankLost as lost:
        raise RankLost(f"{lost}{_what_is_left(arguments, ranks, paths, job)}") from lost


def _run(
    arguments: argparse.Namespace,
    ranks: Ranks,
    device: torch.device,
    paths: dict[tuple[int, int], Path],
    job: frozenset[str],
) -> None:
    every = arguments.checkpoint_every
    if every is None:
        every = 50 if arguments.checkpoint else 0
    if every < 0:
        raise ValueError(f"--checkpoint-every must not be negative, got {every}")
    # Rank 0 alone reads and writes files.
    find = functools.partial(_check_files, arguments, ranks, paths, job, writes=bool(every))
    resumable = launch.from_rank_zero(find, device)

    # With JSON on stdout, what is meant for people goes to stderr.
    out = sys.stderr if arguments.json == "-" else sys.stdout
    results: list[TrainResult] = []
    for split, seed in paths:
        result, model_options = _train_one(
            arguments,
            split=split,
            seed=seed,
            device=device,
            checkpoint=paths[split, seed],
            checkpoint_every=every,
            resume=(split, seed) in resumable,
            job=job,
        )
        results.append(result)
        if not ranks.is_main:
            continue
        print(_summary(result), file=out, flush=True)
        if arguments.json not in (None, "-"):
            # After every run: an interrupt keeps those that are done.
            _write_json(arguments.json, _report(arguments, model_options, results))
    if not ranks.is_main:
        return
    if len(results) > 1:
        mean, deviation = _mean_and_deviation(results)
        print(
            f"{results[0].graph}: test {results[0].metric} "
            f"{100 * mean:.2f} ± {100 * deviation:.2f} over {len(results)} runs",
            file=out,
        )
    if arguments.json == "-":
        _write_json(arguments.json, _report(arguments, model_options, results))


def _check_files(
    arguments: argparse.Namespace,
    ranks: Ranks,
    paths: dict[tuple[int, int], Path],
    job: frozenset[str],
    writes: bool,
) -> set[tuple[int, int]]:
    """The runs that go on from a checkpoint. Files that are to be written can be."""
    if arguments.json not in (None, "-"):
        check_writable(Path(arguments.json))
    first = next(iter(paths.values()))
    if arguments.resume:
        resumable = {run for run, path in paths.items() if path.is_file()}
        if not resumable:
            raise CheckpointError(f"no checkpoint at {first}: nothing to resume")
    else:
        # torchrun starts lost ranks anew: they go on from what this job has saved, never from another job's.
        resumable = {run for run, path in paths.items() if _epoch_of(path, job) is not None}
        if ranks.restarts or resumable:
            _tell_of_restart(arguments, [path for run, path in paths.items() if run in resumable])
    if arguments.checkpoint or writes:
        check_writable(first)
    return resumable


def parse_splits(text: str, available: int, option: str = "--split") -> list[int]:
    """Split indices from ``"3"``, ``"0-9"``, ``"0,2,5-7"`` or ``"all"``; ``option`` is named in errors."""
    if text.strip().lower() == "all":
        return list(range(available))
    splits: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise ValueError(f"{option} wants 0, 0-9, 0,3,5 or all, got {text!r}")
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if last < first:
            raise ValueError(f"{option}: the range {part.strip()} is empty")
        if last - first >= _MOST_SPLITS:
            raise ValueError(f"{option}: the range {part.strip()} has more than {_MOST_SPLITS} numbers")
        splits.extend(range(first, last + 1))
    return list(dict.fromkeys(splits))


def _train_one(
    arguments: argparse.Namespace,
    *,
    split: int,
    seed: int,
    device: torch.device,
    checkpoint: Path,
    checkpoint_every: int,
    resume: bool,
    job: frozenset[str],
) -> tuple[TrainResult, dict[str, Any]]:
    dtype = _DTYPES[arguments.dtype]
    data = load_graph(arguments.graph, data_root=arguments.data_root, split=split)
    data = dataclasses.replace(data, x=data.x.to(dtype))
    config = options.train_config(arguments, seed)
    model_options = options.model_options(arguments)
    torch.manual_seed(seed)
    model = build_model(
        model_options,
        arguments.model,
        channels=data.num_features,
        classes=data.num_classes,
        nodes=data.num_nodes,
    ).to(device, dtype)
    if arguments.model == "dcgnn":
        model_options["num_global"] = model.message_passing.num_global
    else:
        model_options["model"] = arguments.model  # the class alone does not tell GCN from GAT
    batches = None
    if arguments.loader:
        given = {name: getattr(arguments, name) for name in ("num_neighbors", "batch_size")}
        batches = BatchConfig(**{name: value for name, value in given.items() if value is not None})
    problem: Any = GraphShare.of(data, arguments.partition) if arguments.partition else data
    del data  # of a partitioned graph this rank keeps its share
    before = _modified(checkpoint)
    try:
        result = train(
            model,
            problem,
            config,
            batches=batches,
            model_options=model_options,
            checkpoint=checkpoint,
            checkpoint_every=checkpoint_every,
            resume=resume,
            job=job,
            progress=not arguments.quiet,
        )
        return result, model_options
    except TrainingInterrupted as interrupt:
        raise KeyboardInterrupt(
            f"interrupted after epoch {interrupt.epoch}; checkpoint: {checkpoint} (continue with --resume)"
        ) from None
    except KeyboardInterrupt:
        if launch.rank() > 0:
            raise  # rank 0 knows what it has written
        if _modified(checkpoint) in (None, before) and not resume:
            raise KeyboardInterrupt("interrupted; no checkpoint was written") from None
        raise KeyboardInterrupt(f"interrupted; checkpoint: {checkpoint} (continue with --resume)") from None


def _epoch_of(path: Path, job: frozenset[str]) -> int | None:
    """The epoch of the checkpoint at ``path`` if this job wrote it."""
    try:
        saved = load_checkpoint(path) if job else {}
    except CheckpointError:
        return None
    return int(saved["epoch"]) if job.intersection(saved.get("job", ())) else None


def _tell_of_restart(arguments: argparse.Namespace, found: list[Path]) -> None:
    if found:
        then = f"goes on from {found[-1]}"
    elif arguments.checkpoint or arguments.checkpoint_every:
        then = "begins anew, nothing was saved before"
    else:
        then = "begins anew (--checkpoint FILE keeps what is done)"
    print(f"dcgnn: restarted by torchrun: {then}", file=sys.stderr, flush=True)


def _what_is_left(
    arguments: argparse.Namespace, ranks: Ranks, paths: dict[tuple[int, int], Path], job: frozenset[str]
) -> str:
    """After a rank was lost: the checkpoint of the last run that has one."""
    for path in reversed(paths.values()):
        epoch = _epoch_of(path, job)
        if epoch is not None:
            how = "continue with --resume, or start with torchrun --max-restarts"
            return f"; {path} holds epoch {epoch}: {how}"
    if not ranks.is_main:
        return ""  # another machine's files may lie elsewhere
    return "; no checkpoint was written" + ("" if arguments.checkpoint else " (--checkpoint FILE)")


def _modified(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.is_file() else None


def _checkpoint_paths(
    arguments: argparse.Namespace, runs: list[tuple[int, int]]
) -> dict[tuple[int, int], Path]:
    """One file for each run; several runs get the split and the seed into the name."""
    if arguments.checkpoint and len(runs) == 1:
        return {runs[0]: Path(arguments.checkpoint)}
    if arguments.checkpoint:
        base = Path(arguments.checkpoint)
    else:
        base = Path(f"{arguments.model}-" + re.sub(r"[^\w.=,-]+", "-", arguments.graph) + ".pt")
    return {
        (split, seed): base.with_name(f"{base.stem}-split{split}-seed{seed}{base.suffix}")
        for split, seed in runs
    }


def _summary(result: TrainResult) -> str:
    stopped = ", stopped early" if result.stopped_early else ""
    return (
        f"{result.graph}, split {result.split}, seed {result.seed}: "
        f"test {result.metric} {100 * result.test_metric:.2f} "
        f"(validation {100 * result.val_metric:.2f}, best epoch {result.best_epoch} of "
        f"{result.epochs}{stopped}; {1000 * result.seconds_per_epoch:.1f} ms per epoch)"
    )


def _mean_and_deviation(results: list[TrainResult]) -> tuple[float, float]:
    scores = [result.test_metric for result in results]
    return statistics.fmean(scores), statistics.stdev(scores) if len(scores) > 1 else 0.0


def _report(
    arguments: argparse.Namespace, model_options: dict[str, Any], results: list[TrainResult]
) -> dict[str, Any]:
    mean, deviation = _mean_and_deviation(results)
    return {
        "graph": results[0].graph,
        "metric": results[0].metric,
        "test_mean": mean,
        "test_std": deviation,
        "runs": [result.to_dict() for result in results],
        "model": model_options,
        "dtype": arguments.dtype,
        "training": {name: getattr(arguments, name) for name in options.train_option_names()},
        "environment": environment(),
    }


def _write_json(target: str, report: dict[str, Any]) -> None:
    text = json.dumps(report, indent=2, allow_nan=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    atomic_write(target, lambda file: file.write(text.encode()))
