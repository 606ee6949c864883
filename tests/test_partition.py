"""Cutting a graph into parts."""

from __future__ import annotations

import pytest
import torch
from graphs import awkward, both_ways, random_graphs
from hypothesis import given
from hypothesis import strategies as st

from dcgnn.partition import METHODS, chunks, edge_cut, make_part, owners
from dcgnn_kernels import EgoGraph


@given(case=random_graphs(), num_parts=st.integers(1, 4), method=st.sampled_from(METHODS))
def test_parts_hold_their_egos_and_every_node_has_one_owner(case, num_parts, method):
    edge_index, num_nodes = case
    if num_nodes < num_parts:
        return
    graph = EgoGraph.from_edge_index(edge_index, num_nodes)
    owner = owners(graph, num_parts, method)
    assert torch.bincount(owner, minlength=num_parts).min() > 0
    parts = [make_part(graph, owner, index) for index in range(num_parts)]
    assert torch.cat([part.own for part in parts]).sort().values.tolist() == list(range(num_nodes))
    for index, part in enumerate(parts):
        assert torch.equal(owner[part.own], torch.full_like(part.own, index))
        assert torch.equal(owner[part.nodes[part.halo_rows]], part.halo_owner)
        assert bool((part.nodes.diff() > 0).all())
        for row, node in enumerate(part.nodes.tolist()):
            members = part.graph.member[part.graph.rowptr[row] : part.graph.rowptr[row + 1]].long()
            found = part.nodes[members].tolist()
            whole = graph.member[graph.rowptr[node] : graph.rowptr[node + 1]].tolist()
            assert found == (whole if owner[node] == index else [node])
    assert sum(part.num_edge_slots for part in parts) == graph.num_slots


def test_metis_cuts_few_edges():
    pytest.importorskip("pymetis", reason="the package pymetis is not installed")
    nodes = torch.arange(200)
    graph = EgoGraph.from_edge_index(both_ways(torch.stack([nodes, (nodes * 7 + 7) % 200])), 200)
    assert edge_cut(graph, owners(graph, 4, "metis")) < 0.5 * edge_cut(graph, owners(graph, 4, "hash"))


def test_ranges_balance_slots_not_nodes():
    hub = torch.stack([torch.arange(100), torch.zeros(100, dtype=torch.int64)])
    graph = EgoGraph.from_edge_index(hub, 200)
    owner = owners(graph, 2, "range")
    assert bool((owner.diff() >= 0).all())
    slots = torch.zeros(2).index_add(0, owner, graph.ego_sizes().float())
    assert slots.max() < 0.55 * graph.num_slots


def test_chunks_are_consecutive():
    graph = EgoGraph.from_edge_index(*awkward())
    assert [part.own.tolist() for part in chunks(graph, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_bad_cuts_are_named():
    graph = EgoGraph.from_edge_index(*awkward())
    with pytest.raises(ValueError, match=r"num_parts must be in \[1, 10\], got 11"):
        owners(graph, 11)
    with pytest.raises(ValueError, match="method must be one of"):
        owners(graph, 2, "random")
    with pytest.raises(ValueError, match="chunk_size must be positive"):
        chunks(graph, 0)
    with pytest.raises(ValueError, match="part 1 owns no node"):
        make_part(graph, torch.zeros(10, dtype=torch.int64), 1)
