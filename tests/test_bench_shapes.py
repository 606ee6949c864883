"""Random graphs of published shapes: simple, exact in size, seeded, with the degrees that are promised."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcgnn.bench.shapes import SHAPES, Shape, expected_degrees, make_edges, scaled_shape

SMALL = Shape(2000, 30_000, 0.4)


def test_edges_are_simple_go_both_ways_and_are_exactly_as_many():
    edges = make_edges(SMALL)
    assert edges.shape == (2, 60_000)
    assert edges.dtype == torch.int64
    keys = edges[0] * SMALL.num_nodes + edges[1]
    assert bool((keys.diff() > 0).all()), "sorted, and every edge once"
    assert bool((edges[0] != edges[1]).all())
    assert torch.equal(keys, (edges[1] * SMALL.num_nodes + edges[0]).sort().values)
    assert int(edges.min()) >= 0
    assert int(edges.max()) < SMALL.num_nodes


def test_the_seed_decides():
    assert torch.equal(make_edges(SMALL, 3), make_edges(SMALL, 3))
    assert not torch.equal(make_edges(SMALL, 3), make_edges(SMALL, 4))


@pytest.mark.parametrize("tail", [0.1, 0.5])
def test_degrees_follow_the_distribution(tail):
    shape = Shape(20_000, 200_000, tail)
    degrees = np.sort(np.bincount(make_edges(shape)[0].numpy(), minlength=shape.num_nodes))[::-1]
    expected = expected_degrees(shape)
    assert expected.mean() == pytest.approx(20.0)
    assert degrees.sum() == 400_000
    for share in (0.02, 0.1, 0.5):
        place = int(share * shape.num_nodes)
        assert degrees[place] == pytest.approx(expected[place], rel=0.25)
    # The tail: a heavy one has a much larger hub than an almost exponential one.
    assert degrees[0] == pytest.approx(expected[0], rel=0.4)


def test_nodes_are_in_random_order():
    degrees = torch.bincount(make_edges(SMALL)[0], minlength=SMALL.num_nodes).double()
    half = SMALL.num_nodes // 2
    assert float(degrees[:half].mean()) == pytest.approx(float(degrees[half:].mean()), rel=0.15)


def test_published_sizes():
    assert (SHAPES["penn94"].num_nodes, SHAPES["penn94"].num_edges) == (41_554, 1_362_229)
    assert set(SHAPES) == {"penn94", "cornell5", "genius", "ogbn-arxiv", "ogbn-products"}
    shape = scaled_shape(1_000_000)
    products = SHAPES["ogbn-products"]
    assert shape.num_edges / shape.num_nodes == pytest.approx(
        products.num_edges / products.num_nodes, rel=1e-3
    )


def test_more_edges_than_a_random_graph_can_hold_are_refused():
    with pytest.raises(ValueError, match="num_edges must be positive and at most half of all pairs, got 100"):
        make_edges(Shape(10, 100, 0.3))
