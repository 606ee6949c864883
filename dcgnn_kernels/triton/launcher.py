"""The one door through which kernels are launched, and where launches can be listed instead of run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel, its grid, and all arguments and options by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


_records: list[list[Launch]] = []


def start(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Launches ``kernel`` on the current device and stream; an empty grid is not launched."""
    if 0 in grid:
        return
    if _records:
        _records[-1].append(Launch(kernel, grid, arguments))
    else:
        kernel[grid](**arguments)


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Inside, launches are listed and not run: outputs stay as they were allocated."""
    launches: list[Launch] = []
    _records.append(launches)
    try:
        yield launches
    finally:
        _records.pop()
