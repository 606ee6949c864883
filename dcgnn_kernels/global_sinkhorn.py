"""global_sinkhorn: one tall optimal-transport problem between all nodes and the global cluster-nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcgnn_kernels import fallback
from dcgnn_kernels._checks import check_float, check_same, check_shape, check_sinkhorn_options
from dcgnn_kernels._library import (
    autocast_to_float32,
    define,
    define_autograd,
    forbid_double_backward,
)
from dcgnn_kernels.graph import EgoGraph, filled_graphs
from dcgnn_kernels.local_sinkhorn import local_sinkhorn
from dcgnn_kernels.reference import DEFAULT_MAX_ITERS, DEFAULT_TOL, accumulate_dtype


def global_sinkhorn(
    z: Tensor,
    centroids: Tensor,
    lam: float = 2.0,
    num_iters: int | None = 5,
    cost_scale: str = "none",
    *,
    batch: Tensor | EgoGraph | None = None,
    tol: float = DEFAULT_TOL,
    max_iters: int = DEFAULT_MAX_ITERS,
) -> tuple[Tensor, Tensor]:
    r"""Assigns all nodes to the global cluster-nodes and moves these to their nodes' mean.

    The problem of :func:`dcgnn_kernels.local_sinkhorn` with all :math:`N` nodes as its members and
    :math:`|\Omega|` cluster-nodes.

    Args:
        z: ``[N, F]`` node features, ``N`` at least 1; float64, float32, float16 or bfloat16.
        centroids: ``[Ω, F]`` cluster-nodes, same dtype and device; with ``batch`` also ``[G, Ω, F]``, those
            of every graph.
        lam: inverse temperature :math:`\lambda \ge 0`; larger is sharper.
        num_iters: number :math:`T \ge 1` of iterations, or None: to convergence, with the implicit
            gradient.
        cost_scale: divide the cost by ``"none"``, or the ``"mean"`` or ``"max"`` of all costs.
        batch: ``[N]`` the graph of every node in a disjoint union of ``G`` graphs, or
            :meth:`EgoGraph.from_batch` of it: every graph is a problem of its own, with its own number of
            nodes, all solved by one call of the kernels of :func:`local_sinkhorn`. ``G`` is that of
            ``centroids``, else one more than the largest entry; clusters of a graph without nodes are 0.
        tol: with ``num_iters=None``, stop when no potential moves by more than this.
        max_iters: with ``num_iters=None``, stop after this many iterations at the latest.

    Returns:
        ``assign`` ``[N, Ω]``: :math:`P`, columns sum to :math:`1/|\Omega|`; ``clusters`` ``[Ω, F]``:
        :math:`C_j = |\Omega| \sum_i P_{ij} z_i`; with ``batch`` ``[G, Ω, F]``, and the columns of every
        graph's rows sum to :math:`1/|\Omega|`.
    """
    if batch is not None:
        return _of_batch(z, centroids, batch, (lam, num_iters, cost_scale), tol=tol, max_iters=max_iters)
    check_float("z", z, 2)
    check_float("centroids", centroids, 2)
    check_same("centroids", centroids, "z", z)
    check_shape("centroids", centroids, (centroids.size(0), z.size(1)), "[Ω, F]")
    if z.size(0) < 1:
        raise ValueError("z has no rows: the global problem needs at least one node")
    if centroids.size(0) < 1:
        raise ValueError("centroids has no rows: the global problem needs at least one cluster-node")
    check_sinkhorn_options(lam, num_iters, cost_scale, tol, max_iters)
    assign, clusters, _ = torch.ops.dcgnn.global_sinkhorn(
        z, centroids, lam, num_iters, cost_scale, tol, max_iters
    )
    return assign, clusters


def _of_batch(
    z: Tensor, centroids: Tensor, batch: Tensor | EgoGraph, options: tuple[Any, ...], **limits: Any
) -> tuple[Tensor, Tensor]:
    """One problem for every graph of the batch: egos that are whole graphs."""
    check_float("z", z, 2)
    own = isinstance(centroids, Tensor) and centroids.dim() == 3
    if isinstance(batch, EgoGraph):
        graphs, num_graphs, filled = batch, batch.num_egos, None
    else:
        graphs, num_graphs, filled = filled_graphs(batch, centroids.size(0) if own else None)
    if own and filled is not None:
        centroids = centroids[filled]
    elif isinstance(centroids, Tensor) and centroids.dim() == 2:
        centroids = centroids.expand(graphs.num_egos, -1, -1)
    assign, clusters = local_sinkhorn(z, centroids, graphs, *options, **limits)
    if filled is not None:
        clusters = clusters.new_zeros(num_graphs, *clusters.shape[1:]).index_copy(0, filled, clusters)
    # The rows of the assignment are slots: the nodes sorted by graph.
    return assign[graphs.slot.long()], clusters


def _fake(
    z: Tensor,
    centroids: Tensor,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
    tol: float,
    max_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    num_clusters = centroids.size(0)
    history = 1 if num_iters is None else num_iters
    return (
        z.new_empty(z.size(0), num_clusters),
        z.new_empty(centroids.shape),
        z.new_empty(history, num_clusters, dtype=accumulate_dtype(z.dtype)),
    )


def _fake_backward(
    grad_assign: Tensor | None, grad_clusters: Tensor | None, z: Tensor, centroids: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), z.new_empty(centroids.shape)


FORWARD = define(
    "global_sinkhorn(Tensor z, Tensor centroids, float lam, int? num_iters, str cost_scale, "
    "float tol, int max_iters) -> (Tensor assign, Tensor clusters, Tensor potentials)",
    fallback=fallback.global_sinkhorn,
    fake=_fake,
)
BACKWARD = define(
    "global_sinkhorn_backward(Tensor? grad_assign, Tensor? grad_clusters, Tensor z, Tensor centroids, "
    "Tensor potentials, float lam, int? num_iters, str cost_scale)"
    " -> (Tensor grad_z, Tensor grad_centroids)",
    fallback=fallback.global_sinkhorn_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, centroids, ctx.lam, ctx.num_iters, ctx.cost_scale = inputs[:5]
    potentials = output[2]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(potentials)
    ctx.save_for_backward(z, centroids, potentials)


def _backward(
    ctx: Any, grad_assign: Tensor | None, grad_clusters: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_assign is None and grad_clusters is None:
        return (None,) * 7
    grads = torch.ops.dcgnn.global_sinkhorn_backward(
        grad_assign, grad_clusters, *ctx.saved_tensors, ctx.lam, ctx.num_iters, ctx.cost_scale
    )
    return (*grads, *((None,) * 5))


define_autograd(FORWARD, _setup_context, _backward)
forbid_double_backward(BACKWARD)
autocast_to_float32(FORWARD)
