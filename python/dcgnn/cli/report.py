"""``dcgnn report``: a trained model on one page."""

from __future__ import annotations

import argparse
from pathlib import Path

from dcgnn.data import DATA_ROOT_VARIABLE
from dcgnn.report import load_trained, write_report


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "report",
        help="one HTML page about a trained model",
        description="One self-contained HTML page on a checkpoint of dcgnn train, and its pictures as PNG.",
    )
    parser.add_argument("checkpoint", metavar="FILE", help="checkpoint of dcgnn train --checkpoint")
    parser.add_argument(
        "--data-root", metavar="DIR", help=f"folder of the raw files (default: {DATA_ROOT_VARIABLE})"
    )
    parser.add_argument("--out", metavar="DIR", help="folder to write to (default: FILE-report)")
    parser.add_argument("--embedding", default="pca", metavar="WORD", help="pca or tsne (default: pca)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Read the checkpoint and write the page."""
    trained = load_trained(arguments.checkpoint, arguments.data_root)
    default = f"{Path(arguments.checkpoint).with_suffix('')}-report"
    print(write_report(trained, arguments.out or default, arguments.embedding))
