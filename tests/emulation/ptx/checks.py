"""Race detection: for every granule of memory, who touched it last and in which interval between barriers.

Two accesses by different threads conflict when one of them writes, except two atomics. They are ordered only

- by a block barrier, when both threads are in one block;
- by ``bar.warp.sync`` as well, when both are in one warp;
- never, when they are in different blocks of one launch.

So a conflict is found whatever the order in which the threads happened to run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NOBODY, SEVERAL = -1, -2
_CONFLICTING = {
    "read": ("write", "atomic"),
    "write": ("write", "read", "atomic"),
    "atomic": ("write", "read"),
}


@dataclass
class Who:
    """The accessing threads: their numbers in the launch, and their intervals between barriers."""

    thread: np.ndarray
    warp: np.ndarray
    block: np.ndarray
    block_interval: np.ndarray  # unique for (block, barriers passed)
    warp_interval: np.ndarray  # unique for (warp, warp barriers passed)

    def spread(self, shape: tuple[int, ...]) -> Who:
        """One row for each access, repeated over its granules."""
        return Who(*(np.broadcast_to(v[:, None], shape) for v in vars(self).values()))


class _Touched:
    """Who accessed each granule in one way, as far as a later conflicting access needs it."""

    def __init__(self, size: int) -> None:
        self.any = False
        self.block, self.warp, self.thread, self.block_interval, self.warp_interval = (
            np.full(size, NOBODY, np.int64) for _ in range(5)
        )

    def conflicts(self, at: np.ndarray, who: Who, harmless: np.ndarray) -> np.ndarray:
        """Which accesses nothing orders after the earlier ones; ``harmless`` rows only between blocks."""
        if not self.any:
            return np.zeros(at.shape, bool)
        block, warp, thread = self.block[at], self.warp[at], self.thread[at]
        other_block = (block != NOBODY) & (block != who.block)
        other_warp = (warp != who.warp) & (self.block_interval[at] == who.block_interval)
        other_thread = (thread != who.thread) & (self.warp_interval[at] == who.warp_interval)
        return other_block | (other_warp | other_thread) & ~harmless[:, None]

    def record(self, at: np.ndarray, who: Who) -> None:
        self.any = True
        always = np.zeros(at.shape, np.int64)
        self._merge(self.block, None, at, who.block, always)
        self._merge(self.warp, self.block_interval, at, who.warp, who.block_interval)
        self._merge(self.thread, self.warp_interval, at, who.thread, who.warp_interval)

    @staticmethod
    def _merge(
        actor: np.ndarray, interval: np.ndarray | None, at: np.ndarray, new: np.ndarray, now: np.ndarray
    ):
        before = actor[at]
        same_interval = before != NOBODY if interval is None else interval[at] == now
        value = np.where(same_interval & (before != new), SEVERAL, new)
        actor[at] = value
        if interval is not None:
            interval[at] = now
        # Several rows of one instruction may name one granule; only the last was stored.
        lost = actor[at] != value
        if interval is not None:
            lost &= interval[at] == now
        if lost.any():
            actor[at[lost]] = SEVERAL


class AccessLog:
    """The history of one region of memory."""

    def __init__(self, size: int) -> None:
        self.touched = {kind: _Touched(size) for kind in ("read", "write", "atomic")}

    def access(
        self, kind: str, at: np.ndarray, who: Who, repeated: np.ndarray | None = None
    ) -> tuple[int, str] | None:
        """Records accesses (rows of granules); the first row in conflict and the earlier kind of access.

        ``repeated`` marks writes of a value that was there already: harmless after a write of the same block.
        Without it two warps may not write one place at all.
        """
        spread = who.spread(at.shape)
        none = np.zeros(len(at), bool)
        for earlier in _CONFLICTING[kind]:
            harmless = repeated if repeated is not None and earlier == "write" else none
            rows = self.touched[earlier].conflicts(at, spread, harmless).any(1)
            if rows.any():
                return int(np.argmax(rows)), earlier
        self.touched[kind].record(at, spread)
        if kind != "write":
            return None
        rows = self.written_by_several(at, warps=repeated is None)
        return (int(np.argmax(rows)), "write") if rows.any() else None

    def written_by_several(self, at: np.ndarray, warps: bool = True) -> np.ndarray:
        """Which rows were written by several blocks, or by several warps since the last barrier."""
        written = self.touched["write"]
        several = written.block[at] == SEVERAL
        if warps:
            several |= written.warp[at] == SEVERAL
        return several.any(1)
