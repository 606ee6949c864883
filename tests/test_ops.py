"""The three ops and local_centroids: exact against the reference, gradcheck, opcheck, errors."""

from __future__ import annotations

import pytest
import torch
from graphs import awkward, random_graphs, star
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dcgnn_kernels
from dcgnn_kernels import EgoGraph, reference

COST_SCALES = ("none", "mean", "max")
ITERS = (1, 3, None)
# Largest error, relative to the largest entry. A bfloat16 result is rounded once from float32.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 2e-2}


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    assert bool(torch.isfinite(actual).all())
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    error = float((actual.double() - expected).abs().max()) if expected.numel() else 0.0
    assert error <= TOLERANCE[dtype] * scale


def random_inputs(
    num_nodes: int, num_clusters: int, num_channels: int, device: torch.device, dtype=torch.float64
) -> tuple[Tensor, Tensor]:
    z = torch.randn(num_nodes, num_channels, dtype=dtype, device=device)
    centroids = torch.randn(num_nodes, num_clusters, num_channels, dtype=dtype, device=device)
    return z, centroids


def values_and_grads(function, inputs: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and gradients of a fixed random combination of them."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(out.shape, generator=generator, dtype=torch.float64) for out in outputs]
    total = sum(
        (out.double() * weight.to(out.device)).sum() for out, weight in zip(outputs, weights, strict=True)
    )
    return [out.detach() for out in outputs], list(torch.autograd.grad(total, leaves))


def compare_with_reference(op, oracle, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    stored = tuple(tensor.to(dtype) for tensor in inputs)
    # The oracle sees the same rounded numbers, in float64.
    expected = values_and_grads(oracle, tuple(tensor.double() for tensor in stored))
    actual = values_and_grads(op, stored)
    for left, right in zip(actual[0] + actual[1], expected[0] + expected[1], strict=True):
        assert_close(left, right, dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("cost_scale", ["mean", "max"])
@pytest.mark.parametrize("num_clusters", [2, 3, 4])
def test_egos_of_equal_rows_have_cost_zero(num_clusters, cost_scale, dtype, device):
    sizes = (2, 4, 6, 7, 8, 9, 12, 16, 17, 20, 40, 300)
    check_equal_rows(sizes, num_clusters, cost_scale, dtype, device)


def check_equal_rows(numbers, num_clusters, cost_scale, dtype, device) -> None:
    """The mean of equal rows is not quite that row; a scale must not divide that rounding by itself."""
    blocks = [torch.ones(number, number).nonzero().T for number in numbers]
    sizes = torch.tensor(numbers)
    begins = sizes.cumsum(0) - sizes
    edge_index = torch.cat([block + begin for block, begin in zip(blocks, begins, strict=True)], dim=1)
    graph = EgoGraph.from_edge_index(edge_index, int(sizes.sum())).to(device)
    torch.manual_seed(0)
    rows = torch.randn(len(blocks), 7, dtype=dtype).repeat_interleave(sizes, dim=0).to(device)

    def solve(op, lam):
        return lambda z: op(z, None, graph, lam, 3, cost_scale, num_clusters=num_clusters)

    expected = values_and_grads(solve(reference.local_sinkhorn, 0.0), (rows.double(),))
    for op in (reference.local_sinkhorn, dcgnn_kernels.local_sinkhorn):
        found = values_and_grads(solve(op, 2.0), (rows,))
        for left, right in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
            assert_close(left, right, dtype)


@pytest.mark.parametrize("num_clusters", [2, 3, 4])
def test_the_mean_of_one_neighbour_is_its_row(num_clusters, device):
    check_single_neighbours(num_clusters, device)


def check_single_neighbours(num_clusters, device) -> None:
    """To the bit, so that costs that are equal in theory stay equal and the first of them is the maximum."""
    pairs = torch.arange(100, device=device).view(-1, 2).T
    graph = EgoGraph.from_edge_index(torch.cat([pairs, pairs.flip(0)], dim=1), 100)
    z = torch.randn(100, 9, device=device)
    neighbour = z.view(-1, 2, 9).flip(1).reshape(-1, 1, 9).expand(-1, num_clusters - 1, -1)
    for op in (reference.local_centroids, dcgnn_kernels.local_centroids):
        centroids = op(z, graph, num_clusters)
        assert torch.equal(centroids[:, 0], z)
        assert torch.equal(centroids[:, 1:], neighbour)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(
    case=random_graphs(),
    num_clusters=st.integers(1, 5),
    num_iters=st.sampled_from(ITERS),
    cost_scale=st.sampled_from(COST_SCALES),
    num_channels=st.integers(1, 9),
)
def test_local_sinkhorn_matches_the_reference(
    case, num_clusters, num_iters, cost_scale, num_channels, dtype, device
):
    edge_index, num_nodes = case
    graph = EgoGraph.from_edge_index(edge_index, num_nodes).to(device)
    inputs = random_inputs(num_nodes, num_clusters, num_channels, device)
    options = (graph, 0.7, num_iters, cost_scale)
    compare_with_reference(
        lambda z, c: dcgnn_kernels.local_sinkhorn(z, c, *options),
        lambda z, c: reference.local_sinkhorn(z, c, *options),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(
    case=random_graphs(),
    num_clusters=st.sampled_from([2, 2, 1, 3]),
    num_iters=st.sampled_from(ITERS),
    cost_scale=st.sampled_from(COST_SCALES),
    num_channels=st.integers(1, 9),
)
def test_local_sinkhorn_from_a_fresh_start_matches_the_reference(
    case, num_clusters, num_iters, cost_scale, num_channels, dtype, device
):
    edge_index, num_nodes = case
    graph = EgoGraph.from_edge_index(edge_index, num_nodes).to(device)
    z, _ = random_inputs(num_nodes, 2, num_channels, device)
    options = (None, graph, 0.7, num_iters, cost_scale)
    compare_with_reference(
        lambda z: dcgnn_kernels.local_sinkhorn(z, *options, num_clusters=num_clusters),
        lambda z: reference.local_sinkhorn(z, *options, num_clusters=num_clusters),
        (z,),
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(case=random_graphs(), num_clusters=st.integers(1, 5), num_channels=st.integers(1, 9))
def test_cluster_scatter_matches_the_reference(case, num_clusters, num_channels, dtype, device):
    edge_index, num_nodes = case
    graph = EgoGraph.from_edge_index(edge_index, num_nodes).to(device)
    assign = torch.rand(graph.num_slots, num_clusters, dtype=torch.float64, device=device)
    _, clusters = random_inputs(num_nodes, num_clusters, num_channels, device)
    compare_with_reference(
        lambda p, c: dcgnn_kernels.cluster_scatter(p, c, graph),
        lambda p, c: reference.cluster_scatter(p, c, graph),
        (assign, clusters),
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(
    num_nodes=st.integers(1, 12),
    num_clusters=st.integers(1, 9),
    num_iters=st.sampled_from(ITERS),
    cost_scale=st.sampled_from(COST_SCALES),
    num_channels=st.integers(1, 9),
)
def test_global_sinkhorn_matches_the_reference(
    num_nodes, num_clusters, num_iters, cost_scale, num_channels, dtype, device
):
    z, centroids = random_inputs(num_nodes, num_clusters, num_channels, device)
    options = (0.7, num_iters, cost_scale)
    compare_with_reference(
        lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, *options),
        lambda z, c: reference.global_sinkhorn(z, c, *options),
        (z, centroids[0]),
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(case=random_graphs(), num_local=st.integers(1, 5), num_channels=st.integers(1, 9))
def test_local_centroids_match_the_reference(case, num_local, num_channels, dtype, device):
    edge_index, num_nodes = case
    graph = EgoGraph.from_edge_index(edge_index, num_nodes).to(device)
    z, _ = random_inputs(num_nodes, 1, num_channels, device)
    compare_with_reference(
        lambda z: dcgnn_kernels.local_centroids(z, graph, num_local),
        lambda z: reference.local_centroids(z, graph, num_local),
        (z,),
        dtype,
    )


def test_local_centroids_by_hand():
    # Node 0 has neighbours 3, 4, 5, 6, 7; node 9 has none.
    edge_index, num_nodes = awkward()
    edge_index = edge_index[:, edge_index[0] != 1]
    graph = EgoGraph.from_edge_index(edge_index, num_nodes)
    z = torch.randn(num_nodes, 3, dtype=torch.float64)
    two = dcgnn_kernels.local_centroids(z, graph, 2)
    torch.testing.assert_close(two[0, 0], z[0])
    torch.testing.assert_close(two[0, 1], z[3:8].mean(0))
    torch.testing.assert_close(two[9, 1], z[9])
    three = dcgnn_kernels.local_centroids(z, graph, 3)
    torch.testing.assert_close(three[0, 1], z[[3, 5, 7]].mean(0))
    torch.testing.assert_close(three[0, 2], z[[4, 6]].mean(0))
    torch.testing.assert_close(three[1, 1], z[0])  # one neighbour: the second group is empty
    torch.testing.assert_close(three[1, 2], z[0])
    one = dcgnn_kernels.local_centroids(z, graph, 1)
    torch.testing.assert_close(one[0, 0], z[[0, 3, 4, 5, 6, 7]].mean(0))


@pytest.mark.parametrize("cost_scale", COST_SCALES)
@pytest.mark.parametrize("num_iters", [1, 2, 3, None])
@pytest.mark.parametrize("num_clusters", [1, 2, 3, 5])
@pytest.mark.parametrize("implementation", ["op", "reference"])
def test_local_sinkhorn_gradcheck(implementation, num_clusters, num_iters, cost_scale, device):
    module = dcgnn_kernels if implementation == "op" else reference
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    z, centroids = random_inputs(graph.num_nodes, num_clusters, 3, device)
    torch.autograd.gradcheck(
        lambda z, c: module.local_sinkhorn(z, c, graph, 0.7, num_iters, cost_scale),
        (z.requires_grad_(), centroids.requires_grad_()),
        fast_mode=True,
    )


@pytest.mark.parametrize("cost_scale", COST_SCALES)
@pytest.mark.parametrize("num_iters", [1, 2, 3, None])
@pytest.mark.parametrize("lam", [0.7, 40.0])
@pytest.mark.parametrize("case", [awkward(), star(9)], ids=["awkward", "star"])
def test_local_sinkhorn_gradcheck_from_a_fresh_start(case, lam, num_iters, cost_scale, device):
    graph = EgoGraph.from_edge_index(*case).to(device)
    z, _ = random_inputs(graph.num_nodes, 2, 3, device)
    torch.autograd.gradcheck(
        lambda z: dcgnn_kernels.local_sinkhorn(z, None, graph, lam, num_iters, cost_scale),
        (z.requires_grad_(),),
        fast_mode=True,
    )


def test_linear_is_that_of_torch(device):
    x, weight, bias = (
        torch.randn(shape, dtype=torch.float64, device=device) for shape in ((7, 3), (5, 3), (5,))
    )
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        cast = [tensor.to(dtype) for tensor in (x, weight, bias)]
        torch.testing.assert_close(dcgnn_kernels.linear(*cast), torch.nn.functional.linear(*cast))
    leaves = tuple(tensor.requires_grad_() for tensor in (x, weight, bias))
    torch.autograd.gradcheck(dcgnn_kernels.linear, leaves)
    torch.autograd.gradgradcheck(dcgnn_kernels.linear, leaves)
    assert dcgnn_kernels.linear(x.detach()[None], weight, bias).shape == (1, 7, 5)


@pytest.mark.parametrize("cost_scale", COST_SCALES)
@pytest.mark.parametrize("num_iters", [1, 2, 5, None])
@pytest.mark.parametrize("num_clusters", [1, 2, 7])
@pytest.mark.parametrize("implementation", ["op", "reference"])
def test_global_sinkhorn_gradcheck(implementation, num_clusters, num_iters, cost_scale, device):
    module = dcgnn_kernels if implementation == "op" else reference
    z, centroids = random_inputs(8, num_clusters, 3, device)
    torch.autograd.gradcheck(
        lambda z, c: module.global_sinkhorn(z, c, 0.7, num_iters, cost_scale),
        (z.requires_grad_(), centroids[0].clone().requires_grad_()),
        fast_mode=True,
    )


@pytest.mark.parametrize("num_clusters", [1, 2, 3])
def test_linear_ops_gradcheck(num_clusters, device):
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    z, clusters = random_inputs(graph.num_nodes, num_clusters, 3, device)
    assign = torch.rand(graph.num_slots, num_clusters, dtype=torch.float64, device=device)
    torch.autograd.gradcheck(
        lambda p, c: dcgnn_kernels.cluster_scatter(p, c, graph),
        (assign.requires_grad_(), clusters.requires_grad_()),
    )
    torch.autograd.gradcheck(
        lambda z: dcgnn_kernels.local_centroids(z, graph, num_clusters), (z.requires_grad_(),)
    )


def test_gradient_of_one_output_alone(device):
    """An unused output has no gradient (None), which the backward must accept."""
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    z, centroids = random_inputs(graph.num_nodes, 2, 3, device)
    for output in (0, 1):
        for op in (
            lambda z, c, o=output: dcgnn_kernels.local_sinkhorn(z, c, graph)[o],
            lambda z, c, o=output: dcgnn_kernels.global_sinkhorn(z, c[0], 0.5)[o],
        ):
            torch.autograd.gradcheck(op, (z.requires_grad_(), centroids.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize("num_clusters", [2, 3])
def test_convergence_is_the_limit_of_many_iterations(num_clusters, device):
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    inputs = random_inputs(graph.num_nodes, num_clusters, 3, device)
    converged = values_and_grads(
        lambda z, c: dcgnn_kernels.local_sinkhorn(z, c, graph, 0.7, None, "mean"), inputs
    )
    unrolled = values_and_grads(
        lambda z, c: dcgnn_kernels.local_sinkhorn(z, c, graph, 0.7, 2000, "mean"), inputs
    )
    for left, right in zip(converged[0] + converged[1], unrolled[0] + unrolled[1], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-8, atol=1e-8)


@given(random_graphs(), st.sampled_from(ITERS), st.integers(1, 4))
def test_marginals(case, num_iters, num_clusters):
    edge_index, num_nodes = case
    graph = EgoGraph.from_edge_index(edge_index, num_nodes)
    z, centroids = random_inputs(num_nodes, num_clusters, 4, torch.device("cpu"))
    assign, clusters = dcgnn_kernels.local_sinkhorn(z, centroids, graph, 2.0, num_iters, "mean")
    columns = torch.zeros(num_nodes, num_clusters, dtype=torch.float64)
    columns.index_add_(0, graph.ego_of_slot(), assign)
    torch.testing.assert_close(columns, torch.full_like(columns, 1 / num_clusters), rtol=1e-12, atol=0)
    if num_iters is None:
        rows = 1 / graph.ego_sizes().double()[graph.ego_of_slot()]
        torch.testing.assert_close(assign.sum(1), rows, rtol=1e-7, atol=0)
    # A cluster-node is a convex combination of its members.
    if num_nodes:
        assert bool((clusters.abs().amax() <= z.abs().amax() + 1e-12).all())


def test_assignments_are_softer_for_small_lambda_and_uniform_at_zero(device):
    graph = EgoGraph.from_edge_index(*star(6)).to(device)
    z, centroids = random_inputs(6, 2, 4, device)
    assign, _ = dcgnn_kernels.local_sinkhorn(z, centroids, graph, 0.0)
    uniform = 0.5 / graph.ego_sizes().double()[graph.ego_of_slot()]
    torch.testing.assert_close(assign, uniform[:, None].expand_as(assign))


@pytest.mark.parametrize("num_leaves", [5, 2000])
@pytest.mark.parametrize("num_clusters", [2, 3, 4])
def test_maximum_scale_sends_its_gradient_to_the_first_maximum(num_clusters, num_leaves, device):
    """Several members of the hub are at the same largest distance from all cluster-nodes but one: only the
    first of them, and only one cluster-node, get the scale's gradient.
    """
    graph = EgoGraph.from_edge_index(*star(1 + num_leaves)).to(device)
    z = torch.ones(1 + num_leaves, 1, dtype=torch.float64, device=device)
    z[[2, 3, 5, num_leaves]] = -2.0
    centroids = torch.zeros(1 + num_leaves, num_clusters, 1, dtype=torch.float64, device=device)
    centroids[:, 1:] = 0.5
    options = (graph, 0.9, 2, "max")
    actual = values_and_grads(lambda z, c: dcgnn_kernels.local_sinkhorn(z, c, *options), (z, centroids))
    expected = values_and_grads(lambda z, c: reference.local_sinkhorn(z, c, *options), (z, centroids))
    for left, right in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("cost_scale", COST_SCALES)
@pytest.mark.parametrize("num_iters", [3, None])
@pytest.mark.parametrize("num_clusters", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("lam", "size"), [(1e4, 1.0), (2.0, 1e4), (2.0, 1e-20), (1e4, 1e4), (2.0, 0.0)], ids=str
)
def test_extreme_values_stay_finite(lam, size, dtype, num_clusters, num_iters, cost_scale, device):
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    z, centroids = (size * t for t in random_inputs(graph.num_nodes, num_clusters, 4, device, dtype))
    local = values_and_grads(
        lambda z, c: dcgnn_kernels.local_sinkhorn(z, c, graph, lam, num_iters, cost_scale), (z, centroids)
    )
    whole = values_and_grads(
        lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, lam, num_iters, cost_scale), (z, centroids[0])
    )
    for tensor in (*local[0], *local[1], *whole[0], *whole[1]):
        assert bool(torch.isfinite(tensor).all())


def op_samples(device: torch.device, dtype: torch.dtype):
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    z, centroids = random_inputs(graph.num_nodes, 2, 8, device, dtype)
    assign = torch.rand(graph.num_slots, 2, dtype=dtype, device=device)
    leaves = [t.requires_grad_() for t in (z, centroids, assign)]
    z, centroids, assign = leaves
    arrays = graph.arrays()
    accumulate = reference.accumulate_dtype(dtype)
    potentials = torch.randn(graph.num_nodes, 3, 2, dtype=accumulate, device=device)
    grad = torch.randn(graph.num_nodes, 8, dtype=dtype, device=device)
    return {
        "local_sinkhorn": (z, centroids, *arrays, 2, 1.0, 3, "max", 1e-6, 100),
        "local_sinkhorn_backward": (
            *(assign.detach(), centroids.detach(), z.detach(), centroids.detach()),
            *(potentials, *arrays, 2, 1.0, 3, "max"),
        ),
        "local_sinkhorn.fresh": (z, None, *arrays, 2, 1.0, 3, "max", 1e-6, 100),
        "local_sinkhorn_backward.fresh": (
            *(assign.detach(), centroids.detach(), z.detach(), None),
            *(potentials, *arrays, 2, 1.0, 3, "max"),
        ),
        "linear": (z, grad[:5].clone().requires_grad_(), grad[0, :5].clone().requires_grad_()),
        "cluster_scatter": (assign, centroids, *arrays),
        "cluster_scatter_backward": (grad, assign.detach(), centroids.detach(), *arrays),
        "global_sinkhorn": (z, centroids.detach()[0].clone().requires_grad_(), 1.0, 3, "mean", 1e-6, 100),
        "global_sinkhorn_backward": (
            *(None, centroids.detach()[0], z.detach(), centroids.detach()[0]),
            *(potentials[0], 1.0, 3, "mean"),
        ),
        "local_centroids": (z, *arrays, 3),
        "local_centroids_backward": (centroids.detach(), *arrays, 2),
    }


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", op_samples(torch.device("cpu"), torch.float32))
def test_opcheck(name, dtype, device):
    arguments = op_samples(device, dtype)[name]
    # Gradients of bfloat16 outputs differ by one rounding between eager and traced sums.
    rtol, atol = (None, None) if dtype != torch.bfloat16 else (2e-2, 2e-2)
    op = getattr(torch.ops.dcgnn, name.split(".")[0]).default
    torch.library.opcheck(op, arguments, rtol=rtol, atol=atol)


def chained(z: Tensor, centroids: Tensor, graph: EgoGraph) -> Tensor:
    start = dcgnn_kernels.local_centroids(z, graph, 2)
    assign, clusters = dcgnn_kernels.local_sinkhorn(z, start + centroids, graph, cost_scale="max")
    whole, _ = dcgnn_kernels.global_sinkhorn(z, centroids[0])
    return dcgnn_kernels.cluster_scatter(assign, clusters, graph) + whole.sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_code_gives_the_same_values_and_gradients(dynamic, device):
    compiled = torch.compile(chained, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for case in (awkward(), star(7)):
        graph = EgoGraph.from_edge_index(*case).to(device)
        inputs = random_inputs(graph.num_nodes, 2, 4, device)
        eager = values_and_grads(lambda z, c, g=graph: chained(z, c, g), inputs)
        traced = values_and_grads(lambda z, c, g=graph: compiled(z, c, g), inputs)
        for left, right in zip(eager[0] + eager[1], traced[0] + traced[1], strict=True):
            torch.testing.assert_close(left, right)


def test_graph_construction_inside_a_compiled_region(device):
    edge_index, num_nodes = awkward()
    z, centroids = random_inputs(num_nodes, 2, 4, device)

    def build_and_run(z: Tensor, centroids: Tensor, edges: Tensor) -> Tensor:
        return chained(z, centroids, EgoGraph.from_edge_index(edges, z.size(0)))

    compiled = torch.compile(build_and_run, fullgraph=True, backend="aot_eager")
    edges = edge_index.to(device)
    torch.testing.assert_close(compiled(z, centroids, edges), build_and_run(z, centroids, edges))


def test_autocast_runs_in_float32(device):
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    z, centroids = random_inputs(graph.num_nodes, 2, 4, device, torch.float32)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assign, clusters = dcgnn_kernels.local_sinkhorn(z.bfloat16(), centroids, graph)
        out = dcgnn_kernels.cluster_scatter(assign.bfloat16(), clusters, graph)
        whole, _ = dcgnn_kernels.global_sinkhorn(z.bfloat16(), centroids[0])
    assert {t.dtype for t in (assign, clusters, out, whole)} == {torch.float32}
    expected, _ = dcgnn_kernels.local_sinkhorn(z.bfloat16().float(), centroids, graph)
    torch.testing.assert_close(assign, expected)


def test_strided_inputs(device):
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    z, centroids = random_inputs(graph.num_nodes, 2, 6, device)
    wide_z = torch.randn(graph.num_nodes, 12, dtype=torch.float64, device=device)[:, ::2]
    wide_z.copy_(z)
    columns = centroids.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not wide_z.is_contiguous()
    assert not columns.is_contiguous()
    expected = values_and_grads(lambda z, c: chained(z, c, graph), (z, centroids))
    actual = chained(wide_z, columns, graph)
    torch.testing.assert_close(actual, expected[0][0])
    # A gradient that arrives with stride 0.
    leaf = z.clone().requires_grad_()
    dcgnn_kernels.local_sinkhorn(leaf, centroids, graph)[1].sum().backward()
    assert bool(torch.isfinite(leaf.grad).all())


def test_double_backward_is_a_clear_error(device):
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    z, centroids = random_inputs(graph.num_nodes, 2, 4, device)
    z.requires_grad_()
    _, clusters = dcgnn_kernels.local_sinkhorn(z, centroids, graph)
    (first,) = torch.autograd.grad(clusters.square().sum(), z, create_graph=True)
    with pytest.raises(RuntimeError, match=r"double backward is not implemented.*reference"):
        first.sum().backward()


def test_reference_has_second_derivatives():
    graph = EgoGraph.from_edge_index(*star(4))
    z, centroids = random_inputs(4, 2, 2, torch.device("cpu"))
    torch.autograd.gradgradcheck(
        lambda z: reference.local_sinkhorn(z, centroids, graph, 0.7)[1], (z.requires_grad_(),)
    )


def bad_calls():
    graph = EgoGraph.from_edge_index(*star(4))
    z, centroids = torch.randn(4, 3), torch.randn(4, 2, 3)
    whole = torch.randn(5, 3)
    assign = torch.rand(graph.num_slots, 2)
    nan, inf = z.clone(), centroids.clone()
    nan[1, 1], inf[2, 1, 0] = float("nan"), float("inf")
    local, scatter = dcgnn_kernels.local_sinkhorn, dcgnn_kernels.cluster_scatter
    glob, start = dcgnn_kernels.global_sinkhorn, dcgnn_kernels.local_centroids
    v, t = ValueError, TypeError
    return [
        (v, "z must have 2 dimensions", lambda: local(z[0], centroids, graph)),
        (v, "centroids must have 3 dimensions", lambda: local(z, z, graph)),
        (v, r"z must have shape \[graph.num_nodes, F\]", lambda: local(z[:3], centroids[:3], graph)),
        (v, r"centroids must have shape \[N, K, F\]", lambda: local(z, centroids[:, :, :2], graph)),
        (v, "at least one cluster-node", lambda: local(z, centroids[:, :0], graph)),
        (v, "z must be a floating point tensor", lambda: local(z.long(), centroids, graph)),
        (v, "centroids is torch.float64, but z", lambda: local(z, centroids.double(), graph)),
        (v, "centroids is on meta, but z is on cpu", lambda: local(z, centroids.to("meta"), graph)),
        (v, "graph is on meta", lambda: local(z, centroids, graph.to("meta"))),
        (t, "z must be a torch.Tensor, got list", lambda: local([[1.0]], centroids, graph)),
        (v, "z must be a dense tensor", lambda: local(z.to_sparse(), centroids, graph)),
        (v, "lam must be finite and not negative, got -1", lambda: local(z, centroids, graph, -1.0)),
        (v, "lam must be finite", lambda: local(z, centroids, graph, float("nan"))),
        (v, "lam must be finite", lambda: local(z, centroids, graph, float("inf"))),
        (t, "lam must be a Python number", lambda: local(z, centroids, graph, torch.tensor(1.0))),
        (v, "num_iters must be at least 1", lambda: local(z, centroids, graph, 1.0, 0)),
        (v, "num_iters must be at least 1", lambda: local(z, centroids, graph, 1.0, -2)),
        (t, "num_iters must be an int", lambda: local(z, centroids, graph, 1.0, 2.5)),
        (v, "cost_scale must be one of", lambda: local(z, centroids, graph, 1.0, 3, "sum")),
        (v, "tol must be positive", lambda: local(z, centroids, graph, 1.0, None, tol=0.0)),
        (v, "max_iters must be an int", lambda: local(z, centroids, graph, 1.0, None, max_iters=0)),
        (v, "z contains NaN or infinity", lambda: local(nan, centroids, graph)),
        (v, "centroids contains NaN or infinity", lambda: local(z, inf, graph)),
        (v, "assign must have 2 dimensions", lambda: scatter(centroids, centroids, graph)),
        (v, r"assign must have shape \[graph.num_slots", lambda: scatter(assign[:4], centroids, graph)),
        (v, r"clusters must have shape", lambda: scatter(assign, centroids[:2], graph)),
        (v, "assign is torch.float64", lambda: scatter(assign.double(), centroids, graph)),
        (v, "graph is on meta", lambda: scatter(assign, centroids, graph.to("meta"))),
        (v, "z has no rows", lambda: glob(z[:0], whole)),
        (v, "centroids has no rows", lambda: glob(z, whole[:0])),
        (v, r"centroids must have shape \[Ω, F\]", lambda: glob(z, whole[:, :2])),
        (v, "z contains NaN", lambda: glob(nan, whole)),
        (v, "centroids contains NaN or infinity", lambda: glob(z, inf[2])),
        (v, "lam must be finite", lambda: glob(z, whole, -0.5)),
        (v, "num_iters must be at least 1", lambda: glob(z, whole, 1.0, 0)),
        (v, "num_local must be an int of at least 1, got 0", lambda: start(z, graph, 0)),
        (v, "z must have shape", lambda: start(z[:2], graph)),
        (v, "graph is on meta", lambda: start(z, graph.to("meta"))),
    ]


@pytest.mark.parametrize("index", range(len(bad_calls())))
def test_bad_input(index):
    error, message, call = bad_calls()[index]
    with pytest.raises(error, match=message):
        call()


def test_backends_tells_what_is_live_and_why_not():
    states = dcgnn_kernels.backends()
    assert set(states) == {"native-cpu", "triton", "native-cuda", "reference"}
    assert states["reference"].available
    assert all(state.reason for state in states.values())
    assert "native-cpu" in str(states)
