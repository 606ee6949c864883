"""Tables of the results, independent of how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dcgnn.bench.cases import PHASES
from dcgnn.bench.kernels import KERNELS
from dcgnn.bench.rows import Row
from dcgnn.bench.sweeps import SWEEPS, Sweep, fit_edges

#: Runtime of the paper's own implementation on a GPU, relative to PyG's layers: from, to.
PAPER = {"GCNConv(edge_index)": (3.4, 3.9), "GATConv": (0.43, 0.69)}

_OURS = {
    "forward": ("DCConv", "forward"),
    "forward+backward": ("DCConv", "forward+backward"),
    "bfloat16 forward": ("DCConv bfloat16", "forward"),
    "bfloat16 forward+backward": ("DCConv bfloat16", "forward+backward"),
}

#: Title, and (case, phase) over (case, phase).
RATIOS = (
    *(
        (f"{ours} / {case}", pair, (case, pair[1]))
        for case in ("GCNConv(edge_index)", "GATConv", "GCNConv(CSR)", "plain PyTorch")
        for ours, pair in _OURS.items()
    ),
    *(
        (f"{phase}, 2 layers / {case}", ("DCConv", phase), (case, phase))
        for phase in ("epoch", "inference")
        for case in ("GCNConv(edge_index)", "GATConv", "GCNConv(CSR)")
    ),
    ("graph build / own forward", ("DCConv", "build"), ("DCConv", "forward")),
)
MEMORY_RATIO = "peak memory / (N·K·F + S·K) floats"

GOAL_CHANNELS = 64

#: What the CPU kernels are meant to reach at 64 channels: on denser graphs, and on Genius (6 slots a node).
GOALS = {
    "forward / GCNConv(edge_index)": (0.15, 0.30),
    "forward / GATConv": (0.14, 0.25),
    "forward / GCNConv(CSR)": (2.8, 0.9),
    "forward+backward / GCNConv(CSR)": (1.0, 0.8),
    "bfloat16 forward / GCNConv(CSR)": (2.0, 0.7),
    "forward / plain PyTorch": (0.05, 0.05),
    MEMORY_RATIO: (4.0, 4.0),
}


@dataclass(frozen=True)
class Table:
    """Title, cells and a note below; all columns but the first ``words`` are numbers."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""
    words: int = 1


def milliseconds(value: float | None) -> str:
    """Four digits, no more."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def is_ours(row: Row) -> bool:
    """Whether a change of our code can show in it."""
    return row.case.startswith("DCConv") or row.case in ("plain PyTorch", "ego_graph", *KERNELS)


def of_suite(rows: Sequence[Row], suite: str) -> list[Row]:
    """Rows of one suite."""
    return [row for row in rows if row.suite == suite]


def groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of a suite by graph and width, in the order in which they were measured."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(f"{row.graph}, F = {row.channels}", []).append(row)
    return found


def median(rows: Sequence[Row], case: str, phase: str) -> float | None:
    """Median milliseconds of a case in a phase."""
    found = (row.median_ms for row in rows if (row.case, row.phase) == (case, phase))
    return next(found, None)


def ratio(rows: Sequence[Row], ours: tuple[str, str], theirs: tuple[str, str]) -> float | None:
    """Median of ours over theirs; None where one is missing."""
    above, below = median(rows, *ours), median(rows, *theirs)
    return None if above is None or below is None else above / below


def settings_of(row: Row, without: Sequence[str] = ()) -> str:
    """What a row was measured with, in words; but for what is said elsewhere."""
    words = {
        "channels": f"F = {row.channels}",
        "num_local": f"K = {row.num_local}",
        "num_global": f"|Ω| = {row.num_global}",
        "local_iters": f"T = {row.local_iters} local and {row.global_iters} global",
        "dtype": row.dtype,
        "threads": f"{row.threads} threads",
    }
    return ", ".join(text for name, text in words.items() if name not in without)


def layer_tables(rows: Sequence[Row]) -> list[Table]:
    """One table for each graph: every phase and case with its spread, memory and ratio."""
    tables = []
    for name, group in groups(of_suite(rows, "layers")).items():
        first = group[0]
        cells = []
        for phase in PHASES:
            for row in group:
                if row.phase != phase or row.median_ms is None:
                    continue
                share = ratio(group, ("DCConv", phase), (row.case, phase))
                cells.append(
                    [
                        phase,
                        row.case,
                        milliseconds(row.median_ms),
                        milliseconds(row.p20_ms),
                        milliseconds(row.p80_ms),
                        str(row.rounds),
                        "-" if share is None else f"{share:.3g}",
                        "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
                    ]
                )
        if cells:
            tables.append(
                Table(
                    f"{name}: {first.num_nodes:,} nodes, {first.num_edges:,} edges in both directions, "
                    f"{settings_of(first, ('channels', 'dtype'))}",
                    ["phase", "case", "median ms", "p20", "p80", "rounds", "DCConv / it", "peak MB"],
                    cells,
                    words=2,
                )
            )
    return tables


def ratios(group: Sequence[Row]) -> dict[str, float]:
    """Every ratio of RATIOS that a graph has, and peak memory in units of the layer's own tensors."""
    found = {title: ratio(group, ours, theirs) for title, ours, theirs in RATIOS}
    found[MEMORY_RATIO] = memory_units(group)
    return {title: value for title, value in found.items() if value is not None}


