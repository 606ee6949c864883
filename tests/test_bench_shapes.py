"""Random graphs of published shapes: simple, exact in size, seeded, with the degrees that are promised."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
import torch

from dcgnn.bench import shapes
from dcgnn.bench.shapes import SHAPES, Shape, expected_degrees, generation_bytes, make_edges, scaled_shape

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


def test_stored_results_belong_to_these_graphs():
    edges = make_edges(SMALL, 3).numpy().astype("<i8").tobytes()
    assert hashlib.sha256(edges).hexdigest()[:16] == "73dc66d0f108546a"


def test_blocks_do_not_change_the_graph(monkeypatch):
    whole = make_edges(SMALL)
    monkeypatch.setattr(shapes, "BLOCK", 1000)
    assert torch.equal(make_edges(SMALL), whole)


@pytest.mark.parametrize(
    "shape", [SMALL, Shape(200, 9_000, 0.3), Shape(10, 20, 0.3), Shape(5, 3, 0.3)], ids=str
)
def test_more_than_one_draw_gives_a_simple_graph_too(monkeypatch, shape):
    monkeypatch.setattr(shapes, "CHUNK", 500)
    monkeypatch.setattr(shapes, "BLOCK", 300)
    source, target = make_edges(shape)
    keys = source * shape.num_nodes + target
    assert keys.numel() == 2 * shape.num_edges
    assert bool((keys.diff() > 0).all())
    assert bool((source != target).all())
    assert torch.equal(keys, (target * shape.num_nodes + source).sort().values)


def test_memory_stays_within_what_is_announced():
    shape = scaled_shape(1_000_000)
    tracemalloc.start()
    try:
        make_edges(shape)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 32 * shape.num_edges < peak <= generation_bytes(shape)
    announced = generation_bytes(scaled_shape(50_000_000))  # 10^8 edges in both directions
    assert announced < 3e9


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
