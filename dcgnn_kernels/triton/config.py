"""Tile shapes and warps: a default for every size class, and a few neighbours that are timed on the GPU.

A program holds about 4096 numbers of a gathered tile (32 registers a thread with 4 warps). Bits depend on the
shape of the tile, so that nothing is tuned when torch was asked for deterministic algorithms.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from dcgnn_kernels.triton.plan import capturing

TILE = 4096  # numbers in a gathered tile of a program with 4 warps
LONGEST = 256  # slots of the largest ego that one program holds
HUB_TILE = 256  # slots in a tile of a larger one
HUB_BLOCK = 2048  # logits of a larger one that its iterations hold at a time
WIDEST = 1024  # channels of one tile where channels are tiled
MOST_CLUSTERS = 1024  # local cluster-nodes of an ego

# How choices are timed.
GROUPS = 5
LAUNCHES = 5  # in a group
SCRATCH_BYTES = 64 << 20
LONGEST_HEAD_START = 256  # times that the scratch memory is zeroed before a group


@dataclass(frozen=True)
class Config:
    """Segments in a program, slots in its tile, and warps."""

    segments: int
    slots: int
    warps: int


def power_of_two(value: int) -> int:
    """The smallest power of two that is not below ``value``."""
    return 1 << max(0, value - 1).bit_length()


def features(num_channels: int) -> int:
    """Channels of a tile; at least 4, so that a row is one 16-byte load of float32."""
    return max(4, power_of_two(num_channels))


def _numbers_a_warp(dtype: torch.dtype, backward: bool) -> int:
    """What 32 threads hold without spilling: 32 numbers each, less where more of them are alive at a time."""
    return 1024 // (4 if dtype == torch.float64 else 1) // (2 if backward else 1)


def _warps(numbers: int, each: int) -> int:
    return min(16, max(1, power_of_two(-(-numbers // each))))


def slot_width(num_channels: int, num_clusters: int) -> int:
    """Numbers that a program holds for one slot of an ego: its row, and with K > 2 its costs and logits."""
    return (
        features(num_channels)
        if num_clusters == 2
        else power_of_two(features(num_channels) + 4 * power_of_two(num_clusters))
    )


def resident_limit(num_channels: int, num_clusters: int, dtype: torch.dtype, backward: bool) -> int:
    """The largest ego that a program holds in registers, 0 if rows are too wide for any."""
    warps = 8 if dtype == torch.float64 and backward else 16
    slots = warps * _numbers_a_warp(dtype, backward) // slot_width(num_channels, num_clusters)
    return min(LONGEST, slots) if slots >= 4 else 0


def resident_configs(
    limit: int, num_channels: int, num_clusters: int, dtype: torch.dtype, backward: bool
) -> list[Config]:
    """For egos of up to ``limit`` members held whole; the default comes first."""
    most = _numbers_a_warp(dtype, backward)
    one = limit * slot_width(num_channels, num_clusters)
    # Half of what a thread could hold, unless the ego needs all of it: more threads hide more latency.
    each = most if one > 8 * most else most // 2
    count = max(1, 4 * each // 2 // one)
    choices = [Config(count, limit, _warps(count * one, each if count == 1 else each // 2))]
    if count > 1:
        choices.append(Config(count // 2, limit, _warps(count // 2 * one, each // 2)))
        choices.append(Config(2 * count, limit, _warps(2 * count * one, each)))
    elif choices[0].warps > 4:
        choices.append(Config(1, limit, choices[0].warps // 2))
    return choices


def gather_configs(limit: int, width: int, dtype: torch.dtype) -> list[Config]:
    """For sums over segments of up to ``limit`` slots, in steps of a tile; ``width`` numbers a slot."""
    each = _numbers_a_warp(dtype, backward=True) // 2
    tile = 4 * each
    slots = min(power_of_two(limit), max(1, tile // width), 16)
    count = max(1, tile // (slots * width)) if limit <= slots else 1
    shapes = [(count, slots)]
    if slots > 4:
        shapes.append((count, slots // 2))
    if count > 1:
        shapes.append((count // 2, slots))
    return [Config(segments, slots, _warps(segments * slots * width, each)) for segments, slots in shapes]


_chosen: dict[tuple[object, ...], Config] = {}
_every_choice = ContextVar("_every_choice", default=False)


@contextmanager
def every_choice() -> Iterator[None]:
    """Inside, each launch is made in all the configurations that the tuner may choose."""
    token = _every_choice.set(True)
    try:
        yield
    finally:
        _every_choice.reset(token)


def tuning_wanted(tensor: Tensor) -> bool:
    """On a GPU, unless bits must be repeatable or DCGNN_TUNE=0."""
    return (
        tensor.is_cuda
        and os.environ.get("DCGNN_TUNE", "1") != "0"
        and not torch.are_deterministic_algorithms_enabled()
    )


def _scratch() -> Tensor:
    """Memory to be zeroed, larger than most L2 caches; ops hold the guard of their device."""
    return torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")


def measure(run: Callable[[], None]) -> float:
    """Milliseconds of a launch in the quickest of a few groups; infinite where it does not compile or fit.

    Two events on an idle GPU would time the host, which needs longer to launch than many kernels to run. So
    the GPU is first given memory to zero, and a group counts if it was queued before that was done.
    """
    from triton.errors import TritonError

    try:
        run()
    except TritonError:  # a neighbour of the default
        return math.inf
    scratch, head_start = _scratch(), 8
    times: list[float] = []
    while len(times) < GROUPS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(head_start):
            scratch.zero_()
        start.record()
        for _ in range(LAUNCHES):
            run()
        ahead = not start.query()
        end.record()
        end.synchronize()
        if ahead or head_start >= LONGEST_HEAD_START:
            times.append(start.elapsed_time(end) / LAUNCHES)
        else:
            head_start *= 2
    return min(times)


def launch(
    key: tuple[object, ...], configs: list[Config], like: Tensor, run: Callable[[Config], None]
) -> None:
    """Runs a kernel by the configuration chosen for ``key``; the first time each of them is timed.

    Kernels only write outputs that do not overlap their inputs, so that repeating them changes nothing.
    """
    if not tuning_wanted(like):
        for choice in configs if _every_choice.get() else configs[:1]:
            run(choice)
        return
    key = (*key, like.dtype, like.device)
    config = _chosen.get(key)
    if config is None:
        if capturing(like):
            run(configs[0])
            return
        times = [measure(lambda config=config: run(config)) for config in configs]  # type: ignore[misc]
        config = configs[times.index(min(times))]
        _chosen[key] = config
    run(config)
