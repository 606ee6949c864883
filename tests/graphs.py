"""Graphs for the tests: a few with a name, and random ones with everything that is awkward."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


def both_ways(edge_index: Tensor) -> Tensor:
    return torch.cat([edge_index, edge_index.flip(0)], dim=1)


def ring(num_nodes: int) -> tuple[Tensor, int]:
    nodes = torch.arange(num_nodes)
    return both_ways(torch.stack([nodes, (nodes + 1) % num_nodes])), num_nodes


def star(num_nodes: int) -> tuple[Tensor, int]:
    leaves = torch.arange(1, num_nodes)
    return both_ways(torch.stack([torch.zeros_like(leaves), leaves])), num_nodes


def awkward() -> tuple[Tensor, int]:
    """Directed, with a hub, parallel edges, self-loops and isolated nodes (8 and 9)."""
    edges = [(0, 1), (0, 1), (1, 0), (2, 2), (2, 2), (3, 4), (5, 0), (6, 0), (7, 0), (4, 0), (3, 0), (7, 6)]
    return torch.tensor(edges).T.contiguous(), 10


@st.composite
def random_graphs(draw: st.DrawFn, max_nodes: int = 9) -> tuple[Tensor, int]:
    """Edge lists on few nodes: self-loops, parallel and one-way edges and isolated nodes are common."""
    num_nodes = draw(st.integers(0, max_nodes))
    if num_nodes == 0:
        return torch.zeros(2, 0, dtype=torch.int64), 0
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=3 * max_nodes))
    if draw(st.booleans()):
        hub = draw(node)
        edges += [(i, hub) for i in range(num_nodes)]
    edge_index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    return (both_ways(edge_index) if draw(st.booleans()) else edge_index), num_nodes
