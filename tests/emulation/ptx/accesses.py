"""Checked accesses to memory, for the threads of a group."""

from __future__ import annotations

import numpy as np

from emulation.ptx import errors
from emulation.ptx.checks import Who
from emulation.ptx.memory import LOCAL_WINDOW, REGION_BITS, SHARED_WINDOW, GlobalMemory, Region
from emulation.ptx.operands import Operands
from emulation.ptx.state import Group


class Accesses(Operands):
    """The part of the machine that loads and stores."""

    total: int
    races: bool
    lanes_must_agree: bool
    random: np.random.Generator | None
    global_memory: GlobalMemory
    shared: Region
    local: Region
    shared_bytes: int
    local_bytes: int
    local_block: np.ndarray
    local_warp: np.ndarray
    warp_number: np.ndarray
    thread_number: np.ndarray
    barriers_passed: np.ndarray
    warp_syncs: np.ndarray

    def _regions(self, space: str, address: np.ndarray, group: Group):
        """For each region that is hit: the rows that hit it, and their bytes in its data."""
        if space == "generic":
            window = np.where(
                address >= LOCAL_WINDOW, LOCAL_WINDOW, np.where(address >= SHARED_WINDOW, SHARED_WINDOW, 0)
            )
            for start, name in ((0, "global"), (SHARED_WINDOW, "shared"), (LOCAL_WINDOW, "local")):
                rows = np.nonzero(window == start)[0]
                if len(rows):
                    part = Group(group.threads[rows], self.total)
                    for region, inner, begin in self._regions(name, address[rows] - start, part):
                        yield region, rows[inner], begin
            return
        rows = np.arange(len(address))
        if space in ("shared", "local"):
            size = self.shared_bytes if space == "shared" else self.local_bytes
            owner = group.of(self.local_block) if space == "shared" else group.threads
            region = self.shared if space == "shared" else self.local
            outside = np.where((address < 0) | (address > size), -(1 << 62), address + owner * size)
            limit = (owner + 1) * size
            yield region, rows, (outside, limit)
            return
        numbers = address >> REGION_BITS
        for number in np.unique(numbers):
            chosen = rows[numbers == number]
            region = self.global_memory.regions.get(int(number))
            if region is None:
                raise errors.OutOfBounds(
                    f"address {int(address[chosen[0]]):#x} is in no argument; "
                    f"{self.where(group.threads[chosen[0]])}"
                )
            yield region, chosen, (address[chosen] - (int(number) << REGION_BITS), None)

    def places(self, space: str, address: np.ndarray, size: int, kind: str, group: Group):
        """Checked accesses of ``size`` bytes: regions, rows that hit each, first bytes in its data."""
        apart = address % size != 0
        if apart.any():
            thread = group.threads[apart][0]
            raise errors.Misaligned(
                f"{kind} of {size} bytes at {int(address[apart][0]):#x}, not a multiple; {self.where(thread)}"
            )
        out = []
        for region, rows, (begin, limit) in self._regions(space, address, group):
            good = region.allowed(begin, size)
            if limit is not None:
                good &= begin + size <= limit
            if not good.all():
                row = rows[~good][0]
                described = f"{self.shared_bytes} bytes" if region is self.shared else region.describe()
                offset = int(address[row]) & ((1 << REGION_BITS) - 1)
                raise errors.OutOfBounds(
                    f"{space} {kind} of {size} bytes at byte {offset} is outside of {described}; "
                    + self.where(group.threads[row])
                )
            out.append((region, rows, begin - region.first))
        return out

    def track(
        self,
        region: Region,
        granules: np.ndarray,
        kind: str,
        threads: np.ndarray,
        repeated: np.ndarray | None = None,
    ) -> None:
        """Tell the region's log; raise on a race."""
        if region.log is None:
            return
        interval = self.block_number[threads] * (1 << 24) + self.barriers_passed[self.local_block[threads]]
        warp_interval = self.warp_number[threads] * (1 << 24) + self.warp_syncs[self.local_warp[threads]]
        warp_interval = warp_interval * (1 << 12) + self.barriers_passed[self.local_block[threads]] % (
            1 << 12
        )
        block = self.block_number[threads]
        who = Who(self.thread_number[threads], self.warp_number[threads], block, interval, warp_interval)
        found = region.log.access(kind, granules, who, repeated)
        if found:
            row, earlier = found
            place = "shared memory" if region is self.shared else region.describe()
            raise errors.Race(
                f"{kind} of {place} after a {earlier} by another thread that nothing orders; "
                f"{self.where(threads[row])}"
            )

    def load(
        self, space: str, address: np.ndarray, size: int, group: Group, kind: str = "read"
    ) -> np.ndarray:
        """Bytes at addresses: one row of ``size`` for each thread."""
        out = np.zeros((len(address), size), np.uint8)
        for region, rows, begin in self.places(space, address, size, "load", group):
            granules = region.granules(begin, size)
            ready = region.initialised[granules].all(1)
            if not ready.all():
                raise self.uninitialised(f"{space} memory", group.threads[rows[~ready][0]])
            self.track(region, granules, kind, group.threads[rows])
            out[rows] = region.data[begin[:, None] + np.arange(size)]
        return out

    def store(
        self, space: str, address: np.ndarray, data: np.ndarray, group: Group, kind: str = "write"
    ) -> None:
        """Write rows of bytes."""
        size = data.shape[1]
        for region, rows, begin in self.places(space, address, size, "store", group):
            granules = region.granules(begin, size)
            at = begin[:, None] + np.arange(size)
            repeated = None
            if not self.lanes_must_agree and kind == "write":
                repeated = (region.data[at] == data[rows]).all(1) & region.initialised[granules].all(1)
            self.track(region, granules, kind, group.threads[rows], repeated)
            order = np.arange(len(rows)) if self.random is None else self.random.permutation(len(rows))
            region.data[at[order]] = data[rows[order]]
            region.initialised[granules] = True
            lost = (region.data[at] != data[rows]).any(1)
            if not self.lanes_must_agree and region.log is not None:
                lost &= region.log.written_by_several(granules)
            if self.races and lost.any():
                thread = group.threads[rows[lost][0]]
                raise errors.Race(
                    f"threads store different values to one {space} address; {self.where(thread)}"
                )
