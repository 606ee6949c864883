"""The native CPU kernels beyond tests/test_ops.py: widths, many clusters, hubs, threads, instruction sets."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from graphs import awkward, star
from test_ops import COST_SCALES, TOLERANCE, compare_with_reference, random_inputs, values_and_grads
from torch import Tensor

import dcgnn_kernels
from dcgnn_kernels import EgoGraph, reference

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(
    not dcgnn_kernels.backends()["native-cpu"].available,
    reason=dcgnn_kernels.backends()["native-cpu"].reason,
)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def irregular(num_nodes: int, num_edges: int) -> EgoGraph:
    """Directed, with one ego of a quarter of the nodes and one node in as many egos."""
    edges = torch.randint(0, num_nodes, (2, num_edges))
    quarter = torch.randperm(num_nodes)[: num_nodes // 4]
    into, out_of = torch.stack([quarter, quarter * 0]), torch.stack([quarter * 0 + 1, quarter])
    return EgoGraph.from_edge_index(torch.cat([edges, into, out_of], 1), num_nodes)


def test_every_op_has_a_native_kernel():
    backend = dcgnn_kernels.backends()["native-cpu"]
    assert set(backend.ops) >= {"local_sinkhorn", "cluster_scatter", "global_sinkhorn", "local_centroids"}
    assert backend.reason.split(",")[0] in ("baseline", "avx2", "avx512")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_channels", [8, 16, 24, 32, 64, 100, 128, 256, 333])
def test_widths(num_channels, dtype):
    graph = irregular(40, 160)
    z, centroids = (t / num_channels**0.5 for t in random_inputs(40, 2, num_channels, CPU))
    for cost_scale in COST_SCALES:
        options = (graph, 2.0, 3, cost_scale)
        compare_with_reference(
            lambda z, c, o=options: dcgnn_kernels.local_sinkhorn(z, c, *o),
            lambda z, c, o=options: reference.local_sinkhorn(z, c, *o),
            (z, centroids),
            dtype,
        )
    assign = torch.rand(graph.num_slots, 2, dtype=torch.float64)
    compare_with_reference(
        lambda p, c: dcgnn_kernels.cluster_scatter(p, c, graph),
        lambda p, c: reference.cluster_scatter(p, c, graph),
        (assign, centroids),
        dtype,
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_iters", [1, 5, None])
@pytest.mark.parametrize("num_clusters", [16, 19])
def test_many_clusters(num_clusters, num_iters, dtype):
    graph = irregular(40, 160)
    z, centroids = random_inputs(40, num_clusters, 10, CPU)
    for cost_scale in COST_SCALES:
        lam = 0.2 if cost_scale == "none" else 2.0
        options = (lam, num_iters, cost_scale)
        compare_with_reference(
            lambda z, c, o=options: dcgnn_kernels.local_sinkhorn(z, c, graph, *o),
            lambda z, c, o=options: reference.local_sinkhorn(z, c, graph, *o),
            (z, centroids),
            dtype,
        )
        compare_with_reference(
            lambda z, c, o=options: dcgnn_kernels.global_sinkhorn(z, c, *o),
            lambda z, c, o=options: reference.global_sinkhorn(z, c, *o),
            (z, centroids[0]),
            dtype,
        )


@pytest.mark.parametrize("num_clusters", [2, 3])
def test_hubs_and_many_blocks(num_clusters):
    """An ego, and the egos of a node, too long for one task; the global problem in many blocks."""
    graph = irregular(40_000, 1000)
    assert int(graph.ego_sizes().max()) > 9000
    assert int(graph.egos_per_node().max()) > 9000
    z, centroids = random_inputs(40_000, num_clusters, 3, CPU)
    for num_iters in (2, None):
        options = (0.7, num_iters, "max")
        compare_with_reference(
            lambda z, c, o=options: dcgnn_kernels.local_sinkhorn(z, c, graph, *o),
            lambda z, c, o=options: reference.local_sinkhorn(z, c, graph, *o),
            (z, centroids),
            torch.float64,
        )
        compare_with_reference(
            lambda z, c, o=options: dcgnn_kernels.global_sinkhorn(z, c, *o),
            lambda z, c, o=options: reference.global_sinkhorn(z, c, *o),
            (z, centroids[0]),
            torch.float64,
        )
    compare_with_reference(
        lambda z: dcgnn_kernels.local_centroids(z, graph, num_clusters),
        lambda z: reference.local_centroids(z, graph, num_clusters),
        (z,),
        torch.float64,
    )


def layer(z: Tensor, centroids: Tensor, graph: EgoGraph, cost_scale: str = "max") -> Tensor:
    start = dcgnn_kernels.local_centroids(z, graph, centroids.size(1)) + centroids
    assign, clusters = dcgnn_kernels.local_sinkhorn(z, start, graph, 2.0, 3, cost_scale)
    whole, means = dcgnn_kernels.global_sinkhorn(z, centroids[0], 2.0, 5, cost_scale)
    # Only elementwise: torch's own sums may depend on the number of threads.
    means = torch.nn.functional.pad(means, (0, 0, 0, z.size(0) - means.size(0)))
    return dcgnn_kernels.cluster_scatter(assign, clusters, graph) + whole[:, :1] + means


@pytest.mark.parametrize("num_clusters", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_for_any_number_of_threads(num_clusters, dtype, threads):
    graph = irregular(40_000, 60_000)
    inputs = random_inputs(40_000, num_clusters, 8, CPU, dtype)
    results = []
    for count in (1, 2, 3, 8, 2):
        threads(count)
        values = [*dcgnn_kernels.local_sinkhorn(*inputs, graph, 2.0, 3, "max")]
        values += dcgnn_kernels.global_sinkhorn(inputs[0], inputs[1][0], 2.0, 5, "mean")
        values += [dcgnn_kernels.cluster_scatter(values[0], values[1], graph)]
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = layer(*leaves, graph)
        results.append([*values, out.detach(), *torch.autograd.grad(out, leaves, out.detach())])
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            assert torch.equal(left, right)


def test_int64_indices_give_the_same_bits():
    graph = irregular(300, 2000)
    wide = EgoGraph(*(array.long() for array in graph.arrays()))
    inputs = random_inputs(300, 2, 16, CPU, torch.float32)
    left = values_and_grads(lambda z, c: layer(z, c, graph), inputs)
    right = values_and_grads(lambda z, c: layer(z, c, wide), inputs)
    for a, b in zip(left[0] + left[1], right[0] + right[1], strict=True):
        assert torch.equal(a, b)


def test_float16_is_computed_in_float32():
    graph = EgoGraph.from_edge_index(*awkward())
    z, centroids = (t.half() for t in random_inputs(graph.num_nodes, 2, 5, CPU))
    assign, clusters = dcgnn_kernels.local_sinkhorn(z, centroids, graph)
    wide_assign, wide_clusters = dcgnn_kernels.local_sinkhorn(z.float(), centroids.float(), graph)
    assert torch.equal(assign, wide_assign.half())
    assert torch.equal(clusters, wide_clusters.half())


def test_an_offset_of_all_points_costs_no_digits():
    """K = 2 works about the midpoint of the centroids: far from the origin is as good as near it."""
    graph = EgoGraph.from_edge_index(*star(9))
    z, centroids = random_inputs(9, 2, 4, CPU)
    far = [(t + 1000.0).float() for t in (z, centroids)]
    near = [t.double() - 1000.0 for t in far]
    assign, _ = dcgnn_kernels.local_sinkhorn(*far, graph)
    expected, _ = reference.local_sinkhorn(*near, graph)
    torch.testing.assert_close(assign.double(), expected, rtol=1e-4, atol=1e-6)


def test_costs_that_overflow_are_an_error():
    graph = EgoGraph.from_edge_index(*star(4))
    z, centroids = random_inputs(4, 2, 3, CPU, torch.float32)
    with pytest.raises(ValueError, match="overflow"):
        dcgnn_kernels.local_sinkhorn(1e25 * z, centroids, graph, cost_scale="max")
    with pytest.raises(ValueError, match="overflow"):
        dcgnn_kernels.global_sinkhorn(1e25 * z, centroids[0], cost_scale="max")


@pytest.mark.parametrize("position", [(0, 0), (8, 3)])
def test_nan_is_found_wherever_it_is(position):
    graph = EgoGraph.from_edge_index(*awkward())  # 8 is isolated
    z, centroids = random_inputs(graph.num_nodes, 2, 4, CPU)
    for cost_scale in COST_SCALES:
        for value in (float("nan"), float("-inf")):
            bad_z, bad_centroids = z.clone(), centroids.clone()
            bad_z[position] = value
            bad_centroids[position[0], 1, position[1]] = value
            with pytest.raises(ValueError, match="local_sinkhorn: z contains NaN or infinity"):
                dcgnn_kernels.local_sinkhorn(bad_z, centroids, graph, cost_scale=cost_scale)
            with pytest.raises(ValueError, match="local_sinkhorn: centroids contains NaN or infinity"):
                dcgnn_kernels.local_sinkhorn(z, bad_centroids, graph, cost_scale=cost_scale)
            with pytest.raises(ValueError, match="global_sinkhorn: z contains NaN or infinity"):
                dcgnn_kernels.global_sinkhorn(bad_z, centroids[0], cost_scale=cost_scale)


def test_malformed_graph_arrays_are_refused():
    graph = EgoGraph.from_edge_index(*star(4))
    z, centroids = random_inputs(4, 2, 3, CPU)
    rowptr, member, colptr, ego, slot = graph.arrays()
    for arrays in (
        (rowptr, member[:-1], colptr, ego, slot),
        (rowptr, member, colptr[:-1], ego, slot),
        (rowptr.long(), member, colptr, ego, slot),
        (rowptr + 1, member, colptr, ego, slot),
    ):
        with pytest.raises(ValueError, match="local_sinkhorn: "):
            torch.ops.dcgnn.local_sinkhorn(z, centroids, *arrays, 2, 1.0, 3, "none", 1e-9, 10)


def test_exported_program():
    class Layer(torch.nn.Module):
        def forward(self, z: Tensor, centroids: Tensor, graph: EgoGraph) -> Tensor:
            return layer(z, centroids, graph)

    graph = irregular(30, 90)
    inputs = random_inputs(30, 2, 8, CPU, torch.float32)
    program = torch.export.export(Layer(), (*inputs, graph))
    torch.testing.assert_close(program.module()(*inputs, graph), layer(*inputs, graph))


SAME_EVERYWHERE = """
import sys, torch
sys.path.insert(0, sys.argv[2])
from test_native_cpu import irregular, layer
from test_ops import random_inputs, values_and_grads
import dcgnn_kernels
assert dcgnn_kernels.backends()["native-cpu"].reason.startswith(sys.argv[1]), dcgnn_kernels.backends()
torch.manual_seed(0)
graph = irregular(200, 1500)
results = []
for num_clusters in (2, 3):
    for cost_scale in ("none", "max"):
        inputs = random_inputs(200, num_clusters, 21, torch.device("cpu"))
        inputs = [t / 5 for t in inputs]
        values, grads = values_and_grads(lambda z, c: layer(z, c, graph, cost_scale), inputs)
        results += values + grads
