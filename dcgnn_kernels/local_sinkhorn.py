"""local_sinkhorn: one small optimal-transport problem for every ego-neighbourhood."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcgnn_kernels import fallback
from dcgnn_kernels._checks import check_float, check_same, check_shape, check_sinkhorn_options
from dcgnn_kernels._library import (
    GRAPH_ARGS,
    autocast_to_float32,
    define,
    define_autograd,
    forbid_double_backward,
)
from dcgnn_kernels.graph import EgoGraph, check_graph
from dcgnn_kernels.local_centroids import local_centroids
from dcgnn_kernels.reference import DEFAULT_MAX_ITERS, DEFAULT_TOL, accumulate_dtype


def local_sinkhorn(
    z: Tensor,
    centroids: Tensor | None,
    graph: EgoGraph,
    lam: float = 2.0,
    num_iters: int | None = 3,
    cost_scale: str = "none",
    *,
    num_clusters: int = 2,
    tol: float = DEFAULT_TOL,
    max_iters: int = DEFAULT_MAX_ITERS,
) -> tuple[Tensor, Tensor]:
    r"""Assigns the members of every ego to its cluster-nodes and moves these to their members' mean.

    For ego :math:`i` with :math:`n` members and centroids :math:`c_1..c_K`: entropic optimal transport
    between members (mass :math:`1/n`) and cluster-nodes (mass :math:`1/K`) with cost
    :math:`M_{uj} = \|z_u - c_j\|^2`, by ``num_iters`` log-domain Sinkhorn iterations from
    :math:`g = 0`; then :math:`C_j = K \sum_u P_{uj} z_u`. Columns of :math:`P` sum to :math:`1/K`
    exactly, rows to :math:`1/n` in the limit. The gradient is exact through the iterations.

    Args:
        z: ``[N, F]`` node features, float64, float32, float16 or bfloat16.
        centroids: ``[egos, K, F]`` cluster-nodes of every ego, same dtype and device; or None: start at
            :func:`local_centroids` of ``z``, with its gradient. At K = 2 that costs no memory and hardly
            any time.
        graph: the ego-neighbourhoods, ``N`` nodes and ``S`` slots; ``N`` egos, or as many as there are
            graphs in :meth:`EgoGraph.from_batch`.
        lam: inverse temperature :math:`\lambda \ge 0`; larger is sharper.
        num_iters: number :math:`T \ge 1` of iterations, or None: to convergence, with the implicit
            gradient.
        cost_scale: divide the cost by one number for each ego: ``"none"``, ``"mean"`` or ``"max"`` of
            its costs.
        num_clusters: K where ``centroids`` is None; not used otherwise.
        tol: with ``num_iters=None``, stop when no potential moves by more than this.
        max_iters: with ``num_iters=None``, stop after this many iterations at the latest.

    Returns:
        ``assign`` ``[S, K]``: :math:`P`, row ``k`` for slot ``k``; ``clusters`` ``[egos, K, F]``: :math:`C`.
    """
    check_graph(graph, ego_of_every_node=centroids is None)
    check_float("z", z, 2)
    num_channels = z.size(1)
    check_shape("z", z, (graph.num_nodes, num_channels), "[graph.num_nodes, F]")
    if graph.device != z.device:
        raise ValueError(f"graph is on {graph.device}, but z is on {z.device}; use graph.to(device)")
    if centroids is None:
        if num_clusters != 2:
            centroids = local_centroids(z, graph, num_clusters)
    else:
        check_float("centroids", centroids, 3)
        check_same("centroids", centroids, "z", z)
        num_clusters = centroids.size(1)
        shape = (graph.num_egos, num_clusters, num_channels)
        check_shape("centroids", centroids, shape, "[N, K, F]")
        if num_clusters < 1:
            raise ValueError("centroids must hold at least one cluster-node for every ego, got K = 0")
    check_sinkhorn_options(lam, num_iters, cost_scale, tol, max_iters)
    assign, clusters, _ = torch.ops.dcgnn.local_sinkhorn(
        z, centroids, *graph.arrays(), num_clusters, lam, num_iters, cost_scale, tol, max_iters
    )
    return assign, clusters


def _fake(
    z: Tensor,
    centroids: Tensor | None,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
    num_clusters: int,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
    tol: float,
    max_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    history = 1 if num_iters is None else num_iters
    num_egos = rowptr.size(0) - 1
    return (
        z.new_empty(member.size(0), num_clusters),
        z.new_empty(num_egos, num_clusters, z.size(1)),
        z.new_empty(num_egos, history, num_clusters, dtype=accumulate_dtype(z.dtype)),
    )


def _fake_backward(
    grad_assign: Tensor | None,
    grad_clusters: Tensor | None,
    z: Tensor,
    centroids: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(0 if centroids is None else centroids.shape)


FORWARD = define(
    f"local_sinkhorn(Tensor z, Tensor? centroids, {GRAPH_ARGS}, int num_clusters, float lam, int? num_iters, "
    "str cost_scale, float tol, int max_iters) -> (Tensor assign, Tensor clusters, Tensor potentials)",
    fallback=fallback.local_sinkhorn,
    fake=_fake,
)
BACKWARD = define(
    "local_sinkhorn_backward(Tensor? grad_assign, Tensor? grad_clusters, Tensor z, Tensor? centroids, "
    f"Tensor potentials, {GRAPH_ARGS}, int num_clusters, float lam, int? num_iters, str cost_scale)"
    " -> (Tensor grad_z, Tensor grad_centroids)",
    fallback=fallback.local_sinkhorn_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, centroids, *graph = inputs[:7]
    ctx.options = inputs[7:11]
    potentials = output[2]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(potentials)
    ctx.save_for_backward(z, centroids, potentials, *graph)


def _backward(
    ctx: Any, grad_assign: Tensor | None, grad_clusters: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_assign is None and grad_clusters is None:
        return (None,) * 13
    z, centroids, *rest = ctx.saved_tensors
    grad_z, grad_centroids = torch.ops.dcgnn.local_sinkhorn_backward(
        grad_assign, grad_clusters, z, centroids, *rest, *ctx.options
    )
    return (grad_z, None if centroids is None else grad_centroids, *((None,) * 11))


define_autograd(FORWARD, _setup_context, _backward)
forbid_double_backward(BACKWARD)
autocast_to_float32(FORWARD)
