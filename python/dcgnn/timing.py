"""Timing of alternatives side by side on a machine that others use, too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch


def interleaved_medians(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 10,
    warmup: int = 2,
    max_seconds: float | None = None,
) -> dict[str, float]:
    """Median seconds of each candidate, measured in turns.

    Every round runs each candidate once, so that a slow phase of the machine meets all of them;
    the ratio of two medians is then steadier than the medians themselves.

    Args:
        candidates: Functions by name.
        rounds: Rounds that are measured.
        warmup: Rounds before them that are not.
        max_seconds: Stop after the round in which this much time has passed.

    Returns:
        Median time of each candidate in seconds.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be positive, got {rounds}")
    for _ in range(warmup):
        for candidate in candidates.values():
            _timed(candidate)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    started = time.perf_counter()
    for _ in range(rounds):
        for name, candidate in candidates.items():
            samples[name].append(_timed(candidate))
        if max_seconds is not None and time.perf_counter() - started > max_seconds:
            break
    return {name: statistics.median(times) for name, times in samples.items()}


def _timed(candidate: Callable[[], object]) -> float:
    _synchronize()
    started = time.perf_counter()
    candidate()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    # Kernels of a GPU run on after the call that launched them has returned.
    if torch.cuda.is_available():
        torch.cuda.synchronize()
