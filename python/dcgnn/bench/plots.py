"""Plots of the results; matplotlib is imported when one is made."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dcgnn.bench.cases import CASES, PHASES
from dcgnn.bench.rows import Row
from dcgnn.bench.sweeps import SWEEPS, Sweep, fit_edges
from dcgnn.bench.tables import PAPER, groups, of_suite, ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666", "#000000", "#8B5A2B")
MARKERS = "osD^vP*Xh"
WIDTH = 8.0
_CASE_ORDER = list(CASES)


def new_figure(rows: int = 1, columns: int = 1, height: float = 4.0) -> tuple[Figure, Any]:
    """A figure of the page's width without a window, and its axes as a list."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.grid(True, alpha=0.3)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def png(figure: Figure, dpi: int = 110) -> bytes:
    """The figure as a small PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def svg_data(figure: Figure) -> str:
    """The figure as an address that an HTML page can hold."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(buffer.getvalue()).decode()


def plot_ratios(rows: Sequence[Row]) -> Figure | None:
    """DCConv over the paper's two baselines, with the paper's range as a band."""
    found = groups(of_suite(rows, "layers"))
    phases = ("forward", "forward+backward")
    shares = {
        (name, case, phase): ratio(group, ("DCConv", phase), (case, phase))
        for name, group in found.items()
        for case in PAPER
        for phase in phases
    }
    names = [name for name in found if any(shares[name, case, phase] for case in PAPER for phase in phases)]
    if not names:
        return None
    figure, axes = new_figure(1, 2, 1.6 + 0.6 * len(names))
    for axis, (case, (low, high)) in zip(axes, PAPER.items(), strict=True):
        axis.axvspan(low, high, color="#D55E00", alpha=0.25, label="paper, on a GPU")
        axis.axvline(1, color="black", linewidth=1)
        for offset, phase, color in zip((-0.2, 0.2), phases, COLORS, strict=False):
            values = [shares[name, case, phase] or float("nan") for name in names]
            places = [place + offset for place in range(len(names))]
            bars = axis.barh(places, values, height=0.36, color=color, label=phase)
            axis.bar_label(bars, [f"{value:.2f}" for value in values], padding=2, fontsize=9)
        axis.set_yticks(range(len(names)), names)
        axis.invert_yaxis()
        own = [shares[name, case, phase] or 0 for name in names for phase in phases]
        axis.set_xlim(0, 1.15 * max(1.0, high, *own))
        axis.set_xlabel(f"DCConv / {case}")
    axes[1].set_yticklabels([])
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


def plot_phases(rows: Sequence[Row]) -> Figure | None:
    """Time of every phase and case, one panel for each graph, p20 to p80 as whiskers."""
    found = {
        name: [row for row in group if row.median_ms is not None]
        for name, group in groups(of_suite(rows, "layers")).items()
    }
    found = {name: group for name, group in found.items() if group}
    if not found:
        return None
    names = [
        case for case in _CASE_ORDER if any(row.case == case for group in found.values() for row in group)
    ]
    figure, axes = new_figure(len(found), 1, 1.0 + 3.0 * len(found))
    for axis, (title, group) in zip(axes, found.items(), strict=True):
        phases = [phase for phase in PHASES if any(row.phase == phase for row in group)]
        for place, case in enumerate(names):
            offset = 0.8 * ((place + 0.5) / len(names) - 0.5)
            chosen = [row for row in group if row.case == case]
            _whiskers(
                axis,
                [phases.index(row.phase) + offset for row in chosen],
                chosen,
                color=COLORS[place % len(COLORS)],
                marker=MARKERS[place % len(MARKERS)],
                linestyle="none",
                label=case,
            )
        axis.set_yscale("log")
        axis.set_xticks(range(len(phases)), phases)
        for border in range(len(phases) - 1):
            axis.axvline(border + 0.5, color="#cccccc", linewidth=1)
        axis.set_xlim(-0.5, len(phases) - 0.5)
        axis.set_ylabel("milliseconds")
        axis.set_title(title, fontsize=11)
    _legend_of(figure, axes, 4)
    return figure


