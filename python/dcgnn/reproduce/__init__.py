"""Every table and figure of the paper that the data at hand allow, as one command each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcgnn.checkpoint import atomic_write
from dcgnn.extras import require
from dcgnn.reproduce import (
    ablations,
    classification,
    dirichlet,
    few_labels,
    homophily,
    resistance,
    runtime,
    sensitivity,
    tree,
)
from dcgnn.reproduce.experiment import Context, Outcome, has_files, write_json

__all__ = ["Context", "EXPERIMENTS", "Experiment", "Outcome", "reproduce", "state_of"]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Args:
        name: Name on the command line.
        title: What it shows.
        run: Makes it.
        graphs: Published graphs that it is about.
        needs_files: Whether it needs the files of at least one of them.
    """

    name: str
    title: str
    run: Callable[..., Outcome]
    graphs: tuple[str, ...] = ()
    needs_files: bool = True


EXPERIMENTS: Mapping[str, Experiment] = {
    entry.name: entry
    for entry in (
        Experiment(
            "classification",
            "tables: classification of heterophilous and homophilous graphs",
            classification.run,
            classification.GRAPHS,
        ),
        Experiment("few-labels", "table: 5 labels per class", few_labels.run, few_labels.HOMOPHILOUS),
        Experiment(
            "ablation-objective",
            "table: terms of the objective (α = 0, α = 1, β = 0)",
            ablations.objective,
            classification.GRAPHS,
        ),
        Experiment("ablation-losses", "table: training losses", ablations.losses, classification.GRAPHS),
        Experiment(
            "ablation-aggregator",
            "table: aggregator of the similarity loss",
            ablations.aggregator,
            classification.GRAPHS,
        ),
        Experiment(
            "sensitivity",
            "figure: sensitivity to λ, |Ω| and K",
            sensitivity.run,
            classification.GRAPHS,
            needs_files=False,
        ),
        Experiment(
            "dirichlet-energy",
            "figure: Dirichlet energy over layers for β = 0, 0.5, 1",
            dirichlet.run,
            needs_files=False,
        ),
        Experiment(
            "tree-neighborsmatch",
            "figure: over-squashing on Tree-NeighborsMatch, depths 2 to 6",
            tree.run,
            needs_files=False,
        ),
        Experiment(
            "effective-resistance",
            "figure: total effective resistance, real and Erdős–Rényi graphs",
            resistance.run,
            resistance.REAL,
            needs_files=False,
        ),
        Experiment("homophily", "figure: homophily matrices", homophily.matrices, classification.GRAPHS),
        Experiment("datasets", "table: sizes of the datasets", homophily.sizes, classification.GRAPHS),
        Experiment(
            "runtime", "table: time of a training step", runtime.run, classification.GRAPHS, needs_files=False
        ),
    )
}


def reproduce(name: str, context: Context, environment: Mapping[str, Any] | None = None) -> Outcome:
    """Make one table or figure and write ``result.json`` and ``figure.png`` below ``context.out``.

    Raises:
        ValueError: If there is no such experiment, or its graphs are not there.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"no table or figure {name!r}; there are {', '.join(EXPERIMENTS)}")
    require("matplotlib")  # now rather than after hours of training
    started = time.perf_counter()
    outcome = EXPERIMENTS[name].run(context, name)
    folder = context.out / name
    write_json(
        folder / "result.json",
        {
            "name": name,
            "title": EXPERIMENTS[name].title,
            "header": list(outcome.header),
            "rows": [list(row) for row in outcome.rows],
            "verdicts": dict(outcome.verdicts),
            "notes": list(outcome.notes),
            "seed": context.seed,
            "seconds": time.perf_counter() - started,
            **outcome.data,
            "environment": dict(environment or {}),
        },
    )
    draw(outcome, folder / "figure.png")
    return outcome


def draw(outcome: Outcome, path: Path) -> None:
    """Draw the figure of an outcome into a PNG file."""
    # The object-oriented interface needs no display and leaves the user's backend alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    outcome.draw(figure)
    atomic_write(path, lambda file: figure.savefig(file, format="png", dpi=130))


def state_of(experiment: Experiment, context: Context) -> str:
    """``done: FILE``, ``available``, or what it still needs."""
    path = context.out / experiment.name / "result.json"
    if path.is_file():
        return f"done ({_summary(path)}): {path}"
    runs = context.out / experiment.name / "runs"
    begun = len(list(runs.glob("*.json"))) if runs.is_dir() else 0
    kept = f", {begun} runs kept" if begun else ""
    missing = [graph for graph in experiment.graphs if not has_files(graph, context.data_root)]
    if not missing:
        return f"available{kept}"
    if experiment.needs_files and len(missing) == len(experiment.graphs):
        return "needs data: " + ", ".join(missing)
    return f"available{kept}; needs data: {', '.join(missing)}"


def _summary(path: Path) -> str:
    try:
        verdicts = json.loads(path.read_text(encoding="utf-8"))["verdicts"].values()
    except (json.JSONDecodeError, KeyError, AttributeError):
        return "unreadable"
    passed = sum(verdict == "pass" for verdict in verdicts)
    return f"{passed} of {len(verdicts)} pass" if verdicts else "nothing to compare with"
