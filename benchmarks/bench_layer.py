"""pytest-benchmark suite of one layer: ``pytest benchmarks/bench_layer.py`` (``-k penn94`` for one graph)."""

from __future__ import annotations

from functools import lru_cache

import pytest
from layer_cases import SHAPES, Case, forward, forward_backward

LAYERS = ("DCConv", "GCNConv(edge_index)", "GCNConv(CSR)", "GATConv")


@lru_cache(maxsize=1)
def case_and_layers(shape: str, channels: int):
    case = Case.of_shape(shape, channels)
    return case, case.layers()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("channels", [16, 64, 128])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("direction", ["forward", "forward+backward"])
def test_layer(benchmark, shape, channels, layer, direction):
    case, layers = case_and_layers(shape, channels)
    measured = (forward if direction == "forward" else forward_backward)(layers[layer], case.x)
    benchmark.group = f"{shape} F={channels} {direction}"
    benchmark.extra_info.update(slots=case.graph.num_slots, channels=channels)
    benchmark.pedantic(measured, warmup_rounds=1, rounds=5)
