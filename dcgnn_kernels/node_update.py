"""node_update: the broadcast, fused with everything else that makes a node's new embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcgnn_kernels import fallback
from dcgnn_kernels._checks import check_float, check_same, check_shape
from dcgnn_kernels._library import (
    GRAPH_ARGS,
    autocast_to_float32,
    define,
    define_autograd,
    forbid_double_backward,
)
from dcgnn_kernels.graph import EgoGraph, check_graph
from dcgnn_kernels.reference import accumulate_dtype

ACTIVATIONS = ("none", "relu", "tanh")


def node_update(
    x: Tensor,
    global_assign: Tensor,
    global_message: Tensor,
    assign: Tensor,
    message: Tensor,
    graph: EgoGraph,
    *,
    x_factor: Tensor,
    global_factor: Tensor,
    local_factor: Tensor,
    ego_factor: Tensor,
    activation: str = "none",
) -> Tensor:
    r"""One weighted sum of the input, the global and the local cluster-nodes for every node:

    .. math::
        z_i = \sigma\Bigl( a_i x_i + b_i \sum_j P^\Omega_{ij} M^\Omega_j
        + c_i \sum_{u : i \in \mathcal N_u^+} w_u \sum_j P^u_{ij} M^u_j \Bigr)

    Args:
        x: ``[N, F]`` input features.
        global_assign: ``[N, Ω]`` weights :math:`P^\Omega`; Ω may be 0.
        global_message: ``[Ω, F]`` messages :math:`M^\Omega` of the global cluster-nodes.
        assign: ``[S, K]`` weights :math:`P`, one row for every slot.
        message: ``[N, K, F]`` messages :math:`M` of the cluster-nodes of every ego.
        graph: the ego-neighbourhoods, ``N`` nodes and ``S`` slots.
        x_factor: ``[N]``, :math:`a`. Like the other factors it is not differentiated.
        global_factor: ``[N]``, :math:`b`.
        local_factor: ``[N]``, :math:`c`.
        ego_factor: ``[N]``, :math:`w`.
        activation: :math:`\sigma`, applied while the sum is at hand: ``"none"``, ``"relu"`` or ``"tanh"``.

    Returns:
        ``[N, F]``.
    """
    check_graph(graph, ego_of_every_node=True)
    tensors = {"global_assign": global_assign, "global_message": global_message, "assign": assign}
    check_float("x", x, 2)
    for name, tensor in tensors.items():
        check_float(name, tensor, 2)
        check_same(name, tensor, "x", x)
    check_float("message", message, 3)
    check_same("message", message, "x", x)
    num_nodes, num_channels = graph.num_nodes, x.size(1)
    num_global, num_clusters = global_assign.size(1), message.size(1)
    check_shape("x", x, (num_nodes, num_channels), "[graph.num_nodes, F]")
    check_shape("global_assign", global_assign, (num_nodes, num_global), "[N, Ω]")
    check_shape("global_message", global_message, (num_global, num_channels), "[Ω, F]")
    check_shape("message", message, (num_nodes, num_clusters, num_channels), "[N, K, F]")
    check_shape("assign", assign, (graph.num_slots, num_clusters), "[graph.num_slots, K]")
    if graph.device != x.device:
        raise ValueError(f"graph is on {graph.device}, but x is on {x.device}; use graph.to(device)")
    factors = {
        "x_factor": x_factor,
        "global_factor": global_factor,
        "local_factor": local_factor,
        "ego_factor": ego_factor,
    }
    for name, factor in factors.items():
        check_float(name, factor, 1)
        check_shape(name, factor, (num_nodes,), "[N]")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    wide = accumulate_dtype(x.dtype)
    return torch.ops.dcgnn.node_update(
        x,
        global_assign,
        global_message,
        assign,
        message,
        *(factor.detach().to(wide) for factor in factors.values()),
        *graph.arrays(),
        activation,
    )


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(
    grad: Tensor, global_assign: Tensor, global_message: Tensor, assign: Tensor, message: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    like = (global_assign, global_message, assign, message)
    return (message.new_empty(grad.shape), *(tensor.new_empty(tensor.shape) for tensor in like))


FACTORS = "Tensor x_factor, Tensor global_factor, Tensor local_factor, Tensor ego_factor"
MESSAGES = "Tensor global_assign, Tensor global_message, Tensor assign, Tensor message"

FORWARD = define(
    f"node_update(Tensor x, {MESSAGES}, {FACTORS}, {GRAPH_ARGS}, str activation) -> Tensor",
    fallback=fallback.node_update,
    fake=_fake,
)
BACKWARD = define(
    f"node_update_backward(Tensor grad, {MESSAGES}, {FACTORS}, {GRAPH_ARGS}) -> (Tensor grad_x, "
    "Tensor grad_global_assign, Tensor grad_global_message, Tensor grad_assign, Tensor grad_message)",
    fallback=fallback.node_update_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.activation = inputs[-1]
    saved = inputs[1:-1] if ctx.activation == "none" else (*inputs[1:-1], output)
    ctx.save_for_backward(*saved)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    if ctx.activation != "none":
        *saved, output = saved
        slope = (output > 0).to(grad.dtype) if ctx.activation == "relu" else 1 - output.square()
        grad = grad * slope
    grads = torch.ops.dcgnn.node_update_backward(grad, *saved)
    return (*grads, *((None,) * 10))


define_autograd(FORWARD, _setup_context, _backward)
forbid_double_backward(BACKWARD)
autocast_to_float32(FORWARD)
