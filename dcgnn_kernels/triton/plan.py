"""How segments of different sizes are shared out over programs: planned once for a graph, then reused.

The ops receive the graph's index arrays and nothing else, so that one schema serves every backend,
``torch.compile`` and ``torch.export``. The plan therefore hangs on the pointer array (``rowptr`` for the
egos, ``colptr`` for the transpose): a weak dictionary by tensor identity, guarded by the array's version.
An undirected graph shares its arrays and so its plan.

- Building reads the number of segments of every size class back to the host once and waits for its own
  stream, so that later uses on any stream see complete arrays.
- While a CUDA graph is captured nothing may be read back: then grids take upper bounds that follow from the
  shapes alone (at most ``S / n`` segments have ``n`` slots or more), surplus programs leave at once, and the
  plan is not kept, because its memory belongs to the captured graph.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SMALLEST = 4  # a segment of up to this many slots is in class 0, then each class doubles
NUM_CLASSES = 30
MOST_SEGMENTS = 2**31  # programs count them in 32 bits; slots are counted in the bits of the index arrays
RARE = 32  # a class with fewer than 1/32 of the slots joins the next larger one: one launch less


def class_of(size: int) -> int:
    """The size class of a segment with ``size`` slots; -1 for none."""
    return -1 if size < 1 else max(0, (size - 1).bit_length() - (SMALLEST - 1).bit_length())


def class_limit(index: int) -> int:
    """The largest segment of a class; 0 for -1."""
    return SMALLEST << index if index >= 0 else 0


@dataclass(frozen=True)
class Group:
    """Neighbouring size classes that one launch serves: ``order[bounds[first]:bounds[last]]``."""

    first: int
    last: int
    limit: int  # no segment has more slots
    count: int  # number of segments, or an upper bound


@dataclass(frozen=True)
class Tiles:
    """Large segments cut into tiles of equal length, in order; the segments are ``hubs``."""

    hubs: Tensor  # [H] segment of each hub; padding has no tiles
    hub_of_tile: Tensor  # [tiles]
    segment_of_tile: Tensor  # [tiles]
    begin: Tensor  # [tiles] first slot
    end: Tensor  # [tiles] past the last slot; equal to begin in padding
    pointer: Tensor  # [H + 1] tiles of each hub

    def tensors(self) -> tuple[Tensor, ...]:
        """All arrays."""
        return (self.hubs, self.hub_of_tile, self.segment_of_tile, self.begin, self.end, self.pointer)

    @property
    def num_hubs(self) -> int:
        """Number of hubs, or an upper bound."""
        return self.hubs.size(0)

    @property
    def num_tiles(self) -> int:
        """Number of tiles, or an upper bound."""
        return self.begin.size(0)


class Plan:
    """Segments of a pointer array ``[N + 1]`` in ascending order of their size class."""

    def __init__(self, pointer: Tensor, num_slots: int) -> None:
        self.pointer = pointer.detach()  # not the key of the dictionary of plans: that must be free to die
        self.num_slots = num_slots
        self.num_segments = pointer.size(0) - 1
        if self.num_segments >= MOST_SEGMENTS:
            raise ValueError(f"the Triton kernels take fewer than 2^31 nodes, got {self.num_segments}")
        self.exact = not capturing(pointer)
        # Made on the device: a copy from the host is forbidden while a CUDA graph is captured.
        steps = torch.arange(NUM_CLASSES - 1, dtype=torch.int64, device=pointer.device)
        limits = (SMALLEST << steps).clamp(max=torch.iinfo(pointer.dtype).max).to(pointer.dtype)
        classes = torch.bucketize(pointer.diff(), limits)
        ordered, order = torch.sort(classes, stable=True)
        self.order = order.to(torch.int32)
        edges = torch.arange(NUM_CLASSES + 1, device=pointer.device, dtype=ordered.dtype)
        self.bounds = torch.searchsorted(ordered, edges).to(torch.int32)
        self.counts = self._counts()
        self._tiles: dict[tuple[int, int], Tiles] = {}
        self._made_on: list[tuple[torch.cuda.Stream | None, tuple[Tensor, ...]]] = []
        if self.exact:
            self._made_on.append((wait(pointer), (self.order, self.bounds)))

    def _counts(self) -> list[int]:
        if self.exact:
            edges: list[int] = self.bounds.tolist()
            return [high - low for low, high in itertools.pairwise(edges)]
        smallest = [1, *(class_limit(index) + 1 for index in range(NUM_CLASSES - 1))]
        return [min(self.num_segments, self.num_slots // size) for size in smallest]

    def groups(self, limit: int) -> list[Group]:
        """Launches for the segments of at most ``limit`` slots, the largest first."""
        groups: list[Group] = []
        first = 0
        last_class = class_of(limit)
        for index in range(last_class + 1):
            count = sum(self.counts[first : index + 1])
            if count == 0:
                first = index + 1
                continue
            slots = sum(n * class_limit(first + i) for i, n in enumerate(self.counts[first : index + 1]))
            larger = any(self.counts[index + 1 : last_class + 1])
            if self.exact and larger and slots * RARE < self.num_slots:
                continue
            groups.append(Group(first, index + 1, class_limit(index), count))
            first = index + 1
        return groups[::-1]

    def tiles(self, limit: int, length: int) -> Tiles | None:
        """The segments of more than ``limit`` slots in tiles of ``length``; None if there is none."""
        first = class_of(limit) + 1
        count = sum(self.counts[first:]) if self.exact else self.counts[first]
        if count == 0:
            return None
        key = (first, length)
        known = self._tiles.get(key)
        if known is not None:
            return known
        exact = self.exact and not capturing(self.pointer)
        tiles = self._cut(count, class_limit(first - 1), length, exact)
        if exact:
            self._made_on.append((wait(self.pointer), tiles.tensors()))
            self._tiles[key] = tiles
        return tiles

    def _cut(self, count: int, limit: int, length: int, exact: bool) -> Tiles:
        hubs = self.order[self.num_segments - count :].long()
        begins, ends = self.pointer[hubs].long(), self.pointer[hubs + 1].long()
        sizes = ends - begins
        tiles = torch.where(sizes > limit, (sizes + length - 1) // length, 0)
        pointer = torch.cat([tiles.new_zeros(1), tiles.cumsum(0)])
        number = int(pointer[-1]) if exact else count + self.num_slots // length
        index = torch.arange(number, device=hubs.device)
        hub_of_tile = torch.searchsorted(pointer, index, right=True).sub_(1).clamp_(max=count - 1)
        begin = begins[hub_of_tile] + (index - pointer[hub_of_tile]) * length
        end = torch.minimum(begin + length, ends[hub_of_tile])
        begin = torch.minimum(begin, end)
        return Tiles(hubs, hub_of_tile, hubs[hub_of_tile], begin, end, pointer)

    def used_on_current_stream(self) -> Plan:
        """Tells the allocator where a stream reads what another one built."""
        if self.pointer.is_cuda and not capturing(self.pointer):
            current = torch.cuda.current_stream(self.pointer.device)
            for stream, tensors in self._made_on:
                if stream != current:
                    for tensor in tensors:
                        tensor.record_stream(current)
        return self


def capturing(tensor: Tensor) -> bool:
    """Whether the current stream of the tensor's device is being captured into a CUDA graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def wait(tensor: Tensor) -> torch.cuda.Stream | None:
    """Waits until what was queued on the current stream is done; gives the stream."""
    if not tensor.is_cuda:
        return None
    stream = torch.cuda.current_stream(tensor.device)
    stream.synchronize()
    return stream


_plans = WeakTensorKeyDictionary()


def plan_of(pointer: Tensor, num_slots: int) -> Plan:
    """The plan of a pointer array, built when it is first seen."""
    version = 0 if pointer.is_inference() else pointer._version
    known = _plans.get(pointer)
    if known is not None and known[0] == version:
        return known[1].used_on_current_stream()
    plan = Plan(pointer, num_slots)
    if plan.exact:
        _plans[pointer] = (version, plan)
    return plan