def ratio_table(rows: Sequence[Row]) -> Table | None:
    """DCConv over each baseline, a column for each graph."""
    found = {name: ratios(group) for name, group in groups(of_suite(rows, "layers")).items()}
    titles = [title for title, _, _ in RATIOS] + [MEMORY_RATIO]
    cells = [
        [title, *(f"{values[title]:.3g}" if title in values else "-" for values in found.values())]
        for title in titles
        if any(title in values for values in found.values())
    ]
    if not cells:
        return None
    dtypes = dict.fromkeys(
        row.dtype for row in of_suite(rows, "layers") if not is_ours(row) and row.median_ms is not None
    )
    baselines = f" Baselines are {', '.join(dtypes)}." if dtypes else ""
    note = f"Ratios of medians; below 1 DCConv is faster.{baselines} Memory: forward+backward."
    return Table("DCConv against the others", ["DCConv", *found], cells, note)


def goal_table(rows: Sequence[Row]) -> Table | None:
    """The ratios that have a goal, in bold (Markdown) where it is reached."""
    wanted = [row for row in of_suite(rows, "layers") if row.channels == GOAL_CHANNELS]
    found = {name: ratios(group) for name, group in groups(wanted).items()}
    cells = []
    for title, (dense, sparse) in GOALS.items():
        line = [title, f"≤ {dense:g}" + (f", Genius {sparse:g}" if sparse != dense else "")]
        for name, values in found.items():
            goal = sparse if name.startswith("genius") else dense
            value = values.get(title)
            text = "-" if value is None else f"{value:.3g}"
            line.append(f"**{text}**" if value is not None and value <= goal else text)
        cells.append(line)
    return Table("Goals", ["DCConv", "goal", *found], cells) if found else None


def memory_units(group: Sequence[Row]) -> float | None:
    """Peak memory of DCConv forward+backward in units of its clusters and assignments, in its dtype."""
    for row in group:
        if (row.case, row.phase) == ("DCConv", "forward+backward") and row.peak_bytes is not None:
            floats = row.num_local * (row.num_nodes * row.channels + row.num_slots)
            return row.peak_bytes / getattr(torch, row.dtype).itemsize / floats
    return None


def time_table(rows: Sequence[Row]) -> Table | None:
    """Forward / forward+backward milliseconds of every case, a column for each graph: short, for a page."""
    found = groups(of_suite(rows, "layers"))
    names = list(dict.fromkeys(row.case for group in found.values() for row in group if row.median_ms))
    cells = [
        [name]
        + [
            " / ".join(milliseconds(median(group, name, phase)) for phase in ("forward", "forward+backward"))
            for group in found.values()
        ]
        for name in names
    ]
    return Table("forward / forward+backward, ms", ["", *found], cells) if cells else None


def paper_table(rows: Sequence[Row]) -> Table | None:
    """The paper's runtime table: our ratios beside the published ones."""
    cells = []
    for name, group in groups(of_suite(rows, "layers")).items():
        for phase in ("forward", "forward+backward"):
            own = [median(group, case, phase) for case in ("DCConv", *PAPER)]
            if all(value is None for value in own):
                continue
            shares = [ratio(group, ("DCConv", phase), (case, phase)) for case in PAPER]
            line = [name, phase, *(milliseconds(value) for value in own)]
            for share, (low, high) in zip(shares, PAPER.values(), strict=True):
                line += ["-" if share is None else f"{share:.2f}", f"{low:g} to {high:g}"]
            cells.append(line)
    if not cells:
        return None
    return Table(
        "The paper's runtime table",
        [
            "graph",
            "phase",
            "DCConv ms",
            "GCNConv ms",
            "GATConv ms",
            "/ GCNConv",
            "paper",
            "/ GATConv",
            "paper",
        ],
        cells,
        "paper: the authors' DC-MsgPassing on a GPU, arXiv 2405.16185; GCNConv on edge_index, as theirs.",
        words=2,
    )


def kernel_tables(rows: Sequence[Row]) -> list[Table]:
    """Every kernel against the least time at the machine's rates."""
    tables = []
    for name, group in groups(of_suite(rows, "kernels")).items():
        cells = [
            [
                row.case,
                milliseconds(row.median_ms),
                milliseconds(row.p20_ms),
                milliseconds(row.p80_ms),
                milliseconds(row.limit_ms),
                "-" if row.fraction is None else f"{row.fraction:.0%}",
            ]
            for row in group
            if row.median_ms is not None
        ]
        if cells:
            header = ["kernel", "median ms", "p20", "p80", "least ms", "share of the limit"]
            tables.append(Table(f"Kernels, {name}", header, cells, rates_note(rows, group[0])))
    return tables


