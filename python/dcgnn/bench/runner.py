"""Runs suites: gate first, then interleaved rounds, then memory; every result is handed on at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from tqdm import tqdm

from dcgnn.bench import gate, kernels, limits, memory
from dcgnn.bench.cases import Case
from dcgnn.bench.limits import Rates
from dcgnn.bench.phases import RELATIVE_COST, Run, make_runs
from dcgnn.bench.problem import Problem
from dcgnn.bench.rows import Context, Row
from dcgnn.bench.shapes import Shape, make_edges
from dcgnn.timing import Samples, interleaved_samples
from dcgnn_kernels import release_memory

SECONDS_PER_FLOAT = 1.3e-9  # of working memory, for the progress bar alone
MEMORY_PHASES = ("forward", "forward+backward", "epoch")
SMALL_GRAPH = Shape(1500, 15_000, 0.4)  # where single kernels are checked


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        rounds: Measured rounds.
        warmup: Rounds before them.
        max_seconds: A group of interleaved candidates ends after the round in which this has passed.
        each_seconds: A candidate sits out later rounds when it alone has taken this long.
        memory: Names of the cases whose peak memory is measured; None: all.
    """

    rounds: int = 7
    warmup: int = 1
    max_seconds: float = 60.0
    each_seconds: float = 15.0
    memory: Sequence[str] | None = None

    def measures_memory_of(self, case: Case) -> bool:
        """Whether the peak memory of a case is wanted."""
        return self.memory is None or case.name in self.memory

    def estimate(self, seconds: float) -> float:
        """Time of a candidate that takes ``seconds`` once."""
        return min((self.rounds + self.warmup) * seconds, self.each_seconds + seconds)


