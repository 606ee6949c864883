"""What a run of the benchmark measures, in which order, and how long it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from dcgnn.bench import memory, sweeps
from dcgnn.bench.cases import CASES, PHASES, find_cases
from dcgnn.bench.problem import Problem, Settings, loaded_problem, shaped_problem
from dcgnn.bench.runner import Effort, Runner, case_estimate, kernel_estimate, memory_estimate
from dcgnn.bench.shapes import SHAPES, generation_bytes

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
        find_cases(self.cases)
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

    def at(self, channels: int) -> Settings:
        """The settings at one width."""
        return replace(self.settings, channels=channels)


def measure(plan: Plan, runner: Runner) -> None:
    """Run the plan; rows are in the runner, also when it is interrupted."""
    runner.bar.total = round(estimate(plan, runner.effort), 1)
    runner.bar.refresh()
    if plan.suites:
        for name in (*plan.shapes, *plan.graphs):
            _measure_graph(plan, runner, name)
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


def _measure_graph(plan: Plan, runner: Runner, name: str) -> None:
    runner.bar.set_description_str(f"making {name}")
    settings = plan.at(plan.channels[0])
    if name in plan.graphs:
        problem = loaded_problem(name, settings, plan.device, data_root=plan.data_root)
    else:
        reason = memory.too_large(generation_bytes(SHAPES[name]), torch.device("cpu"))
        if reason is not None:
            for suite in plan.suites:
                runner.leave_out(suite, _sizes(plan, name, settings), "all", f"making the graph {reason}")
            return
        problem = shaped_problem(name, settings, plan.device, seed=plan.seed)
    for channels in plan.channels:
        wide = problem.with_settings(plan.at(channels))
        if "layers" in plan.suites:
            runner.layers(
                "layers", wide, find_cases(plan.cases), tuple(plan.phases), measure_memory=plan.memory
            )
        if "kernels" in plan.suites:
            reason = memory.too_large(3 * 4 * CASES["DCConv"].working_floats(wide), plan.device)
            if reason is None:
                runner.kernels("kernels", wide)
            else:
                runner.leave_out("kernels", wide, "all", reason)


def estimate(plan: Plan, effort: Effort) -> float:
    """Rough seconds of the whole plan, which weigh the progress bar."""
    total = 1.0
    cases = [case for case in find_cases(plan.cases) if case.missing() is None]
    for name in (*plan.shapes, *plan.graphs) if plan.suites else ():
        for channels in plan.channels:
            # The size of a graph in files is not known before it is read.
            problem = _sizes(plan, name if name in SHAPES else "cornell5", plan.at(channels))
            if "layers" in plan.suites:
                for case in cases:
                    total += sum(case_estimate(case, problem, phase, effort) for phase in plan.phases)
                    if plan.memory and (effort.memory is None or case.name in effort.memory):
                        total += memory_estimate(case, problem)
            if "kernels" in plan.suites:
                total += kernel_estimate(problem, effort)
    base = _sizes(plan, plan.sweep_shape, plan.at(plan.channels[0]))
    edges = sweeps.edge_values(plan.edges)
    return total + sum(sweeps.estimate(sweeps.SWEEPS[name], base, edges, effort) for name in plan.sweeps)


def _sizes(plan: Plan, shape: str, settings: Settings) -> Problem:
    """A problem with sizes but without memory."""
    known = SHAPES[shape]
    edges = torch.empty(2, 2 * known.num_edges, device="meta")
    return Problem(shape, edges, known.num_nodes, settings, plan.device)
