"""The two classification tables: test metric over the paper's splits, beside the baselines."""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dcgnn.data.real import lacks_its_splits
from dcgnn.presets import recipe_for
from dcgnn.recipe import TITLES
from dcgnn.reproduce import paper
from dcgnn.reproduce.experiment import Context, Outcome, averaged, listed, spread
from dcgnn.reproduce.paper import HETEROPHILOUS, HOMOPHILOUS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GRAPHS = (*HETEROPHILOUS, *HOMOPHILOUS)
#: How many splits the paper's means are over.
PAPERS_SPLITS = 3
MODELS = ("dcgnn", "mlp", "gcn", "gat", "sage", "linkx")


def run(context: Context, name: str = "classification") -> Outcome:
    """Train every model on every graph and split."""
    graphs = context.choose_graphs(GRAPHS)
    models = context.choose_models(MODELS)
    cells = [(graph, model) for graph in graphs for model in models]
    seeds = list(range(context.seed, context.seed + context.seeds))
    # Split by split, so that after an interruption every graph and model has its first ones.
    order = [
        (graph, model, split, seed)
        for graph in graphs
        for split in context.splits_of(graph)
        for model in models
        for seed in seeds
    ]
    results = context.collect(
        name,
        [
            context.training_job(recipe_for(graph, model), graph, split, seed=seed)
            for graph, model, split, seed in order
        ],
    )
    tests: dict[tuple[str, str, int], list[float]] = {}
    for (graph, model, split, _), result in zip(order, results, strict=True):
        tests.setdefault((graph, model, split), []).append(100 * result["test_metric"])
    scores = {
        (graph, model): [statistics.fmean(tests[graph, model, split]) for split in context.splits]
        for graph, model in cells
    }

    # What the paper prints is about its own splits.
    comparable = [graph for graph in graphs if not lacks_its_splits(graph, context.data_root)]
    printed = {graph: paper.CLASSIFICATION[graph] for graph in comparable if graph in paper.CLASSIFICATION}
    rows, verdicts, data = [], {}, {}
    for graph in graphs:
        row = {model: scores[graph, model] for model in models}
        line, verdict = _row(graph, row, printed.get(graph), graph in comparable)
        rows.append(line)
        if verdict is not None:
            verdicts[graph] = verdict
        known = paper.BASELINES.get(graph, {}) if graph in comparable else {}
        if any(model in known for model in models):
            below = ["  in the paper", "", *(str(known.get(model, "")) for model in models)]
            rows.append(below + [""] * (len(line) - len(below)))
        data[graph] = {model: {"mean": _mean(values), "deviation": _deviation(values), "splits": values}
                       for model, values in row.items()}  # fmt: skip
    seconds = sum(result["seconds"] for result in results)
    return Outcome(
        header=[
            "graph",
            "paper's DC-GNN",
            *(TITLES[model] for model in models),
            *(("against the paper", "against the baselines") if "dcgnn" in models else ()),
        ],
        rows=rows,
        verdicts=verdicts,
        data={"results": data, "splits": list(context.splits), "training_seconds": seconds},
        draw=lambda figure: _draw(figure, data, models, printed),
        notes=[
            f"Test metric in percent, {averaged(context.splits)}"
            + (f", each the mean over seeds {listed(seeds)}; " if len(seeds) > 1 else f", seed {seeds[0]}; ")
            + "the epoch and the settings are chosen on validation. "
            f"Training took {seconds:.0f} seconds in all, runs that were kept from before included.",
            *(
                _threes(graph, scores[graph, "dcgnn"], printed[graph])
                for graph in printed
                if "dcgnn" in models and len(context.splits) > PAPERS_SPLITS
            ),
        ],
    )


def _row(
    graph: str, scores: Mapping[str, Sequence[float]], printed: paper.Printed | None, comparable: bool
) -> tuple[list[str], str | None]:
    cells = [spread(values) for values in scores.values()]
    if "dcgnn" not in scores:
        return [graph, paper.shown(printed), *cells], None
    ours = _mean(scores["dcgnn"])
    verdict = "not compared: random splits, not the published ones"
    if comparable:
        verdict = paper.verdict(printed, ours)
    others = {model: _mean(values) for model, values in scores.items() if model != "dcgnn"}
    versus = ""
    if others:
        best = max(others, key=lambda model: others[model])
        versus = f"{ours - others[best]:+.2f} to {TITLES[best]}"
    return [graph, paper.shown(printed), *cells, verdict, versus], verdict


def _threes(graph: str, scores: Sequence[float], printed: paper.Printed) -> str:
    """Where the printed mean, over three splits that are not known, lies among those of any three of ours."""
    ordered = sorted(scores)
    wanted = PAPERS_SPLITS * (printed.mean - (printed.deviation or 0.0))
    # Hundreds of splits have millions of threes: of each two, bisection finds how many thirds there are.
    passing = sum(
        len(ordered) - bisect.bisect_left(ordered, wanted - first - second, lo=place + 1)
        for place, second in enumerate(ordered)
        for first in ordered[:place]
    )
    return (
        f"{graph}: of the {math.comb(len(ordered), PAPERS_SPLITS)} choices of {PAPERS_SPLITS} of these "
        f"splits, as many as the paper has, {passing} pass; DC-GNN's means over them go from "
        f"{_mean(ordered[:PAPERS_SPLITS]):.2f} to {_mean(ordered[-PAPERS_SPLITS:]):.2f}."
    )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


def _deviation(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def _draw(
    figure: Figure, data: Mapping[str, Any], models: Sequence[str], printed: Mapping[str, paper.Printed]
) -> None:
    axes = figure.subplots()
    graphs = list(data)
    width = 0.8 / len(models)
    for index, model in enumerate(models):
        places = [position + (index - (len(models) - 1) / 2) * width for position in range(len(graphs))]
        axes.bar(
            places,
            [data[graph][model]["mean"] for graph in graphs],
            width,
            yerr=[data[graph][model]["deviation"] or 0.0 for graph in graphs],
            label=TITLES[model],
            capsize=2,
        )
    for position, graph in enumerate(graphs):
        if graph in printed:
            axes.hlines(
                printed[graph].mean, position - 0.42, position + 0.42, colors="black", linestyles="--"
            )
    axes.plot([], [], "k--", label="DC-GNN in the paper")
    axes.set_xticks(range(len(graphs)), graphs, rotation=20)
    lowest = min(entry["mean"] for graph in graphs for entry in data[graph].values())
    axes.set_ylim(max(0.0, lowest - 10), 100)
    axes.set_ylabel("test metric, %")
    axes.legend(ncols=4, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
