"""pytest-benchmark suite of the registered ops: ``pytest benchmarks/bench_kernels.py -k genius``."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from dcgnn.bench.kernels import KERNELS, kernel_calls
from dcgnn.bench.problem import Problem, Settings, shaped_problem
from dcgnn.bench.shapes import SHAPES


@lru_cache(maxsize=1)
def calls_of(shape: str, channels: int, dtype: str):
    problem: Problem = shaped_problem(shape, Settings(channels=channels, dtype=dtype), torch.device("cpu"))
    return problem, kernel_calls(problem)


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("channels", [16, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel(benchmark, shape, channels, dtype, kernel):
    problem, calls = calls_of(shape, channels, dtype)
    benchmark.group = f"{shape} F={channels} {dtype}"
    benchmark.extra_info.update(slots=problem.num_slots, channels=channels)
    benchmark.pedantic(calls[kernel], warmup_rounds=1, rounds=5)
