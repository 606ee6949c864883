"""Mini-batches of a large graph, by PyG's own loader.

PyG samples neighbours with pyg-lib. Where it is not installed, a sampler of plain PyTorch takes its place
behind the same interface, so that batches have the same fields. PyG would also take torch-sparse, which is
deprecated there and draws the last neighbours of a node too rarely
(https://github.com/rusty1s/pytorch_sparse/issues/385).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler
from torch_geometric import typing as installed
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler import BaseSampler, NeighborSampler, NodeSamplerInput, SamplerOutput


class InMemoryNeighborSampler(BaseSampler):
    """Samples in-neighbours hop by hop, each at most once, uniformly.

    Args:
        edge_index: ``[2, E]``.
        num_nodes: number of nodes.
        num_neighbors: how many in-edges of a node to keep in every hop; -1: all.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, num_neighbors: Sequence[int]) -> None:
        self.num_neighbors = check_neighbors(num_neighbors)
        self.order = torch.argsort(edge_index[1], stable=True)
        self.source = edge_index[0][self.order]
        counts = torch.bincount(edge_index[1], minlength=num_nodes)
        self.pointer = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self.num_nodes = num_nodes

    def sample_from_nodes(self, inputs: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        """The seeds first, then the nodes of every hop; edges end at nodes of the hops before."""
        seeds = inputs.node
        position = torch.full((self.num_nodes,), -1)
        position[seeds] = torch.arange(seeds.numel())
        nodes, rows, columns, edges = [seeds], [], [], []
        frontier, found = seeds, seeds.numel()
        for limit in self.num_neighbors:
            entries, targets = self._in_edges(frontier, limit)
            sources = self.source[entries]
            fresh = torch.unique(sources[position[sources] < 0])
            position[fresh] = torch.arange(found, found + fresh.numel())
            found += fresh.numel()
            rows.append(position[sources])
            columns.append(position[targets])
            edges.append(self.order[entries])
            nodes.append(fresh)
            frontier = fresh
        return SamplerOutput(
            node=torch.cat(nodes),
            row=torch.cat(rows),
            col=torch.cat(columns),
            edge=torch.cat(edges),
            batch=None,
            num_sampled_nodes=[part.numel() for part in nodes],
            num_sampled_edges=[part.numel() for part in edges],
            metadata=(inputs.input_id, inputs.time),
        )

    def sample_from_edges(self, *args: Any, **kwargs: Any) -> Any:
        """Batches of edges are not sampled here."""
        raise NotImplementedError("only nodes can be sampled; install pyg-lib for link prediction")

    def _in_edges(self, nodes: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """Positions of the chosen in-edges, and the node each ends at."""
        begin, degree = self.pointer[nodes], self.pointer[nodes + 1] - self.pointer[nodes]
        owner = torch.repeat_interleave(torch.arange(nodes.numel()), degree)
        rank = torch.arange(owner.numel()) - (degree.cumsum(0) - degree)[owner]
        entries = begin[owner] + rank
        if limit >= 0:
            # The first `limit` of a random order within every node.
            shuffled = torch.randperm(owner.numel())
            by_node = shuffled[torch.argsort(owner[shuffled], stable=True)]
            chosen = by_node[rank < limit].sort().values
            entries, owner = entries[chosen], owner[chosen]
        return entries, nodes[owner]


def check_neighbors(num_neighbors: Sequence[int]) -> list[int]:
    """At least one hop, each -1 or positive."""
    hops = [int(limit) for limit in num_neighbors]
    if not hops or any(limit != -1 and limit < 1 for limit in hops):
        raise ValueError(f"num_neighbors must be positive numbers or -1 (all), one for each hop, got {hops}")
    return hops


def neighbor_loader(
    data: Data,
    num_neighbors: Sequence[int],
    *,
    batch_size: int,
    input_nodes: Tensor,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> NodeLoader:
    """Batches of ``input_nodes`` with sampled neighbourhoods, shuffled; each rank has its share of the nodes.

    Call ``loader.sampler.set_epoch(epoch)`` before every epoch, which seeds its order. Ranks have equally
    many batches; some nodes are seen twice where the numbers do not divide.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    hops = check_neighbors(num_neighbors)
    if installed.WITH_PYG_LIB:
        sampler: BaseSampler = NeighborSampler(data, hops)
    else:
        sampler = InMemoryNeighborSampler(data.edge_index, data.num_nodes, hops)
    order: DistributedSampler = DistributedSampler(
        range(input_nodes.numel()),  # type: ignore[arg-type]
        num_replicas=world_size,
        rank=rank,
        seed=seed,
    )
    return NodeLoader(data, sampler, input_nodes=input_nodes, batch_size=batch_size, sampler=order)
