"""The PTX that Triton emits for the kernels, executed on the CPU behind the ops: values, bounds, races."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from emulation import triton_ptx
from test_ops import random_inputs, values_and_grads
from triton_cases import FULL, close, mixed, node_update_inputs, on_cpu, only_full, small_tiles

import dcgnn_kernels
from dcgnn_kernels import reference
from dcgnn_kernels.triton import catalogue
from dcgnn_kernels.triton.launcher import recorded

CPU = torch.device("cpu")
F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = (F32, BF16, F16, F64) if FULL else (F32,)


@pytest.fixture(params=[80, 90] if FULL else [80], ids=lambda arch: f"sm_{arch}")
def executed(request):
    with on_cpu(lambda: triton_ptx.emulate(arch=request.param)):
        yield


def local_cases():
    quick = [
        # tiles, dtype, K, channels, iterations, cost scale, fresh centroids
        (False, F32, 2, 8, 3, "max", True),
        (True, F32, 2, 8, 2, "max", True),
        (False, BF16, 3, 8, 2, "mean", False),
    ]
    more = [
        (F32, 2, 64, 3, "max", True),
        (F32, 4, 16, 3, "max", False),
        (F32, 2, 8, None, "none", True),
        (BF16, 2, 64, 3, "max", True),
        (BF16, 2, 5, 3, "none", False),
        (F16, 2, 16, 3, "mean", False),
        (F16, 4, 16, 2, "none", True),
        (F64, 2, 5, 3, "none", True),
        (F64, 3, 8, 2, "max", False),
    ]
    return quick + [(tiled, *case) for case in more for tiled in (False, True) if FULL]


@pytest.mark.parametrize(
    ("tiled", "dtype", "num_local", "num_channels", "num_iters", "cost_scale", "fresh"),
    local_cases(),
    ids=str,
)
def test_local_sinkhorn(
    executed, monkeypatch, tiled, dtype, num_local, num_channels, num_iters, cost_scale, fresh
):
    if tiled:
        small_tiles(monkeypatch)
    graph = mixed()
    z, centroids = random_inputs(graph.num_nodes, num_local, num_channels, CPU)
    options = (graph, 0.7, num_iters, cost_scale)

    def start(z, c):
        return reference.local_centroids(z, graph, num_local) if fresh else c

    close(
        lambda z, *c: dcgnn_kernels.local_sinkhorn(z, c[0] if c else None, *options, num_clusters=num_local),
        lambda z, *c: reference.local_sinkhorn(z, start(z, c[0] if c else None), *options),
        (z,) if fresh else (z, centroids),
        dtype,
    )


@pytest.mark.parametrize("tiled", [True, False] if FULL else [True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_node_update_and_scatter(executed, monkeypatch, dtype, tiled):
    if tiled:
        small_tiles(monkeypatch)
    graph = mixed()
    inputs, factors = node_update_inputs(graph, 2, 2, 8)
    factors = {name: factor.to(reference.accumulate_dtype(dtype)) for name, factor in factors.items()}
    close(
        lambda *t: dcgnn_kernels.node_update(*t, graph, **factors, activation="tanh"),
        lambda *t: reference.node_update(*t, graph, **factors, activation="tanh"),
        inputs,
        dtype,
    )


@only_full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_local", [1, 2, 4])
def test_linear_ops(executed, dtype, num_local):
    graph = mixed()
    inputs, _ = node_update_inputs(graph, 0, num_local, 12)
    close(
        lambda p, c: dcgnn_kernels.cluster_scatter(p, c, graph),
        lambda p, c: reference.cluster_scatter(p, c, graph),
        inputs[3:],
        dtype,
    )
    close(
        lambda z: dcgnn_kernels.local_centroids(z, graph, num_local),
        lambda z: reference.local_centroids(z, graph, num_local),
        (inputs[0],),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_global", "num_iters", "cost_scale"),
    [(5, 2, "max"), (20, 3, "mean"), (1, 1, "none")][: 3 if FULL else 1],
)
def test_global_sinkhorn(executed, monkeypatch, dtype, num_global, num_iters, cost_scale):
    small_tiles(monkeypatch)
    z, centroids = random_inputs(13, num_global, 8, CPU)
    close(
        lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, 0.7, num_iters, cost_scale),
        lambda z, c: reference.global_sinkhorn(z, c, 0.7, num_iters, cost_scale),
        (z, centroids[0]),
        dtype,
    )


def test_bits_do_not_depend_on_which_lane_or_warp_is_first():
    """Lanes that hold copies of a sum all write it to shared memory; a seed draws who wins."""
    graph = mixed()
    z, _ = random_inputs(graph.num_nodes, 2, 16, CPU, torch.float32)
    results = []
    for seed in (1, 2):
        with on_cpu(lambda seed=seed: triton_ptx.emulate(arch=80, seed=seed)):
            results.append(
                values_and_grads(lambda z: dcgnn_kernels.local_sinkhorn(z, None, graph, 0.7, 2, "max"), (z,))
            )
    for left, right in zip(*(values + grads for values, grads in results), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def gradient_of_tiny_features(num_local):
    graph = mixed()
    z, _ = random_inputs(graph.num_nodes, 2, 8, CPU, torch.float32)
    _, (grad,) = values_and_grads(
        lambda z: dcgnn_kernels.local_sinkhorn(z, None, graph, 2.0, 2, "max", num_clusters=num_local),
        (1e-20 * z,),
    )
    return grad


@pytest.mark.parametrize("num_local", [2, 3])
def test_tiny_features_have_finite_gradients(executed, num_local):
    """Squares of 1e-20 are subnormal in float32, which approximate instructions take for 0."""
    grad = gradient_of_tiny_features(num_local)
    assert bool(torch.isfinite(grad).all())
    assert bool((grad != 0).any())


def test_every_kernel_is_executed_by_these(monkeypatch):
    """Launches of the cases above are listed; there are no values to compare."""
    monkeypatch.setitem(
        globals(),
        "close",
        lambda op, _, inputs, dtype: values_and_grads(op, tuple(t.to(dtype) for t in inputs)),
    )
    with on_cpu(recorded) as launches:
        for case in local_cases():
            with monkeypatch.context() as tiles:
                test_local_sinkhorn(None, tiles, *case)
        with monkeypatch.context() as tiles:
            test_node_update_and_scatter(None, tiles, F32, True)
            test_global_sinkhorn(None, tiles, F32, 5, 2, "max")
        gradient_of_tiny_features(3)
    executed = {launch.kernel.__name__ for launch in launches}
    assert executed == {entry.kernel.__name__ for entry in catalogue.entries([F32], options=True)}