torch.save(results, sys.argv[3])
"""


def test_instruction_sets_agree(tmp_path: Path):
    """Lower instruction sets than this processor's, in processes of their own: the choice is made at load."""
    order = ("baseline", "avx2", "avx512")
    best = dcgnn_kernels.backends()["native-cpu"].reason.split(",")[0]
    results = []
    for isa in order[: order.index(best) + 1]:
        file = tmp_path / f"{isa}.pt"
        subprocess.run(
            [sys.executable, "-c", SAME_EVERYWHERE, isa, str(Path(__file__).parent), str(file)],
            check=True,
            env=os.environ | {"DCGNN_CPU_ISA": isa},
        )
        results.append(torch.load(file))
    for other in results[1:]:
        for left, right in zip(results[0], other, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-10)


def test_large_outputs_reuse_memory():
    native = pytest.importorskip("dcgnn_kernels._native")
    native.release_memory()
    x, weight = torch.randn(20_000, 64), torch.randn(64, 64)
    out = dcgnn_kernels.linear(x, weight)
    address = out.data_ptr()
    assert address % 2**21 == 0
    assert native.kept_bytes() == 0
    del out
    assert native.kept_bytes() >= 20_000 * 64 * 4
    again = dcgnn_kernels.linear(x, weight)
    assert again.data_ptr() == address
    torch.testing.assert_close(again, x @ weight.T)
    del again
    assert dcgnn_kernels.release_memory() >= 20_000 * 64 * 4
    assert native.kept_bytes() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="pages change their address only on Linux")
