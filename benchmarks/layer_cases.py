"""Graphs and layers of the runtime comparison: one DCConv beside the layers that a PyG user runs today."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from dcgnn import DCConv
from dcgnn_kernels import EgoGraph, fallback

# Nodes and undirected edges of the graphs whose shapes are imitated.
SHAPES = {
    "penn94": (41_554, 1_362_229),
    "cornell5": (18_660, 790_777),
    "genius": (421_961, 984_979),
}
NUM_GLOBAL = 8


def power_law_edges(num_nodes: int, num_edges: int, exponent: float = 0.6, seed: int = 0) -> Tensor:
    """Both directions of random edges; the node of rank r is an end with probability ∝ r^(−exponent)."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.arange(1, num_nodes + 1, dtype=torch.float64)
    cumulative = (ranks**-exponent).cumsum(0)
    cumulative /= cumulative[-1].clone()
    names = torch.randperm(num_nodes, generator=generator)
    draws = torch.rand(2, num_edges, generator=generator, dtype=torch.float64)
    ends = names[torch.searchsorted(cumulative, draws).clamp_(max=num_nodes - 1)]
    return torch.cat([ends, ends.flip(0)], dim=1)


@dataclass
class Case:
    """One graph with features, and the layers as functions without arguments."""

    graph: EgoGraph
    edge_index: Tensor
    x: Tensor

    @classmethod
    def of_shape(cls, shape: str, channels: int) -> Case:
        num_nodes, num_edges = SHAPES[shape]
        edge_index = power_law_edges(num_nodes, num_edges)
        x = torch.randn(num_nodes, channels, generator=torch.Generator().manual_seed(1))
        return cls(EgoGraph.from_edge_index(edge_index, num_nodes), edge_index, x)

    def normalised_matrix(self) -> Tensor:
        """GCN's normalised adjacency as a torch.sparse CSR matrix, which MKL multiplies."""
        edge_index, weight = gcn_norm(self.edge_index, None, self.x.size(0), add_self_loops=True)
        matrix = torch.sparse_coo_tensor(edge_index.flip(0), weight, (self.x.size(0),) * 2)
        return matrix.coalesce().to_sparse_csr()

    def layers(self) -> dict[str, Callable[[Tensor], Tensor]]:
        """Name to layer, each a function of the features."""
        torch.manual_seed(0)
        channels = self.x.size(1)
        dc = DCConv(channels, channels, NUM_GLOBAL)
        gcn = GCNConv(channels, channels, cached=True)
        gcn_csr = GCNConv(channels, channels, normalize=False)
        gat = GATConv(channels, channels)
        matrix = self.normalised_matrix()
        return {
            "DCConv": lambda x: dc(x, self.graph),
            "GCNConv(edge_index)": lambda x: gcn(x, self.edge_index),
            "GCNConv(CSR)": lambda x: gcn_csr(x, matrix),
            "GATConv": lambda x: gat(x, self.edge_index),
        }


class PlainPyTorch:
    """While entered, the ops run their plain PyTorch kernels on the CPU: the reference of the same maths."""

    OPS = ("local_sinkhorn", "cluster_scatter", "global_sinkhorn", "local_centroids", "node_update")

    def __enter__(self) -> None:
        self.library = torch.library.Library("dcgnn", "IMPL")
        for op in self.OPS:
            self.library.impl(op, getattr(fallback, op), "CPU", allow_override=True)

    def __exit__(self, *_: object) -> None:
        self.library._destroy()


def forward(layer: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    def run() -> object:
        with torch.no_grad():
            return layer(x)

    return run


def forward_backward(layer: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    leaf = x.clone().requires_grad_()
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))

    def run() -> object:
        leaf.grad = None
        layer(leaf).backward(weight)
        return leaf.grad

    return run
