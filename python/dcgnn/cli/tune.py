"""``dcgnn tune``: search for settings on the validation metric."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from dcgnn.allocator import keep_freed_memory
from dcgnn.cli.train import parse_splits
from dcgnn.data import DATA_ROOT_VARIABLE, load_graph, num_splits
from dcgnn.presets import preset_to_write, save_preset
from dcgnn.recipe import MODELS
from dcgnn.tuning import SEED, Budget, tune


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    defaults = Budget()
    parser = commands.add_parser(
        "tune",
        help="search for settings of a model on a graph",
        description="Search for the settings with the best mean validation metric over some splits. The test "
        "nodes are not looked at. For a fair comparison give every model the same limits.",
    )
    parser.add_argument("graph", metavar="GRAPH", help="graph to train on, see dcgnn graphs")
    parser.add_argument("--model", default="dcgnn", help=f"one of {', '.join(MODELS)} (default: dcgnn)")
    parser.add_argument(
        "--data-root", metavar="DIR", help=f"folder of the raw files (default: {DATA_ROOT_VARIABLE})"
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=40,
        metavar="N",
        help="trials in all; of several processes on one storage each ends the trial it is in (default: 40)",
    )
    parser.add_argument("--minutes", type=float, metavar="X", help="begin no trial after this time")
    parser.add_argument("--split", default="0-2", metavar="SPLITS", help="splits to train (default: 0-2)")
    parser.add_argument(
        "--finalists",
        type=int,
        default=5,
        metavar="N",
        help="the best N trials are trained again with two other seeds, the best mean wins (default: 5)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=SEED,
        metavar="N",
        help="first seed of the search (default: %(default)s, which no table reports)",
    )
    parser.add_argument(
        "--epochs", type=int, default=defaults.epochs, metavar="N", help="most epochs (default: %(default)s)"
    )
    parser.add_argument(
        "--patience",
        type=int,
        default=defaults.patience,
        metavar="N",
        help="epochs without a better validation metric before a run stops (default: %(default)s)",
    )
    parser.add_argument(
        "--max-layers",
        type=int,
        default=defaults.max_layers,
        metavar="N",
        help="most layers (default: %(default)s)",
    )
    parser.add_argument(
        "--max-channels",
        type=int,
        default=defaults.max_channels,
        metavar="N",
        help="most hidden channels (default: %(default)s)",
    )
    parser.add_argument(
        "--storage",
        metavar="FILE",
        help="journal of the trials; a search continues there (default: dcgnn-tune-GRAPH-MODEL.log)",
    )
    parser.add_argument("--write", metavar="FILE", help="put the settings into this preset file (JSON)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Search, then print the settings and write them where asked."""
    if arguments.model not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, got {arguments.model!r}")
    if arguments.minutes is not None and not arguments.minutes > 0:
        raise ValueError(f"--minutes must be positive, got {arguments.minutes:g}")
    if arguments.seed < 0:
        raise ValueError(f"--seed must not be negative, got {arguments.seed}")
    indices = parse_splits(arguments.split, num_splits(arguments.graph))
    splits = [load_graph(arguments.graph, data_root=arguments.data_root, split=index) for index in indices]
    name = splits[0].name
    if arguments.write:
        preset_to_write(arguments.write, name)  # a mistake shows before the search, not after it
    default = f"dcgnn-tune-{re.sub(r'[^a-z0-9.=,-]+', '-', name)}-{arguments.model}.log"
    storage = arguments.storage or default
    keep_freed_memory()
    found = tune(
        splits,
        arguments.model,
        trials=arguments.trials,
        budget=Budget(arguments.epochs, arguments.patience, arguments.max_layers, arguments.max_channels),
        storage=storage,
        seconds=None if arguments.minutes is None else 60 * arguments.minutes,
        seed=arguments.seed,
        finalists=arguments.finalists,
        progress=not arguments.quiet,
    )
    print(json.dumps(found.recipe.to_dict(), indent=2))
    seeds = ("seeds " if len(found.seeds) > 1 else "seed ") + ", ".join(map(str, found.seeds))
    print(
        f"{name}: validation {splits[0].metric} {100 * found.validation:.2f} over splits {arguments.split} "
        f"and {seeds}, best of {found.trials} trials "
        f"({found.pruned} given up early); journal: {storage}"
    )
    if arguments.write:
        facts = {
            "trials": found.trials,
            "splits": indices,
            "seeds": list(found.seeds),
            "validation": round(found.validation, 4),
        }
        save_preset(Path(arguments.write), name, found.recipe, facts)
        print(f"written to {arguments.write}")