def test_kept_pages_serve_outputs_of_other_sizes():
    native = pytest.importorskip("dcgnn_kernels._native")
    native.release_memory()
    x, weight = torch.randn(60_000, 64), torch.randn(64, 64)
    megabyte = 2**20
    parts = [dcgnn_kernels.linear(x[:rows], weight) for rows in (20_000, 20_000, 10_000)]
    del parts
    assert native.kept_bytes() == (6 + 6 + 4) * megabyte
    large = dcgnn_kernels.linear(x[:50_000], weight)
    assert native.kept_bytes() == (16 - 14) * megabyte, "the large output is made of kept pages"
    larger = dcgnn_kernels.linear(x, weight)
    assert native.kept_bytes() == 0
    torch.testing.assert_close(large, x[:50_000] @ weight.T)
    torch.testing.assert_close(larger, x @ weight.T)
    del large, larger
    assert native.kept_bytes() == (14 + 16) * megabyte
    for rows in (15_000, 45_000, 30_000):  # pieces are cut and joined once more
        torch.testing.assert_close(dcgnn_kernels.linear(x[:rows], weight), x[:rows] @ weight.T)
    assert native.release_memory() == native.kept_bytes() + (14 + 16) * megabyte


def test_memory_in_use_is_not_given_out_again():
    x, weight = torch.randn(20_000, 64), torch.randn(64, 64)
    held = dcgnn_kernels.linear(x, weight)
    view = held[:10]
    del held
    other = dcgnn_kernels.linear(x, 2 * weight)
    torch.testing.assert_close(view, x[:10] @ weight.T)
    assert other.data_ptr() != view.data_ptr()


