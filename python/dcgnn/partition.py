"""Cutting a graph into parts: which part owns a node, and what a part must hold.

A part has the egos of its own nodes. Their members that belong to others are its *halo*; they have rows
here, too, with an ego of one member that counts nothing, because an ego graph has an ego for every row.
Rows are in ascending order of the nodes' numbers in the whole graph, so that everything which depends on
that order is the same as in one process.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from dcgnn_kernels import EgoGraph

METHODS = ("auto", "metis", "range", "hash")


@dataclass(frozen=True)
class Part:
    """One part of a graph.

    Attributes:
        nodes: ``[n]`` int64, the node in the whole graph of every row, ascending.
        own_rows: rows of the part's own nodes, ascending.
        halo_rows: the other rows, ascending.
        halo_owner: the part that owns the node of each halo row.
        graph: the ego-neighbourhoods on the rows.
        num_nodes: number of nodes of the whole graph.
    """

    nodes: Tensor
    own_rows: Tensor
    halo_rows: Tensor
    halo_owner: Tensor
    graph: EgoGraph
    num_nodes: int

    @property
    def own(self) -> Tensor:
        """The part's own nodes in the whole graph."""
        return self.nodes[self.own_rows]

    def to(self, device: torch.device) -> Part:
        """The same part on another device; itself when it is there already."""
        if self.nodes.device == device or (device.index is None and self.nodes.device.type == device.type):
            return self
        names = ("nodes", "own_rows", "halo_rows", "halo_owner", "graph")
        return dataclasses.replace(self, **{name: getattr(self, name).to(device) for name in names})

    @property
    def num_edge_slots(self) -> int:
        """Memberships of the part's own egos."""
        return self.graph.num_slots - self.halo_rows.numel()


def owners(graph: EgoGraph, num_parts: int, method: str = "auto") -> Tensor:
    """``[N]`` int64: the part that owns each node.

    Args:
        graph: the whole graph.
        num_parts: number of parts, each of which gets at least one node.
        method: ``"metis"`` (few edges between parts; needs pymetis), ``"range"`` (consecutive nodes, equal
            numbers of slots), ``"hash"`` (spread evenly) or ``"auto"``: METIS where it is installed, else
            ranges.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if not 1 <= num_parts <= graph.num_nodes:
        raise ValueError(f"num_parts must be in [1, {graph.num_nodes}], got {num_parts}")
    nodes = torch.arange(graph.num_nodes)
    if num_parts == 1:
        return torch.zeros_like(nodes)
    if method == "auto":
        method = "metis" if importlib.util.find_spec("pymetis") is not None else "range"
    if method == "metis":
        found = _metis(graph, num_parts)
        # METIS may leave a part of a tiny graph empty.
        if torch.bincount(found, minlength=num_parts).min() > 0:
            return found
        method = "range"
    if method == "hash":
        # A multiplication by an odd number permutes the remainders of a power of two.
        order = torch.argsort((nodes * 2654435761) % 2**32, stable=True)
        return torch.empty_like(nodes).scatter_(0, order, nodes * num_parts // graph.num_nodes)
    slots = graph.rowptr[1:].cpu().double()
    found = ((slots - 0.5) * num_parts / graph.num_slots).long().clamp(0, num_parts - 1)
    if torch.bincount(found, minlength=num_parts).min() > 0:
        return found
    return nodes * num_parts // graph.num_nodes


def _metis(graph: EgoGraph, num_parts: int) -> Tensor:
    if importlib.util.find_spec("pymetis") is None:
        raise ValueError("method 'metis' needs the package pymetis: pip install pymetis")
    import pymetis

    ego, member = graph.ego_of_slot().cpu(), graph.member.long().cpu()
    apart = ego != member
    ego, member = ego[apart], member[apart]
    if not graph.is_undirected:
        ego, member = torch.cat([ego, member]), torch.cat([member, ego])
        ego, member = torch.unique(torch.stack([ego, member]), dim=1)
    pointer = torch.zeros(graph.num_nodes + 1, dtype=torch.int64)
    pointer[1:] = torch.bincount(ego, minlength=graph.num_nodes).cumsum(0)
    # A node's work is its memberships, not one.
    weights = graph.ego_sizes().tolist()
    adjacency = pymetis.CSRAdjacency(pointer.tolist(), member.tolist())
    _, membership = pymetis.part_graph(num_parts, adjacency, vweights=weights)
    return torch.tensor(membership, dtype=torch.int64)


def make_part(graph: EgoGraph, owner: Tensor, index: int) -> Part:
    """Part ``index`` of a graph whose nodes belong to ``owner`` ``[N]``."""
    rowptr, member = graph.rowptr.long(), graph.member.long()
    is_own = owner == index
    own = is_own.nonzero()[:, 0]
    if own.numel() == 0:
        raise ValueError(f"part {index} owns no node")
    slots, sizes = _ranges(rowptr[own], rowptr[own + 1])
    members = member[slots]
    nodes = torch.unique(torch.cat([own, members]))
    ego = torch.repeat_interleave(torch.searchsorted(nodes, own), sizes)
    edges = torch.stack([torch.searchsorted(nodes, members), ego])
    here = is_own[nodes]
    halo_rows = (~here).nonzero()[:, 0]
    return Part(
        nodes=nodes,
        own_rows=here.nonzero()[:, 0],
        halo_rows=halo_rows,
        halo_owner=owner[nodes[halo_rows]],
        graph=EgoGraph.from_edge_index(edges, nodes.numel()),
        num_nodes=graph.num_nodes,
    )


def chunks(graph: EgoGraph, chunk_size: int, nodes: Tensor | None = None) -> list[Part]:
    """The graph in consecutive parts of at most ``chunk_size`` nodes of their own.

    Args:
        graph: the whole graph.
        chunk_size: most nodes of a part.
        nodes: the nodes to share out, ascending; None: all. The others are in halos alone.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be positive, got {chunk_size}")
    count = graph.num_nodes if nodes is None else nodes.numel()
    owner = torch.arange(count, device=graph.device) // chunk_size
    if nodes is not None:
        owner = owner.new_full((graph.num_nodes,), -1).index_copy(0, nodes, owner)
    return [make_part(graph, owner, index) for index in range(-(-count // chunk_size))]


def edge_cut(graph: EgoGraph, owner: Tensor) -> float:
    """The share of memberships (a node's own in its ego aside) that join two parts."""
    ego, member = graph.ego_of_slot(), graph.member.long()
    apart = ego != member
    return float((owner[ego] != owner[member])[apart].double().mean()) if bool(apart.any()) else 0.0


def _ranges(begin: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """The concatenated ranges begin[i]:end[i], and their lengths."""
    sizes = end - begin
    first = torch.repeat_interleave(begin - (sizes.cumsum(0) - sizes), sizes)
    return first + torch.arange(int(sizes.sum()), device=begin.device), sizes
