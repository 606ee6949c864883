"""Every op and a training step on the --device: hubs, wide rows, every dtype and index type.

The shapes are those at which GPU kernels change: segments above 32, 128 (CUDA C++), 256 and 1024 entries
(Triton), rows with and without 16-byte vectors, rows wider than a warp or a tile.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_node_update import sample
from test_ops import random_inputs, values_and_grads
from torch import Tensor

import dcgnn_kernels
from dcgnn import DCGNN, DCConv
from dcgnn_kernels import EgoGraph, reference

NUM_NODES = 1600
# Largest error, relative to the largest entry of the same row. 16-bit results are rounded once from float32.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
# Gradients may cancel, most of all dot products over channels: their rows count as at least this large,
# beside outputs that are weighted by about 1, and at least as the mean entry.
GRADIENT_FLOOR = 0.02


def hub_graph(index: torch.dtype = torch.int32) -> EgoGraph:
    """Directed: in-hubs 0, 1, 2 and out-hubs 3, 4, 5 of 1500, 300 and 60. Some nodes are alone."""
    generator = torch.Generator().manual_seed(1)
    edges = [torch.randint(6, NUM_NODES - 9, (2, 2000), generator=generator)]
    for hub, degree in enumerate((1500, 300, 60)):
        others = 6 + torch.randperm(NUM_NODES - 15, generator=generator)[:degree]
        edges.append(torch.stack([others, torch.full_like(others, hub)]))
        edges.append(torch.stack([torch.full_like(others, hub + 3), others]))
    graph = EgoGraph.from_edge_index(torch.cat(edges, dim=1), NUM_NODES)
    assert graph.ego_sizes()[:3].tolist() == graph.egos_per_node()[3:6].tolist() == [1501, 301, 61]
    return EgoGraph(*(array.to(index) for array in graph.arrays()))


def largest_error(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Relative to the largest entry of each row; rows of nothing but zeros must be met exactly."""
    assert actual.shape == expected.shape
    assert bool(torch.isfinite(actual).all())
    error = (actual.double().cpu() - expected).abs().flatten(1).amax(1)
    scale = expected.abs().flatten(1).amax(1).clamp(min=floor)
    return float(torch.where(error > 0, error / scale, 0.0).max())


Call = Callable[..., Any]  # (dcgnn_kernels or reference, graph, *tensors)


def problem(name: str, num_clusters: int, num_channels: int) -> tuple[tuple[Tensor, ...], Call]:
    """Random float64 input on the CPU, and the call."""
    graph = hub_graph()
    z, centroids = random_inputs(NUM_NODES, num_clusters, num_channels, graph.device)
    if name == "local_sinkhorn":
        return (z, centroids), lambda ops, graph, z, c: ops.local_sinkhorn(z, c, graph, 0.7, 3, "mean")
    if name == "local_sinkhorn, fresh":
        return (z,), lambda ops, graph, z: ops.local_sinkhorn(z, None, graph, 0.7, 2, "max")
    if name == "local_sinkhorn, converged":
        return (z, centroids), lambda ops, graph, z, c: ops.local_sinkhorn(z, c, graph, 0.7, None, "mean")
    if name == "global_sinkhorn":
        start = torch.randn(9 * num_clusters, num_channels, dtype=z.dtype)
        return (z, start), lambda ops, _, z, c: ops.global_sinkhorn(z, c, 0.7, 5, "mean")
    if name == "local_centroids":
        return (z,), lambda ops, graph, z: ops.local_centroids(z, graph, num_clusters)
    inputs, factors = sample(graph, 9, num_clusters, num_channels)
    if name == "cluster_scatter":
        return inputs[3:], lambda ops, graph, p, c: ops.cluster_scatter(p, c, graph)

    def node_update(ops: Any, graph: EgoGraph, *tensors: Tensor) -> Tensor:
        moved = {key: factor.to(graph.device) for key, factor in factors.items()}
        return ops.node_update(*tensors, graph, **moved, activation="tanh" if num_channels == 7 else "none")

    return inputs, node_update


def check(
    name: str,
    num_channels: int,
    num_clusters: int,
    dtype: torch.dtype,
    index: torch.dtype,
    device: torch.device,
) -> None:
    inputs, call = problem(name, num_clusters, num_channels)
    stored = tuple(tensor.to(dtype) for tensor in inputs)
    graph = hub_graph(index).to(device)
    outputs, grads = values_and_grads(
        lambda *tensors: call(dcgnn_kernels, graph, *tensors), tuple(tensor.to(device) for tensor in stored)
    )

    # The oracle sees the same rounded numbers, also as gradients of its outputs, in float64 on the CPU.
    def oracle(*tensors: Tensor) -> tuple[Tensor, ...]:
        found = call(reference, hub_graph(), *tensors)
        found = (found,) if isinstance(found, Tensor) else found
        for tensor in found:
            tensor.register_hook(lambda grad: grad.to(dtype).double())
        return found

    wanted, wanted_grads = values_and_grads(oracle, tuple(tensor.double() for tensor in stored))
    errors = {f"output {i}": largest_error(*pair) for i, pair in enumerate(zip(outputs, wanted, strict=True))}
    for i, pair in enumerate(zip(grads, wanted_grads, strict=True)):
        floor = max(GRADIENT_FLOOR, float(pair[1].abs().mean()))
        errors[f"gradient {i}"] = largest_error(*pair, floor=floor)
    assert {tensor.dtype for tensor in (*outputs, *grads)} == {dtype}
    assert {tensor.device.type for tensor in (*outputs, *grads)} == {device.type}
    assert max(errors.values()) <= TOLERANCE[dtype], errors


