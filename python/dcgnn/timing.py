"""Timing of alternatives side by side on a machine that others use, too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Samples:
    """Seconds of every measured run, in order."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.seconds)

    def quantile(self, share: float) -> float:
        """The time that ``share`` of the runs stay below, interpolated."""
        ordered = sorted(self.seconds)
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def interleaved_samples(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 10,
    warmup: int = 2,
    max_seconds: float | None = None,
    each_seconds: float | None = None,
    prepare: Mapping[str, Callable[[], object]] | None = None,
    after_run: Callable[[], object] | None = None,
    on_error: Callable[[str, Exception], object] | None = None,
) -> dict[str, Samples]:
    """Seconds of each candidate, measured in turns.

    Every round runs each candidate once, so that a slow phase of the machine meets all of them;
    the ratio of two medians is then steadier than the medians themselves.

    Args:
        candidates: Functions by name.
        rounds: Rounds that are measured.
        warmup: Rounds before them that are not.
        max_seconds: Stop after the measured round in which this much time has passed.
        each_seconds: A candidate that has run for this long, warm-up included, sits the rest out as
            soon as it has one measured run.
        prepare: What some candidates need before every run; not measured.
        after_run: Called after every run, for a progress bar.
        on_error: Called with the name of a candidate that raises, which is then left out; by default the
            error is raised.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be positive, got {rounds}")
    prepare = prepare or {}
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    spent = dict.fromkeys(candidates, 0.0)

    def run(name: str) -> float:
        if name in prepare:
            prepare[name]()
        seconds = _timed(candidates[name])
        spent[name] += seconds
        if after_run is not None:
            after_run()
        return seconds

    def sits_out(name: str) -> bool:
        return each_seconds is not None and spent[name] >= each_seconds

    def attempt(name: str) -> float | None:
        try:
            return run(name)
        except Exception as error:
            if on_error is None:
                raise
            del samples[name]
            on_error(name, error)
            return None

    for _ in range(warmup):
        for name in list(samples):
            if not sits_out(name):
                attempt(name)
    started = time.perf_counter()
    for _ in range(rounds):
        for name, times in list(samples.items()):
            if (not times or not sits_out(name)) and (seconds := attempt(name)) is not None:
                times.append(seconds)
        if max_seconds is not None and time.perf_counter() - started > max_seconds:
            break
    return {name: Samples(tuple(times)) for name, times in samples.items()}


def interleaved_medians(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 10,
    warmup: int = 2,
    max_seconds: float | None = None,
) -> dict[str, float]:
    """Median seconds of each candidate; see :func:`interleaved_samples`."""
    samples = interleaved_samples(candidates, rounds=rounds, warmup=warmup, max_seconds=max_seconds)
    return {name: times.median for name, times in samples.items()}


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
