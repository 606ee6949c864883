"""Dirichlet energy over depth for β = 0, 0.5 and 1: does fidelity to the input keep nodes apart?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcgnn.data.minesweeper import grid_edges
from dcgnn.nn.msg_passing import DCMsgPassing
from dcgnn.reproduce.classification import GRAPHS
from dcgnn.reproduce.experiment import Context, Job, Outcome
from dcgnn_kernels import EgoGraph

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETAS = (0.0, 0.5, 1.0)
NUM_LAYERS = 64
_CHANNELS = 32
_GRID = "grid 20 x 20"


def dirichlet_energy(z: Tensor, edge_index: Tensor) -> float:
    r""":math:`E(Z) = \frac1N \sum_{(j, i) \in E} \|z_i - z_j\|^2`, in float64.

    Args:
        z: ``[N, F]`` node embeddings.
        edge_index: ``[2, E]``, both directions of every edge.
    """
    source, target = edge_index
    # In chunks: a dense graph's differences need not fit into memory at once.
    total = sum(
        float((z[s].double() - z[t].double()).square().sum())
        for s, t in zip(source.split(1 << 18), target.split(1 << 18), strict=True)
    )
    return total / z.size(0)


def run(context: Context, name: str = "dirichlet-energy") -> Outcome:
    """Follow random features through many untrained layers."""
    graphs = [_GRID, *(context.choose_graphs(GRAPHS) if context.datasets else [])]
    context.covered |= {"graphs": graphs, "seeds": [context.seed]}
    jobs = [_job(context, graph, beta) for graph in graphs for beta in BETAS]
    results = iter(context.collect(name, jobs))
    curves = {graph: {f"β = {beta:g}": next(results)["energy"] for beta in BETAS} for graph in graphs}
    rows, verdicts = [], {}
    for graph, by_beta in curves.items():
        kept = {label: energy[-1] / energy[0] for label, energy in by_beta.items()}
        lowest, *others = kept.values()
        holds = all(share > 0.01 and share > lowest for share in others)
        verdicts[graph] = "pass" if holds else "short: β > 0 does not keep the energy"
        rows.append([graph, *(f"{share:.2e}" for share in kept.values()), verdicts[graph]])

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, len(curves), squeeze=False)[0]
        for axes, (graph, by_beta) in zip(panels, curves.items(), strict=True):
            for label, energy in by_beta.items():
                axes.semilogy(range(len(energy)), [max(value, 1e-32) for value in energy], label=label)
            axes.set_title(graph)
            axes.set_xlabel("layer")
            axes.set_ylabel("Dirichlet energy")
            axes.legend()

    return Outcome(
        header=["graph", *(f"β = {beta:g}" for beta in BETAS), "verdict"],
        rows=rows,
        verdicts=verdicts,
        data={"energy_by_layer": curves, "layers": NUM_LAYERS},
        draw=draw,
        notes=[
            f"Share of the input's Dirichlet energy that is left after {NUM_LAYERS} untrained layers. Passes "
            "where β > 0 keeps more than 1% and more than β = 0 does. Below 1e-30 of the input a curve "
            "is rounding, which later layers enlarge: so it can rise again."
        ],
    )


def _job(context: Context, graph: str, beta: float) -> Job:
    def compute() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(context.seed)
        edge_index = grid_edges(20, 20) if graph == _GRID else context.load(graph).edge_index
        num_nodes = int(edge_index.max()) + 1 if graph == _GRID else context.load(graph).num_nodes
        # In float64: what is left at β = 0 is soon below the rounding of float32.
        x = torch.randn(num_nodes, _CHANNELS, generator=generator).double()
        torch.manual_seed(context.seed)
        layers = DCMsgPassing(_CHANNELS, 8, num_layers=NUM_LAYERS, beta=beta).double()
        with torch.no_grad():
            _, state = layers(x, EgoGraph.from_edge_index(edge_index, num_nodes), return_state=True)
        depths = [x, *(layer.z for layer in state.layers)]
        return {"energy": [dirichlet_energy(z, edge_index) for z in depths]}

    settings = {
        "graph": graph,
        "beta": beta,
        "layers": NUM_LAYERS,
        "channels": _CHANNELS,
        "dtype": "float64",
        "seed": context.seed,
    }
    return Job(f"{graph} beta {beta:g}", settings, compute, graph)
