"""``dcgnn graphs``: the graphs that can be trained on."""

from __future__ import annotations

import argparse

from dcgnn.cli.table import format_table
from dcgnn.data import DATA_ROOT_VARIABLE, list_graphs


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("graphs", help="list the graphs and where they come from")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print the list."""
    print(describe_graphs())


def describe_graphs() -> str:
    """A table of all graphs and the options of the generators."""
    entries = list_graphs()
    rows = [[entry.name, entry.metric, entry.splits, entry.source] for entry in entries]
    table = format_table(["graph", "metric", "splits", "source"], rows)
    options = [
        f"  {entry.name}:" + ",".join(f"{name}={value}" for name, value in entry.options.items())
        for entry in entries
        if entry.options
    ]
    return "\n".join(
        [
            table,
            "",
            "Generators take options after a colon; these are the defaults:",
            *options,
            "",
            f"Files of the others: <data root>/<graph>/, with --data-root or {DATA_ROOT_VARIABLE};",
            "what is not there is downloaded by PyTorch Geometric.",
        ]
    )
