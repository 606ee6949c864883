"""local_sinkhorn and its backward on the GPU: which kernels run, on what memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcgnn_kernels import fallback
from dcgnn_kernels.reference import accumulate_dtype
from dcgnn_kernels.triton import config, local_centroids
from dcgnn_kernels.triton.config import Config
from dcgnn_kernels.triton.device import COST_SCALE
from dcgnn_kernels.triton.hubs import hub_backward, hub_forward, hub_pair_rows
from dcgnn_kernels.triton.launcher import start
from dcgnn_kernels.triton.many import many_backward, many_forward
from dcgnn_kernels.triton.pair import pair_backward, pair_forward
from dcgnn_kernels.triton.plan import Tiles
from dcgnn_kernels.triton.rows import centroid_sums, member_sums, slot_products
from dcgnn_kernels.triton.sweep import (
    REDUCE,
    Segments,
    Work,
    accumulator,
    channel_blocks,
    compiler_options,
    in_two_parts,
    reduce,
)
from dcgnn_kernels.triton.transpose import many_gather, pair_gather


def _served_by_fallback(z: Tensor, num_clusters: int, num_iters: int | None) -> bool:
    """Convergence for K other than 2 needs a dense solve for each ego, many cluster-nodes many registers."""
    return z.numel() == 0 or num_clusters > config.MOST_CLUSTERS or (num_iters is None and num_clusters != 2)


@dataclass(frozen=True)
class _Problem:
    """What every launch of one call has in common."""

    z: Tensor
    centroids: Tensor | None
    rowptr: Tensor
    member: Tensor
    egos: Segments
    num_clusters: int
    lam: float
    num_iters: int | None
    cost_scale: str

    @classmethod
    def of(
        cls, z: Tensor, centroids: Tensor | None, rowptr: Tensor, member: Tensor, *options: Any
    ) -> _Problem:
        rowptr, member = rowptr.contiguous(), member.contiguous()
        centroids = None if centroids is None else centroids.contiguous()
        egos = Segments.of(rowptr, member.size(0))
        return cls(z.contiguous(), centroids, rowptr, member, egos, *options)

    @property
    def fresh(self) -> bool:
        return self.centroids is None

    @property
    def steps(self) -> int:
        return 1 if self.num_iters is None else self.num_iters

    def common(self) -> dict[str, Any]:
        """Arguments of every kernel that solves transport problems."""
        return {"num_iters": self.steps, **in_two_parts(self.lam), "SCALE": COST_SCALE[self.cost_scale]}

    def shape(self) -> dict[str, Any]:
        """Further ones of the kernels that hold whole egos."""
        num_channels = self.z.size(1)
        fixed: dict[str, Any] = {"num_channels": num_channels, "FEATURES": config.features(num_channels)}
        if self.num_clusters == 2:
            fixed.update(FRESH=self.fresh, CONVERGE=self.num_iters is None)
        else:
            columns = config.power_of_two(self.num_clusters)
            fixed.update(num_clusters=self.num_clusters, COLUMNS=columns)
        return fixed | self.common()

    def limit(self, backward: bool) -> int:
        return config.resident_limit(self.z.size(1), self.num_clusters, self.z.dtype, backward)

    def configs(self, limit: int, backward: bool) -> list[Config]:
        return config.resident_configs(limit, self.z.size(1), self.num_clusters, self.z.dtype, backward)

    def hub_tiles(self, backward: bool) -> Tiles | None:
        return self.egos.plan.tiles(self.limit(backward), config.HUB_TILE)

    def hub_options(self) -> dict[str, Any]:
        columns = config.power_of_two(self.num_clusters)
        return {
            "num_clusters": self.num_clusters,
            "CONVERGE": self.num_iters is None,
            "B": max(1, min(1024, 2048 // columns)),
            "COLUMNS": columns,
            **compiler_options(8),
            **self.common(),
        }

    def scratch(self, *shape: int) -> Tensor:
        return self.z.new_empty(shape, dtype=accumulate_dtype(self.z.dtype))


def _hub_choice(problem: _Problem, rows: int) -> Config:
    width = config.power_of_two(rows) * min(config.features(problem.z.size(1)), config.WIDEST)
    return config.gather_configs(config.HUB_TILE, width, problem.z.dtype)[0]


def _hub_centroids(problem: _Problem, tiles: Tiles) -> Tensor:
    """``[N, K, F]`` as given, or ``[H, 2, F]``: each hub itself and the mean of its neighbours."""
    if problem.centroids is not None:
        return problem.centroids
    num_channels = problem.z.size(1)
    width, blocks = channel_blocks(num_channels)
    work = problem.egos.tiled(tiles, _hub_choice(problem, 1))
    partial = problem.scratch(tiles.num_tiles, 1, num_channels)
    start(
        centroid_sums,
        (work.programs, blocks),
        z=problem.z,
        member=problem.member,
        rowptr=problem.rowptr,
        out=partial,
        num_channels=num_channels,
        num_groups=1,
        WHOLE=False,
        TILED=True,
        ACC=accumulator(problem.z.dtype),
        COLUMNS=1,
        FEATURES=width,
        **work.arguments(),
    )
    sums = problem.scratch(tiles.num_hubs, 1, num_channels)
    reduce(tiles, partial, sums, compact=True)
    sizes = problem.rowptr[tiles.hubs + 1] - problem.rowptr[tiles.hubs]
    own = problem.z[tiles.hubs].to(sums.dtype)
    return torch.stack([own, sums[:, 0] / (sizes - 1).clamp(min=1)[:, None].to(sums.dtype)], dim=1)


def _hub_products(
    problem: _Problem, tiles: Tiles, sources: Tensor, addend: Tensor | None, distance: bool
) -> Tensor:
    """``[S, K]``, at the hubs' slots: squared distances, or K times dot products plus ``addend``."""
    out = problem.scratch(problem.member.size(0), problem.num_clusters)
    num_channels = problem.z.size(1)
    width, blocks = channel_blocks(num_channels)
    work = problem.egos.tiled(tiles, _hub_choice(problem, 1))
    start(
        slot_products,
        (work.programs,),
        x=problem.z,
        sources=sources,
        member=problem.member,
        out=out,
        addend=out if addend is None else addend,
        source_index=tiles.hub_of_tile,
        member_factor=out,
        ego_factor=out,
        num_channels=num_channels,
        num_clusters=problem.num_clusters,
        gain=float(problem.num_clusters),
        DISTANCE=distance,
        ADD=addend is not None,
        COMPACT=distance and problem.fresh,
        FACTORS=False,
        TILED=True,
        ACC=accumulator(problem.z.dtype),
        FEATURES=width,
        BLOCKS=blocks,
        **work.arguments(),
    )
    return out