def plot_memory(rows: Sequence[Row]) -> Figure | None:
    """Peak memory of every case, a group of bars for each graph."""
    found = {
        name: {
            row.case: row for row in group if row.phase == "forward+backward" and row.peak_bytes is not None
        }
        for name, group in groups(of_suite(rows, "layers")).items()
    }
    found = {name: group for name, group in found.items() if group}
    if not found:
        return None
    names = [case for case in _CASE_ORDER if any(case in group for group in found.values())]
    figure, (axis,) = new_figure(1, 1, 1.2 + 0.28 * len(names) * len(found))
    height = 0.85 / len(names)
    for place, case in enumerate(names):
        values = [
            (group[case].peak_bytes or 0) / 1e6 if case in group else float("nan") for group in found.values()
        ]
        places = [index + height * (place - (len(names) - 1) / 2) for index in range(len(found))]
        bars = axis.barh(places, values, height=height, color=COLORS[place % len(COLORS)], label=case)
        axis.bar_label(bars, [f"{value:.0f}" for value in values], padding=2, fontsize=8)
    axis.set_xscale("log")
    axis.margins(x=0.12)
    axis.set_yticks(range(len(found)), list(found))
    axis.invert_yaxis()
    axis.set_xlabel("peak memory of forward+backward above the inputs, MB")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def plot_kernels(rows: Sequence[Row]) -> Figure | None:
    """Share of the measured limit that every kernel reaches, a group of bars for each kernel."""
    found = {
        name: {row.case: row.fraction for row in group if row.fraction is not None}
        for name, group in groups(of_suite(rows, "kernels")).items()
    }
    found = {name: group for name, group in found.items() if group}
    if not found:
        return None
    names = list(dict.fromkeys(case for group in found.values() for case in group))
    figure, (axis,) = new_figure(1, 1, 1.2 + 0.2 * len(names) * (len(found) + 0.6))
    height = 0.85 / len(found)
    for place, (title, group) in enumerate(found.items()):
        values = [100 * group.get(name, float("nan")) for name in names]
        places = [index + height * (place - (len(found) - 1) / 2) for index in range(len(names))]
        bars = axis.barh(places, values, height=height, color=COLORS[place % len(COLORS)], label=title)
        axis.bar_label(bars, [f"{value:.0f}" for value in values], padding=2, fontsize=8)
    axis.axvline(100, color="black", linewidth=1)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("least time at the measured rates / median time, %")
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def plot_edges(rows: Sequence[Row]) -> Figure | None:
    """Time over edges with the fitted slopes, and time for each slot."""
    suite = [row for row in of_suite(rows, "sweep edges") if row.median_ms is not None]
    if not suite:
        return None
    figure, (left, right) = new_figure(1, 2, 4.6)
    place = 0
    for case in SWEEPS["edges"].cases:
        for phase in ("forward", "forward+backward"):
            chosen = [row for row in suite if (row.case, row.phase) == (case.name, phase)]
            if not chosen:
                continue
            fit = fit_edges(chosen)
            edges = [row.num_edges for row in chosen]
            style = {
                "color": COLORS[place // 2],
                "marker": MARKERS[place // 2],
                "markerfacecolor": "white" if phase == "forward" else COLORS[place // 2],
            }
            slope = f", slope {fit.slope:.2f}" if fit is not None else ""
            _whiskers(left, edges, chosen, linestyle="none", label=f"{case.name} {phase}{slope}", **style)
            if fit is not None:
                left.plot(
                    edges, [fit.milliseconds(count) for count in edges], color=style["color"], alpha=0.5
                )
            right.plot(edges, [1e6 * (row.median_ms or 0) / row.num_slots for row in chosen], **style)
            place += 1
        place += place % 2
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_xlabel("edges, both directions")
    left.set_ylabel("milliseconds")
    right.set_ylabel("nanoseconds for each slot")
    figure.legend(loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure


def plot_sweep(rows: Sequence[Row], sweep: Sweep) -> Figure | None:
    """Left: time of the layer over the size. Right: share of the limit of every kernel."""
    suite = [row for row in of_suite(rows, sweep.suite) if row.median_ms is not None]
    layers = [case.name for case in sweep.cases]
    if not any(row.case in layers for row in suite):
        return None
    values = list(dict.fromkeys(sweep.value(row) for row in suite))
    figure, (left, right) = new_figure(1, 2, 4.4)
    place = 0
    for case in layers:
        for phase, style in (("forward", "-"), ("forward+backward", "--")):
            chosen = [row for row in suite if (row.case, row.phase) == (case, phase)]
            places = [values.index(sweep.value(row)) for row in chosen]
            color, marker = COLORS[place // 2], MARKERS[place // 2]
            _whiskers(
                left, places, chosen, color=color, marker=marker, linestyle=style, label=f"{case} {phase}"
            )
            place += 1
    kernels = list(dict.fromkeys(row.case for row in suite if row.case not in layers))
    ops = list(dict.fromkeys(name.removesuffix("_backward") for name in kernels))
    for name in kernels:
        chosen = [row for row in suite if row.case == name]
        place = ops.index(name.removesuffix("_backward"))
        color, style = COLORS[place % len(COLORS)], "--" if name.endswith("backward") else "-"
        right.plot(
            [values.index(sweep.value(row)) for row in chosen],
            [100 * (row.fraction or float("nan")) for row in chosen],
            color=color,
            marker=MARKERS[place % len(MARKERS)],
            linestyle=style,
            markersize=5,
            label=name,
        )
    for axis in (left, right):
        axis.set_xticks(range(len(values)), [str(value) for value in values])
        axis.set_xlabel(sweep.title)
    left.set_ylim(0, 1.3 * left.get_ylim()[1])  # room for the legend
    left.set_ylabel("milliseconds")
    left.legend(frameon=False, fontsize=8, handlelength=3, loc="upper left")
    right.set_ylim(bottom=0)
    right.set_ylabel("share of the limit, %")
    right.legend(frameon=False, fontsize=7, handlelength=3, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _whiskers(axis: Any, places: Sequence[float], rows: Sequence[Row], **style: Any) -> None:
    """Medians with the span from p20 to p80."""
    medians = [row.median_ms or 0.0 for row in rows]
    below = [max(0.0, (row.median_ms or 0.0) - (row.p20_ms or 0.0)) for row in rows]
    above = [max(0.0, (row.p80_ms or 0.0) - (row.median_ms or 0.0)) for row in rows]
    axis.errorbar(places, medians, yerr=[below, above], capsize=2, markersize=6, **style)


def _legend_of(figure: Figure, axes: Sequence[Any], columns: int) -> None:
    """One legend for all panels."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(
        list(entries.values()), list(entries), loc="outside upper center", ncols=columns, frameon=False
    )


def _of_sweep(sweep: Sweep) -> Callable[[Sequence[Row]], Figure | None]:
    return lambda rows: plot_sweep(rows, sweep)


#: Name of the file, what the plot shows, and the function.
PLOTS: dict[str, tuple[str, Callable[[Sequence[Row]], Any]]] = {
    "ratios": ("DCConv against GCNConv and GATConv, beside the paper's ratios", plot_ratios),
    "phases": ("Time of every phase; whiskers from p20 to p80", plot_phases),
    "memory": ("Peak memory of one layer, forward and backward", plot_memory),
    "kernels": ("Kernels against the limit of the machine", plot_kernels),
    "edges": ("Time over edges", plot_edges),
    **{
        f"sweep-{name}": (f"Sweep over {sweep.title}", _of_sweep(sweep))
        for name, sweep in SWEEPS.items()
        if name != "edges"
    },
}


def make_plots(rows: Sequence[Row]) -> dict[str, tuple[str, Figure]]:
    """Every plot for which there are rows, by name, with its title."""
    made = {name: (title, plot(rows)) for name, (title, plot) in PLOTS.items()}
    return {name: (title, figure) for name, (title, figure) in made.items() if figure is not None}
