"""The Triton kernels' source, executed on the CPU behind the ops: values, bounds, races, program order."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from emulation import triton_guard
from graphs import awkward, random_graphs, star
from hypothesis import given, settings
from hypothesis import strategies as st
from test_ops import (
    COST_SCALES,
    check_equal_rows,
    check_single_neighbours,
    compare_with_reference,
    random_inputs,
    values_and_grads,
)
from triton_cases import FULL, close, mixed, node_update_inputs, on_cpu, small_tiles

import dcgnn_kernels
from dcgnn_kernels import EgoGraph, reference
from dcgnn_kernels.triton import config

DTYPES = (torch.float64, torch.bfloat16, torch.float32, torch.float16)[: 4 if FULL else 2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _interpreted():
    with on_cpu(lambda: triton_guard.guard(seed=1)):
        yield


@pytest.fixture(params=["tiled", "whole"])
def shape(request, monkeypatch):
    if request.param == "tiled":
        small_tiles(monkeypatch)
    return request.param


LOCAL = [
    # dtype, K, channels, iterations, cost scale, fresh centroids
    (torch.float64, 2, 5, 3, "max", True),
    (torch.float32, 2, 16, None, "mean", False),
    (torch.bfloat16, 2, 16, 2, "none", True),
    (torch.float64, 3, 5, 2, "max", False),
    (torch.float64, 2, 16, 1, "none", False),
    (torch.float64, 2, 5, None, "mean", True),
    (torch.float32, 2, 16, 3, "max", False),
    (torch.float32, 2, 7, 3, "mean", True),
    (torch.float16, 2, 16, 2, "none", True),
    (torch.float64, 1, 4, 2, "mean", False),
    (torch.float32, 5, 16, 2, "none", True),
    (torch.bfloat16, 4, 8, 3, "max", False),
][: 12 if FULL else 4]


@pytest.mark.parametrize(("dtype", "num_local", "num_channels", "num_iters", "cost_scale", "fresh"), LOCAL)
def test_local_sinkhorn(shape, dtype, num_local, num_channels, num_iters, cost_scale, fresh):
    graph = mixed()
    z, centroids = random_inputs(graph.num_nodes, num_local, num_channels, CPU)
    options = (graph, 0.7, num_iters, cost_scale)
    if fresh:
        close(
            lambda z: dcgnn_kernels.local_sinkhorn(z, None, *options, num_clusters=num_local),
            lambda z: reference.local_sinkhorn(z, reference.local_centroids(z, graph, num_local), *options),
            (z,),
            dtype,
        )
    else:
        close(
            lambda z, c: dcgnn_kernels.local_sinkhorn(z, c, *options),
            lambda z, c: reference.local_sinkhorn(z, c, *options),
            (z, centroids),
            dtype,
        )


def test_int64_indices(shape):
    graph = EgoGraph._trusted(*(array.long() for array in mixed().arrays()))
    assert graph.rowptr.dtype == torch.int64
    z, _ = random_inputs(graph.num_nodes, 1, 5, CPU)

    def layer(module):
        def run(z):
            start = None if module is dcgnn_kernels else reference.local_centroids(z, graph, 2)
            assign, clusters = module.local_sinkhorn(z, start, graph, 0.7, 2, "max")
            return assign, module.cluster_scatter(assign, clusters, graph)

        return run

    close(layer(dcgnn_kernels), layer(reference), (z,), torch.float64)


@pytest.mark.parametrize("near", [3, 17])
def test_a_hub_balances_over_all_of_its_blocks(shape, near):
    """Its first members are all near one centroid, so that the balance lies far outside of what they span."""
    edges, num_nodes = star(20)
    graph = EgoGraph.from_edge_index(edges, num_nodes)
    z, centroids = random_inputs(num_nodes, 2, 4, CPU)
    centroids = 0.1 * centroids + torch.tensor([0.0, 1.0], dtype=z.dtype)[:, None]
    z = 0.1 * z + (torch.arange(num_nodes) > near).to(z.dtype)[:, None]
    options = (graph, 0.7, None, "none")
    close(
        lambda z, c: dcgnn_kernels.local_sinkhorn(z, c, *options),
        lambda z, c: reference.local_sinkhorn(z, c, *options),
        (z.detach().requires_grad_(), centroids.detach().requires_grad_()),
        torch.float64,
    )


@pytest.mark.parametrize("num_clusters", [2, 3])
def test_graphs_of_a_batch_as_egos(shape, num_clusters):
    batch = torch.tensor([1, 0, 1, 1, 2, 1, 0, 1, 1, 1, 1, 1])
    graphs = EgoGraph.from_batch(batch)
    z, centroids = (
        torch.randn(12, 5, dtype=torch.float64),
        torch.randn(3, num_clusters, 5, dtype=torch.float64),
    )
    close(
        lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, 0.7, 2, "max", batch=batch),
        lambda z, c: reference.global_sinkhorn(z, c, 0.7, 2, "max", batch=batch),
        (z, centroids),
        torch.float64,
    )
    close(
        lambda p, c: dcgnn_kernels.cluster_scatter(p, c, graphs),
        lambda p, c: reference.cluster_scatter(p, c, graphs),
        (torch.rand(12, num_clusters, dtype=torch.float64), centroids),
        torch.float64,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_local", [2, 4, 1, 5][: 4 if FULL else 2])
def test_local_centroids(shape, num_local, dtype):
    graph = mixed()
    z, _ = random_inputs(graph.num_nodes, 1, 9, CPU)
    close(
        lambda z: dcgnn_kernels.local_centroids(z, graph, num_local),
        lambda z: reference.local_centroids(z, graph, num_local),
        (z,),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_clusters", [2, 1, 3][: 3 if FULL else 1])
def test_cluster_scatter(shape, num_clusters, dtype):
    graph = mixed()
    inputs, _ = node_update_inputs(graph, 0, num_clusters, 12)
    close(
        lambda p, c: dcgnn_kernels.cluster_scatter(p, c, graph),
        lambda p, c: reference.cluster_scatter(p, c, graph),
        inputs[3:],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_global", "num_clusters", "activation"), [(3, 2, "tanh"), (0, 3, "relu"), (2, 0, "none")]
)
def test_node_update(shape, num_global, num_clusters, activation, dtype):
    graph = mixed()
    inputs, factors = node_update_inputs(graph, num_global, num_clusters, 12)
    factors = {name: factor.to(reference.accumulate_dtype(dtype)) for name, factor in factors.items()}
    close(
        lambda *t: dcgnn_kernels.node_update(*t, graph, **factors, activation=activation),
        lambda *t: reference.node_update(*t, graph, **factors, activation=activation),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_global", "num_iters", "cost_scale"),
    [(7, 3, "max"), (20, 2, "mean"), (3, 1, "none"), (1, 2, "mean")][: 4 if FULL else 2],
)
def test_global_sinkhorn(shape, num_global, num_iters, cost_scale, dtype):
    z, centroids = random_inputs(13, num_global, 12, CPU)
    close(
        lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, 0.7, num_iters, cost_scale),
        lambda z, c: reference.global_sinkhorn(z, c, 0.7, num_iters, cost_scale),
        (z, centroids[0]),
        dtype,
    )


def test_global_clusters_far_from_each_other_keep_their_digits():
    """Two groups, a thousand times as far from each other as their points are: float32 as good as ever."""
    z, centroids = random_inputs(12, 6, 4, CPU)
    for points in (z, centroids[0]):
        points[::2] += 1000.0
    compare_with_reference(
        lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, 0.7, 3),
        lambda z, c: reference.global_sinkhorn(z, c, 0.7, 3),
        (z, centroids[0].clone()),
        torch.float32,
    )


MOST_CHOICES = 3


@pytest.mark.parametrize("index", range(1, MOST_CHOICES))
def test_choices_that_only_the_tuner_takes(shape, index, monkeypatch):
    """Every tuned launch by its choice of this number; the other tests take the default, number 0."""
    offered: dict[str, int] = {}

    def launch(key, configs, like, run):
        offered[key[0]] = max(offered.get(key[0], 0), len(configs))
        run(configs[min(index, len(configs) - 1)])

    monkeypatch.setattr(config, "launch", launch)
    graph = mixed()
    z, centroids = random_inputs(graph.num_nodes, 3, 4, CPU)
    inputs, factors = node_update_inputs(graph, 2, 2, 4)

    def every_op(module):
        def run(z, c, *t):
            start = None if module is dcgnn_kernels else reference.local_centroids(z, graph, 2)
            fresh = module.local_sinkhorn(z, start, graph, 0.7, 2, "max")
            pair = module.local_sinkhorn(z, c[:, :2], graph, 0.7, 2, "max")
            many = module.local_sinkhorn(z, c, graph, 0.7, 2, "max")
            return (
                *fresh,
                *pair,
                *many,
                module.local_centroids(z, graph, 3),
                module.cluster_scatter(*t[-2:], graph),
                module.node_update(*t, graph, **factors, activation="tanh"),
            )

        return run

    close(every_op(dcgnn_kernels), every_op(reference), (z, centroids, *inputs), torch.float64)
    assert max(offered.values()) <= MOST_CHOICES


@settings(max_examples=40 if FULL else 3)
@given(
    case=random_graphs(),
    num_local=st.integers(1, 4),
    num_iters=st.sampled_from((1, 3)),
    cost_scale=st.sampled_from(COST_SCALES),
    num_channels=st.integers(1, 9),
)
def test_random_graphs(case, num_local, num_iters, cost_scale, num_channels):
    edge_index, num_nodes = case
    graph = EgoGraph.from_edge_index(edge_index, num_nodes)
    z, centroids = random_inputs(num_nodes, num_local, num_channels, CPU)

    def chained(module):
        def run(z, c):
            assign, clusters = module.local_sinkhorn(z, c, graph, 0.7, num_iters, cost_scale)
            return assign, module.cluster_scatter(assign, clusters, graph)

        return run

    compare_with_reference(chained(dcgnn_kernels), chained(reference), (z, centroids), torch.float64)


@pytest.mark.parametrize(
    ("num_local", "num_iters", "cost_scale"),
    [(2, 3, "max"), (3, 2, "mean"), (2, None, "none")][: 3 if FULL else 1],
)
def test_gradcheck(shape, num_local, num_iters, cost_scale):
    """Directional derivatives through the op, autograd wired as on a GPU."""
    graph = EgoGraph.from_edge_index(*awkward())
    z, centroids = random_inputs(graph.num_nodes, num_local, 3, CPU)

    def layer(z, c):
        assign, clusters = dcgnn_kernels.local_sinkhorn(z, c, graph, 0.7, num_iters, cost_scale)
        return assign, dcgnn_kernels.cluster_scatter(assign, clusters, graph)

    torch.autograd.gradcheck(layer, (z.requires_grad_(), centroids.requires_grad_()), fast_mode=True)


def test_gradcheck_of_the_global_problem():
    z, centroids = random_inputs(9, 4, 3, CPU)
    torch.autograd.gradcheck(
        lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, 0.7, 3, "max"),
        (z.requires_grad_(), centroids[0].clone().requires_grad_()),
        fast_mode=True,
    )


def test_one_gradient_alone(shape):
    """An output that is not used has no gradient."""
    graph = EgoGraph.from_edge_index(*awkward())
    z, centroids = random_inputs(graph.num_nodes, 3, 4, CPU)
    for count in (2, 3) if FULL else (2,):
        for output in (0, 1):
            compare_with_reference(
                lambda z, c, o=output: dcgnn_kernels.local_sinkhorn(z, c, graph, 0.7, 2, "max")[o],
                lambda z, c, o=output: reference.local_sinkhorn(z, c, graph, 0.7, 2, "max")[o],
                (z, centroids[:, :count].contiguous()),
                torch.float64,
            )


def test_the_first_maximum_gets_the_gradient_of_the_scale(shape):
    """Members 2, 3 and 5 of the hub attain it, with three cluster-nodes in their last two columns."""
    graph = EgoGraph.from_edge_index(*star(6))
    z = torch.tensor([[0.0], [2.0], [-2.0], [-2.0], [2.0], [-2.0]], dtype=torch.float64)
    for num_local in (2, 3):
        centroids = torch.zeros(6, num_local, 1, dtype=torch.float64)
        centroids[:, 1:] = 0.5
        compare_with_reference(
            lambda z, c: dcgnn_kernels.local_sinkhorn(z, c, graph, 0.9, 2, "max"),
            lambda z, c: reference.local_sinkhorn(z, c, graph, 0.9, 2, "max"),
            (z, centroids),
            torch.float64,
        )


def test_the_first_maximum_of_the_global_costs_gets_the_gradient_of_the_scale():
    """Rows 1 and 3 attain it in their last two columns."""
    z = torch.tensor([[1.0], [2.0], [0.5], [2.0]], dtype=torch.float64)
    centroids = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64)
    compare_with_reference(
        lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, 0.9, 2, "max"),
        lambda z, c: reference.global_sinkhorn(z, c, 0.9, 2, "max"),
        (z, centroids),
        torch.float64,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32] if FULL else [torch.float32], ids=str)
@pytest.mark.parametrize("cost_scale", ["mean", "max"])
@pytest.mark.parametrize("num_clusters", [2, 3, 4])
def test_egos_of_equal_rows_have_cost_zero(shape, num_clusters, cost_scale, dtype):
    check_equal_rows((2, 4, 7, 10) if FULL else (4, 7), num_clusters, cost_scale, dtype, CPU)


@pytest.mark.parametrize("num_clusters", [2, 3, 4])
def test_the_mean_of_one_neighbour_is_its_row(shape, num_clusters):
    check_single_neighbours(num_clusters, CPU)


@pytest.mark.parametrize("cost_scale", COST_SCALES if FULL else ["max"])
@pytest.mark.parametrize("num_iters", [3, None] if FULL else [3])
@pytest.mark.parametrize(("lam", "size"), [(1e4, 1e4), (2.0, 1e-20), (2.0, 0.0)][: 3 if FULL else 2], ids=str)
def test_extreme_values_stay_finite(shape, lam, size, num_iters, cost_scale):
    graph = EgoGraph.from_edge_index(*awkward())
    z, centroids = (size * t for t in random_inputs(graph.num_nodes, 2, 4, CPU, torch.float32))
    local = values_and_grads(
        lambda z, c: dcgnn_kernels.local_sinkhorn(z, c, graph, lam, num_iters, cost_scale), (z, centroids)
    )
    whole = values_and_grads(
        lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, lam, num_iters, cost_scale), (z, centroids[0])
    )
    for tensor in (*local[0], *local[1], *whole[0], *whole[1]):
        assert bool(torch.isfinite(tensor).all())


def test_nan_is_passed_on():
    """Nothing is read back to look for it; every result that depends on it shows it."""
    graph = EgoGraph.from_edge_index(*star(6))
    z, _ = random_inputs(6, 2, 4, CPU)
    z[2, 1] = float("nan")
    assign, clusters = dcgnn_kernels.local_sinkhorn(z, None, graph)
    hub, leaf = (assign[graph.rowptr[i] : graph.rowptr[i + 1]] for i in (0, 1))
    assert bool(hub.isnan().all())
    assert bool(clusters[0].isnan().any())
    assert not bool(leaf.isnan().any())


def test_backward_inside_autocast_is_that_outside():
    """Dense products of the backward ops are torch's: autocast must not round them."""
    graph = EgoGraph.from_edge_index(*star(6))
    inputs, factors = node_update_inputs(graph, 3, 2, 4)
    x, _, centroids, assign, message = (tensor.float() for tensor in inputs)

    def grads(enabled: bool) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, centroids, message)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            share, clusters = dcgnn_kernels.global_sinkhorn(leaves[0], leaves[1], 0.7)
            out = dcgnn_kernels.node_update(
                leaves[0], share, clusters, assign, leaves[2], graph, activation="none", **factors
            )
            out.square().sum().backward()
        return [leaf.grad for leaf in leaves]

    for inside, outside in zip(grads(True), grads(False), strict=True):
        torch.testing.assert_close(inside, outside)