@dataclass
class Runner:
    """Measures and collects rows.

    Args:
        context: What all rows share.
        effort: How long to measure.
        bar: Progress in estimated seconds.
        keep: Called with all rows after each step, to write them.
    """

    context: Context
    effort: Effort
    bar: tqdm
    keep: Callable[[list[Row]], None] = lambda rows: None
    rows: list[Row] = field(default_factory=list)

    def layers(
        self,
        suite: str,
        problem: Problem,
        cases: Iterable[Case],
        phases: tuple[str, ...],
        *,
        rates: Rates | None = None,
        measure_memory: bool = True,
    ) -> None:
        """Time every phase of every case on one problem; a case that fails the gate gets a reason instead."""
        passed = self._gate(suite, problem, list(cases), phases, measure_memory)
        runs: dict[str, dict[str, Run]] = {}
        for case in passed:
            with self.attempt(suite, case.fit(problem), case.name):
                runs[case.name] = make_runs(case, problem, phases)
        passed = [case for case in passed if case.name in runs]
        for phase in phases:
            group = {case.name: runs[case.name][phase] for case in passed if phase in runs[case.name]}
            timed, failed = self._timed(f"{problem.name}: {phase}", group)
            for case in passed:
                fitted = case.fit(problem)
                row = self._row(suite, fitted, case.name, phase)
                if case.name in failed:
                    self.rows.append(row.failed(f"{phase}: {failed[case.name]}"))
                if case.name in timed:
                    known = rates is not None and case.name == "DCConv" and phase == "forward"
                    least = limits.forward_seconds(fitted, rates) if known and rates else None
                    self.rows.append(row.timed(timed[case.name], least))
            self._step(sum(self._estimate(case, problem, phase) for case in passed if case.name in group))
        del runs
        problem.forget()
        if measure_memory:
            self._memory(suite, problem, passed, phases)

    def kernels(self, suite: str, problem: Problem, rates: Rates | None = None) -> None:
        """Time every kernel and hold it against the measured rates."""
        self._say(f"{problem.name}: rates of the machine")
        with self.attempt(suite, problem, "kernels"):
            self._kernels(suite, problem, rates or self.rates(suite, problem))
        self._step(kernel_estimate(problem, self.effort))

    def _kernels(self, suite: str, problem: Problem, rates: Rates) -> None:
        reasons = self._kernel_gate(problem)
        calls = kernels.kernel_calls(problem)
        work = limits.kernel_work(problem)
        good: dict[str, Run] = {name: Run(call) for name, call in calls.items() if reasons[name] is None}
        if suite == "kernels" and reasons["ego_graph"] is None:
            good["ego_graph"] = Run(lambda: torch.ops.dcgnn.ego_graph(problem.edge_index, problem.num_nodes))
        timed, failed = self._timed(f"{problem.name}: kernels", good)
        reasons |= failed
        for name in (*calls, "ego_graph"):
            phase = "backward" if name.endswith("backward") else "forward"
            row = self._row(suite, problem, name, phase)
            if name in timed:
                self.rows.append(row.timed(timed[name], work[name].seconds(rates)))
            elif reasons.get(name):
                self.rows.append(row.failed(reasons[name] or ""))

    def rates(self, suite: str, problem: Problem) -> Rates:
        """Measure the machine's rates and note them."""
        rates = limits.measure_rates(problem, after_run=self.bar.refresh)
        noted = {
            f"gather by {rates.gathered_by}, GB/s": rates.gather,
            "stream, GB/s": rates.stream,
            "gemm, Gflop/s": rates.gemm,
        }
        for name, rate in noted.items():
            row = self._row("limits", problem, name, suite)
            self.rows.append(replace(row, rate=rate / 1e9))
        return rates

    def leave_out(self, suite: str, problem: Problem, case: str, reason: str) -> None:
        """Note that something was not measured, and why."""
        self.rows.append(self._row(suite, problem, case, "all").failed(reason))

    @contextmanager
    def attempt(self, suite: str, problem: Problem, case: str) -> Iterator[None]:
        """What fails inside becomes a reason; the others go on."""
        try:
            yield
        except Exception as error:
            self.leave_out(suite, problem, case, f"does not run: {gate.one_line(error)}")

    def skip(self, seconds: float) -> None:
        """Take work that will not be done out of the progress bar."""
        if self.bar.total is not None:
            self.bar.total = max(self.bar.n, self.bar.total - seconds)

    def _gate(
        self, suite: str, problem: Problem, cases: list[Case], phases: tuple[str, ...], measure_memory: bool
    ) -> list[Case]:
        passed = []
        for case in cases:
            self._say(f"{problem.name}: checking {case.name}")
            reason = case.missing() or memory.case_too_large(case, problem) or gate.check(case, problem)
            if reason is None:
                passed.append(case)
            else:
                self.leave_out(suite, case.fit(problem), case.name, reason)
                if case.missing() is None:  # else it is not in the total
                    self.skip(layer_estimate(case, problem, phases, self.effort, measure_memory))
        release_memory()
        return passed

    def _kernel_gate(self, problem: Problem) -> dict[str, str | None]:
        edges = make_edges(SMALL_GRAPH).to(problem.device)
        small = Problem("small", edges, SMALL_GRAPH.num_nodes, problem.settings, problem.device)
        found = {
            name: kernels.check_kernel(call, problem.settings.dtype)
            for name, call in kernels.kernel_calls(small).items()
        }
        return {**found, "ego_graph": kernels.check_ego_graph(small)}

    def _timed(self, title: str, group: dict[str, Run]) -> tuple[dict[str, Samples], dict[str, str]]:
        """Samples of those that run, and reasons of those that raise."""
        self._say(title)
        failed: dict[str, str] = {}

        def on_error(name: str, error: Exception) -> None:
            failed[name] = f"does not run: {gate.one_line(error)}"

        timed = interleaved_samples(
            {name: run.timed for name, run in group.items()},
            prepare={name: run.prepare for name, run in group.items() if run.prepare is not None},
            rounds=self.effort.rounds,
            warmup=self.effort.warmup,
            max_seconds=self.effort.max_seconds,
            each_seconds=self.effort.each_seconds,
            after_run=self.bar.refresh,
            on_error=on_error,
        )
        return timed, failed

    def _memory(self, suite: str, problem: Problem, cases: list[Case], phases: tuple[str, ...]) -> None:
        with memory.edges_file(problem) as path:
            for case in cases:
                if not self.effort.measures_memory_of(case):
                    continue
                self._say(f"{problem.name}: memory of {case.name}")
                fitted = case.fit(problem)
                places = self._places(suite, fitted, case, [name for name in phases if name in MEMORY_PHASES])
                patience = 600.0 + 10 * memory_estimate(case, problem)
                peaks = memory.peak_bytes(case, fitted, tuple(places), path, patience) if places else {}
                for phase, place in places.items():
                    peak = peaks[phase]
                    if isinstance(peak, int):
                        self.rows[place] = self.rows[place].with_peak(peak)
                    else:
                        self.rows[place] = self.rows[place].failed(f"memory was not measured: {peak}")
                self._step(memory_estimate(case, problem))

    def _places(self, suite: str, problem: Problem, case: Case, phases: Iterable[str]) -> dict[str, int]:
        """Where the timed rows of a case are, by phase."""
        wanted = {self._row(suite, problem, case.name, phase).key: phase for phase in phases}
        return {
            wanted[row.key]: place
            for place, row in enumerate(self.rows)
            if row.key in wanted and row.median_ms is not None
        }

    def _row(self, suite: str, problem: Problem, case: str, phase: str) -> Row:
        return self.context.row(suite, problem, case, phase, torch.get_num_threads())

    def _estimate(self, case: Case, problem: Problem, phase: str) -> float:
        return case_estimate(case, problem, phase, self.effort)

    def _step(self, seconds: float) -> None:
        self.bar.update(seconds)
        self.keep(self.rows)

    def _say(self, title: str) -> None:
        self.bar.set_description_str(title)