def _hub_sums(
    problem: _Problem, tiles: Tiles, weights: Tensor, centroids: Tensor | None, root: Tensor | None
) -> Tensor:
    """Partial sums ``[tiles, K, F]`` of the members' rows; of their scaled distance from given centroids."""
    num_channels = problem.z.size(1)
    width, blocks = channel_blocks(num_channels)
    work = problem.egos.tiled(tiles, _hub_choice(problem, problem.num_clusters))
    partial = problem.scratch(tiles.num_tiles, problem.num_clusters, num_channels)
    start(
        member_sums,
        (work.programs, blocks),
        weights=weights,
        x=problem.z,
        sources=problem.z if centroids is None else centroids,
        member=problem.member,
        out=partial,
        dots=partial,
        source_index=tiles.hub_of_tile,
        centre_root=weights if root is None else root,
        member_factor=weights,
        ego_factor=weights,
        num_channels=num_channels,
        num_clusters=problem.num_clusters,
        DOTS=False,
        CENTRED=centroids is not None,
        COMPACT=centroids is not None and problem.fresh,
        FACTORS=False,
        TILED=True,
        ACC=accumulator(problem.z.dtype),
        COLUMNS=config.power_of_two(problem.num_clusters),
        FEATURES=width,
        **work.arguments(),
    )
    return partial


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
        problem = _Problem.of(z, centroids, rowptr, member, num_clusters, lam, num_iters, cost_scale)
        assign = z.new_empty(member.size(0), num_clusters)
        clusters = z.new_empty(z.size(0), num_clusters, z.size(1))
        potentials = problem.scratch(z.size(0), problem.steps, num_clusters)
        outputs = {"assign": assign, "clusters": clusters, "potentials": potentials}
        _resident_forward(problem, outputs, tol, max_iters)
        tiles = problem.hub_tiles(backward=False)
        if tiles is not None:
            _hubs_forward(problem, tiles, assign, clusters, potentials, tol, max_iters)
        return assign, clusters, potentials


