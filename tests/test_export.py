"""Exported programs: saved and loaded with an EgoGraph input, and with a free number of nodes and edges."""

from __future__ import annotations

import pytest
import torch
from graphs import awkward, star
from torch.export import Dim

from dcgnn import DCConv, DCMsgPassing
from dcgnn_kernels import EgoGraph


@pytest.mark.parametrize("case", [awkward(), star(10)], ids=["directed", "undirected"])
def test_a_saved_program_takes_an_ego_graph(case, tmp_path):
    graph = EgoGraph.from_edge_index(*case)
    x = torch.randn(graph.num_nodes, 4)
    model = DCMsgPassing(4, 3, num_layers=2).eval()
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, (x, graph)), path)
    loaded = torch.export.load(path).module()
    torch.testing.assert_close(loaded(x, graph), model(x, graph))


@pytest.mark.parametrize("mass", ["node", "paper"])
def test_nodes_and_edges_may_vary(mass):
    model = DCConv(4, 8, 3, mass=mass).eval()
    edge_index, num_nodes = awkward()
    shapes = {"x": {0: Dim("nodes", min=2)}, "edge_index": {1: Dim("edges", min=2)}, "return_state": None}
    program = torch.export.export(
        model, (torch.randn(num_nodes, 4), edge_index, False), dynamic_shapes=shapes
    ).module()
    for other, size in (awkward(), star(6), star(33)):
        x = torch.randn(size, 4)
        torch.testing.assert_close(program(x, other, False), model(x, other))