OPS = ("local_sinkhorn", "cluster_scatter", "global_sinkhorn", "local_centroids", "node_update")
INT32, INT64 = torch.int32, torch.int64


@pytest.mark.parametrize(
    ("num_channels", "num_clusters", "dtype", "index"),
    [
        (7, 1, torch.float32, INT32),
        (7, 3, torch.float64, INT64),
        (64, 2, torch.float32, INT32),
        (64, 3, torch.float16, INT64),
        (64, 1, torch.bfloat16, INT64),
        (132, 2, torch.float32, INT64),
        (132, 1, torch.float64, INT32),
        (132, 2, torch.float16, INT32),
        (132, 3, torch.bfloat16, INT32),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", OPS)
def test_ops_match_the_reference(name, num_channels, num_clusters, dtype, index, device):
    check(name, num_channels, num_clusters, dtype, index, device)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ["local_sinkhorn, fresh", "local_sinkhorn, converged"])
def test_other_ways_of_local_sinkhorn(name, dtype, device):
    check(name, 64, 2, dtype, INT32, device)


@pytest.mark.parametrize(
    ("name", "num_channels", "num_clusters", "dtype"),
    [
        ("local_sinkhorn", 1030, 1, torch.float32),
        ("cluster_scatter", 1030, 2, torch.float32),
        ("cluster_scatter", 264, 2, torch.bfloat16),  # vectors, and wider than a warp
        ("cluster_scatter", 132, 5, torch.float32),  # more clusters than have a kernel of their own
        ("global_sinkhorn", 1030, 1, torch.bfloat16),
        ("local_centroids", 1030, 2, torch.float32),
        ("node_update", 1030, 1, torch.float16),
    ],
    ids=str,
)
def test_wide_rows(name, num_channels, num_clusters, dtype, device):
    check(name, num_channels, num_clusters, dtype, INT32, device)


@pytest.mark.parametrize("name", OPS)
def test_without_deterministic_algorithms(name, device):
    """Triton's kernels are then tuned on a GPU, and fresh memory is not NaN."""
    torch.use_deterministic_algorithms(False)
    check(name, 64, 2, torch.float32, INT32, device)


@pytest.mark.parametrize("name", OPS)
def test_the_same_bits_in_every_run(name, device):
    inputs, call = problem(name, 2, 64)
    graph = hub_graph().to(device)
    stored = tuple(tensor.to(device, torch.float32) for tensor in inputs)
    first, second = (
        values_and_grads(lambda *tensors: call(dcgnn_kernels, graph, *tensors), stored) for _ in range(2)
    )
    for left, right in zip((*first[0], *first[1]), (*second[0], *second[1]), strict=True):
        assert torch.equal(left, right)


def training_step(model: torch.nn.Module, x: Tensor, graph: EgoGraph) -> dict[str, Tensor]:
    """Output, gradients and the parameters after one step, all on the CPU in float64."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out = model(x, graph)
    target = torch.arange(NUM_NODES, device=x.device) % out.size(1)
    torch.nn.functional.cross_entropy(out, target).backward()
    optimizer.step()
    found = {"output": out.detach()}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found |= {f"gradient of {name}": parameter.grad, f"{name} after the step": parameter.detach()}
    return {name: tensor.double().cpu() for name, tensor in found.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: DCConv(16, 64, 8),
        lambda: DCGNN(16, 64, 5, 8, num_layers=2, num_mlp_layers=2),
        lambda: DCGNN(16, 33, 5, 8, num_layers=2, num_local=3, local_iters=None, transform="per-cluster"),
    ],
    ids=["DCConv", "DCGNN", "DCGNN, K = 3"],
)
def test_a_training_step_matches_the_cpu_in_float64(make, dtype, tolerance, device):
    model = make().double()
    x = torch.randn(NUM_NODES, 16, dtype=torch.float64)
    graph = hub_graph()
    moved = copy.deepcopy(model).to(device, dtype)
    expected = training_step(model, x, graph)
    actual = training_step(moved, x.to(device, dtype), graph.to(device))
    for name, value in expected.items():
        error = float((actual[name] - value).abs().max() / value.abs().max().clamp(min=1e-6))
        assert error <= tolerance, f"{name}: {error}"