def test_no_memory_is_kept_when_the_limit_is_zero():
    code = (
        "import torch, dcgnn_kernels; from dcgnn_kernels import _native;"
        "dcgnn_kernels.linear(torch.ones(20_000, 64), torch.ones(64, 64)); print(_native.kept_bytes())"
    )
    environment = {**os.environ, "DCGNN_KEEP_MB": "0"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "0"


@pytest.mark.parametrize("num_channels", [9, 16, 24, 31, 32, 40, 56, 72, 100])
def test_bfloat16_is_float32_rounded(num_channels):
    """bfloat16 rows stand in vectors in an order of their own; no channel may see another's number."""
    graph = irregular(40, 160)
    z, centroids = (t / num_channels**0.5 for t in random_inputs(40, 3, num_channels, CPU))
    weights = torch.rand(graph.member.numel(), 3)
    calls = (
        lambda z, c, w: dcgnn_kernels.local_centroids(z, graph, 3),
        lambda z, c, w: dcgnn_kernels.local_centroids(z, graph, 50),  # groups without a member
        lambda z, c, w: dcgnn_kernels.cluster_scatter(w, c, graph),
        lambda z, c, w: dcgnn_kernels.local_sinkhorn(z, c, graph, 2.0, 3)[1],
        lambda z, c, w: dcgnn_kernels.local_sinkhorn(z, None, graph, 2.0, 3)[1],
        lambda z, c, w: dcgnn_kernels.global_sinkhorn(z, c[0], 2.0, 3)[1],
    )
    for call in calls:
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            leaves = [t.bfloat16().to(dtype).requires_grad_() for t in (z, centroids, weights)]
            out = call(*leaves)
            upstream = torch.arange(out.numel()).reshape(out.shape).sin().bfloat16().to(dtype)
            grads = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
            found.append((out.detach(), *(g for g in grads if g is not None)))
        for narrow, wide in zip(*found, strict=True):
            torch.testing.assert_close(
                narrow.float(), wide.float(), rtol=2e-2, atol=2e-2 * wide.abs().max().item()
            )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 300, 9000, 70_000])
def test_linear_of_many_rows(rows, dtype, threads):
    x, weight, bias = torch.randn(rows, 24), torch.randn(9, 24), torch.randn(9)
    narrow = [tensor.to(dtype) for tensor in (x, weight, bias)]
    wide = [tensor.double() for tensor in narrow]
    expected = torch.nn.functional.linear(*wide)
    upstream = torch.randn(rows, 9).to(dtype)
    found = []
    for count in (1, 2, 3):
        threads(count)
        leaf = narrow[0].clone().requires_grad_()
        weight_leaf = narrow[1].clone().requires_grad_()
        out = dcgnn_kernels.linear(leaf, weight_leaf, narrow[2])
        out.backward(upstream)
        found.append((out.detach(), leaf.grad, weight_leaf.grad))
    sums = upstream.double().T @ wide[0]
    torch.testing.assert_close(found[0][0], expected.to(dtype), rtol=None, atol=None)
    torch.testing.assert_close(found[0][1], (upstream.double() @ wide[1]).to(dtype), rtol=None, atol=None)
    # A sum that happens to be near 0 has the error of its terms.
    error = (found[0][2].double() - sums).abs()
    largest = upstream.double().abs().T @ wide[0].abs()
    assert bool((error <= 8 * torch.finfo(dtype).eps * largest).all())
    for others in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], others, strict=True))


