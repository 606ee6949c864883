"""Shared fixtures: fresh memory is NaN, random numbers are seeded, the device is chosen once."""

from __future__ import annotations

import os
import shutil
import subprocess

# Some virtual machines announce AMX but do not let programs use it: torch's own bfloat16 matrix products
# then die of an illegal instruction. Read when torch first multiplies.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Timings on a shared machine say nothing; examples are the same in every run, so that CI is repeatable.
settings.register_profile(
    "project",
    deadline=None,
    derandomize=True,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the op tests run: cpu (default) or cuda")


def pytest_report_header() -> list[str]:
    """What the machine's compiler lets these tests do with the CUDA kernels."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return ["cuda: no nvcc on PATH: CUDA kernels run on the host only (CTest); their PTX is left out"]
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout.splitlines()[-2]
    return [f"cuda: {version}: CUDA kernels are compiled and their PTX is executed in an interpreter"]


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _poisoned_memory_and_seed() -> None:
    """torch.empty gives NaN: a kernel that reads or leaves unwritten memory cannot pass by luck."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(0)
