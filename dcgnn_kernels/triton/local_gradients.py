"""The backward of local_sinkhorn, recomputed from the potentials: over egos, then over the transpose."""

from __future__ import annotations

import torch
from torch import Tensor

from dcgnn_kernels.triton.device import COST_SCALE
from dcgnn_kernels.triton.hubs import hub_backward, hub_pair_rows
from dcgnn_kernels.triton.launcher import start
from dcgnn_kernels.triton.local_problem import (
    LocalProblem,
    hub_centroids,
    hub_products,
    hub_sums,
    resident_arguments,
)
from dcgnn_kernels.triton.many import many_backward
from dcgnn_kernels.triton.pair import pair_backward
from dcgnn_kernels.triton.plan import Tiles
from dcgnn_kernels.triton.sweep import (
    Segments,
    Work,
    accumulator,
    channel_blocks,
    compiler_options,
    partial_sums_at_a_time,
    reduce,
)
from dcgnn_kernels.triton.transpose import many_gather, pair_gather


def _optional(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is not followed, where there is no tensor."""
    return other if tensor is None else tensor


def _hub_gradients(
    problem: LocalProblem,
    tiles: Tiles,
    grad_assign: Tensor | None,
    grad_clusters: Tensor | None,
    potentials: Tensor,
    weights: Tensor,
    root: Tensor,
) -> tuple[Tensor, Tensor]:
    """Writes the hubs' weights and scales; gives their centroids and the centroids' partial gradients."""
    centroids = hub_centroids(problem, tiles)
    costs = hub_products(problem, tiles, centroids, None, distance=True)
    if grad_clusters is None:
        assert grad_assign is not None
        grads = grad_assign.to(costs.dtype)
    else:
        grads = hub_products(problem, tiles, grad_clusters, grad_assign, distance=False)
    shares, grad_logits, pulls = (torch.empty_like(costs) for _ in range(3))
    start(
        hub_backward,
        (tiles.num_hubs,),
        costs=costs,
        grads=grads,
        hubs=tiles.hubs,
        begins=problem.rowptr,
        pointer=tiles.pointer,
        potentials=potentials,
        shares=shares,
        grad_logits=grad_logits,
        weights=weights,
        pulls=pulls,
        scale_root=root,
        PAIR=problem.num_clusters == 2,
        **problem.hub_options(),
    )
    return centroids, hub_sums(problem, tiles, pulls, centroids, root)


def pair_gradients(
    problem: LocalProblem,
    transpose: tuple[Segments, Tensor, Tensor],
    grad_assign: Tensor | None,
    grad_clusters: Tensor | None,
    potentials: Tensor,
) -> tuple[Tensor, Tensor]:
    z, fresh = problem.z, problem.fresh
    num_egos, num_channels = problem.num_egos, z.size(1)
    # Rows that are only gathered again keep the storage dtype; float16 has too little range for them.
    storage = torch.float32 if z.dtype == torch.float16 else z.dtype
    weights = problem.scratch(problem.member.size(0), 4)
    root = problem.scratch(num_egos)
    half_rows = z.new_empty(num_egos, num_channels, dtype=storage)
    if fresh:
        grad_centroids = z.new_empty(0)
        grad_near, grad_far = (torch.empty_like(half_rows) for _ in range(2))
        grad_stride = num_channels
    else:
        grad_centroids = z.new_empty(num_egos, 2, num_channels)
        grad_near, grad_far = grad_centroids, grad_centroids.view(-1)[num_channels:]
        grad_stride = 2 * num_channels
    rows = {"half_rows": half_rows, "grad_near": grad_near, "grad_far": grad_far}
    incoming = {
        "grad_assign": _optional(grad_assign, z),
        "grad_clusters": _optional(grad_clusters, z),
        "HAS_ASSIGN": grad_assign is not None,
        "HAS_CLUSTERS": grad_clusters is not None,
    }

    def run(work: Work) -> None:
        start(
            pair_backward,
            (work.programs,),
            z=z,
            centroids=_optional(problem.centroids, z),
            potentials=potentials,
            member=problem.member,
            weights=weights,
            scale_root=root,
            grad_stride=grad_stride,
            **rows,
            **incoming,
            **problem.shape(),
            **resident_arguments(problem, work),
        )

    name = str(("pair_backward", problem.cost_scale, fresh))
    limit = problem.limit(backward=True)
    problem.egos.whole(name, limit, lambda size: problem.configs(size, backward=True), z, run)
    tiles = problem.hub_tiles(backward=True)
    if tiles is not None:
        centroids, partial = _hub_gradients(
            problem, tiles, grad_assign, grad_clusters, potentials, weights, root
        )
        width, blocks = channel_blocks(num_channels)
        start(
            hub_pair_rows,
            (tiles.num_hubs, blocks),
            partial=partial,
            pointer=tiles.pointer,
            hubs=tiles.hubs,
            rowptr=problem.rowptr,
            centroids=centroids,
            scale_root=root,
            num_channels=num_channels,
            grad_stride=grad_stride,
            FRESH=fresh,
            ACC=accumulator(z.dtype),
            M=partial_sums_at_a_time(width),
            FEATURES=width,
            **compiler_options(4),
            **rows,
        )

    nodes, ego, slot = transpose
    grad_z = torch.empty_like(z)
    near_rows, near_stride = (z, num_channels) if fresh else (problem.centroids, 2 * num_channels)

    def gather(work: Work, out: Tensor, width: int, blocks: int) -> None:
        start(
            pair_gather,
            (work.programs, blocks),
            weights=weights,
            grad_clusters=incoming["grad_clusters"],
            scale_root=root,
            near_rows=near_rows,
            z=z,
            ego=ego,
            slot=slot,
            out=out,
            num_channels=num_channels,
            near_stride=near_stride,
            SCALE=COST_SCALE[problem.cost_scale],
            FRESH=fresh,
            HAS_CLUSTERS=grad_clusters is not None,
            TILED=work.tiled,
            ACC=accumulator(z.dtype),
            FEATURES=width,
            **rows,
            **work.arguments(),
        )

    left = nodes.sums(str(("pair_gather", problem.cost_scale, fresh)), 1, grad_z, z, gather)
    if left is not None:
        reduce(*left, grad_z, addend=grad_near if fresh else None)
    return grad_z, grad_centroids


def many_gradients(
    problem: LocalProblem,
    transpose: tuple[Segments, Tensor, Tensor],
    grad_assign: Tensor | None,
    grad_clusters: Tensor | None,
    potentials: Tensor,
) -> tuple[Tensor, Tensor]:
    z, centroids, num_clusters = problem.z, problem.centroids, problem.num_clusters
    assert centroids is not None
    weights = problem.scratch(problem.member.size(0), 2 * num_clusters)
    root = problem.scratch(problem.num_egos)
    grad_centroids = torch.empty_like(centroids)

    def run(work: Work) -> None:
        start(
            many_backward,
            (work.programs,),
            grad_assign=_optional(grad_assign, z),
            grad_clusters=_optional(grad_clusters, z),
            z=z,
            centroids=centroids,
            potentials=potentials,
            member=problem.member,
            weights=weights,
            scale_root=root,
            grad_centroids=grad_centroids,
            HAS_ASSIGN=grad_assign is not None,
            HAS_CLUSTERS=grad_clusters is not None,
            **problem.shape(),
            **resident_arguments(problem, work),
        )

    name = str(("many_backward", num_clusters, problem.cost_scale))
    limit = problem.limit(backward=True)
    problem.egos.whole(name, limit, lambda size: problem.configs(size, backward=True), z, run)
    tiles = problem.hub_tiles(backward=True)
    if tiles is not None:
        _, partial = _hub_gradients(problem, tiles, grad_assign, grad_clusters, potentials, weights, root)
        reduce(tiles, partial, grad_centroids, gain=-2.0)

    nodes, ego, slot = transpose
    grad_z = torch.empty_like(z)

    def gather(work: Work, out: Tensor, width: int, blocks: int) -> None:
        start(
            many_gather,
            (work.programs, blocks),
            weights=weights,
            grad_clusters=_optional(grad_clusters, z),
            centroids=centroids,
            scale_root=root,
            z=z,
            ego=ego,
            slot=slot,
            out=out,
            num_channels=z.size(1),
            num_clusters=num_clusters,
            HAS_CLUSTERS=grad_clusters is not None,
            TILED=work.tiled,
            ACC=accumulator(z.dtype),
            FEATURES=width,
            **work.arguments(),
        )

    left = nodes.sums(str(("many_gather", num_clusters)), 1, grad_z, z, gather)
    if left is not None:
        reduce(*left, grad_z)
    return grad_z, grad_centroids
