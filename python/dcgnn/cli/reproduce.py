"""``dcgnn reproduce``: the paper's tables and figures."""

from __future__ import annotations

import argparse
from pathlib import Path

from dcgnn.allocator import keep_freed_memory
from dcgnn.cli.info import environment
from dcgnn.cli.table import format_table
from dcgnn.cli.train import parse_splits
from dcgnn.data import DATA_ROOT_VARIABLE
from dcgnn.reproduce import EXPERIMENTS, Context, covered_by, experiment_of, reproduce, state_of


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "reproduce",
        help="make a table or figure of the paper",
        description="Make a table or figure of the paper (arXiv 2405.16185) and compare it with the "
        "printed one. Every run is kept: the same command continues after an interruption.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="table or figure, see --list")
    parser.add_argument("--list", action="store_true", help="list all of them and their state")
    parser.add_argument(
        "--data-root", metavar="DIR", help=f"folder of the raw files (default: {DATA_ROOT_VARIABLE})"
    )
    parser.add_argument(
        "--datasets", metavar="NAMES", help="graphs, separated by commas (default: all there)"
    )
    parser.add_argument("--models", metavar="NAMES", help="models, separated by commas (default: all)")
    parser.add_argument("--split", metavar="SPLITS", help="0-2, 0-9, 0,3,5 (default: 0-2)")
    parser.add_argument(
        "--depths", metavar="DEPTHS", help="depths of tree-neighborsmatch: 2-5, 2,4 (default: 2-6)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed (default: 0)")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="seeds for every split of classification (default: 1)"
    )
    parser.add_argument("--epochs", type=int, metavar="N", help="most epochs (default: the presets')")
    parser.add_argument(
        "--out", default="reproduction", metavar="DIR", help="folder of the results (default: %(default)s)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """List, or make one table or figure."""
    context = Context(
        out=Path(arguments.out),
        data_root=arguments.data_root,
        datasets=_names(arguments.datasets),
        models=_names(arguments.models),
        splits=parse_splits(arguments.split or "0-2", 10),
        depths=_depths(arguments.depths),
        seed=arguments.seed,
        seeds=1 if arguments.seeds is None else arguments.seeds,
        epochs=arguments.epochs,
        progress=not arguments.quiet,
    )
    if arguments.list:
        rows = [[entry.name, entry.title, state_of(entry, context)] for entry in EXPERIMENTS.values()]
        print(format_table(["name", "what", "state"], rows))
        return
    if arguments.name is None:
        raise ValueError(f"NAME is wanted: {', '.join(EXPERIMENTS)}; or --list")
    experiment = experiment_of(arguments.name)
    takes = experiment.takes
    if context.seeds < 1:
        raise ValueError(f"--seeds must be positive, got {context.seeds}")
    if context.epochs is not None and context.epochs < 1:
        raise ValueError(f"--epochs must be positive, got {context.epochs}")
    for option in ("datasets", "models", "split", "seeds", "depths", "epochs"):
        if getattr(arguments, option) is not None and option not in takes:
            raise ValueError(f"--{option}: {arguments.name} does not take it")
    keep_freed_memory()
    before = covered_by(experiment, context)
    outcome = reproduce(arguments.name, context, environment())
    print(format_table(outcome.header, outcome.rows))
    for note in outcome.notes:
        print(note)
    for subject, verdict in outcome.verdicts.items():
        print(f"{subject}: {verdict}")
    folder = context.out / arguments.name
    if before and before != covered_by(experiment, context):
        print(f"This replaces the result for {before}; its runs are kept, its command makes it again")
    print(f"results: {folder / 'result.json'}, {folder / 'figure.png'}")


def _depths(text: str | None) -> list[int] | None:
    if text is None or text.strip().lower() == "all":
        return None
    return parse_splits(text, 0, "--depths")


def _names(text: str | None) -> list[str] | None:
    if text is None:
        return None
    return [name.strip().lower() for name in text.split(",") if name.strip()]