def _resident_arguments(problem: _Problem, work: Work) -> dict[str, Any]:
    """Products and sums are fused where every thread first adds several products of its own."""
    choice, num_channels = work.config, problem.z.size(1)
    numbers_a_thread = choice.slots * config.features(num_channels) // (32 * choice.warps)
    several = numbers_a_thread >= 2 * (16 // problem.z.element_size())
    fuse = problem.num_clusters == 2 and choice.segments == 1 and num_channels >= 64 and several
    return work.arguments() | compiler_options(choice.warps, fuse=fuse)


def _resident_forward(problem: _Problem, outputs: dict[str, Tensor], tol: float, max_iters: int) -> None:
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
            **_resident_arguments(problem, work),
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
    problem: _Problem,
    tiles: Tiles,
    assign: Tensor,
    clusters: Tensor,
    potentials: Tensor,
    tol: float,
    max_iters: int,
) -> None:
    costs = _hub_products(problem, tiles, _hub_centroids(problem, tiles), None, distance=True)
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
    reduce(tiles, _hub_sums(problem, tiles, shares, None, None), clusters, gain=float(problem.num_clusters))


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
        problem = _Problem.of(z, centroids, rowptr, member, num_clusters, lam, num_iters, cost_scale)
        nodes = Segments.of(colptr.contiguous(), member.size(0))
        transpose = (nodes, ego.contiguous(), slot.contiguous())
        potentials = potentials.contiguous()
        if num_clusters == 2:
            return _pair_backward(problem, transpose, grad_assign, grad_clusters, potentials)
        grad_z, grad_centroids = _many_backward(problem, transpose, grad_assign, grad_clusters, potentials)
        if composed:
            grad_z = grad_z + local_centroids.local_centroids_backward(grad_centroids, *arrays, num_clusters)
            grad_centroids = z.new_empty(0)
        return grad_z, grad_centroids


def _optional(tensor: Tensor | None, other: Tensor) -> Tensor:
    """A pointer that is not followed, where there is no tensor."""
    return other if tensor is None else tensor


def _hub_gradients(
    problem: _Problem,
    tiles: Tiles,
    grad_assign: Tensor | None,
    grad_clusters: Tensor | None,
    potentials: Tensor,
    weights: Tensor,
    root: Tensor,
) -> tuple[Tensor, Tensor]:
    """Writes the hubs' weights and scales; gives their centroids and the centroids' partial gradients."""
    centroids = _hub_centroids(problem, tiles)
    costs = _hub_products(problem, tiles, centroids, None, distance=True)
    if grad_clusters is None:
        assert grad_assign is not None
        grads = grad_assign.to(costs.dtype)
    else:
        grads = _hub_products(problem, tiles, grad_clusters, grad_assign, distance=False)
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
    return centroids, _hub_sums(problem, tiles, pulls, centroids, root)


def _pair_backward(
    problem: _Problem,
    transpose: tuple[Segments, Tensor, Tensor],
    grad_assign: Tensor | None,
    grad_clusters: Tensor | None,
    potentials: Tensor,
) -> tuple[Tensor, Tensor]:
    z, fresh = problem.z, problem.fresh
    num_nodes, num_channels = z.shape
    # Rows that are only gathered again keep the storage dtype; float16 has too little range for them.
    storage = torch.float32 if z.dtype == torch.float16 else z.dtype
    weights = problem.scratch(problem.member.size(0), 4)
    root = problem.scratch(num_nodes)
    half_rows = z.new_empty(num_nodes, num_channels, dtype=storage)
    if fresh:
        grad_centroids = z.new_empty(0)
        grad_near, grad_far = (torch.empty_like(half_rows) for _ in range(2))
        grad_stride = num_channels
    else:
        grad_centroids = z.new_empty(num_nodes, 2, num_channels)
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
            **_resident_arguments(problem, work),
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
            M=max(1, min(REDUCE, config.TILE // width)),
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


def _many_backward(
    problem: _Problem,
    transpose: tuple[Segments, Tensor, Tensor],
    grad_assign: Tensor | None,
    grad_clusters: Tensor | None,
    potentials: Tensor,
) -> tuple[Tensor, Tensor]:
    z, centroids, num_clusters = problem.z, problem.centroids, problem.num_clusters
    assert centroids is not None
    weights = problem.scratch(problem.member.size(0), 2 * num_clusters)
    root = problem.scratch(z.size(0))
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
            **_resident_arguments(problem, work),
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