def case_estimate(case: Case, problem: Problem, phase: str, effort: Effort) -> float:
    """Rough seconds of one phase of a case, for the progress bar."""
    if phase not in case.phases or (phase == "build" and case.make_graph is None):
        return 0.0
    return effort.estimate(SECONDS_PER_FLOAT * case.working_floats(problem) * RELATIVE_COST[phase])


def memory_estimate(case: Case, problem: Problem) -> float:
    """Rough seconds of the child process of a case."""
    return 6.0 + 20 * SECONDS_PER_FLOAT * case.working_floats(problem)


def layer_estimate(
    case: Case, problem: Problem, phases: Sequence[str], effort: Effort, measure_memory: bool
) -> float:
    """Rough seconds of all phases of a case."""
    times = sum(case_estimate(case, problem, phase, effort) for phase in phases)
    measured = measure_memory and effort.measures_memory_of(case)
    return times + (memory_estimate(case, problem) if measured else 0.0)


def kernel_estimate(problem: Problem, effort: Effort) -> float:
    """Rough seconds of all kernels on a problem."""
    once = 30 * SECONDS_PER_FLOAT * problem.num_slots * problem.settings.channels * problem.settings.num_local
    return min((effort.rounds + effort.warmup) * once / 10, effort.max_seconds) + 3.0


class Bar(tqdm):
    """A bar in estimated seconds, whose first guess of the remaining time is the estimate itself.

    How much faster or slower than estimated the machine is shows only after a while: the first steps are
    short, so that their speed alone would promise hours. PRIOR is the share of the work that counts as done
    at the estimated speed before anything was.
    """

    PRIOR = 0.1

    @property
    def format_dict(self) -> dict[str, Any]:
        """What is shown."""
        facts: dict[str, Any] = super().format_dict
        if facts.get("total"):
            known = self.PRIOR * facts["total"]
            facts["rate"] = (facts["n"] + known) / (facts["elapsed"] + known)
        return facts


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without the warnings that torch gives for what is done here on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse invariant checks")
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        yield
