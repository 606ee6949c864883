"""node_update: exact against the reference and against its parts, gradcheck, opcheck, errors."""

from __future__ import annotations

import pytest
import torch
from graphs import awkward, random_graphs
from hypothesis import given
from hypothesis import strategies as st
from test_ops import TOLERANCE, compare_with_reference, values_and_grads
from torch import Tensor

import dcgnn_kernels
from dcgnn_kernels import EgoGraph, reference


def sample(
    graph: EgoGraph, num_global: int, num_clusters: int, num_channels: int
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    options = {"dtype": torch.float64, "device": graph.device}
    num_nodes = graph.num_nodes
    inputs = (
        torch.randn(num_nodes, num_channels, **options),
        torch.rand(num_nodes, num_global, **options),
        torch.randn(num_global, num_channels, **options),
        torch.rand(graph.num_slots, num_clusters, **options),
        torch.randn(num_nodes, num_clusters, num_channels, **options),
    )
    names = ("x_factor", "global_factor", "local_factor", "ego_factor")
    return inputs, {name: torch.rand(num_nodes, **options) for name in names}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@given(
    case=random_graphs(),
    num_global=st.integers(0, 5),
    num_clusters=st.integers(0, 4),
    num_channels=st.integers(1, 9),
    activation=st.sampled_from(["none", "relu", "tanh"]),
)
def test_matches_the_reference(case, num_global, num_clusters, num_channels, activation, dtype, device):
    edge_index, num_nodes = case
    graph = EgoGraph.from_edge_index(edge_index, num_nodes).to(device)
    inputs, factors = sample(graph, num_global, num_clusters, num_channels)
    # The kernels read float32 factors for float32 and bfloat16 data; so does the oracle here.
    factors = {name: factor.to(reference.accumulate_dtype(dtype)) for name, factor in factors.items()}
    compare_with_reference(
        lambda *tensors: dcgnn_kernels.node_update(*tensors, graph, **factors, activation=activation),
        lambda *tensors: reference.node_update(*tensors, graph, **factors, activation=activation),
        inputs,
        dtype,
    )


@pytest.mark.parametrize("num_channels", [16, 64, 100])
def test_is_the_sum_of_its_parts(num_channels, device):
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    inputs, factors = sample(graph, 8, 2, num_channels)
    x, global_assign, global_message, assign, message = inputs
    weighted = factors["ego_factor"][:, None, None] * message
    expected = (
        factors["x_factor"][:, None] * x
        + factors["global_factor"][:, None] * (global_assign @ global_message)
        + factors["local_factor"][:, None] * dcgnn_kernels.cluster_scatter(assign, weighted, graph)
    )
    torch.testing.assert_close(dcgnn_kernels.node_update(*inputs, graph, **factors), expected)


@pytest.mark.parametrize("activation", ["none", "relu", "tanh"])
@pytest.mark.parametrize(("num_global", "num_clusters"), [(3, 2), (0, 2), (3, 0), (1, 3)])
def test_gradcheck(num_global, num_clusters, activation, device):
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    inputs, factors = sample(graph, num_global, num_clusters, 3)
    torch.autograd.gradcheck(
        lambda *tensors: dcgnn_kernels.node_update(*tensors, graph, **factors, activation=activation),
        tuple(tensor.requires_grad_() for tensor in inputs),
    )


@pytest.mark.parametrize("activation", ["none", "relu", "tanh"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_opcheck(dtype, activation, device):
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    inputs, factors = sample(graph, 3, 2, 8)
    wide = [factor.to(reference.accumulate_dtype(dtype)) for factor in factors.values()]
    stored = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    rtol, atol = (None, None) if dtype != torch.bfloat16 else (2e-2, 2e-2)
    torch.library.opcheck(
        torch.ops.dcgnn.node_update.default,
        (*stored, *wide, *graph.arrays(), activation),
        rtol=rtol,
        atol=atol,
    )
    grad = torch.randn(graph.num_nodes, 8, dtype=dtype, device=device)
    detached = [tensor.detach() for tensor in stored[1:]]
    torch.library.opcheck(
        torch.ops.dcgnn.node_update_backward.default, (grad, *detached, *wide, *graph.arrays())
    )


def test_strided_gradient(device):
    graph = EgoGraph.from_edge_index(*awkward()).to(device)
    inputs, factors = sample(graph, 3, 2, 4)
    plain = values_and_grads(lambda *t: dcgnn_kernels.node_update(*t, graph, **factors).sum(), inputs)
    dense = values_and_grads(lambda *t: reference.node_update(*t, graph, **factors).sum(), inputs)
    for left, right in zip(plain[1], dense[1], strict=True):
        torch.testing.assert_close(left, right)


def test_bad_input():
    graph = EgoGraph.from_edge_index(*awkward())
    inputs, factors = sample(graph, 3, 2, 4)
    x, global_assign, global_message, assign, message = inputs
    calls = {
        r"x must have shape \[graph.num_nodes, F\]": (x[:2], *inputs[1:]),
        r"global_assign must have shape \[N, Ω\]": (x, global_assign[:2], *inputs[2:]),
        r"global_message must have shape \[Ω, F\]": (x, global_assign, global_message[:2], assign, message),
        r"assign must have shape \[graph.num_slots, K\]": (*inputs[:3], assign[:2], message),
        r"message must have shape \[N, K, F\]": (*inputs[:4], message[:2]),
        "message is torch.float32, but x": (*inputs[:4], message.float()),
    }
    for text, arguments in calls.items():
        with pytest.raises(ValueError, match=text):
            dcgnn_kernels.node_update(*arguments, graph, **factors)
    with pytest.raises(ValueError, match=r"ego_factor must have shape \[N\]"):
        dcgnn_kernels.node_update(*inputs, graph, **{**factors, "ego_factor": factors["ego_factor"][:2]})
    with pytest.raises(ValueError, match="activation must be one of none, relu, tanh, got 'gelu'"):
        dcgnn_kernels.node_update(*inputs, graph, **factors, activation="gelu")
