"""Registers, spills and occupancy of every CUDA kernel that the extension ships, as ptxas reports them.

The table of all kernels, and an error if one spills on sm_80 or newer:

    python tests/cuda_resources.py sm_75 sm_80 sm_90 sm_100
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

CSRC = Path(__file__).resolve().parent.parent / "csrc"
SOURCES = ("float32.cu", "float64.cu", "float16.cu", "bfloat16.cu")
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
BLOCK_WARPS = 8
REGISTERS = 65536
MAX_WARPS = {"sm_75": 32, "sm_86": 48, "sm_89": 48, "sm_120": 48}  # others: 64


@dataclass(frozen=True)
class Kernel:
    """One instantiation on one architecture."""

    name: str
    architecture: str
    registers: int
    spilled: int
    shared: int

    @property
    def occupancy(self) -> float:
        """Warps that are resident, of those that a multiprocessor can hold."""
        per_warp = -(-self.registers // 8) * 8 * 32  # registers are given out in eights
        blocks = min(REGISTERS // (per_warp * BLOCK_WARPS), self._max_warps // BLOCK_WARPS)
        return blocks * BLOCK_WARPS / self._max_warps

    @property
    def _max_warps(self) -> int:
        return MAX_WARPS.get(self.architecture, 64)


def demangle(names: list[str]) -> list[str]:
    """Readable names where c++filt is there."""
    if shutil.which("c++filt") is None:
        return names
    output = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [re.sub(r"^void |dcgnn::cuda::|\(.*", "", line) for line in output.stdout.splitlines()]


def parse(log: str, architecture: str) -> list[Kernel]:
    """Kernels of a `ptxas -v` log."""
    pattern = re.compile(
        r"Compiling entry function '(?P<name>\w+)'.*?(?P<stores>\d+) bytes spill stores, "
        r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
        re.DOTALL,
    )
    found = list(pattern.finditer(log))
    kernels = []
    for match, name in zip(found, demangle([match["name"] for match in found]), strict=True):
        shared = re.search(r"(\d+) bytes smem", match["rest"])
        spilled = int(match["stores"]) + int(match["loads"])
        kernels.append(
            Kernel(name, architecture, int(match["registers"]), spilled, int(shared[1]) if shared else 0)
        )
    return kernels


def measure(source: str, architecture: str) -> list[Kernel]:
    command = ["nvcc", "-std=c++17", "-O3", f"-arch={architecture}", "-Xptxas", "-v", "-cubin"]
    command += ["-I", str(CSRC), "-o", "/dev/null", str(CSRC / "cuda" / source)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(result.stderr)
    return parse(result.stderr, architecture)


def measure_all(architectures: tuple[str, ...], sources: tuple[str, ...] = SOURCES) -> list[Kernel]:
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(measure, source, arch) for arch in architectures for source in sources]
        return [kernel for job in jobs for kernel in job.result()]


def spilling(kernels: list[Kernel]) -> list[Kernel]:
    """Those that spill on sm_80 or newer."""
    return [
        kernel
        for kernel in kernels
        if kernel.spilled and int(kernel.architecture.removeprefix("sm_").rstrip("af")) >= 80
    ]


def table(kernels: list[Kernel]) -> str:
    lines = [f"{'arch':<8}{'registers':>9}{'spilled':>9}{'shared':>8}{'occupancy':>11}  kernel"]
    lines += [
        f"{kernel.architecture:<8}{kernel.registers:>9}{kernel.spilled:>9}{kernel.shared:>8}"
        f"{kernel.occupancy:>11.0%}  {kernel.name}"
        for kernel in kernels
    ]
    return "\n".join(lines)


def main() -> int:
    if shutil.which("nvcc") is None:
        print("no nvcc on PATH: the CUDA kernels cannot be compiled", file=sys.stderr)
        return 2
    kernels = measure_all(tuple(sys.argv[1:]) or ARCHITECTURES)
    print(table(kernels))
    bad = spilling(kernels)
    if bad:
        print(f"\n{len(bad)} kernels spill registers on sm_80 or newer:\n{table(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