@pytest.mark.parametrize("inputs", [1, 3])
@pytest.mark.parametrize("outputs", [1, 4])
def test_gradient_of_a_weight_sums_in_blocks(inputs, outputs):
    """However gradient and features lie: one long sum of float32 would be off by percents."""
    wide = torch.full((400_000, 2 * inputs), 0.1)
    weight = torch.ones(outputs, inputs, requires_grad=True)
    for x in (wide[:, :inputs], wide[:, :inputs].contiguous(), wide[:, ::2]):
        for loss in (lambda out: out.sum(), lambda out: (out * torch.ones_like(out)).sum()):
            (grad,) = torch.autograd.grad(loss(dcgnn_kernels.linear(x, weight)), weight)
            torch.testing.assert_close(grad, torch.full_like(grad, 40_000.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(40, 3, 5), (7, 70, 33), (1, 1, 1), (5, 0, 4)])
def test_linear_takes_matrices_as_they_lie(shape):
    rows, inputs, outputs = shape
    matrices = {
        "rows": lambda *size: torch.randn(*size, dtype=torch.float64),
        "columns": lambda *size: torch.randn(*size[::-1], dtype=torch.float64).t(),
        "every second": lambda *size: torch.randn(2 * size[0], 2 * size[1], dtype=torch.float64)[::2, ::2],
        "expanded": lambda *size: torch.randn(1, 1, dtype=torch.float64).expand(*size),
    }
    for make_x in matrices.values():
        for make_weight in matrices.values():
            x, weight = make_x(rows, inputs), make_weight(outputs, inputs)
            bias = torch.randn(2 * outputs, dtype=torch.float64)[::2]
            for shift in (None, bias):
                found = dcgnn_kernels.linear(x, weight, shift)
                torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, shift))


@pytest.mark.parametrize("cost_scale", COST_SCALES)
def test_small_egos_with_large_and_small_logits_side_by_side(cost_scale):
    """Egos share vectors while exp can take their logits; the others must not disturb them."""
    torch.manual_seed(3)
    graph = EgoGraph.from_edge_index(torch.randint(0, 90, (2, 150)), 90)
    sizes = graph.rowptr.diff()
    assert int(sizes.min()) == 1
    assert 4 < int(sizes.max()) < 16
    z = torch.randn(90, 5, dtype=torch.float64)
    z[::4] *= 30  # logits far above and far below the limit in the same batch
    for lam in (0.5, 40.0):
        compare_with_reference(
            lambda z, lam=lam: dcgnn_kernels.local_sinkhorn(z, None, graph, lam, 3, cost_scale),
            lambda z, lam=lam: reference.local_sinkhorn(
                z, reference.local_centroids(z, graph, 2), graph, lam, 3, cost_scale
            ),
            (z,),
            torch.float64,
        )


def test_gathers_prefetch():
    """The compiler dropped prefetches as calls without effect, which made the gathers twice as slow."""
    tool = shutil.which("objdump")
    if tool is None or platform.machine() != "x86_64":
        pytest.skip("needs objdump and an x86-64 processor")
    file = pytest.importorskip("dcgnn_kernels._native").__file__
    lines = subprocess.run(
        [tool, "-d", "--no-show-raw-insn", file], capture_output=True, text=True, check=True
    )
    missing, found = set(), set()
    name = ""
    for line in lines.stdout.splitlines():
        if line.endswith(">:"):
            name = line
            if "gather_clusters" in name or "gather_pair_gradient" in name:
                missing.add(name)
        elif "prefetch" in line:
            found.add(name)
    if not missing:
        pytest.skip("the extension holds no symbols of its own functions")
    missing = {name for name in missing if "OneProblem" not in name}
    assert missing <= found, sorted(missing - found)
