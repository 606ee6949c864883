"""Time of one training step: DC-GNN beside the baselines, interleaved in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dcgnn.data import GraphData
from dcgnn.nn.model import DCGNN
from dcgnn.recipe import TITLES, Recipe
from dcgnn.reproduce.classification import GRAPHS
from dcgnn.reproduce.experiment import Context, Job, Outcome
from dcgnn.timing import interleaved_medians
from dcgnn_kernels import EgoGraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = ("dcgnn", "gcn", "gat", "sage")
_SKELETON = {"hidden_channels": 64, "num_layers": 2}
_GENERATED = "minesweeper-synthetic"


def run(context: Context, name: str = "runtime") -> Outcome:
    """Time a training step of every model, all with two layers of 64 channels."""
    graphs = context.choose_graphs(GRAPHS, otherwise=_GENERATED)
    models = context.choose_models(MODELS)
    results = context.collect(name, [_job(context, graph, models) for graph in graphs])
    rows = []
    for graph, result in zip(graphs, results, strict=True):
        cells = [f"{1000 * result['seconds'][model]:.1f}" for model in models]
        ratio = ""
        if {"dcgnn", "gcn"} <= set(models):
            ratio = f"{result['seconds']['dcgnn'] / result['seconds']['gcn']:.2f}"
        rows.append([graph, *cells, ratio])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for index, model in enumerate(models):
            places = [position + (index - (len(models) - 1) / 2) * 0.2 for position in range(len(graphs))]
            axes.bar(
                places, [1000 * result["seconds"][model] for result in results], 0.2, label=TITLES[model]
            )
        axes.set_xticks(range(len(graphs)), graphs, rotation=20)
        axes.set_yscale("log")
        axes.set_ylabel("ms per training step")
        axes.legend()

    return Outcome(
        header=["graph", *(f"{TITLES[model]}, ms" for model in models), "DC-GNN / GCN"],
        rows=rows,
        verdicts={},
        data={"results": dict(zip(graphs, results, strict=True)), "threads": torch.get_num_threads()},
        draw=draw,
        notes=[
            f"Median of a training step, {torch.get_num_threads()} threads; the paper's times are of another "
            "machine and not at hand. One layer alone: dcgnn bench --quick."
        ],
    )


def _job(context: Context, graph: str, models: list[str]) -> Job:
    def compute() -> dict[str, Any]:
        data = context.load(graph)
        steps = {model: _step(Recipe(model, _SKELETON), data) for model in models}
        return {"seconds": interleaved_medians(steps, rounds=10, max_seconds=60.0)}

    settings = {"graph": graph, "models": models, "skeleton": _SKELETON, "threads": torch.get_num_threads()}
    return Job(graph, settings, compute)


def _step(recipe: Recipe, data: GraphData) -> Callable[[], object]:
    torch.manual_seed(0)
    model = recipe.build(data)
    graph = (
        EgoGraph.from_edge_index(data.edge_index, data.num_nodes)
        if isinstance(model, DCGNN)
        else data.edge_index
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(data.x, graph)
        nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()

    return step
