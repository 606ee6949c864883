"""What all launches of one call of local_sinkhorn share, and the sums over the slots of its hubs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcgnn_kernels.reference import accumulate_dtype
from dcgnn_kernels.triton import config
from dcgnn_kernels.triton.config import Config
from dcgnn_kernels.triton.device import COST_SCALE
from dcgnn_kernels.triton.launcher import start
from dcgnn_kernels.triton.plan import Tiles
from dcgnn_kernels.triton.rows import centroid_sums, member_sums, slot_products
from dcgnn_kernels.triton.sweep import (
    Segments,
    Work,
    accumulator,
    channel_blocks,
    compiler_options,
    in_two_parts,
    reduce,
)


@dataclass(frozen=True)
class LocalProblem:
    """Inputs and options of one call."""

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
    ) -> LocalProblem:
        rowptr, member = rowptr.contiguous(), member.contiguous()
        centroids = None if centroids is None else centroids.contiguous()
        egos = Segments.of(rowptr, member.size(0))
        return cls(z.contiguous(), centroids, rowptr, member, egos, *options)

    @property
    def num_egos(self) -> int:
        """Number of problems."""
        return self.rowptr.size(0) - 1

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
            "B": max(1, config.HUB_BLOCK // max(2, columns)),
            "COLUMNS": columns,
            **compiler_options(8),
            **self.common(),
        }

    def scratch(self, *shape: int) -> Tensor:
        return self.z.new_empty(shape, dtype=accumulate_dtype(self.z.dtype))


def resident_arguments(problem: LocalProblem, work: Work) -> dict[str, Any]:
    """Products and sums are fused where every thread first adds several products of its own."""
    choice, num_channels = work.config, problem.z.size(1)
    numbers_a_thread = choice.slots * config.features(num_channels) // (32 * choice.warps)
    several = numbers_a_thread >= 2 * (16 // problem.z.element_size())
    fuse = problem.num_clusters == 2 and choice.segments == 1 and num_channels >= 64 and several
    return work.arguments() | compiler_options(choice.warps, fuse=fuse)


def _hub_choice(problem: LocalProblem, rows: int) -> Config:
    width = config.power_of_two(rows) * min(config.features(problem.z.size(1)), config.WIDEST)
    return config.gather_configs(config.HUB_TILE, width, problem.z.dtype)[0]


def hub_centroids(problem: LocalProblem, tiles: Tiles) -> Tensor:
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
    mean = own + sums[:, 0] / (sizes - 1).clamp(min=1)[:, None].to(sums.dtype)
    return torch.stack([own, torch.where((sizes == 2)[:, None], sums[:, 0], mean)], dim=1)


def hub_products(
    problem: LocalProblem, tiles: Tiles, sources: Tensor, addend: Tensor | None, distance: bool
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


def hub_sums(
    problem: LocalProblem, tiles: Tiles, weights: Tensor, centroids: Tensor | None, root: Tensor | None
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
