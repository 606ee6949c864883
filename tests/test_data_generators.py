"""Generated graphs: exact counts, features against plain loops, seeds and bad arguments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcgnn.data import (
    GraphData,
    load_graph,
    minesweeper,
    random_split,
    stochastic_block_model,
    tree_neighbors_match,
)


def test_minesweeper_default_has_the_published_shape():
    x, edge_index, y = minesweeper()
    assert x.shape == (10_000, 10)
    assert edge_index.shape == (2, 2 * 39_402)
    assert int(y.sum()) == 2_000
    assert int(x[:, 0].sum()) == 5_000
    assert torch.equal(x.sum(dim=1), torch.ones(10_000))


@pytest.mark.parametrize(("rows", "cols"), [(1, 2), (1, 7), (5, 1), (2, 2), (6, 9)])
def test_minesweeper_features_equal_a_loop(rows, cols):
    x, edge_index, y = minesweeper(rows=rows, cols=cols, seed=5)
    expected_edges = set()
    for r in range(rows):
        for c in range(cols):
            node, mines = r * cols + c, 0
            for rr in range(max(0, r - 1), min(rows, r + 2)):
                for cc in range(max(0, c - 1), min(cols, c + 2)):
                    if (rr, cc) != (r, c):
                        expected_edges.add((rr * cols + cc, node))
                        mines += int(y[rr * cols + cc])
            row = [0.0] * 10
            row[0 if x[node, 0] == 1 else 1 + mines] = 1.0
            assert x[node].tolist() == row
    assert set(map(tuple, edge_index.t().tolist())) == expected_edges
    assert edge_index.size(1) == len(expected_edges)
    assert int(y.sum()) == round(0.2 * rows * cols)
    assert int(x[:, 0].sum()) == round(0.5 * rows * cols)


def test_minesweeper_is_seeded():
    first, again, other = (minesweeper(rows=9, cols=9, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[2], other[2])


@settings(max_examples=30, deadline=None)
@given(
    num_nodes=st.integers(40, 120),
    num_classes=st.integers(2, 5),
    homophily=st.floats(0, 1),
    avg_degree=st.floats(0, 6),
    seed=st.integers(0, 100),
)
def test_sbm_has_exactly_the_edges_asked_for(num_nodes, num_classes, homophily, avg_degree, seed):
    x, edge_index, y = stochastic_block_model(
        num_nodes=num_nodes,
        num_classes=num_classes,
        homophily=homophily,
        avg_degree=avg_degree,
        seed=seed,
    )
    num_edges = round(num_nodes * avg_degree / 2)
    assert edge_index.shape == (2, 2 * num_edges)
    source, target = edge_index
    assert not bool((source == target).any())
    pairs = set(map(tuple, edge_index.t().tolist()))
    assert len(pairs) == 2 * num_edges
    assert all((b, a) in pairs for a, b in pairs)
    assert int((y[source] == y[target]).sum()) == 2 * round(homophily * num_edges)
    assert x.shape == (num_nodes, 16)


def test_sbm_can_fill_every_pair():
    _, edge_index, _ = stochastic_block_model(num_nodes=20, num_classes=2, homophily=90 / 190, avg_degree=19)
    assert edge_index.size(1) == 20 * 19


def test_sbm_signal_separates_the_classes():
    x, _, y = stochastic_block_model(num_nodes=4000, num_features=8, signal=3.0, num_classes=3)
    means = torch.stack([x[y == label].mean(dim=0) for label in range(3)])
    torch.testing.assert_close(means.norm(dim=1), torch.full((3,), 3.0), atol=0.2, rtol=0)
    torch.testing.assert_close((x - means[y]).std(), torch.tensor(1.0), atol=0.05, rtol=0)


def test_sbm_is_seeded_and_large_ones_are_quick():
    first, again, other = (stochastic_block_model(seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[1], other[1])
    _, edge_index, _ = stochastic_block_model(num_nodes=100_000, avg_degree=20)
    assert edge_index.size(1) == 2_000_000


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_tree_answer_is_solvable_and_unique(depth, bidirectional):
    num_leaves = 2**depth
    tree_size = 2 * num_leaves - 1
    x, edge_index, y = tree_neighbors_match(depth=depth, num_trees=50, bidirectional=bidirectional)
    num_trees = x.size(0) // tree_size
    assert num_trees == min(50, 4 if depth == 1 else 50)
    key = x[:, : num_leaves + 1].argmax(dim=1).view(num_trees, tree_size)
    value = x[:, num_leaves + 1 :].argmax(dim=1).view(num_trees, tree_size)
    assert torch.equal(x.sum(dim=1), torch.full((x.size(0),), 2.0))

    # Walk up the edges from every leaf: all arrive at their own root after `depth` steps.
    up = edge_index[:, edge_index[0] > edge_index[1]]
    parent = dict(up.t().tolist())
    assert len(parent) == up.size(1) == num_trees * (tree_size - 1)
    assert edge_index.size(1) == up.size(1) * (2 if bidirectional else 1)
    for tree in range(num_trees):
        root, answers = tree * tree_size, []
        for leaf in range(num_leaves - 1, tree_size):
            node = root + leaf
            for _ in range(depth):
                node = parent[node]
            assert node == root
            if key[tree, leaf] == key[tree, 0]:
                answers.append(int(value[tree, leaf]) - 1)
        assert answers == [int(y[root])]
    labelled = (y >= 0).nonzero().view(-1)
    assert torch.equal(labelled, torch.arange(num_trees) * tree_size)


def test_tree_problems_are_all_different():
    x, _, y = tree_neighbors_match(depth=2, num_trees=10_000)
    assert x.size(0) == 96 * 7
    assert x.view(96, -1).unique(dim=0).size(0) == 96
    assert torch.equal(torch.bincount(y[y >= 0]), torch.full((4,), 24))


def test_random_split_depends_on_its_index_alone():
    y = torch.arange(40) % 3 - 1
    first = random_split(y, 7)
    torch.manual_seed(99)
    again = random_split(y, 7)
    other = random_split(y, 8)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    total = sum(mask.long() for mask in first)
    assert torch.equal(total, (y >= 0).long())
    labelled = int((y >= 0).sum())
    sizes = [int(mask.sum()) for mask in first]
    assert sizes == [round(0.5 * labelled), round(0.25 * labelled), labelled - sum(sizes[:2])]


@pytest.mark.parametrize("seed", range(4))
def test_splits_are_independent_of_the_board(seed):
    data = load_graph("minesweeper-synthetic", split=seed, seed=seed)
    for mask in data.masks().values():
        assert 0.17 < float(data.y[mask].float().mean()) < 0.23


def test_specs_and_keywords_mean_the_same():
    by_spec = load_graph("Minesweeper_Synthetic:rows=6, cols=5,seed=1", split=2)
    by_keyword = load_graph("minesweeper-synthetic", split=2, rows=6, cols=5, seed=1)
    assert by_spec.name == by_keyword.name == "minesweeper-synthetic:cols=5,rows=6,seed=1"
    assert by_spec.fingerprint() == by_keyword.fingerprint()
    assert by_spec.num_nodes == 30
    assert (by_spec.metric, by_spec.num_classes, by_spec.split) == ("roc_auc", 2, 2)
    tree = load_graph("tree-neighborsmatch:depth=2,bidirectional=yes")
    assert (tree.num_classes, tree.metric) == (4, "accuracy")
    assert load_graph("sbm:num_classes=3,num_nodes=90").num_classes == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("korra", "unknown graph 'korra' .did you mean cora"),
        ("zzz", "unknown graph 'zzz'; known are minesweeper-synthetic"),
        ("sbm:homofily=0.2", "no option 'homofily' .did you mean homophily"),
        ("sbm:num_nodes=0.5", "'num_nodes' wants an int, got '0.5'"),
        ("sbm:homophily=high", "'homophily' wants a float, got 'high'"),
        ("sbm:homophily=1.5", "homophily must be between 0 and 1"),
        ("sbm:num_nodes=10,avg_degree=9", "only 20 such pairs"),
        ("sbm:avg_degree=-1", "avg_degree must not be negative"),
        ("sbm:num_classes=0", "num_classes must be between"),
        ("sbm:num_features=0", "num_features must be positive"),
        ("sbm:seed=1,seed=2", "'seed' is given twice"),
        ("sbm:seed", "not of the form option=value"),
        ("sbm:", "options are wanted after the colon"),
        ("tree-neighborsmatch:bidirectional=maybe", "wants a bool"),
        ("tree-neighborsmatch:depth=0", "depth must be between 1 and 12"),
        ("tree-neighborsmatch:num_trees=0", "num_trees must be positive"),
        ("minesweeper-synthetic:rows=0", "at least two cells"),
        ("minesweeper-synthetic:mine_share=2", "mine_share must be between 0 and 1"),
        ("cora:seed=1", "cora takes no options"),
    ],
)
def test_bad_specs_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        load_graph(spec)


def test_bad_keywords_are_named():
    with pytest.raises(ValueError, match="wants an int, got True"):
        load_graph("sbm", num_nodes=True)
    with pytest.raises(ValueError, match="split must not be negative"):
        load_graph("sbm", split=-1)


def test_graph_data_checks_its_parts():
    good = load_graph("sbm:num_nodes=20")
    fields = {name: getattr(good, name) for name in GraphData.__dataclass_fields__}
    for change, message in [
        ({"x": good.x.long()}, "x must be a float matrix"),
        ({"edge_index": good.edge_index[0]}, r"edge_index must be \[2, E\]"),
        ({"edge_index": good.edge_index + 10}, "has 20 nodes"),
        ({"y": good.y[1:]}, "y must be"),
        ({"metric": "f1"}, "metric must be one of"),
        ({"val_mask": good.val_mask.long()}, "val_mask must be bool"),
        ({"y": torch.full_like(good.y, -1)}, "train_mask holds labels outside"),
    ]:
        with pytest.raises(ValueError, match=message):
            GraphData(**{**fields, **change})
    assert GraphData(**fields).to("cpu").fingerprint() == good.fingerprint()
    assert GraphData(**{**fields, "x": good.x + 1}).fingerprint() != good.fingerprint()
