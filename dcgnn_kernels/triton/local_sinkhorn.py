"""local_sinkhorn and its backward on the GPU: which kernels run, on what memory."""

from __future__ import annotations

import torch
from torch import Tensor

from dcgnn_kernels import fallback
from dcgnn_kernels.triton import config, local_centroids
from dcgnn_kernels.triton.hubs import hub_forward
from dcgnn_kernels.triton.launcher import start
from dcgnn_kernels.triton.local_gradients import many_gradients, pair_gradients
from dcgnn_kernels.triton.local_problem import (
    LocalProblem,
    hub_centroids,
    hub_products,
    hub_sums,
    resident_arguments,
)
from dcgnn_kernels.triton.many import many_forward
from dcgnn_kernels.triton.pair import pair_forward
from dcgnn_kernels.triton.plan import Tiles
from dcgnn_kernels.triton.sweep import Segments, Work, reduce


def _served_by_fallback(z: Tensor, num_clusters: int, num_iters: int | None) -> bool:
    """Convergence for K other than 2 needs a dense solve for each ego, many cluster-nodes many registers."""
    return z.numel() == 0 or num_clusters > config.MOST_CLUSTERS or (num_iters is None and num_clusters != 2)


def local_sinkhorn(
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
    """CUDA kernel of ``dcgnn::local_sinkhorn``."""
    arrays = (rowptr, member, colptr, ego, slot)
    if _served_by_fallback(z, num_clusters, num_iters):
        return fallback.local_sinkhorn(
            z, centroids, *arrays, num_clusters, lam, num_iters, cost_scale, tol, max_iters
        )
    with torch.cuda.device_of(z):
        if centroids is None and num_clusters != 2:
            centroids = local_centroids.local_centroids(z, *arrays, num_clusters)
        problem = LocalProblem.of(z, centroids, rowptr, member, num_clusters, lam, num_iters, cost_scale)
        assign = z.new_empty(member.size(0), num_clusters)
        clusters = z.new_empty(problem.num_egos, num_clusters, z.size(1))
        potentials = problem.scratch(problem.num_egos, problem.steps, num_clusters)
        outputs = {"assign": assign, "clusters": clusters, "potentials": potentials}
        _resident_forward(problem, outputs, tol, max_iters)
        tiles = problem.hub_tiles(backward=False)
        if tiles is not None:
            _hubs_forward(problem, tiles, assign, clusters, potentials, tol, max_iters)
        return assign, clusters, potentials


def _resident_forward(problem: LocalProblem, outputs: dict[str, Tensor], tol: float, max_iters: int) -> None:
    pair = problem.num_clusters == 2
    kernel = pair_forward if pair else many_forward
    options = problem.shape() | ({"tol": tol, "max_iters": max_iters} if pair else {})

    def run(work: Work) -> None:
        start(
            kernel,
            (work.programs,),
            z=problem.z,
            centroids=problem.z if problem.centroids is None else problem.centroids,
            member=problem.member,
            **outputs,
            **options,
            **resident_arguments(problem, work),
        )

    name = (kernel.__name__, problem.num_clusters, problem.cost_scale, problem.fresh)
    problem.egos.whole(
        str(name),
        problem.limit(backward=False),
        lambda limit: problem.configs(limit, backward=False),
        problem.z,
        run,
    )


def _hubs_forward(
    problem: LocalProblem,
    tiles: Tiles,
    assign: Tensor,
    clusters: Tensor,
    potentials: Tensor,
    tol: float,
    max_iters: int,
) -> None:
    costs = hub_products(problem, tiles, hub_centroids(problem, tiles), None, distance=True)
    shares = torch.empty_like(costs)
    start(
        hub_forward,
        (tiles.num_hubs,),
        costs=costs,
        hubs=tiles.hubs,
        begins=problem.rowptr,
        pointer=tiles.pointer,
        shares=shares,
        assign=assign,
        potentials=potentials,
        max_iters=max_iters,
        tol=tol,
        **problem.hub_options(),
    )
    reduce(tiles, hub_sums(problem, tiles, shares, None, None), clusters, gain=float(problem.num_clusters))


def local_sinkhorn_backward(
    grad_assign: Tensor | None,
    grad_clusters: Tensor | None,
    z: Tensor,
    centroids: Tensor | None,
    potentials: Tensor,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
    num_clusters: int,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
) -> tuple[Tensor, Tensor]:
    """CUDA kernel of ``dcgnn::local_sinkhorn_backward``."""
    arrays = (rowptr, member, colptr, ego, slot)
    if _served_by_fallback(z, num_clusters, num_iters):
        return fallback.local_sinkhorn_backward(
            grad_assign,
            grad_clusters,
            z,
            centroids,
            potentials,
            *arrays,
            num_clusters,
            lam,
            num_iters,
            cost_scale,
        )
    with torch.cuda.device_of(z):
        grad_assign = None if grad_assign is None else grad_assign.contiguous()
        grad_clusters = None if grad_clusters is None else grad_clusters.contiguous()
        composed = centroids is None and num_clusters != 2
        if composed:
            centroids = local_centroids.local_centroids(z, *arrays, num_clusters)
        problem = LocalProblem.of(z, centroids, rowptr, member, num_clusters, lam, num_iters, cost_scale)
        nodes = Segments.of(colptr.contiguous(), member.size(0))
        transpose = (nodes, ego.contiguous(), slot.contiguous())
        potentials = potentials.contiguous()
        if num_clusters == 2:
            return pair_gradients(problem, transpose, grad_assign, grad_clusters, potentials)
        grad_z, grad_centroids = many_gradients(problem, transpose, grad_assign, grad_clusters, potentials)
        if composed:
            grad_z = grad_z + local_centroids.local_centroids_backward(grad_centroids, *arrays, num_clusters)
            grad_centroids = z.new_empty(0)
        return grad_z, grad_centroids
