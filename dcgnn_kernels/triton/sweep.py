"""Launching a kernel over all segments of a graph: once for each size class, in tiles for the large ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dcgnn_kernels.reference import accumulate_dtype
from dcgnn_kernels.triton import config
from dcgnn_kernels.triton.config import Config
from dcgnn_kernels.triton.launcher import start
from dcgnn_kernels.triton.plan import Plan, Tiles, plan_of
from dcgnn_kernels.triton.rows import reduce_tiles

WHOLE_SEGMENT = 1024  # a larger segment is summed by several programs
REDUCE = 16  # partial sums that are added at a time, at most


def accumulator(dtype: torch.dtype) -> Any:
    """Triton's name of the dtype that arithmetic runs in."""
    return tl.float64 if accumulate_dtype(dtype) == torch.float64 else tl.float32


def compiler_options(num_warps: int, *, fuse: bool = False) -> dict[str, Any]:
    """Options of Triton's compiler.

    ``fuse``: whether products and sums may become one instruction. Lanes that hold copies of one sum must
    agree to the last bit, since any of them may write it to shared memory; where a thread adds its own
    product to a neighbour's, a fused multiply-add would round the two differently.

    NVIDIA's assembler spills a few registers to get below 64 or 96 unless it is told how many there are.
    """
    chosen: dict[str, Any] = {"num_warps": num_warps, "enable_fp_fusion": fuse}
    if torch.version.hip is None:
        chosen["maxnreg"] = min(255, 65536 // (32 * num_warps))
    return chosen


def in_two_parts(value: float) -> dict[str, float]:
    """A float64 number as two float32 ones, which is how Python floats reach a kernel."""
    head = torch.tensor(value, dtype=torch.float32).item()
    rest = torch.tensor(value - head, dtype=torch.float32).item()
    return {"lam": head, "lam_rest": rest}


@dataclass(frozen=True)
class Work:
    """What one launch covers: the arguments that ``device.segments`` takes, and the first grid size."""

    order: Tensor
    bounds: Tensor
    begins: Tensor
    ends: Tensor
    first: int
    last: int
    tiled: bool
    config: Config
    count: int

    @property
    def programs(self) -> int:
        """Programs along the first grid axis."""
        return triton.cdiv(self.count, self.config.segments)

    def arguments(self) -> dict[str, Any]:
        """By name, for a kernel that takes whole segments or tiles."""
        return {
            "order": self.order,
            "bounds": self.bounds,
            "begins": self.begins,
            "ends": self.ends,
            "first": self.first,
            "last": self.last,
            "E": self.config.segments,
            "M": self.config.slots,
            **compiler_options(self.config.warps),
        }


@dataclass(frozen=True)
class Segments:
    """The segments of one pointer array."""

    pointer: Tensor
    plan: Plan

    @classmethod
    def of(cls, pointer: Tensor, num_slots: int) -> Segments:
        """With the plan that belongs to the array."""
        return cls(pointer, plan_of(pointer, num_slots))

    def whole(self, name: str, limit: int, configs: Callable[[int], list[Config]], like: Tensor,
              run: Callable[[Work], None]) -> None:  # fmt: skip
        """``run`` for every size class of at most ``limit`` slots, by the configuration chosen for it."""
        for group in self.plan.groups(limit):
            choices = configs(group.limit)

            def launch(choice: Config, group: Any = group) -> None:
                run(
                    Work(
                        self.plan.order,
                        self.plan.bounds,
                        self.pointer,
                        self.pointer[1:],
                        group.first,
                        group.last,
                        False,
                        choice,
                        group.count,
                    )
                )

            config.launch((name, group.limit, like.size(-1)), choices, like, launch)

    def tiled(self, tiles: Tiles, choice: Config) -> Work:
        """The tiles of large segments."""
        return Work(
            tiles.segment_of_tile,
            self.plan.bounds,
            tiles.begin,
            tiles.end,
            0,
            tiles.num_tiles,
            True,
            choice,
            tiles.num_tiles,
        )

    def sums(
        self, name: str, rows: int, out: Tensor, like: Tensor, run: Callable[[Work, Tensor, int, int], None]
    ) -> tuple[Tiles, Tensor] | None:
        """Calls ``run(work, out, width of a channel tile, number of channel tiles)``.

        Whole segments go into ``out``, tiles of large ones into partial sums.

        ``rows`` rows of sums a segment. Gives the tiles and their partial sums ``[tiles, rows, F]`` if there
        are any; :func:`reduce` adds them.
        """
        num_channels = like.size(-1)
        width, blocks = channel_blocks(num_channels)

        def choices(limit: int) -> list[Config]:
            return config.gather_configs(limit, width * config.power_of_two(rows), like.dtype)

        self.whole(name, WHOLE_SEGMENT, choices, like, lambda work: run(work, out, width, blocks))
        tiles = self.plan.tiles(WHOLE_SEGMENT, config.HUB_TILE)
        if tiles is None:
            return None
        partial = like.new_empty(tiles.num_tiles, rows, num_channels, dtype=accumulate_dtype(like.dtype))
        run(self.tiled(tiles, choices(WHOLE_SEGMENT)[0]), partial, width, blocks)
        return tiles, partial


def channel_blocks(num_channels: int) -> tuple[int, int]:
    """Width and number of channel tiles."""
    width = min(config.features(num_channels), config.WIDEST)
    return width, triton.cdiv(num_channels, width)


def partial_sums_at_a_time(width: int) -> int:
    """Of rows of ``width`` channels, in the second stage of a sum."""
    return max(1, min(REDUCE, config.TILE // width))


def reduce(
    tiles: Tiles, partial: Tensor, out: Tensor, *, gain: float = 1.0, addend: Tensor | None = None,
    factor: Tensor | None = None, compact: bool = False,
) -> None:  # fmt: skip
    """Adds the partial sums of every hub, in order, and writes the hub's rows of ``out``."""
    rows, num_channels = partial.shape[1:]
    width, blocks = channel_blocks(num_channels)
    start(
        reduce_tiles,
        (tiles.num_hubs * rows, blocks),
        partial=partial,
        pointer=tiles.pointer,
        hubs=tiles.hubs,
        out=out,
        addend=out if addend is None else addend,
        factor=out if factor is None else factor.contiguous(),
        num_rows=rows,
        num_channels=num_channels,
        gain=gain,
        ADD=addend is not None,
        FACTOR=factor is not None,
        COMPACT=compact,
        ACC=accumulator(partial.dtype),
        M=partial_sums_at_a_time(width),
        FEATURES=width,
        **compiler_options(4),
    )
