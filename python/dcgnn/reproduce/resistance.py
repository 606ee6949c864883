"""Effective resistance between nodes: the plain graph against the graph of nodes and cluster-nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import scipy.sparse.csgraph
import torch
from torch import Tensor
from torch_geometric.utils import erdos_renyi_graph, to_scipy_sparse_matrix, to_undirected

from dcgnn.reproduce.experiment import Context, Job, Outcome
from dcgnn_kernels import EgoGraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REAL = ("wisconsin", "amherst41")
PROBABILITIES = (0.2, 0.3, 0.5, 0.8)
_ER_NODES = 100
_NUM_GLOBAL = 8
_NUM_LOCAL = 2

#: Heat maps show so many nodes at most; totals are over all.
_SHOWN = 150

_MAPS = {"plain_map": "plain", "cluster_map": "cluster-nodes"}


def plain_laplacian(edge_index: Tensor, num_nodes: int) -> Tensor:
    """``[N, N]`` Laplacian of an undirected graph without self-loops, parallel edges counted once."""
    adjacency = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)
    adjacency[edge_index[0], edge_index[1]] = 1.0
    adjacency.fill_diagonal_(0.0)
    return torch.diag(adjacency.sum(1)) - adjacency


def cluster_laplacian(edge_index: Tensor, num_nodes: int, num_global: int, num_local: int) -> Tensor:
    r"""``[N, N]`` Laplacian of the bipartite graph of nodes and cluster-nodes, seen from the nodes.

    Every node is joined to all global cluster-nodes and to the local ones of the egos that hold it, by
    edges of weight 1. Cluster-nodes are joined to nodes alone, so that their block of the Laplacian is
    diagonal, and eliminating them (a Schur complement, which keeps effective resistances) turns a
    cluster-node with members :math:`S` into a clique on :math:`S` of weight :math:`1/|S|`.
    """
    graph = EgoGraph.from_edge_index(edge_index, num_nodes)
    member = torch.zeros(num_nodes, num_nodes, dtype=torch.float64)  # [ego, node]
    member[graph.ego_of_slot(), graph.member.long()] = 1.0
    weights = num_local * member.T @ (member / member.sum(1, keepdim=True))
    weights += num_global / num_nodes
    weights.fill_diagonal_(0.0)
    return torch.diag(weights.sum(1)) - weights


def effective_resistance(laplacian: Tensor) -> Tensor:
    r"""``[N, N]`` with :math:`R_{uv} = L^+_{uu} + L^+_{vv} - 2 L^+_{uv}`, for a connected graph."""
    num_nodes = laplacian.size(0)
    # Adding J/N moves the eigenvalue 0 of the constant vector to 1 and leaves the others.
    inverse = torch.linalg.inv(laplacian + 1.0 / num_nodes) - 1.0 / num_nodes
    diagonal = inverse.diagonal()
    return (diagonal[:, None] + diagonal[None, :] - 2 * inverse).clamp(min=0.0).fill_diagonal_(0.0)


def total_resistance(laplacian: Tensor) -> float:
    r""":math:`R_{tot} = \sum_{u < v} R_{uv}`."""
    return float(effective_resistance(laplacian).sum()) / 2


def run(context: Context, name: str = "effective-resistance") -> Outcome:
    """Compare both graphs on real and random ones."""
    # Random graphs need no files; real ones join them where they are there.
    try:
        real = context.choose_graphs(REAL)
    except ValueError:
        if context.datasets:
            raise
        real = []
    cases = [*real, *(f"Erdős–Rényi p = {p:g}" for p in PROBABILITIES)]
    context.covered |= {"graphs": cases, "seeds": [context.seed]}
    results = context.collect(name, [_job(context, case) for case in cases])
    rows, verdicts, data = [], {}, {}
    for case, result in zip(cases, results, strict=True):
        plain, clusters = result["plain"], result["clusters"]
        verdicts[case] = "pass" if clusters < plain else "short: not below the plain graph"
        rows.append(
            [
                case,
                str(result["nodes"]),
                f"{plain:.4g}",
                f"{clusters:.4g}",
                f"{plain / clusters:.2f}",
                verdicts[case],
            ]
        )
        data[case] = {key: result[key] for key in ("nodes", "plain", "clusters")}

    def draw(figure: Figure) -> None:
        from matplotlib.colors import LogNorm

        figure.set_size_inches(2.6 * len(cases), 5.6)
        panels = figure.subplots(2, len(cases), squeeze=False)
        for column, (case, result) in enumerate(zip(cases, results, strict=True)):
            # Random graphs share one scale, so that columns compare; real ones have resistances of their own.
            alike = [result] if case in REAL else [other for name, other in zip(cases, results, strict=True)
                                                   if name not in REAL]  # fmt: skip
            seen = torch.cat([_positive(other[key]) for other in alike for key in _MAPS]).nan_to_num()
            # Resistances span decades: on a linear scale those with cluster-nodes all look like zero.
            scale = LogNorm(float(seen[seen > 0].min()), float(seen.max()))
            part = f", first {_SHOWN} nodes" if result["nodes"] > _SHOWN else ""
            for row, (key, kind) in enumerate(_MAPS.items()):
                image = panels[row][column].imshow(_positive(result[key]).numpy(), norm=scale, cmap="viridis")
                panels[row][column].set_title(f"{case}\n{kind}{part}", fontsize=8)
                panels[row][column].set_xticks([])
                panels[row][column].set_yticks([])
                bar = figure.colorbar(image, ax=panels[row][column], fraction=0.046)
                bar.ax.tick_params(which="both", labelsize=7)
                bar.set_label("effective resistance", fontsize=7)

    return Outcome(
        header=["graph", "nodes", "plain", "with cluster-nodes", "ratio", "verdict"],
        rows=rows,
        verdicts=verdicts,
        data={"total": data, "num_global": _NUM_GLOBAL, "num_local": _NUM_LOCAL},
        draw=draw,
        notes=[
            "Total effective resistance over the pairs of nodes of the largest component; every edge has "
            "weight 1. Passes where the cluster-nodes lower it, which is the paper's claim.",
            f"The heat maps have a logarithmic scale and show the first {_SHOWN} nodes of a larger graph.",
        ],
    )


def _positive(values: Sequence[Sequence[float]]) -> Tensor:
    """A heat map with NaN, which is drawn as nothing, where a logarithm has no value: on the diagonal."""
    resistance = torch.tensor(values, dtype=torch.float64)
    return resistance.masked_fill(resistance <= 0, float("nan"))


def _job(context: Context, case: str) -> Job:
    def compute() -> dict[str, Any]:
        if case in REAL:
            data = context.load(case)
            edges, num_nodes = data.edge_index, data.num_nodes
        else:
            torch.manual_seed(context.seed)
            num_nodes = _ER_NODES
            edges = to_undirected(
                erdos_renyi_graph(num_nodes, float(case.rsplit("=", 1)[1])), num_nodes=num_nodes
            )
        edges, num_nodes = largest_component(edges, num_nodes)
        plain = effective_resistance(plain_laplacian(edges, num_nodes))
        clusters = effective_resistance(cluster_laplacian(edges, num_nodes, _NUM_GLOBAL, _NUM_LOCAL))
        shown = slice(0, _SHOWN)
        return {
            "nodes": num_nodes,
            "plain": float(plain.sum()) / 2,
            "clusters": float(clusters.sum()) / 2,
            "plain_map": [[round(value, 5) for value in row] for row in plain[shown, shown].tolist()],
            "cluster_map": [[round(value, 5) for value in row] for row in clusters[shown, shown].tolist()],
        }

    settings = {
        "case": case,
        "global": _NUM_GLOBAL,
        "local": _NUM_LOCAL,
        "nodes": _ER_NODES,
        "seed": context.seed,
    }
    return Job(case, settings, compute, case)


def largest_component(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, int]:
    """The edges among the nodes of the largest component, and their number; nodes are numbered anew."""
    matrix = to_scipy_sparse_matrix(edge_index, num_nodes=num_nodes)
    _, labels = scipy.sparse.csgraph.connected_components(matrix, directed=False)
    component = torch.from_numpy(labels).long()
    keep = component == component.bincount().argmax()
    number = torch.cumsum(keep.long(), 0) - 1
    inside = keep[edge_index[0]] & keep[edge_index[1]]
    return number[edge_index[:, inside]], int(keep.sum())
