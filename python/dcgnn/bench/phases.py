"""What is measured of a case: building its graph, a layer forward and backward, an epoch, inference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from dcgnn.bench.cases import MODEL_PHASES, Case
from dcgnn.bench.problem import Problem
from dcgnn.training import TrainConfig, TrainingRun

# Time of a phase in forward passes, for the progress bar alone.
RELATIVE_COST = {
    "build": 0.5,
    "forward": 1.0,
    "backward": 3.0,
    "forward+backward": 3.0,
    "epoch": 10.0,
    "inference": 2.5,
}


@dataclass(frozen=True)
class Run:
    """What is timed, and what comes before every run untimed."""

    timed: Callable[[], object]
    prepare: Callable[[], object] | None = None


def make_runs(case: Case, problem: Problem, phases: tuple[str, ...]) -> dict[str, Run]:
    """The phases that the case has, by name; all of them share one layer and one graph."""
    problem = case.fit(problem)
    runs: dict[str, Run] = {}
    chosen = [phase for phase in phases if phase in case.phases]
    make = case.make_graph
    if "build" in chosen and make is not None:
        runs["build"] = _wrapped(case, problem, lambda: make(problem))
    if any(phase not in ("build", *MODEL_PHASES) for phase in chosen):
        runs |= {name: run for name, run in _layer_runs(case, problem).items() if name in chosen}
    if any(phase in MODEL_PHASES for phase in chosen):
        runs |= {name: run for name, run in _model_runs(case, problem).items() if name in chosen}
    return {phase: runs[phase] for phase in chosen if phase in runs}


def _layer_runs(case: Case, problem: Problem) -> dict[str, Run]:
    graph, layer = case.graph(problem), case.layer(problem)
    leaf = problem.x.detach().clone().requires_grad_()
    weight = problem.random(2)
    held: dict[str, Any] = {}

    def forward() -> object:
        with torch.no_grad():
            return layer(problem.x, graph)

    def clear() -> None:
        leaf.grad = None
        layer.zero_grad(set_to_none=True)

    def keep() -> None:
        clear()
        held["out"] = layer(leaf, graph)

    def backward() -> None:
        held.pop("out").backward(weight)

    def both() -> None:
        layer(leaf, graph).backward(weight)

    return {
        "forward": _wrapped(case, problem, forward),
        "backward": _wrapped(case, problem, backward, keep),
        "forward+backward": _wrapped(case, problem, both, clear),
    }


def _model_runs(case: Case, problem: Problem) -> dict[str, Run]:
    run = TrainingRun(case.model(problem), problem.data(), TrainConfig(), case.graph(problem))

    def inference() -> object:
        return run.predict()

    return {
        "epoch": _wrapped(case, problem, run.step),
        "inference": _wrapped(case, problem, inference),
    }


def _wrapped(
    case: Case,
    problem: Problem,
    timed: Callable[[], object],
    prepare: Callable[[], object] | None = None,
) -> Run:
    """Both inside the context of the case."""

    def inside(function: Callable[[], object]) -> Callable[[], object]:
        def call() -> object:
            with case.context(problem):
                return function()

        return call

    return Run(inside(timed), None if prepare is None else inside(prepare))
