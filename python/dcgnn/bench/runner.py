"""Runs suites: gate first, then interleaved rounds, then memory; every result is handed on at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from tqdm import tqdm

from dcgnn.bench import gate, kernels, limits, memory
from dcgnn.bench.cases import Case
from dcgnn.bench.limits import Rates
from dcgnn.bench.phases import RELATIVE_COST, Run, make_runs
from dcgnn.bench.problem import Problem
from dcgnn.bench.rows import Context, Row
from dcgnn.bench.shapes import Shape, make_edges
from dcgnn.timing import interleaved_samples
from dcgnn_kernels import release_memory

SECONDS_PER_FLOAT = 1.3e-9  # of working memory, for the progress bar alone
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
        passed = self._gate(suite, problem, list(cases), phases)
        runs: dict[str, dict[str, Run]] = {}
        for case in passed:
            runs[case.name] = make_runs(case, problem, phases)
        for phase in phases:
            group = {case.name: runs[case.name][phase] for case in passed if phase in runs[case.name]}
            timed = self._timed(f"{problem.name}: {phase}", group)
            for case in passed:
                if case.name in timed:
                    fitted = case.fit(problem)
                    row = self._row(suite, fitted, case.name, phase)
                    known = rates is not None and case.name == "DCConv" and phase == "forward"
                    least = limits.forward_seconds(fitted, rates) if known and rates else None
                    self.rows.append(row.timed(timed[case.name], least))
            self._step(sum(self._estimate(case, problem, phase) for case in passed if case.name in group))
        del runs
        if measure_memory:
            self._memory(suite, problem, passed, phases)

    def kernels(self, suite: str, problem: Problem, rates: Rates | None = None) -> None:
        """Time every kernel and hold it against the measured rates."""
        self._say(f"{problem.name}: rates of the machine")
        rates = rates or self.rates(suite, problem)
        reasons = self._kernel_gate(problem)
        calls = kernels.kernel_calls(problem)
        work = limits.kernel_work(problem)
        good: dict[str, Run] = {name: Run(call) for name, call in calls.items() if reasons[name] is None}
        if suite == "kernels":
            good["ego_graph"] = Run(lambda: torch.ops.dcgnn.ego_graph(problem.edge_index, problem.num_nodes))
        timed = self._timed(f"{problem.name}: kernels", good)
        for name in (*calls, "ego_graph"):
            phase = "backward" if name.endswith("backward") else "forward"
            row = self._row(suite, problem, name, phase)
            if name in timed:
                self.rows.append(row.timed(timed[name], work[name].seconds(rates)))
            elif reasons.get(name):
                self.rows.append(row.failed(reasons[name] or ""))
        self._step(kernel_estimate(problem, self.effort))

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

    def _gate(self, suite: str, problem: Problem, cases: list[Case], phases: tuple[str, ...]) -> list[Case]:
        passed = []
        for case in cases:
            self._say(f"{problem.name}: checking {case.name}")
            reason = case.missing() or memory.too_large(
                case.fit(problem).settings.torch_dtype.itemsize * case.working_floats(problem), problem.device
            )
            reason = reason or gate.check(case, problem)
            if reason is None:
                passed.append(case)
            else:
                self.leave_out(suite, case.fit(problem), case.name, reason)
                self.bar.update(sum(self._estimate(case, problem, phase) for phase in phases))
        release_memory()
        return passed

    def _kernel_gate(self, problem: Problem) -> dict[str, str | None]:
        edges = make_edges(SMALL_GRAPH).to(problem.device)
        small = Problem("small", edges, SMALL_GRAPH.num_nodes, problem.settings, problem.device)
        return {
            name: kernels.check_kernel(call, problem.settings.dtype)
            for name, call in kernels.kernel_calls(small).items()
        }

    def _timed(self, title: str, group: dict[str, Run]) -> dict:
        self._say(title)
        return interleaved_samples(
            {name: run.timed for name, run in group.items()},
            prepare={name: run.prepare for name, run in group.items() if run.prepare is not None},
            rounds=self.effort.rounds,
            warmup=self.effort.warmup,
            max_seconds=self.effort.max_seconds,
            each_seconds=self.effort.each_seconds,
            after_run=self.bar.refresh,
        )

    def _memory(self, suite: str, problem: Problem, cases: list[Case], phases: tuple[str, ...]) -> None:
        chosen = tuple(phase for phase in phases if phase in ("forward", "forward+backward", "epoch"))
        with memory.edges_file(problem) as path:
            for case in cases:
                if self.effort.memory is not None and case.name not in self.effort.memory:
                    continue
                self._say(f"{problem.name}: memory of {case.name}")
                fitted = case.fit(problem)
                for phase, peak in memory.peak_bytes(case, fitted, chosen, path).items():
                    row = self._row(suite, fitted, case.name, phase)
                    place = next(i for i, known in enumerate(self.rows) if known.key == row.key)
                    if isinstance(peak, int):
                        self.rows[place] = self.rows[place].with_peak(peak)
                    else:
                        self.rows[place] = self.rows[place].failed(f"memory was not measured: {peak}")
                self._step(memory_estimate(case, problem))

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
    if phase not in case.phases:
        return 0.0
    return effort.estimate(SECONDS_PER_FLOAT * case.working_floats(problem) * RELATIVE_COST[phase])


def memory_estimate(case: Case, problem: Problem) -> float:
    """Rough seconds of the child process of a case."""
    return 6.0 + 20 * SECONDS_PER_FLOAT * case.working_floats(problem)


def kernel_estimate(problem: Problem, effort: Effort) -> float:
    """Rough seconds of all kernels on a problem."""
    once = 30 * SECONDS_PER_FLOAT * problem.num_slots * problem.settings.channels * problem.settings.num_local
    return min((effort.rounds + effort.warmup) * once / 10, effort.max_seconds) + 3.0


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Without the warnings that torch gives for what is done here on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse invariant checks")
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        yield
