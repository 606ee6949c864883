"""Two runs side by side: what became faster or slower, beyond the spread of the rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from dcgnn.bench.rows import Row
from dcgnn.bench.tables import Table, is_ours, milliseconds

FEWEST_ROUNDS = 3  # whose spread says something

_SIZES: dict[str, Callable[[Row], str]] = {
    "K": lambda row: str(row.num_local),
    "Ω": lambda row: str(row.num_global),
    "T": lambda row: f"{row.local_iters}/{row.global_iters}",
    "threads": lambda row: str(row.threads),
    "seed": lambda row: str(row.seed),
}


def compare(old: Sequence[Row], new: Sequence[Row]) -> Table:
    """Every measurement that both have.

    A change counts when the intervals from p20 to p80 do not touch. Beside it stands by how much the layers
    of others moved in the same rounds, which no change of our kernels explains: that is the machine. The
    note names what was measured before and gets a reason now, such as a kernel that no longer agrees with
    the reference.
    """
    before = {row.key: row for row in old if row.median_ms is not None}
    pairs = [(before[row.key], row) for row in new if row.median_ms is not None and row.key in before]
    if not pairs:
        raise ValueError("the two runs have no measurement in common: compare runs with the same settings")
    sizes = {
        name: value
        for name, value in _SIZES.items()
        if len({value(now) for _, now in pairs}) > 1  # a column for what was swept
    }
    others = {_group(now): _of_others(pairs, _group(now)) for _, now in pairs}
    cells = [
        [
            now.suite,
            now.graph,
            now.case,
            now.phase,
            str(now.channels),
            now.dtype,
            *(value(now) for value in sizes.values()),
            milliseconds(then.median_ms),
            milliseconds(now.median_ms),
            f"{_change(then, now):.2f}",
            "-" if others[_group(now)] is None else f"{others[_group(now)]:.2f}",
            verdict(then, now),
        ]
        for then, now in pairs
    ]
    header = ["suite", "graph", "case", "phase", "F", "dtype", *sizes]
    header += ["old ms", "new ms", "new / old", "of others", "change"]
    return Table("Compared with the older run", header, cells, _note(pairs, _lost(old, new)), words=4)


def verdict(old: Row, new: Row) -> str:
    """In a word, by the spread of both."""
    spans = old.p20_ms, old.p80_ms, new.p20_ms, new.p80_ms
    if any(value is None for value in spans):
        return "-"
    if min(old.rounds, new.rounds) < FEWEST_ROUNDS:
        return "too few rounds"
    old_low, old_high, new_low, new_high = (float(value or 0.0) for value in spans)
    if new_high < old_low:
        return "faster"
    return "slower" if new_low > old_high else "within the spread"


def _change(old: Row, new: Row) -> float:
    return float(new.median_ms or 0.0) / old.median_ms if old.median_ms else math.inf


def _group(row: Row) -> tuple[object, ...]:
    """Rows with the same were measured in the same rounds."""
    return row.suite, row.graph, row.phase, row.channels, row.threads


def _of_others(pairs: Sequence[tuple[Row, Row]], group: tuple[object, ...]) -> float | None:
    changes = [_change(old, new) for old, new in pairs if _group(new) == group and not is_ours(new)]
    return statistics.median(changes) if changes else None


def _lost(old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """Cases with figures in the old run and a reason instead in the new one."""
    timed = {row.key for row in old if row.median_ms is not None}
    cases = {_of_all_phases(row).key for row in old if row.median_ms is not None}
    lost = (row for row in new if row.median_ms is None and (row.key in timed or row.key in cases))
    return list(dict.fromkeys(f"{row.graph}, {row.suite}: {row.case}" for row in lost))


def _of_all_phases(row: Row) -> Row:
    """As a reason is noted for a case as a whole."""
    return replace(row, phase="all")


def _note(pairs: Sequence[tuple[Row, Row]], lost: Sequence[str]) -> str:
    parts = [
        "of others: new / old of layers that our code does not touch, on the same graph in the same phase"
    ]
    for name in ("machine", "torch", "torch_geometric", "backend", "commit"):
        values = dict.fromkeys((getattr(old, name), getattr(new, name)) for old, new in pairs)
        parts += [f"{name}: {before} before, {now} now" for before, now in values if before != now]
    if lost:
        parts.append(f"measured before, not now: {'; '.join(lost)}")
    return "; ".join(parts)
