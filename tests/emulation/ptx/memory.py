"""Global memory made of the launch's arguments, and the shared and local memory of a batch of blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from emulation.ptx.checks import AccessLog

REGION_BITS = 36  # a global address is a region's number and the byte in its allocation
SHARED_WINDOW = 1 << 60  # generic addresses of shared and local memory
LOCAL_WINDOW = 1 << 61


class Region:
    """Bytes with their state: which may be accessed, which were written, and by whom."""

    def __init__(self, data: np.ndarray, first: int, granule: int, initialised: bool, races: bool) -> None:
        self.data = data
        self.first = first  # address of data[0]
        self.granule = granule
        size = -(-data.size // granule) + 1
        self.initialised = np.full(size, initialised)
        self.log = AccessLog(size) if races else None
        self.arguments: list[tuple[int, int, str]] = []  # begin, end, name

    def allowed(self, begin: np.ndarray, size: int) -> np.ndarray:
        """Which accesses lie inside one argument."""
        inside = np.zeros(begin.shape, bool)
        for first, last, _ in self.arguments:
            inside |= (begin >= first) & (begin + size <= last)
        return inside

    def granules(self, begin: np.ndarray, size: int) -> np.ndarray:
        """For each access the granules that it covers."""
        return begin[:, None] // self.granule + np.arange(max(1, size // self.granule))

    def describe(self) -> str:
        return ", ".join(f"{name} of {last - first} bytes" for first, last, name in self.arguments)


@dataclass
class _Extent:
    root: int
    begin: int
    end: int


def _extent(array: Any) -> _Extent:
    """Where an array or a tensor lies, and where its allocation begins."""
    if hasattr(array, "untyped_storage"):
        if array.device.type != "cpu":
            raise TypeError(f"arguments live on the CPU, this tensor on {array.device}")
        begin, width = array.data_ptr(), array.element_size()
        steps = [(n - 1) * s * width for n, s in zip(array.shape, array.stride(), strict=True)]
        root = array.untyped_storage().data_ptr()
        return _Extent(root, begin, begin + (sum(steps) + width if array.numel() else 0))
    begin = array.__array_interface__["data"][0]
    steps = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
    if any(step < 0 for step in steps):
        raise TypeError("arrays with negative strides cannot be arguments")
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    root = owner.__array_interface__["data"][0]
    return _Extent(root, begin, begin + (sum(steps) + array.itemsize if array.size else 0))


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or hasattr(value, "untyped_storage")


class GlobalMemory:
    """Arguments at invented addresses: allocations begin at multiples of 2**36, so that no overrun reaches
    another.
    """

    def __init__(self, granule: int, races: bool) -> None:
        self.granule, self.races = granule, races
        self.regions: dict[int, Region] = {}

    def place(self, arguments: Iterable[tuple[str, Any, bool]]) -> list[int]:
        """Addresses of (name, array, initialised); arrays of one allocation share a region."""
        items = [(name, _extent(array), initialised) for name, array, initialised in arguments]
        numbers = {
            root: self._allocation([e for _, e, _ in items if e.root == root])
            for root in {e.root for _, e, _ in items}
        }
        addresses = []
        for name, extent, initialised in items:
            number = numbers[extent.root]
            region = self.regions[number]
            offset = extent.begin - extent.root
            region.arguments.append((offset, extent.end - extent.root, name))
            low = (offset - region.first) // self.granule
            high = -(-(extent.end - extent.root - region.first) // self.granule)
            region.initialised[low:high] = initialised
            addresses.append((number << REGION_BITS) + offset)
        return addresses

    def _allocation(self, extents: list[_Extent]) -> int:
        """One region for arrays of one allocation; its number."""
        begin, end = min(e.begin for e in extents), max(e.end for e in extents)
        if end <= begin:
            return self.add(np.zeros(0, np.uint8), 0)
        data = np.ctypeslib.as_array((ctypes.c_uint8 * (end - begin)).from_address(begin))
        return self.add(data, begin - extents[0].root)

    def add(self, data: np.ndarray, offset: int = 0) -> int:
        """A new region of bytes; its number."""
        number = len(self.regions) + 1
        self.regions[number] = Region(data, offset, self.granule, True, self.races)
        return number

    def add_variable(self, name: str, data: bytes) -> int:
        """A module-level variable; its address."""
        number = self.add(np.frombuffer(bytearray(data), np.uint8))
        self.regions[number].arguments.append((0, len(data), name))
        return number << REGION_BITS
