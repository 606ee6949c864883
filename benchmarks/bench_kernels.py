"""pytest-benchmark suite of the registered ops: ``pytest benchmarks/bench_kernels.py -k genius``."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from dcgnn.bench.kernels import KERNELS, check_kernel, kernel_calls
from dcgnn.bench.problem import Problem, Settings, shaped_problem
from dcgnn.bench.runner import SMALL_GRAPH
from dcgnn.bench.shapes import SHAPES

CPU = torch.device("cpu")


@lru_cache(maxsize=1)
def calls_of(shape: str, channels: int, dtype: str):
    problem: Problem = shaped_problem(shape, Settings(channels=channels, dtype=dtype), CPU)
    return problem, kernel_calls(problem)


@lru_cache(maxsize=1)
def reasons_of(channels: int, dtype: str) -> dict[str, str | None]:
    """Why kernels must not be timed, as ``dcgnn bench`` finds it: on a small graph."""
    settings = Settings(channels=channels, dtype=dtype)
    calls = kernel_calls(shaped_problem("small", settings, CPU, shape=SMALL_GRAPH))
    return {name: check_kernel(call, dtype) for name, call in calls.items()}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("channels", [16, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(benchmark, shape, channels, dtype, kernel):
    if reason := reasons_of(channels, dtype)[kernel]:
        pytest.skip(reason)
    problem, calls = calls_of(shape, channels, dtype)
    benchmark.group = f"{shape} F={channels} {dtype}"
    benchmark.extra_info.update(slots=problem.num_slots, channels=channels)
    benchmark.pedantic(calls[kernel], warmup_rounds=1, rounds=5)
