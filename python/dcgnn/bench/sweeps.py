"""One size at a time: edges, channels, clusters, iterations, threads and dtypes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcgnn.bench import memory
from dcgnn.bench.cases import DC_CONV, GCN, GCN_CSR, Case
from dcgnn.bench.problem import Problem, Settings, shaped_problem
from dcgnn.bench.rows import Row
from dcgnn.bench.runner import Effort, Runner, kernel_estimate, layer_estimate
from dcgnn.bench.shapes import generation_bytes, scaled_shape

PHASES = ("forward", "forward+backward")
EDGES = (10_000, 100_000, 1_000_000, 10_000_000, 60_000_000, 100_000_000)
MOST_EDGES = 10**12
FIT_FROM = 1_000_000  # below, calls cost as much as edges


@dataclass(frozen=True)
class Sweep:
    """One size and its values; ``fields`` are those of Settings that take the value."""

    name: str
    title: str
    fields: tuple[str, ...]
    values: tuple[Any, ...]
    cases: tuple[Case, ...] = (DC_CONV,)

    @property
    def suite(self) -> str:
        """Name in the rows."""
        return f"sweep {self.name}"

    def value(self, row: Row) -> Any:
        """The swept size of a row."""
        if self.name == "edges":
            return row.num_edges
        return row.threads if self.name == "threads" else getattr(row, self.fields[0])


SWEEPS = {
    sweep.name: sweep
    for sweep in (
        Sweep("edges", "edges (both directions)", (), EDGES, (DC_CONV, GCN_CSR, GCN)),
        Sweep("channels", "channels F", ("channels",), (16, 32, 64, 128, 256), (DC_CONV, GCN_CSR)),
        Sweep("local", "local clusters K", ("num_local",), (1, 2, 3, 4, 8)),
        Sweep("global", "global clusters |Ω|", ("num_global",), (2, 8, 32, 128)),
        Sweep(
            "iterations",
            "iterations T of both problems",
            ("local_iters", "global_iters"),
            (1, 2, 3, 5, 10, 20),
        ),
        Sweep("threads", "threads", (), (), (DC_CONV, GCN_CSR)),
        Sweep("dtype", "dtype", ("dtype",), ("float64", "float32", "bfloat16", "float16")),
    )
}


def edge_values(values: Sequence[int] | None) -> tuple[int, ...]:
    """The values of the sweep over edges, checked."""
    chosen = tuple(sorted(values or EDGES))
    if chosen[0] < 10_000:
        raise ValueError(f"--edges: at least 10000 are wanted, got {chosen[0]}")
    if chosen[-1] > MOST_EDGES:
        raise ValueError(f"--edges: at most {MOST_EDGES} are possible, got {chosen[-1]}")
    return chosen


def thread_values() -> tuple[int, ...]:
    """1, 2, 4, ... up to the cores."""
    cores = os.cpu_count() or 1
    powers = [2**power for power in range(cores.bit_length()) if 2**power < cores]
    return (*powers, cores)


def sweep_edges(
    runner: Runner, settings: Settings, device: torch.device, values: Sequence[int], seed: int
) -> None:
    """Random graphs of the mean degree of ogbn-products, larger and larger; what does not fit is left out."""
    for count in values:
        _edges_point(runner, settings, device, count, seed)
        runner.keep(runner.rows)


def _edges_point(runner: Runner, settings: Settings, device: torch.device, count: int, seed: int) -> None:
    """One size, whose graph is gone before that of the next is made."""
    sweep, shape = SWEEPS["edges"], scaled_shape(count // 2)
    # The sizes without the edges, to say what was left out.
    edges = torch.empty(2, 2 * shape.num_edges, device="meta")
    sizes = Problem(edges_name(count), edges, shape.num_nodes, settings, device, seed)
    making = memory.too_large("making the graph", generation_bytes(shape), torch.device("cpu"))
    reasons = {case.name: making or memory.case_too_large(case, sizes) for case in sweep.cases}
    problem = None
    if None in reasons.values():
        runner.bar.set_description_str(f"making {sizes.name}")
        with runner.attempt(sweep.suite, sizes, "all"):
            problem = shaped_problem(sizes.name, settings, device, shape=shape, seed=seed)
    else:
        for name, reason in reasons.items():
            runner.leave_out(sweep.suite, sizes, name, reason or "")
    if problem is not None:
        runner.layers(sweep.suite, problem, sweep.cases, PHASES, measure_memory=False)
    else:
        runner.skip(sum(layer_estimate(case, sizes, PHASES, runner.effort, False) for case in sweep.cases))


def edges_name(count: int) -> str:
    """All digits that count, so that different sizes have different names: 1e+06, 2.4e+06."""
    digits, exponent = f"{count:.17e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{exponent} edges"


def sweep_settings(runner: Runner, sweep: Sweep, problem: Problem) -> None:
    """Time layer and kernels for every value of a size, each against the rates at that value."""
    for value in sweep.values:
        settings = replace(problem.settings, **dict.fromkeys(sweep.fields, value))
        _point(runner, sweep, problem.with_settings(settings))


def sweep_threads(runner: Runner, problem: Problem) -> None:
    """From one thread to all cores; the number of before is restored."""
    sweep, before = SWEEPS["threads"], torch.get_num_threads()
    if problem.device.type != "cpu":
        runner.leave_out(sweep.suite, problem, "DCConv", "threads matter on the CPU alone")
        runner.skip(estimate(sweep, problem, (), runner.effort))
        return
    try:
        for count in thread_values():
            torch.set_num_threads(count)
            _point(runner, sweep, problem)
    finally:
        torch.set_num_threads(before)


def _point(runner: Runner, sweep: Sweep, problem: Problem) -> None:
    rates = None
    with runner.attempt(sweep.suite, problem, "rates of the machine"):
        rates = runner.rates(sweep.suite, problem)
    runner.layers(sweep.suite, problem, sweep.cases, PHASES, rates=rates, measure_memory=False)
    runner.kernels(sweep.suite, problem, rates)


def estimate(sweep: Sweep, problem: Problem, edges: Sequence[int], effort: Effort) -> float:
    """Rough seconds of a sweep, for the progress bar."""
    return sum(
        sum(layer_estimate(case, point, PHASES, effort, False) for case in sweep.cases)
        + (0.0 if sweep.name == "edges" else kernel_estimate(point, effort))
        for point in _sizes(sweep, problem, edges)
    )


def _sizes(sweep: Sweep, problem: Problem, edges: Sequence[int]) -> Iterator[Problem]:
    if sweep.name == "edges":
        for count in edges:
            shape = scaled_shape(count // 2)
            yield replace(
                problem,
                edge_index=torch.empty(2, 2 * shape.num_edges, device="meta"),
                num_nodes=shape.num_nodes,
            )
    elif sweep.name == "threads":
        yield from (problem for _ in thread_values())
    else:
        for value in sweep.values:
            yield problem.with_settings(replace(problem.settings, **dict.fromkeys(sweep.fields, value)))


@dataclass(frozen=True)
class Fit:
    """Time ≈ factor · edges^slope, by least squares of the logarithms, from ``first`` to ``last`` edges."""

    slope: float
    factor: float
    points: int
    first: int = 0
    last: int = 0

    def milliseconds(self, edges: float) -> float:
        """The fitted time."""
        return self.factor * edges**self.slope


def fit_edges(rows: Sequence[Row], start: int = FIT_FROM) -> Fit | None:
    """Slope of the rows with at least ``start`` edges (all, if fewer than two have); 1 is linear in edges."""
    timed = [row for row in rows if row.median_ms is not None]
    large = [row for row in timed if row.num_edges >= 0.99 * start]
    chosen = large if len(large) > 1 else timed
    if len(chosen) < 2:
        return None
    x = [math.log(row.num_edges) for row in chosen]
    y = [math.log(row.median_ms or 1.0) for row in chosen]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    if spread == 0:
        return None
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    counts = [row.num_edges for row in chosen]
    return Fit(slope, math.exp(mean_y - slope * mean_x), len(chosen), min(counts), max(counts))