def rates_note(rows: Sequence[Row], like: Row) -> str:
    """The measured rates that belong to a row."""
    found = [
        f"{row.case.rpartition(',')[0]} {row.rate:.3g}{row.case.rpartition(',')[2]}"
        for row in of_suite(rows, "limits")
        if (row.phase, row.graph, row.channels, row.dtype, row.threads)
        == (like.suite, like.graph, like.channels, like.dtype, like.threads)
        and row.rate is not None
    ]
    return "measured: " + ", ".join(dict.fromkeys(found)) if found else ""


def sweep_table(rows: Sequence[Row], sweep: Sweep) -> Table | None:
    """A column for each value: times of the layers, share of the limit of the layer and of its kernels."""
    found = [row for row in of_suite(rows, sweep.suite) if row.median_ms is not None]
    layers = [case.name for case in sweep.cases if any(row.case == case.name for row in found)]
    kernels = list(dict.fromkeys(row.case for row in found if row.case not in layers))
    if not layers:
        return None
    values = list(dict.fromkeys(sweep.value(row) for row in found))
    lines: list[tuple[str, Callable[[list[Row]], str]]] = []
    for case in layers:
        for phase in ("forward", "forward+backward"):
            lines.append((f"{case} {phase}, ms", _cell(case, phase, lambda row: milliseconds(row.median_ms))))
            if sweep.name == "edges":
                lines.append((f"{case} {phase}, ns for each slot", _cell(case, phase, _per_slot)))
    if sweep.name != "edges":
        lines.append(("DCConv forward, share of the limit", _cell("DCConv", "forward", _share)))
    lines += [(f"{kernel}, share of the limit", _cell(kernel, None, _share)) for kernel in kernels]
    cells = [
        [name, *(show([row for row in found if sweep.value(row) == value]) for value in values)]
        for name, show in lines
    ]
    shown = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
    notes = [settings_of(found[0], (*sweep.fields, sweep.name))]
    if sweep.name == "edges" and (slopes := slope_note(rows)):
        notes.append(slopes)
    graph = "" if sweep.name == "edges" else f", {found[0].graph}"
    return Table(f"Sweep over {sweep.title}{graph}", [sweep.name, *shown], cells, "; ".join(notes))


def _cell(case: str, phase: str | None, show: Callable[[Row], str]) -> Callable[[list[Row]], str]:
    def cell(rows: list[Row]) -> str:
        found = (row for row in rows if row.case == case and phase in (None, row.phase))
        return next((show(row) for row in found), "-")

    return cell


def _share(row: Row) -> str:
    return "-" if row.fraction is None else f"{row.fraction:.0%}"


def _per_slot(row: Row) -> str:
    if row.median_ms is None or row.num_slots == 0:
        return "-"
    return f"{1e6 * row.median_ms / row.num_slots:.3g}"


def slope_note(rows: Sequence[Row]) -> str:
    """The fitted slopes in words, each with the edges that it was fitted over."""
    suite = of_suite(rows, "sweep edges")
    parts: dict[str, list[str]] = {}
    for case in SWEEPS["edges"].cases:
        for phase in ("forward", "forward+backward"):
            fit = fit_edges([row for row in suite if (row.case, row.phase) == (case.name, phase)])
            if fit is not None:
                span = f"from {fit.first:,} to {fit.last:,} edges"
                parts.setdefault(span, []).append(f"{case.name} {phase} {fit.slope:.2f}")
    if not parts:
        return ""
    spans = "; ".join(f"{span} {', '.join(slopes)}" for span, slopes in parts.items())
    return f"slope of log time over log edges (1: linear): {spans}."


def left_out(rows: Sequence[Row]) -> list[str]:
    """What was not measured, and why."""
    lines = (f"{row.graph}, {row.suite}: {row.case}: {row.reason}" for row in rows if row.reason)
    return list(dict.fromkeys(lines))


def machine_lines(rows: Sequence[Row]) -> list[str]:
    """Machine, versions and commit, as many lines as there are different ones."""
    lines = (
        f"{row.machine}; {row.device}, {row.backend}; python {row.python}, torch {row.torch}, "
        f"torch-geometric {row.torch_geometric}, dcgnn-kernels {row.dcgnn_kernels}, commit {row.commit}, "
        f"{row.date}"
        for row in rows
    )
    return list(dict.fromkeys(lines))


def all_tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that has something to say, in reading order."""
    sweeps = [sweep_table(rows, sweep) for sweep in SWEEPS.values()]
    candidates = [
        *layer_tables(rows),
        ratio_table(rows),
        paper_table(rows),
        *kernel_tables(rows),
        *sweeps,
    ]
    return [table for table in candidates if table is not None]
