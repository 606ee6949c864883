"""How much DC-GNN depends on λ and on the numbers of clusters: each varied alone from the preset."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcgnn.presets import recipe_for
from dcgnn.recipe import Recipe
from dcgnn.reproduce.classification import GRAPHS
from dcgnn.reproduce.experiment import Context, Outcome, averaged, spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Graphs unless others are asked for, and the one that needs no files.
_DEFAULT_GRAPHS = ("wisconsin", "cora")
_EMBEDDED = "minesweeper-synthetic:rows=40,cols=40"

LAMBDAS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
#: Numbers of global clusters, in multiples of the number of classes, as the similarity loss wants them.
GLOBAL_PER_CLASS = (1, 2, 4, 8)
LOCALS = (1, 2, 3, 4)

#: How the varied options are called where people read.
TITLES = {"lam": "λ", "num_global": "|Ω|", "num_local": "K"}


@dataclass(frozen=True)
class Point:
    """One value of one option on one graph."""

    graph: str
    option: str
    value: float
    is_preset: bool


def run(context: Context, name: str = "sensitivity") -> Outcome:
    """Train DC-GNN over a range of λ, |Ω| and K; the preset's own value is always among them."""
    if context.datasets:
        graphs = context.choose_graphs((*GRAPHS, "minesweeper-synthetic"))
    else:
        graphs = context.choose_graphs(_DEFAULT_GRAPHS, otherwise=_EMBEDDED)
    context.choose_models(("dcgnn",))
    variants = {graph: _variants(context, graph) for graph in graphs}
    order = [
        (point, split, recipe)
        for graph in graphs
        for split in context.splits_of(graph)
        for point, recipe in variants[graph].items()
    ]
    jobs = [context.training_job(recipe, point.graph, split) for point, split, recipe in order]
    scores: dict[Point, dict[str, list[float]]] = {}
    for (point, _, _), result in zip(order, context.collect(name, jobs), strict=True):
        row = scores.setdefault(point, {"validation": [], "test": []})
        row["validation"].append(100 * result["val_metric"])
        row["test"].append(100 * result["test_metric"])
    return Outcome(
        header=["graph", "varied", "value", "validation", "test"],
        rows=[
            [
                point.graph,
                TITLES[point.option],
                f"{point.value:g}" + (" (preset)" if point.is_preset else ""),
                spread(row["validation"]),
                spread(row["test"]),
            ]
            for point, row in scores.items()
        ],
        verdicts={},
        data={
            "results": [{**vars(point), **row} for point, row in scores.items()],
            "presets": {graph: context.shortened(_base(context, graph)).to_dict() for graph in graphs},
            "splits": list(context.splits),
        },
        draw=lambda figure: _draw(figure, scores, graphs),
        notes=[
            f"Metric in percent, {averaged(context.splits)}; all other settings are the preset's. "
            "The paper's numbers are not at hand.",
            *(_span(scores, graph, option) for graph in graphs for option in TITLES),
        ],
    )


def _base(context: Context, graph: str) -> Recipe:
    """The preset with all three options stated, so that the sweeps share the run that they have in common."""
    recipe = recipe_for(graph, "dcgnn").with_num_global(context.load(graph).num_classes)
    return recipe.replaced({"lam": 2.0, "num_local": 2, **recipe.options})


def _variants(context: Context, graph: str) -> dict[Point, Recipe]:
    base = _base(context, graph)
    classes = context.load(graph).num_classes
    values: dict[str, Sequence[float]] = {
        "lam": LAMBDAS,
        "num_global": [classes * factor for factor in GLOBAL_PER_CLASS],
        "num_local": LOCALS,
    }
    return {
        Point(graph, option, value, value == base.options[option]): base.replaced({option: value})
        for option in TITLES
        for value in sorted({*values[option], base.options[option]})
    }


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _span(scores: Mapping[Point, Mapping[str, Sequence[float]]], graph: str, option: str) -> str:
    rows = {point: row for point, row in scores.items() if (point.graph, point.option) == (graph, option)}
    tests = [statistics.fmean(row["test"]) for row in rows.values()]
    chosen = max(rows, key=lambda point: statistics.fmean(rows[point]["validation"]))
    return (
        f"{graph}, {TITLES[option]}: test means from {min(tests):.2f} to {max(tests):.2f}; best validation "
        f"at {chosen.value:g}, where test is {spread(rows[chosen]['test'])}."
    )


def _draw(
    figure: Figure, scores: Mapping[Point, Mapping[str, Sequence[float]]], graphs: Sequence[str]
) -> None:
    figure.set_size_inches(11, 4)
    panels = figure.subplots(1, len(TITLES), sharey=True)
    for axes, option in zip(panels, TITLES, strict=True):
        for index, graph in enumerate(graphs):
            rows = {p: row for p, row in scores.items() if (p.graph, p.option) == (graph, option)}
            for measure, style in (("test", "-"), ("validation", ":")):
                _curve(
                    axes,
                    {point.value: row[measure] for point, row in rows.items()},
                    label=f"{graph}, {measure}",
                    color=f"C{index}",
                    linestyle=style,
                )
            (own,) = [point for point in rows if point.is_preset]
            axes.plot(own.value, statistics.fmean(rows[own]["test"]), "o", markersize=11, fillstyle="none",
                      color=f"C{index}")  # fmt: skip
        shown = sorted({point.value for point in scores if point.option == option})
        if option != "num_local":
            axes.set_xscale("log")
        axes.set_xticks(shown, [f"{value:g}" for value in shown])
        axes.minorticks_off()
        axes.set_xlabel(TITLES[option])
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("metric, %; ring: preset")
    figure.legend(
        *panels[0].get_legend_handles_labels(), ncols=2, fontsize="small", loc="outside upper center"
    )


def _curve(axes: Axes, values: Mapping[float, Sequence[float]], **style: Any) -> None:
    """Mean and deviation over splits by value."""
    axes.errorbar(
        list(values),
        [statistics.fmean(row) for row in values.values()],
        [_deviation(row) for row in values.values()],
        marker=".",
        capsize=3,
        **style,
    )
