"""The measures behind the figures, against other ways to compute them."""

from __future__ import annotations

import itertools

import pytest
import torch
from matplotlib.figure import Figure
from torch_geometric.utils import to_undirected

from dcgnn import DCMsgPassing
from dcgnn.data import load_graph
from dcgnn.data.graph_data import balanced_split, few_label_split
from dcgnn.reproduce.ablations import draw_bars
from dcgnn.reproduce.classification import _threes
from dcgnn.reproduce.dirichlet import dirichlet_energy
from dcgnn.reproduce.homophily import class_matrix, edge_homophily
from dcgnn.reproduce.paper import Printed
from dcgnn.reproduce.resistance import (
    cluster_laplacian,
    effective_resistance,
    largest_component,
    plain_laplacian,
    total_resistance,
)
from dcgnn.reproduce.tree import tree_of_node
from dcgnn_kernels import EgoGraph

PATH = to_undirected(torch.tensor([[0, 1, 2], [1, 2, 3]]))


def test_resistance_of_a_path_is_the_distance():
    resistance = effective_resistance(plain_laplacian(PATH, 4))
    for u, v in itertools.product(range(4), range(4)):
        assert resistance[u, v] == pytest.approx(abs(u - v), abs=1e-9)
    assert total_resistance(plain_laplacian(PATH, 4)) == pytest.approx(1 + 1 + 1 + 2 + 2 + 3)


def test_resistance_of_a_complete_graph():
    pairs = torch.tensor(list(itertools.permutations(range(6), 2))).T
    resistance = effective_resistance(plain_laplacian(pairs, 6))
    assert torch.allclose(resistance, (2 / 6) * (1 - torch.eye(6, dtype=torch.float64)))


@pytest.mark.parametrize(("num_global", "num_local"), [(1, 2), (3, 1)])
def test_cluster_laplacian_is_the_bipartite_graph_seen_from_the_nodes(num_global, num_local):
    num_nodes = 4
    graph = EgoGraph.from_edge_index(PATH, num_nodes)
    edges, cluster = [], num_nodes
    for _ in range(num_global):
        edges += [(node, cluster) for node in range(num_nodes)]
        cluster += 1
    for ego in range(num_nodes):
        members = graph.member[graph.rowptr[ego] : graph.rowptr[ego + 1]].tolist()
        for _ in range(num_local):
            edges += [(node, cluster) for node in members]
            cluster += 1
    whole = effective_resistance(plain_laplacian(to_undirected(torch.tensor(edges).T), cluster))
    seen = effective_resistance(cluster_laplacian(PATH, num_nodes, num_global, num_local))
    assert torch.allclose(seen, whole[:num_nodes, :num_nodes])


def test_largest_component():
    edges = to_undirected(torch.tensor([[0, 3, 4], [1, 4, 5]]))
    kept, count = largest_component(edges, 6)
    assert count == 3
    assert sorted(map(tuple, kept.T.tolist())) == [(0, 1), (1, 0), (1, 2), (2, 1)]


def test_dirichlet_energy():
    z = torch.tensor([[0.0], [1.0], [3.0], [3.0]])
    assert dirichlet_energy(z, PATH) == pytest.approx(2 * (1 + 4 + 0) / 4)


def test_class_matrix():
    y = torch.tensor([0, 0, 1, -1])
    matrix = class_matrix(PATH, y, 3)
    assert torch.allclose(
        matrix, torch.tensor([[2 / 3, 1 / 3, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.float64)
    )
    assert edge_homophily(PATH, y) == pytest.approx(1 / 3)


def test_few_label_split():
    y = torch.tensor([0, 1, 2] * 20 + [-1] * 5)
    train, val, test = few_label_split(y, 3, per_class=4, num_val=10, num_test=20)
    assert torch.bincount(y[train]).tolist() == [4, 4, 4]
    assert (int(val.sum()), int(test.sum())) == (10, 20)
    assert not (train & val).any()
    assert not ((train | val) & test).any()
    assert not (train | val | test)[y < 0].any()
    again = few_label_split(y, 3, per_class=4, num_val=10, num_test=20)
    assert torch.equal(again[0], train)
    assert not torch.equal(few_label_split(y, 4, per_class=4, num_val=10, num_test=20)[0], train)
    with pytest.raises(ValueError, match="class 0 has 20 nodes"):
        few_label_split(y, 0, per_class=21)
    with pytest.raises(ValueError, match="num_val"):
        few_label_split(y, 0)


def test_balanced_split():
    y = torch.tensor([0] * 40 + [1] * 55 + [2] * 5 + [-1] * 7)
    train, val, test = balanced_split(y, 3, (0.6, 0.2))
    assert torch.bincount(y[train]).tolist() == [20, 20, 5], "a small class is there as a whole"
    assert int(val.sum()) == 20
    assert torch.equal(test, (y >= 0) & ~train & ~val)
    assert not (train & val).any()
    assert torch.equal(balanced_split(y, 3, (0.6, 0.2))[0], train)
    assert not torch.equal(balanced_split(y, 4, (0.6, 0.2))[0], train)
    assert not torch.cat(balanced_split(torch.full((3,), -1), 0)).any()


@pytest.mark.parametrize("count", [3, 5, 12])
def test_choices_of_three_splits_are_counted(count):
    scores = [80 + 0.37 * ((7 * index) % count) for index in range(count)]
    means = [sum(three) / 3 for three in itertools.combinations(scores, 3)]
    for printed in (Printed(82.0), Printed(82.0, 0.8), Printed(min(means) - 1e-9), Printed(99.0)):
        passing = sum(printed.verdict(mean) == "pass" for mean in means)
        told = _threes("here", scores, printed)
        assert f"of the {len(means)} choices" in told
        assert (
            f"{passing} pass; DC-GNN's means over them go from {min(means):.2f} to {max(means):.2f}" in told
        )


@pytest.mark.parametrize("models", [1, 2, 3])
def test_bars_stand_around_their_tick_and_show_the_deviation(models):
    scores = {graph: {f"model {m}": [50.0 + m, 54.0 + m] for m in range(models)} for graph in ("a", "b")}
    axes = Figure().subplots()
    assert draw_bars(axes, scores) == pytest.approx(52 - 8**0.5)
    centres = torch.tensor([bar.get_x() + bar.get_width() / 2 for bar in axes.patches]).view(models, 2)
    assert centres.mean(0).tolist() == pytest.approx(axes.get_xticks().tolist(), abs=1e-6)
    ends = [segment[:, 1].tolist() for lines in axes.collections for segment in lines.get_segments()]
    assert ends[0] == pytest.approx([52 - 8**0.5, 52 + 8**0.5])
    single = Figure().subplots()
    assert draw_bars(single, {"a": {"model": [50.0]}}) == 50.0


def test_every_tree_is_a_graph_of_its_own():
    depth, size = 2, 7
    data = load_graph(f"tree-neighborsmatch:depth={depth},num_trees=3")
    torch.manual_seed(0)
    layers = DCMsgPassing(4, 5, num_layers=2, alpha=0.7).double()
    z = torch.randn(3 * size, 4, dtype=torch.float64)
    together = layers(z, data.edge_index, batch=tree_of_node(data, depth))
    for tree in range(3):
        nodes = slice(tree * size, (tree + 1) * size)
        mine = (data.edge_index[0] >= tree * size) & (data.edge_index[0] < (tree + 1) * size)
        alone = layers(z[nodes], data.edge_index[:, mine] - tree * size)
        assert torch.allclose(together[nodes], alone)
