"""What a result owes to the way in which the nodes are split; of some graphs the paper's is not known."""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING

from dcgnn.data import GraphData, num_splits
from dcgnn.data.graph_data import balanced_split, random_split
from dcgnn.data.real import has_split_files, load_from_split_files
from dcgnn.metrics import check_scorable
from dcgnn.presets import recipe_for
from dcgnn.recipe import TITLES
from dcgnn.reproduce import paper
from dcgnn.reproduce.ablations import draw_bars
from dcgnn.reproduce.classification import GRAPHS, MODELS
from dcgnn.reproduce.experiment import Context, Outcome, averaged, spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: The graph unless others are asked for: no other lies so far from the paper.
_DEFAULT_GRAPHS = ("wisconsin",)

_BALANCED, _FROM_FILES = "60/20/20 balanced", "from files"

#: How the nodes may be split; ``balanced``: as many training nodes of each class.
WAYS = {
    "50/25/25": functools.partial(random_split, fractions=(0.5, 0.25)),
    "60/20/20": functools.partial(random_split, fractions=(0.6, 0.2)),
    _BALANCED: functools.partial(balanced_split, fractions=(0.6, 0.2)),
    _FROM_FILES: None,
}


def run(context: Context, name: str = "splits") -> Outcome:
    """Train every model with its preset on splits of each kind."""
    graphs = context.choose_graphs(GRAPHS if context.datasets else _DEFAULT_GRAPHS)
    models = context.choose_models(MODELS)
    order = [
        (graph, way, split, model)
        for graph in graphs
        for way in _ways_of(context, graph)
        for split in context.splits_of(graph)
        for model in models
    ]
    jobs = [
        context.training_job(
            recipe_for(graph, model),
            graph,
            split,
            functools.partial(_split_as, context, graph, way, split),
            variant=way,
        )
        for graph, way, split, model in order
    ]
    tests: dict[tuple[str, str], dict[str, list[float]]] = {}
    for (graph, way, _, model), result in zip(order, context.collect(name, jobs), strict=True):
        tests.setdefault((graph, way), {}).setdefault(model, []).append(100 * result["test_metric"])

    rows, verdicts, sizes = [], {}, {}
    for (graph, way), scores in tests.items():
        masks = _split_as(context, graph, way, context.splits[0]).masks().values()
        sizes[f"{graph}, {way}"] = [int(mask.sum()) for mask in masks]
        printed = paper.CLASSIFICATION.get(graph)
        row = [
            graph,
            way,
            " / ".join(map(str, sizes[f"{graph}, {way}"])),
            paper.shown(printed),
            *(spread(values) for values in scores.values()),
        ]
        if "dcgnn" in scores:
            verdict = paper.verdict(printed, statistics.fmean(scores["dcgnn"]))
            verdicts[f"{graph}, {way}"] = verdict
            row.append(verdict)
        rows.append(row)

    return Outcome(
        header=[
            "graph",
            "splits",
            "nodes",
            "paper's DC-GNN",
            *(TITLES[model] for model in models),
            *(["against the paper"] if "dcgnn" in models else []),
        ],
        rows=rows,
        verdicts=verdicts,
        data={
            "test": {f"{graph}, {way}": scores for (graph, way), scores in tests.items()},
            "nodes": sizes,
            "splits": list(context.splits),
        },
        draw=lambda figure: _draw(figure, tests),
        notes=[
            f"Test metric in percent, {averaged(context.splits)} of each kind; "
            "nodes for training / validation / test. The settings are the presets', which were chosen on the "
            "validation nodes of the splits that the table of classification takes. Where classes differ "
            "much in size, small ones have no test nodes in a balanced split; where that leaves nothing to "
            "score, it is left out.",
        ],
    )


def _ways_of(context: Context, graph: str) -> list[str]:
    """The ways that a graph can be split in and scored.

    Raises:
        ValueError: If its files do not hold the splits that were asked for.
    """
    ways = list(WAYS)
    if not has_split_files(graph, context.data_root):
        ways.remove(_FROM_FILES)
    elif max(context.splits) >= num_splits(graph):
        raise ValueError(f"--split: the files of {graph} have splits 0 to {num_splits(graph) - 1}")
    try:
        for split in context.splits:
            check_scorable(_split_as(context, graph, _BALANCED, split))
    except ValueError:  # all nodes of a class are for training
        ways.remove(_BALANCED)
    return ways


def _split_as(context: Context, graph: str, way: str, split: int) -> GraphData:
    draw = WAYS[way]
    if draw is None:
        data = load_from_split_files(graph, context.data_root, split)
        masks = (data.train_mask, data.val_mask, data.test_mask)
    else:
        data = context.load(graph)
        masks = draw(data.y, split)
    return data.with_split(masks, split, f"{graph}, {way}")


def _draw(figure: Figure, tests: dict[tuple[str, str], dict[str, list[float]]]) -> None:
    axes = figure.subplots()
    lowest = draw_bars(
        axes,
        {
            f"{graph}\n{way}": {TITLES[model]: values for model, values in scores.items()}
            for (graph, way), scores in tests.items()
        },
    )
    for position, (graph, _) in enumerate(tests):
        if printed := paper.CLASSIFICATION.get(graph):
            axes.hlines(printed.mean, position - 0.42, position + 0.42, colors="black", linestyles="--")
    axes.plot([], [], "k--", label="DC-GNN in the paper")
    axes.set_ylim(max(0.0, lowest - 5), 100)
    axes.set_ylabel("test metric, %")
    axes.legend(ncols=4, fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
