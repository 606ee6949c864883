"""pytest-benchmark suite of the layers: ``pytest benchmarks/bench_layers.py -k "penn94 and DCConv"``."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from dcgnn.bench import gate, memory
from dcgnn.bench.cases import CASES, PHASES
from dcgnn.bench.phases import make_runs
from dcgnn.bench.problem import Problem, Settings, shaped_problem
from dcgnn.bench.shapes import SHAPES


@lru_cache(maxsize=1)
def problem_of(shape: str, channels: int) -> Problem:
    return shaped_problem(shape, Settings(channels=channels), torch.device("cpu"))


@lru_cache(maxsize=1)
def runs_of(shape: str, channels: int, name: str):
    case, problem = CASES[name], problem_of(shape, channels)
    reason = case.missing() or memory.case_too_large(case, problem) or gate.check(case, problem)
    return reason, {} if reason else make_runs(case, problem, PHASES)


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("channels", [16, 64, 128])
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("phase", PHASES)
def test_layer(benchmark, shape, channels, name, phase):
    reason, runs = runs_of(shape, channels, name)
    if reason:
        pytest.skip(reason)
    if phase not in runs:
        pytest.skip(f"{name} has no {phase}")
    problem = problem_of(shape, channels)
    benchmark.group = f"{shape} F={channels} {phase}"
    benchmark.extra_info.update(slots=problem.num_slots, channels=channels)
    setup = runs[phase].prepare
    benchmark.pedantic(runs[phase].timed, setup=setup, warmup_rounds=1, rounds=5)
