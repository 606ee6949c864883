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
    splits,
    tree,
)
from dcgnn.reproduce.experiment import Context, Outcome, has_files, listed, write_json

__all__ = [
    "Context",
    "EXPERIMENTS",
    "Experiment",
    "Outcome",
    "covered_by",
    "experiment_of",
    "reproduce",
    "state_of",
]


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Args:
        name: Name on the command line.
        title: What it shows.
        run: Makes it.
        takes: Which of the options that narrow it, it has: ``datasets``, ``models``, ``split``, ``seeds``,
            ``depths``, ``epochs``.
        graphs: Published graphs that it is about.
        needs_files: Whether it needs the files of at least one of them.
    """

    name: str
    title: str
    run: Callable[..., Outcome]
    takes: frozenset[str]
    graphs: tuple[str, ...] = ()
    needs_files: bool = True


_MODELS = frozenset({"datasets", "models", "split", "epochs"})
_SEEDS = _MODELS | {"seeds"}
_VARIANTS = frozenset({"datasets", "split", "epochs"})
_GRAPHS = frozenset({"datasets"})


EXPERIMENTS: Mapping[str, Experiment] = {
    entry.name: entry
    for entry in (
        Experiment(
            "classification",
            "tables: classification of heterophilous and homophilous graphs",
            classification.run,
            _SEEDS,
            classification.GRAPHS,
        ),
        Experiment(
            "few-labels", "table: 5 labels per class", few_labels.run, _MODELS, few_labels.HOMOPHILOUS
        ),
        Experiment(
            "ablation-objective",
            "table: terms of the objective (α = 0, α = 1, β = 0)",
            ablations.objective,
            _VARIANTS,
            classification.GRAPHS,
        ),
        Experiment(
            "ablation-losses", "table: training losses", ablations.losses, _VARIANTS, classification.GRAPHS
        ),
        Experiment(
            "ablation-aggregator",
            "table: aggregator of the similarity loss",
            ablations.aggregator,
            _VARIANTS,
            classification.GRAPHS,
        ),
        Experiment(
            "sensitivity",
            "figure: sensitivity to λ, |Ω| and K",
            sensitivity.run,
            _VARIANTS,
            classification.GRAPHS,
            needs_files=False,
        ),
        Experiment(
            "splits",
            "table: ways of splitting a graph",
            splits.run,
            _MODELS,
            classification.GRAPHS,
        ),
        Experiment(
            "dirichlet-energy",
            "figure: Dirichlet energy over layers for β = 0, 0.5, 1",
            dirichlet.run,
            _GRAPHS,
            needs_files=False,
        ),
        Experiment(
            "tree-neighborsmatch",
            "figure: over-squashing on Tree-NeighborsMatch, depths 2 to 6",
            tree.run,
            frozenset({"models", "depths", "epochs"}),
            needs_files=False,
        ),
        Experiment(
            "effective-resistance",
            "figure: total effective resistance, real and Erdős–Rényi graphs",
            resistance.run,
            _GRAPHS,
            resistance.REAL,
            needs_files=False,
        ),
        Experiment(
            "homophily",
            "figure: homophily matrices",
            homophily.matrices,
            _GRAPHS,
            classification.GRAPHS,
        ),
        Experiment(
            "datasets", "table: sizes of the datasets", homophily.sizes, _GRAPHS, classification.GRAPHS
        ),
        Experiment(
            "runtime",
            "table: time of a training step",
            runtime.run,
            frozenset({"datasets", "models"}),
            classification.GRAPHS,
            needs_files=False,
        ),
    )
}


def experiment_of(name: str) -> Experiment:
    """The table or figure of that name.

    Raises:
        ValueError: If there is none.
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"no table or figure {name!r}; there are {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]


def reproduce(name: str, context: Context, environment: Mapping[str, Any] | None = None) -> Outcome:
    """Make one table or figure and write ``result.json`` and ``figure.png`` below ``context.out``.

    Raises:
        ValueError: If there is no such experiment, or its graphs are not there.
    """
    experiment = experiment_of(name)
    require("matplotlib")  # now rather than after hours of training
    started = time.perf_counter()
    outcome = experiment.run(context, name)
    covers: dict[str, Any] = dict(context.covered)
    if covers.get("seeds") == [0]:
        del covers["seeds"]  # as the command comes
    if context.epochs is not None and "epochs" in experiment.takes:
        covers["epochs"] = context.epochs
    folder = context.out / name
    write_json(
        folder / "result.json",
        {
            "name": name,
            "title": experiment.title,
            "header": list(outcome.header),
            "rows": [list(row) for row in outcome.rows],
            "verdicts": dict(outcome.verdicts),
            "notes": list(outcome.notes),
            "seed": context.seed,
            "covers": covers,
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
    """What the last result covers and how it came out, or ``available``; and what data is missing."""
    missing = [graph for graph in experiment.graphs if not has_files(graph, context.data_root)]
    needs = f"; needs data: {', '.join(missing)}" if missing else ""
    path = context.out / experiment.name / "result.json"
    if path.is_file():
        return _summary(path) + needs
    if experiment.needs_files and len(missing) == len(experiment.graphs):
        return needs.removeprefix("; ")
    runs = context.out / experiment.name / "runs"
    begun = len(list(runs.glob("*.json"))) if runs.is_dir() else 0
    return "available" + (f", {begun} runs kept" if begun else "") + needs


def covered_by(experiment: Experiment, context: Context) -> str:
    """Graphs, models, splits, ... of the last result in words; empty where there is none."""
    try:
        return _read(context.out / experiment.name / "result.json")[1]
    except (OSError, ValueError):
        return ""


def _summary(path: Path) -> str:
    """``done (2 of 3 pass): GRAPHS; splits ...; at most N epochs``."""
    try:
        verdicts, covers = _read(path)
    except ValueError:
        return f"unreadable: {path}; give the command again"
    passed = sum(verdict == "pass" for verdict in verdicts)
    came = f"{passed} of {len(verdicts)} pass" if verdicts else "nothing to compare with"
    return f"done ({came})" + (f": {covers}" if covers else "")


def _read(path: Path) -> tuple[list[str], str]:
    """The verdicts of a result, and what it covers in words.

    Raises:
        ValueError: If the file does not hold a result.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        verdicts, covers = list(result["verdicts"].values()), dict(result["covers"])
        most = covers.pop("epochs", None)
        parts = [(f"{key} " if key != "graphs" else "") + listed(values) for key, values in covers.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a result ({error})") from error
    if most is not None:
        parts.append(f"at most {most} epochs")
    return verdicts, "; ".join(parts)
