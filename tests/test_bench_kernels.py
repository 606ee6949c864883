"""Single kernels, the rates of the machine, and the least work of each kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dcgnn.bench.kernels import KERNELS, KernelCall, check_ego_graph, check_kernel, kernel_calls
from dcgnn.bench.limits import Rates, Work, forward_seconds, kernel_work, measure_rates
from dcgnn.bench.problem import Settings, shaped_problem
from dcgnn.bench.shapes import Shape

TINY = Shape(120, 700, 0.4)
CPU = torch.device("cpu")


def tiny(device=CPU, **settings):
    return shaped_problem("tiny", Settings(channels=8, **settings), device, shape=TINY)


@pytest.mark.parametrize("num_local", [1, 2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_agree_with_plain_pytorch(device, num_local, dtype):
    calls = kernel_calls(tiny(device, num_local=num_local, dtype=dtype))
    assert tuple(calls) == KERNELS
    assert {name: check_kernel(call, dtype) for name, call in calls.items()} == dict.fromkeys(KERNELS)


def test_a_wrong_kernel_is_noticed():
    class Planted(KernelCall):
        def __call__(self):
            assign, *rest = super().__call__()
            return assign * 1.01, *rest

    call = kernel_calls(tiny())["local_sinkhorn"]
    reason = check_kernel(Planted(call.op, call.arguments), "float32")
    assert reason is not None
    assert reason.startswith("result 0 disagrees with plain PyTorch: relative error 0.01")


def test_the_construction_of_the_graph_is_compared_with_a_plain_sort(monkeypatch):
    problem = tiny()
    assert check_ego_graph(problem) is None
    build = torch.ops.dcgnn.ego_graph
    monkeypatch.setattr(torch.ops.dcgnn, "ego_graph", lambda edges, nodes: build(edges[:, 1:], nodes))
    assert check_ego_graph(problem) == "rowptr disagrees with plain PyTorch"


def test_least_time_by_hand():
    rates = Rates(gather=100.0, stream=10.0, gemm=1000.0, gathered_by="")
    assert Work(gathered=200, streamed=10, operations=2000).seconds(rates) == 3.0
    assert Work(gathered=200, streamed=10, operations=5000).seconds(rates) == 5.0


def test_work_counts_rows_of_every_slot():
    problem = tiny(num_local=3)
    work = kernel_work(problem)
    row = problem.num_slots * 8 * 4
    assert set(work) == {*KERNELS, "ego_graph"}
    assert work["local_sinkhorn"].gathered == row
    assert work["node_update"].gathered == 3 * row
    assert work["local_sinkhorn_backward"].gathered == 7 * row
    assert kernel_work(tiny())["local_sinkhorn_backward"].gathered == 4 * row
    table, index = 120 * 8 * 4, problem.num_slots * 4
    assert work["local_sinkhorn"].streamed == 2 * 3 * table + (3 + 1) * index, "centroids are read, too"
    assert kernel_work(tiny())["local_sinkhorn"].streamed == 2 * table + (2 + 1) * index
    assert work["linear"].operations == 2 * 120 * 8 * 8
    half = kernel_work(problem.with_settings(replace(problem.settings, dtype="bfloat16")))
    assert half["node_update"].gathered == 1.5 * row


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_rates_are_measured(device, dtype):
    problem = tiny(device, dtype=dtype)
    rates = measure_rates(problem, rounds=1)
    assert rates.gather > 0
    assert rates.stream > 0
    assert rates.gemm > 0
    assert rates.gathered_by in ("local_centroids", "embedding_bag", "CSR product")
    assert forward_seconds(problem, rates) > 0
