"""Fills the marked places of a Markdown page with tables and plots of a stored run.

A place begins with ``<!-- bench NAME -->`` and ends with ``<!-- /bench -->``; what lies between is replaced.
NAME is a table (``machine``, ``times``, ``ratios``, ``goals``, ``paper``, ``layers``, ``kernels``,
``sweep-edges``, …, ``left-out``) or ``plot-`` and the name of a plot, which is written to ``figures/`` beside
the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from dcgnn.bench import plots, tables
from dcgnn.bench.rows import Row
from dcgnn.bench.sweeps import SWEEPS, Sweep
from dcgnn.checkpoint import atomic_write

PLACE = re.compile(r"(<!-- bench (\S+) -->\n).*?(<!-- /bench -->)", re.DOTALL)


def fill(page: str | Path, rows: Sequence[Row]) -> list[str]:
    """Fill the page; returns the names that were filled.

    Raises:
        ValueError: If the page has no such place, an unknown name, or one that the run has nothing for.
    """
    path = Path(page)
    filled: list[str] = []
    images: dict[Path, bytes] = {}

    def content(match: re.Match[str]) -> str:
        name = match[2]
        filled.append(name)
        text = _plot(name, rows, images) if name.startswith("plot-") else _text(name, rows)
        if not text:
            raise ValueError(f"{path}: the run has nothing for {name}")
        return f"{match[1]}{text}\n{match[3]}"

    text = PLACE.sub(content, path.read_text(encoding="utf-8"))
    if not filled:
        raise ValueError(f"{path} has no place such as <!-- bench ratios --> ... <!-- /bench -->")
    for file, image in images.items():  # only now that every place has its content
        atomic_write(path.parent / file, lambda target, image=image: target.write(image))  # type: ignore[misc]
    atomic_write(path, lambda file: file.write(text.encode()))
    return filled


def markdown(table: tables.Table, with_title: bool = False) -> str:
    """The table in Markdown."""
    rule = ["---"] * min(table.words, len(table.header)) + ["---:"] * (len(table.header) - table.words)
    lines = [table.header, rule, *table.rows]
    text = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    head = f"**{table.title}**\n\n" if with_title else ""
    return head + text + (f"\n\n{table.note}" if table.note else "")


def known_places() -> list[str]:
    """The names that a place may have."""
    return [*_makers([]), *(f"plot-{plot}" for plot in plots.PLOTS)]


def _makers(rows: Sequence[Row]) -> dict[str, Callable[[], str]]:
    return {
        "machine": lambda: "\n".join(f"- {line}" for line in tables.machine_lines(rows)),
        "left-out": lambda: "\n".join(f"- {line}" for line in tables.left_out(rows) or ["nothing"]),
        "times": lambda: _one(tables.time_table(rows)),
        "ratios": lambda: _one(tables.ratio_table(rows)),
        "goals": lambda: _one(tables.goal_table(rows)),
        "paper": lambda: _one(tables.paper_table(rows)),
        "layers": lambda: _many(tables.layer_tables(rows)),
        "kernels": lambda: _many(tables.kernel_tables(rows)),
        **{f"sweep-{key}": _sweep(rows, sweep) for key, sweep in SWEEPS.items()},
    }


def _text(name: str, rows: Sequence[Row]) -> str:
    makers = _makers(rows)
    if name not in makers:
        raise ValueError(f"unknown place {name!r}; known are {', '.join(known_places())}")
    return makers[name]()


def _plot(name: str, rows: Sequence[Row], images: dict[Path, bytes]) -> str:
    """The link to a plot, which is added to ``images`` under its path beside the page."""
    plot = name.removeprefix("plot-")
    if plot not in plots.PLOTS:
        raise ValueError(f"unknown plot {plot!r}; known are {', '.join(plots.PLOTS)}")
    title, make = plots.PLOTS[plot]
    figure = make(rows)
    if figure is None:
        return ""
    file = Path("figures") / f"bench-{plot}.png"
    images[file] = plots.png(figure)
    return f"![{title}]({file.as_posix()})"


def _one(table: tables.Table | None) -> str:
    return "" if table is None else markdown(table)


def _many(found: Sequence[tables.Table]) -> str:
    return "\n\n".join(markdown(table, with_title=True) for table in found)


def _sweep(rows: Sequence[Row], sweep: Sweep) -> Callable[[], str]:
    return lambda: _one(tables.sweep_table(rows, sweep))