def test_strided_inputs():
    graph = mixed()
    z, centroids = random_inputs(graph.num_nodes, 2, 6, CPU)
    wide = torch.randn(graph.num_nodes, 12, dtype=torch.float64)[:, ::2].copy_(z)
    columns = centroids.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    expected = dcgnn_kernels.local_sinkhorn(z, centroids, graph)
    for left, right in zip(dcgnn_kernels.local_sinkhorn(wide, columns, graph), expected, strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def strided_gradients(output: torch.Tensor) -> torch.Tensor:
    """A scalar whose gradient with respect to ``output`` is expanded (stride 0) in the last dimension and
    transposed in the others.
    """
    weights = torch.arange(1.0, 1.0 + output[..., 0].numel(), dtype=output.dtype)
    weights = weights.view(output.shape[:-1][::-1]).mT if output.dim() > 2 else weights
    return (output * weights[..., None].expand_as(output)).sum()


def test_strided_gradients():
    graph = mixed()
    z, centroids = random_inputs(graph.num_nodes, 2, 6, CPU)
    inputs, factors = node_update_inputs(graph, 3, 2, 6)
    arguments = (graph, 0.7, 2, "max")
    calls = {
        "fresh": (lambda m: lambda z: m.local_sinkhorn(z, start(m, z), *arguments), (z,)),
        "given": (lambda m: lambda z, c: m.local_sinkhorn(z, c, *arguments), (z, centroids)),
        "global": (lambda m: lambda z, c: m.global_sinkhorn(z, c, 0.7, 2, "max"), (z, centroids[0])),
        "centroids": (lambda m: lambda z: (m.local_centroids(z, graph, 3),), (z,)),
        "scatter": (lambda m: lambda p, c: (m.cluster_scatter(p, c, graph),), inputs[3:]),
        "update": (lambda m: lambda *t: (m.node_update(*t, graph, **factors, activation="none"),), inputs),
    }

    def start(module, z):
        return None if module is dcgnn_kernels else reference.local_centroids(z, graph, 2)

    for name, (call, tensors) in calls.items():
        grads = []
        for module in (dcgnn_kernels, reference):
            leaves = [tensor.clone().requires_grad_() for tensor in tensors]
            sum(strided_gradients(output) for output in call(module)(*leaves)).backward()
            grads.append([leaf.grad for leaf in leaves])
        for actual, expected in zip(*grads, strict=True):
            torch.testing.assert_close(
                actual, expected, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("num_nodes", [0, 1])
def test_smallest_graphs(num_nodes):
    graph = EgoGraph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), num_nodes)
    z, centroids = random_inputs(num_nodes, 2, 4, CPU)
    for given_centroids in (None, centroids):
        leaf = z.clone().requires_grad_()
        assign, clusters = dcgnn_kernels.local_sinkhorn(leaf, given_centroids, graph)
        out = dcgnn_kernels.cluster_scatter(assign, clusters, graph)
        out.sum().backward()
        assert out.shape == z.shape == leaf.grad.shape
    assert dcgnn_kernels.local_centroids(z, graph, 3).shape == (num_nodes, 3, 4)
