"""What ptxas says about the CUDA kernels: no spills on sm_80, and a parser that sees them."""

from __future__ import annotations

import cuda_resources
import pytest
from cuda_resources import Kernel
from emulation import ptx

LOG = """
ptxas info    : Compiling entry function '_Z5firstv' for 'sm_90'
ptxas info    : Function properties for _Z5firstv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 2048 bytes smem
ptxas info    : Compiling entry function '_Z6secondv' for 'sm_90'
ptxas info    : Function properties for _Z6secondv
    24 bytes stack frame, 36 bytes spill stores, 48 bytes spill loads
ptxas info    : Used 128 registers, used 0 barriers, 24 bytes cumulative stack size
"""


def test_spills_and_shared_memory_are_read_from_the_log():
    first, second = cuda_resources.parse(LOG, "sm_90")
    assert (first.registers, first.spilled, first.shared) == (40, 0, 2048)
    assert (second.registers, second.spilled, second.shared) == (128, 84, 0)
    assert cuda_resources.spilling([first, second]) == [second]
    assert "second" in cuda_resources.table([second])


def test_spills_count_from_sm_80_on():
    kernels = [Kernel("k", architecture, 255, 8, 0) for architecture in ("sm_75", "sm_80", "sm_100a")]
    assert cuda_resources.spilling(kernels) == kernels[1:]


@pytest.mark.parametrize(
    ("architecture", "registers", "occupancy"),
    [
        ("sm_80", 32, 1.0),
        ("sm_80", 64, 0.5),
        ("sm_80", 65, 0.375),
        ("sm_75", 64, 1.0),
        ("sm_120", 128, 1 / 3),
    ],
)
def test_occupancy(architecture, registers, occupancy):
    assert Kernel("k", architecture, registers, 0, 0).occupancy == pytest.approx(occupancy)


@pytest.mark.skipif(not ptx.nvcc.available(), reason=f"registers and spills are left out: {ptx.nvcc.MISSING}")
def test_no_float32_kernel_spills_on_sm_80():
    """All types and architectures: `make cuda-resources`."""
    kernels = cuda_resources.measure("float32.cu", "sm_80")
    assert len(kernels) == 34
    assert not cuda_resources.spilling(kernels), cuda_resources.table(cuda_resources.spilling(kernels))
