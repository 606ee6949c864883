"""local_centroids: where the local cluster-nodes of every ego start."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcgnn_kernels import fallback
from dcgnn_kernels._checks import check_float, check_shape
from dcgnn_kernels._library import GRAPH_ARGS, define, define_autograd, forbid_double_backward
from dcgnn_kernels.graph import EgoGraph, check_graph


def local_centroids(z: Tensor, graph: EgoGraph, num_local: int = 2) -> Tensor:
    r"""Initial cluster-nodes of every ego, ``[N, K, F]``, from the node features ``z`` ``[N, F]``.

    - :math:`K = 2`: the node's own features and the mean of its neighbours' (its own, if it has none).
    - :math:`K > 2`: the node's own features, then the means of :math:`K - 1` groups of neighbours; the
      neighbour at position :math:`p` of the ascending list is in group :math:`p \bmod (K - 1)`. An
      empty group takes the mean of all neighbours (the node's own features, if it has none).
    - :math:`K = 1`: the mean of the ego, the node included.
    """
    check_graph(graph, ego_of_every_node=True)
    check_float("z", z, 2)
    check_shape("z", z, (graph.num_nodes, z.size(1)), "[graph.num_nodes, F]")
    if isinstance(num_local, bool) or not isinstance(num_local, int) or num_local < 1:
        raise ValueError(f"num_local must be an int of at least 1, got {num_local!r}")
    if graph.device != z.device:
        raise ValueError(f"graph is on {graph.device}, but z is on {z.device}; use graph.to(device)")
    return torch.ops.dcgnn.local_centroids(z, *graph.arrays(), num_local)


def _fake(
    z: Tensor,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
    num_local: int,
) -> Tensor:
    return z.new_empty(z.size(0), num_local, z.size(1))


def _fake_backward(grad: Tensor, *_: Any) -> Tensor:
    return grad.new_empty(grad.size(0), grad.size(2))


FORWARD = define(
    f"local_centroids(Tensor z, {GRAPH_ARGS}, int num_local) -> Tensor",
    fallback=fallback.local_centroids,
    fake=_fake,
)
BACKWARD = define(
    f"local_centroids_backward(Tensor grad, {GRAPH_ARGS}, int num_local) -> Tensor",
    fallback=fallback.local_centroids_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *graph, ctx.num_local = inputs
    ctx.save_for_backward(*graph)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_z = torch.ops.dcgnn.local_centroids_backward(grad, *ctx.saved_tensors, ctx.num_local)
    return (grad_z, *((None,) * 6))


define_autograd(FORWARD, _setup_context, _backward)
forbid_double_backward(BACKWARD)
