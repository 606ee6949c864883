"""What a run of the benchmark measures, in which order, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from dcgnn.bench import memory, sweeps
from dcgnn.bench.cases import CASES, PHASES, find_cases
from dcgnn.bench.problem import Problem, Settings, loaded_problem, shape_name, shaped_problem
from dcgnn.bench.runner import Effort, Runner, kernel_estimate, layer_estimate
from dcgnn.bench.shapes import SHAPES, generation_bytes
from dcgnn.data.registry import check_name

PAPER_SHAPES = ("penn94", "cornell5", "genius")
SUITES = ("layers", "kernels")

#: What ``--quick`` measures: the paper's runtime table and no more.
QUICK_CASES = ("DCConv", "GCNConv(edge_index)", "GATConv", "GCNConv(CSR)")
QUICK_PHASES = ("forward", "forward+backward")
QUICK_EFFORT = Effort(rounds=5, warmup=1, max_seconds=12.0, each_seconds=5.0, memory=("DCConv",))


@dataclass(frozen=True)
class Plan:
    """Everything that the command line chooses.

    Args:
        shapes: Random graphs of these published shapes.
        graphs: Graphs by the names of :func:`dcgnn.data.load_graph`.
        data_root: Folder of their files.
        cases: Names of the layers.
        phases: What is timed of them.
        suites: ``"layers"``, ``"kernels"`` or both.
        sweeps: Names of sweeps.
        sweep_shape: Shape of the graph on which sizes other than edges are swept.
        edges: Values of the sweep over edges; None: the usual ones.
        channels: Widths of the layers; a sweep takes the first.
        settings: The other sizes.
        device: Where to run.
        seed: Seed of the random graphs.
        memory: Whether to measure peak memory.
    """

    shapes: Sequence[str] = PAPER_SHAPES
    graphs: Sequence[str] = ()
    data_root: str | None = None
    cases: Sequence[str] = tuple(CASES)
    phases: Sequence[str] = PHASES
    suites: Sequence[str] = SUITES
    sweeps: Sequence[str] = ()
    sweep_shape: str = "cornell5"
    edges: Sequence[int] | None = None
    channels: Sequence[int] = (64,)
    settings: Settings = field(default_factory=Settings)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    memory: bool = True

    def __post_init__(self) -> None:
        for name in ("shapes", "graphs", "cases", "phases", "suites", "sweeps", "channels"):
            object.__setattr__(self, name, tuple(dict.fromkeys(getattr(self, name))))  # once each
        find_cases(self.cases)
        for name in self.graphs:
            check_name(name)
        for what, names, known in (
            ("shape", (*self.shapes, self.sweep_shape), SHAPES),
            ("phase", self.phases, PHASES),
            ("suite", self.suites, SUITES),
            ("sweep", self.sweeps, sweeps.SWEEPS),
        ):
            for name in names:
                if name not in known:
                    raise ValueError(f"unknown {what} {name!r}; known are {', '.join(known)}")
        if not self.channels or min(self.channels) < 1:
            raise ValueError(f"channels must be positive, got {list(self.channels)}")
        sweeps.edge_values(self.edges)
        if self.seed < 0:
            raise ValueError(f"--seed must not be negative, got {self.seed}")
        if not self.sweeps and not (self.suites and (self.shapes or self.graphs)):
            raise ValueError("nothing to measure: give a shape or a graph and a suite, or a sweep")

    def at(self, channels: int) -> Settings:
        """The settings at one width."""
        return replace(self.settings, channels=channels)


def measure(plan: Plan, runner: Runner) -> None:
    """Run the plan; rows are in the runner, also when it is interrupted."""
    runner.bar.total = round(estimate(plan, runner.effort), 1)
    runner.bar.refresh()
    if plan.suites:
        for name in plan.shapes:
            _measure_shape(plan, runner, name)
        for name in plan.graphs:
            runner.bar.set_description_str(f"reading {name}")
            problem = loaded_problem(name, plan.at(plan.channels[0]), plan.device, data_root=plan.data_root)
            runner.skip(_graph_estimate(plan, _guess(plan), runner.effort))
            runner.skip(-_graph_estimate(plan, problem, runner.effort))
            _measure_graph(plan, runner, problem)
    if plan.sweeps:
        settings = plan.at(plan.channels[0])
        others = [name for name in plan.sweeps if name != "edges"]
        if "edges" in plan.sweeps:
            sweeps.sweep_edges(runner, settings, plan.device, sweeps.edge_values(plan.edges), plan.seed)
        if others:
            problem = shaped_problem(plan.sweep_shape, settings, plan.device, seed=plan.seed)
            for name in others:
                if name == "threads":
                    sweeps.sweep_threads(runner, problem)
                else:
                    sweeps.sweep_settings(runner, sweeps.SWEEPS[name], problem)
    runner.bar.update(max(0.0, runner.bar.total - runner.bar.n))


def _measure_shape(plan: Plan, runner: Runner, name: str) -> None:
    runner.bar.set_description_str(f"making {name}")
    settings = plan.at(plan.channels[0])
    reason = memory.too_large("making the graph", generation_bytes(SHAPES[name]), torch.device("cpu"))
    if reason is None:
        _measure_graph(plan, runner, shaped_problem(name, settings, plan.device, seed=plan.seed))
        return
    sizes = _sizes(plan, name, settings)
    for suite in plan.suites:
        runner.leave_out(suite, sizes, "all", reason)
    runner.skip(_graph_estimate(plan, sizes, runner.effort))


def _measure_graph(plan: Plan, runner: Runner, problem: Problem) -> None:
    for channels in plan.channels:
        wide = problem.with_settings(plan.at(channels))
        if "layers" in plan.suites:
            runner.layers(
                "layers", wide, find_cases(plan.cases), tuple(plan.phases), measure_memory=plan.memory
            )
        if "kernels" in plan.suites:
            need = 3 * 4 * CASES["DCConv"].working_floats(wide)
            reason = memory.too_large("timing the kernels", need, plan.device)
            if reason is None:
                runner.kernels("kernels", wide)
            else:
                runner.leave_out("kernels", wide, "all", reason)
                runner.skip(kernel_estimate(wide, runner.effort))


def estimate(plan: Plan, effort: Effort) -> float:
    """Rough seconds of the whole plan, which weigh the progress bar."""
    total = 1.0
    problems = [_sizes(plan, name, plan.settings) for name in plan.shapes] + [_guess(plan)] * len(plan.graphs)
    total += sum(_graph_estimate(plan, problem, effort) for problem in problems)
    base = _sizes(plan, plan.sweep_shape, plan.at(plan.channels[0]))
    edges = sweeps.edge_values(plan.edges)
    return total + sum(sweeps.estimate(sweeps.SWEEPS[name], base, edges, effort) for name in plan.sweeps)


def _graph_estimate(plan: Plan, problem: Problem, effort: Effort) -> float:
    """Rough seconds of all suites and widths on one graph."""
    total = 0.0
    cases = [case for case in find_cases(plan.cases) if case.missing() is None]
    for channels in plan.channels:
        wide = problem.with_settings(plan.at(channels))
        if "layers" in plan.suites:
            total += sum(layer_estimate(case, wide, plan.phases, effort, plan.memory) for case in cases)
        if "kernels" in plan.suites:
            total += kernel_estimate(wide, effort)
    return total


def _guess(plan: Plan) -> Problem:
    """Stands for a graph in files, whose size is not known before it is read."""
    return _sizes(plan, "cornell5", plan.settings)


def _sizes(plan: Plan, shape: str, settings: Settings) -> Problem:
    """A problem with sizes but without memory."""
    known = SHAPES[shape]
    edges = torch.empty(2, 2 * known.num_edges, device="meta")
    return Problem(shape_name(shape), edges, known.num_nodes, settings, plan.device, plan.seed)
