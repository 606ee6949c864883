"""Time of one training step: DC-GNN beside the baselines, interleaved in one process."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dcgnn.baselines import ConvNet
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


@dataclass(frozen=True)
class Case:
    """A model and the form in which it takes the graph: as it comes, or prepared once."""

    model: str
    prepared: bool = False

    @property
    def name(self) -> str:
        """Its name in the JSON file."""
        return f"{self.model} prepared" if self.prepared else self.model

    @property
    def title(self) -> str:
        """Its name where people read."""
        return f"{TITLES[self.model]} (prepared)" if self.prepared else TITLES[self.model]


def cases_of(models: Sequence[str]) -> list[Case]:
    """Every model; baselines also on a graph that is prepared once, as they are trained here."""
    return [
        Case(model, prepared)
        for model in models
        for prepared in (False, True)
        if not prepared or model in ("gcn", "gat", "sage")
    ]


def run(context: Context, name: str = "runtime") -> Outcome:
    """Time a training step of every model, all with two layers of 64 channels."""
    graphs = context.choose_graphs(GRAPHS, otherwise=_GENERATED)
    models = context.choose_models(MODELS)
    cases = cases_of(models)
    results = context.collect(name, [_job(context, graph, cases) for graph in graphs])
    compared = [case for case in cases if case.model == "gcn"] if "dcgnn" in models else []
    rows = []
    for graph, result in zip(graphs, results, strict=True):
        seconds = result["seconds"]
        times = [f"{1000 * seconds[case.name]:.1f}" for case in cases]
        rows.append([graph, *times, *(f"{seconds['dcgnn'] / seconds[case.name]:.2f}" for case in compared)])

    def draw(figure: Figure) -> None:
        from matplotlib.ticker import LogFormatter

        axes = figure.subplots()
        width = 0.5 / len(cases)
        # Points, not bars: on a logarithmic axis the foot of a bar is arbitrary.
        for index, (case, marker) in enumerate(zip(cases, itertools.cycle("os^vDP"), strict=False)):
            places = [position + (index - (len(cases) - 1) / 2) * width for position in range(len(graphs))]
            heights = [1000 * result["seconds"][case.name] for result in results]
            axes.plot(places, heights, marker, label=case.title)
        axes.set_xticks(range(len(graphs)), graphs, rotation=20)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter())
        axes.set_ylabel("ms per training step")
        axes.grid(axis="y", which="both", alpha=0.3)
        axes.legend()

    return Outcome(
        header=[
            "graph",
            *(f"{case.title}, ms" for case in cases),
            *(f"DC-GNN / {case.title}" for case in compared),
        ],
        rows=rows,
        verdicts={},
        data={"results": dict(zip(graphs, results, strict=True)), "threads": torch.get_num_threads()},
        draw=draw,
        notes=[
            f"Median of a training step, {torch.get_num_threads()} threads; the paper's times are of another "
            "machine and not at hand. One layer alone: dcgnn bench --quick."
        ],
    )


def _job(context: Context, graph: str, cases: Sequence[Case]) -> Job:
    def compute() -> dict[str, Any]:
        data = context.load(graph)
        steps = {case.name: _step(case, data) for case in cases}
        return {"seconds": interleaved_medians(steps, rounds=10, max_seconds=60.0)}

    names = [case.name for case in cases]
    settings = {"graph": graph, "models": names, "skeleton": _SKELETON, "threads": torch.get_num_threads()}
    settings["machine"] = platform.node()  # times of another one are not kept for this
    return Job(graph, settings, compute, graph)


def _step(case: Case, data: GraphData) -> Callable[[], object]:
    torch.manual_seed(0)
    model = Recipe(case.model, _SKELETON).build(data)
    graph: Any = data.edge_index
    if isinstance(model, DCGNN):
        graph = EgoGraph.from_edge_index(data.edge_index, data.num_nodes)
    elif case.prepared:
        assert isinstance(model, ConvNet)
        graph = model.graph_of(data.edge_index, data.num_nodes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        logits = model(data.x, graph)
        nn.functional.cross_entropy(logits[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()

    return step
