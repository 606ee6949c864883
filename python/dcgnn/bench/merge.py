"""Several runs as one: what no table could tell apart is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dcgnn.bench.rows import Row
from dcgnn.bench.sweeps import SWEEPS

#: What a table says at most once for all of its rows. The dtype of a case that has its own is in its name.
_SETTINGS = ("num_local", "num_global", "local_iters", "global_iters", "dtype", "device", "threads", "seed")


def merged(runs: Mapping[str, Sequence[Row]]) -> list[Row]:
    """The rows of all runs, which have the names of their files.

    Raises:
        ValueError: If two of them have the same measurement, or the same case with other settings.
    """
    places: dict[tuple[object, ...], str] = {}
    settings: dict[tuple[str, str], tuple[str, Row]] = {}
    found = []
    for file, rows in runs.items():
        for row in rows:
            found.append(row)
            if row.median_ms is None:
                continue
            other = places.setdefault(row.key, file)
            if other != file:
                raise ValueError(f"{other} and {file} both have {row.case}, {row.phase}, on {row.graph}")
            known, first = settings.setdefault((row.suite, row.case), (file, row))
            for name in _fixed(row.suite):
                before, now = getattr(first, name), getattr(row, name)
                if before != now and known != file:
                    raise ValueError(
                        f"{row.case} of {row.suite} has {name} = {before} in {known} and {now} in {file}: "
                        "one table cannot show both"
                    )
    return found


def _fixed(suite: str) -> list[str]:
    """What is the same in all rows of a case in a suite."""
    sweep = next((sweep for sweep in SWEEPS.values() if sweep.suite == suite), None)
    if sweep is None:
        return list(_SETTINGS)
    return [name for name in (*_SETTINGS, "channels") if name not in (*sweep.fields, sweep.name)]
