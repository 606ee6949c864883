"""The roofline model: counts that can be done by hand, and what the page claims."""

from __future__ import annotations

import pytest
import torch

from dcgnn_kernels.triton import config
from dcgnn_kernels.triton.roofline import A100, H100, Gather, Kernel, Layer, seconds


def test_a_table_in_cache_is_read_once_and_a_large_one_is_missed():
    small = Gather(rows=1e6, width=256, table=10e6)
    assert small.l2_bytes == 256e6
    assert small.dram_bytes(A100) == 10e6
    large = Gather(rows=1e7, width=256, table=320e6)
    assert large.dram_bytes(A100) == pytest.approx(2560e6 * (1 - 32 / 320))
    assert Gather(rows=100, width=4, table=400).l2_bytes == 3200  # a sector each


def test_time_is_the_slowest_of_three():
    assert Kernel("k", (), streamed=2.039e12, flops=0).seconds(A100) == pytest.approx(1.0)
    assert Kernel("k", (), streamed=0, flops=19.5e12).seconds(A100) == pytest.approx(1.0)
    assert Kernel("k", (Gather(1e9, 5000, 1e6),), 0, 0).seconds(A100) == pytest.approx(1.0)


def test_spmm_by_hand():
    layer = Layer(torch.full((10,), 3), num_channels=4)
    assert layer.spmm().bytes() == 30 * 32 + 30 * 8 + 10 * 4 + 10 * 16  # rows of 16 bytes cost a sector
    assert layer.spmm().flops == 240


def test_hubs_are_visited_more_often():
    limit = config.resident_limit(64, 2, torch.float32, backward=False)
    small, large = (Layer(torch.full((1000,), size)) for size in (limit, limit + 1))
    assert small.hub_slots(backward=False) == 0
    assert large.hub_slots(backward=False) == large.slots
    assert large.local_sinkhorn().gathers[0].rows == 3 * large.slots


def skewed(nodes: int, mean: float) -> torch.Tensor:
    """Ego sizes as of a social network: half of the slots in a tenth of the egos, hubs of thousands."""
    ranks = (torch.arange(nodes) + 10.0) ** -0.7
    return (1 + ranks * (mean - 1) * nodes / ranks.sum()).long()


@pytest.mark.parametrize("gpu", [A100, H100], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("even", [True, False], ids=["even", "skewed"])
@pytest.mark.parametrize(("nodes", "size"), [(41_554, 66), (18_660, 86), (421_961, 6)])
def test_what_the_page_claims(gpu, nodes, size, even):
    """Below unfused GATConv and below 3.4 times GCNConv everywhere; bfloat16 well below float32."""
    sizes = torch.full((nodes,), size) if even else skewed(nodes, size)
    layer = Layer(sizes)
    assert even or layer.hub_slots(backward=False) > 0.05 * layer.slots
    ours = seconds(layer.forward(), gpu)
    assert ours < seconds(layer.gat_unfused(), gpu)
    assert ours < 3.4 * seconds(layer.gcn_unfused(), gpu)
    half = Layer(sizes, dtype=torch.bfloat16)
    assert seconds(half.forward(), gpu) < 0.7 * ours
    assert seconds(half.backward(), gpu) < seconds(layer.backward(), gpu)
