"""The graphs themselves: their sizes beside the paper's table, and which classes their edges join."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcgnn.data import GraphData
from dcgnn.reproduce import paper
from dcgnn.reproduce.classification import GRAPHS
from dcgnn.reproduce.experiment import Context, Job, Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LOOPS = (
    "Self-loops count where the loader gives them, as those of US-election (3234) and Wisconsin (16); PyG "
    "drops those of Citeseer (124) and Pubmed (3)."
)


def class_matrix(edge_index: Tensor, y: Tensor, num_classes: int) -> Tensor:
    r"""``[C, C]`` homophily matrix: :math:`H_{ab}` is the share of the edges at nodes of class :math:`a`
    whose other end has class :math:`b`. Edges at unlabelled nodes are left out; a class without edges has
    a row of zeros.
    """
    source, target = y[edge_index[0]], y[edge_index[1]]
    known = (source >= 0) & (target >= 0)
    counts = torch.bincount(source[known] * num_classes + target[known], minlength=num_classes**2)
    counts = counts.view(num_classes, num_classes).double()
    return counts / counts.sum(1, keepdim=True).clamp(min=1.0)


def edge_homophily(edge_index: Tensor, y: Tensor) -> float:
    """Share of the edges whose ends have the same label; unlabelled counts as a label of its own."""
    return float((y[edge_index[0]] == y[edge_index[1]]).double().mean())


def matrices(context: Context, name: str = "homophily") -> Outcome:
    """Homophily matrices as heat maps."""
    graphs = context.choose_graphs(GRAPHS)
    results = dict(
        zip(graphs, context.collect(name, [_job(context, graph) for graph in graphs]), strict=True)
    )
    rows, verdicts = [], {}
    for graph, result in results.items():
        printed = paper.HOMOPHILY.get(graph)
        if printed is not None:
            # The paper cuts after two digits.
            agrees = abs(result["homophily"] - printed) < 0.01
            verdicts[graph] = "pass" if agrees else "differs"
        rows.append(
            [
                graph,
                "–" if printed is None else f"{printed:.2f}",
                f"{result['homophily']:.3f}",
                f"{result['own_class']:.3f}",
                verdicts.get(graph, "no number at hand"),
            ]
        )

    def draw(figure: Figure) -> None:
        columns = min(5, len(graphs))
        lines = math.ceil(len(graphs) / columns)
        figure.set_size_inches(2.8 * columns, 2.9 * lines)
        panels = figure.subplots(lines, columns, squeeze=False).flatten()
        for axes in panels[len(graphs) :]:
            axes.set_axis_off()
        for axes, (graph, result) in zip(panels, results.items(), strict=False):
            image = axes.imshow(result["matrix"], vmin=0.0, vmax=1.0, cmap="viridis")
            classes = range(len(result["matrix"]))
            axes.set_xticks(classes)
            axes.set_yticks(classes)
            axes.set_title(graph, fontsize=9)
            axes.set_xlabel("class of the neighbour", fontsize=7)
            axes.set_ylabel("class", fontsize=7)
            for row, column in itertools.product(classes, classes):
                share = result["matrix"][row][column]
                axes.text(
                    column,
                    row,
                    f"{share:.2f}",
                    ha="center",
                    va="center",
                    fontsize=9 if len(classes) < 4 else 5,
                    color="black" if share > 0.6 else "white",
                )
            bar = figure.colorbar(image, ax=axes, fraction=0.046)
            bar.set_label("share of the neighbours", fontsize=7)

    return Outcome(
        header=["graph", "paper", "edges within a class", "mean of the diagonal", "verdict"],
        rows=rows,
        verdicts=verdicts,
        data={"graphs": results},
        draw=draw,
        notes=[
            f"{_LOOPS} Unlabelled nodes count as a class of their own among the edges within a class. The "
            "paper's numbers fit both, where they are at hand."
        ],
    )


def sizes(context: Context, name: str = "datasets") -> Outcome:
    """Nodes, edges, features and classes."""
    graphs = context.choose_graphs(GRAPHS)
    results = dict(
        zip(graphs, context.collect(name, [_job(context, graph) for graph in graphs]), strict=True)
    )
    keys = ("nodes", "edges", "features", "classes")
    rows, verdicts = [], {}
    for graph, result in results.items():
        printed = paper.DATASETS.get(graph)
        ours = tuple(result[key] for key in keys)
        if printed is None:
            verdict = "no number at hand"
        elif ours == printed:
            verdict = verdicts[graph] = "pass"
        else:
            wrong = [
                f"{key} {there} in the paper"
                for key, here, there in zip(keys, ours, printed, strict=True)
                if here != there
            ]
            verdict = verdicts[graph] = f"differs: {', '.join(wrong)}"
        shown = "–" if printed is None else " / ".join(map(str, printed))
        rows.append([graph, *(str(value) for value in ours), shown, verdict])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for graph, result in results.items():
            axes.scatter(result["nodes"], result["edges"])
            axes.annotate(graph, (result["nodes"], result["edges"]), fontsize=8)
        axes.margins(x=0.15)  # room for the name beside the rightmost point
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("nodes")
        axes.set_ylabel("edges")

    return Outcome(
        header=["graph", *keys, "paper", "verdict"],
        rows=rows,
        verdicts=verdicts,
        data={"graphs": results},
        draw=draw,
        notes=[
            f"Undirected edges, each counted once. {_LOOPS} US-election's count half, because the paper "
            "prints half the rows of its file."
        ],
    )


def _job(context: Context, graph: str) -> Job:
    def compute() -> dict[str, Any]:
        data = context.load(graph)
        matrix = class_matrix(data.edge_index, data.y, data.num_classes)
        return {
            "nodes": data.num_nodes,
            "edges": count_edges(data),
            "features": data.num_features,
            "classes": data.num_classes,
            "homophily": edge_homophily(data.edge_index, data.y),
            "own_class": float(matrix.diagonal().mean()),
            "matrix": matrix.tolist(),
        }

    return Job(graph, {"graph": graph, "measure": 1}, compute, graph)


def count_edges(data: GraphData) -> int:
    """Undirected edges: pairs counted once, and self-loops.

    US-election's file lists both directions of every edge and one self-loop a county; the paper prints half
    of its rows.
    """
    loops = int((data.edge_index[0] == data.edge_index[1]).sum())
    if data.name == "us-election":
        return data.num_edges // 2
    return (data.num_edges - loops) // 2 + loops
