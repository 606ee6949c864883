"""What machine and instructions share: states of a thread, groups of threads, copies under way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

RUNNING, AT_BARRIER, AT_WARP_SYNC, EXITED = range(4)
WARP = 32


@dataclass
class AsyncCopy:
    """One ``cp.async`` of some threads, not yet visible in shared memory."""

    threads: np.ndarray
    address: np.ndarray
    data: np.ndarray
    group: np.ndarray  # the commit group of each thread
    waiting: np.ndarray


class Group:
    """Threads that execute one instruction together."""

    def __init__(self, threads: np.ndarray, total: int) -> None:
        self.threads = threads
        self.all = len(threads) == total

    def __len__(self) -> int:
        return len(self.threads)

    def of(self, values: np.ndarray) -> np.ndarray:
        """The threads' entries of a vector over all threads."""
        return values if self.all else values[self.threads]
