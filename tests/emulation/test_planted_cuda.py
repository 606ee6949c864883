"""Bugs planted in CUDA kernels: found on the host under sanitizers, and in the PTX that nvcc makes."""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from emulation import cuda_host, ptx

HERE = Path(__file__).parent
BUGS = (  # in the order of planted.cuh
    "",
    "missing mask",
    "missing barrier",
    "plain sum",
    "misaligned vector",
    "past the end",
    "divergent barrier",
    "missing warp barrier",
)
needs_compiler = pytest.mark.skipif(not cuda_host.available(), reason=cuda_host.MISSING)
needs_nvcc = pytest.mark.skipif(not ptx.nvcc.available(), reason=ptx.nvcc.MISSING)


@pytest.fixture(scope="module")
def run_host(tmp_path_factory):
    """Runs the planted kernels: bug, sanitizer, seed. One program for each sanitizer."""
    programs = {}

    def run(bug: str, sanitize: str, seed: int):
        if sanitize not in programs:
            folder = tmp_path_factory.mktemp("host")
            programs[sanitize] = cuda_host.build(HERE / "planted_main.cpp", folder, sanitize)
        return cuda_host.run(programs[sanitize], BUGS.index(bug), seed)

    return run


@needs_compiler
@pytest.mark.parametrize("sanitize", ["address,undefined", "races"])
def test_right_kernels_pass_on_the_host_in_every_order(run_host, sanitize):
    for seed in range(4):
        done = run_host("", sanitize, seed)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "right\n"


@needs_compiler
@pytest.mark.parametrize(
    ("bug", "sanitize", "message"),
    [
        ("missing mask", "address,undefined", r"heap-buffer-overflow(.|\n)*block_sums.* .*planted\.cuh:\d+"),
        ("past the end", "address,undefined", r"heap-buffer-overflow(.|\n)*block_sums.* .*planted\.cuh:\d+"),
        (
            "misaligned vector",
            "address,undefined",
            r"planted\.cuh:\d+:\d+: runtime error: .*misaligned address",
        ),
        (
            "divergent barrier",
            "address,undefined",
            r"member mask names a lane that has returned|not reached by every",
        ),
        ("missing barrier", "races", r"race: .* of shared memory(.|\n)*planted\.cuh:\d+"),
        ("missing warp barrier", "races", r"race: .* of shared memory(.|\n)*planted\.cuh:\d+"),
        ("plain sum", "races", r"race: .* of global memory(.|\n)*planted\.cuh:\d+"),
    ],
)
def test_bugs_are_found_on_the_host(run_host, bug, sanitize, message):
    for seed in (0, 2):
        done = run_host(bug, sanitize, seed)
        assert done.returncode != 0
        assert re.search(message, done.stderr), done.stderr


@needs_compiler
def test_the_order_of_threads_shows_a_missing_barrier(run_host):
    results = [run_host("missing warp barrier", "address,undefined", seed).stdout for seed in range(4)]
    assert "wrong\n" in results


HOST_RULES = {
    "own lane": ("__shfl_xor_sync(0xffffu, 1, 1);", "not in its own member mask"),
    "outside": ("if (threadIdx.x < 16) __shfl_xor_sync(0xffffu, 1, 16);", "outside of the member mask"),
    "returned": ("if (threadIdx.x == 3) return; __syncwarp();", "a lane that has returned"),
    "elsewhere": ("if (threadIdx.x == 3) __syncthreads(); else __syncwarp();", "waits elsewhere"),
    "mixed": ("if (threadIdx.x < 9) __syncwarp(); else __shfl_sync(~0u, 1, 1);", "in a different function"),
    "barrier": ("if (threadIdx.x < 32) __syncthreads();", "__syncthreads is not reached by every thread"),
}


WORDS = """
#include "tests/cuda_host.h"
#define EXPECT(condition) if (!(condition)) { std::puts(#condition); failed = 1; }
static int failed = 0;
__global__ void words(int* count, double* sums, int bytes) {
  const int lane = threadIdx.x % 32, first = lane / 8 * 8;
  EXPECT(__shfl_sync(~0u, lane, 5) == 5);
  EXPECT(__shfl_sync(~0u, lane, 5, 8) == first + 5);
  EXPECT(__shfl_xor_sync(~0u, 2.5 * lane, 3) == 2.5 * (lane ^ 3));
  EXPECT(__shfl_up_sync(~0u, lane, 2, 8) == (lane - 2 < first ? lane : lane - 2));
  EXPECT(__shfl_down_sync(~0u, lane, 2) == (lane + 2 > 31 ? lane : lane + 2));
  EXPECT(__ballot_sync(~0u, lane < 4) == 15u);
  EXPECT(__any_sync(~0u, lane == 9) && !__any_sync(~0u, lane > 40));
  EXPECT(__all_sync(~0u, lane < 32) && !__all_sync(~0u, lane < 31));
  if (lane < 16) EXPECT(__shfl_xor_sync(0xffffu, lane, 1) == (lane ^ 1));
  CUDA_HOST_DYNAMIC_SHARED(float, shared);
  if (threadIdx.x == 0) EXPECT(bytes == 0 || std::isnan(shared[0]));
  __syncthreads();
  const unsigned me = threadIdx.x + blockDim.x * threadIdx.y;
  shared[me] = float(me);
  __syncthreads();
  EXPECT(shared[63 - me] == float(63 - me));
  atomicAdd(count, 1);
  atomicMax(count + 1, int(me));
  atomicMin(count + 2, -int(me));
  atomicCAS(count + 3, 0, 7);
  atomicExch(count + 4, 9);
  atomicAdd(sums, 0.5);
  EXPECT(blockIdx.y < gridDim.y && blockIdx.z < gridDim.z && warpSize == 32);
  EXPECT(__popc(7u) == 3 && __clz(1) == 31 && __clz(0) == 32 && __ffs(8) == 4);
  const float four = 4.f;
  EXPECT(rsqrtf(four) == 0.5f && __fdividef(four, 2.f) == 2.f && __ldg(&four) == 4.f && max(1, 2) == 2);
}
__global__ void rules(int rule) {
RULES
}
int main(int, char** arguments) {
  const unsigned seed = unsigned(std::atoi(arguments[1]));
  const int rule = std::atoi(arguments[2]);
  if (rule >= 0) cuda_host::launch(1, 64, [&] { rules(rule); }, seed);
  int count[5] = {};
  double sums[1] = {};
  cuda_host::launch(dim3(2, 2, 2), dim3(32, 2), [&] { words(count, sums, 256); }, seed, 256);
  EXPECT(count[0] == 512 && count[1] == 63 && count[2] == -63 && count[3] == 7 && count[4] == 9);
  EXPECT(sums[0] == 256.0);
  return failed;
}
"""


@needs_compiler
@pytest.mark.parametrize("sanitize", ["address,undefined", "races"])
def test_words_of_cuda_mean_on_the_host_what_they_mean_there(tmp_path, sanitize):
    rules = "\n".join(f"if (rule == {i}) {{ {body} }}" for i, (body, _) in enumerate(HOST_RULES.values()))
    program = cuda_host.build(WORDS.replace("RULES", rules), tmp_path, sanitize)
    for seed in range(3):
        done = cuda_host.run(program, seed, -1)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        for rule, (_, message) in enumerate(HOST_RULES.values()):
            done = cuda_host.run(program, seed, rule)
            assert done.returncode == 3
            assert message in done.stderr


@cache
def compiled(arch: str) -> ptx.Module:
    return ptx.parse(ptx.nvcc.compile(HERE / "planted.cuh", arch, ["-x", "cu"]))


def run_ptx(bug: str, arch: str, seed: int | None = None) -> None:
    """All three kernels; compares with numpy."""
    kernels = [
        compiled(arch).kernel(f"{name}ILi{BUGS.index(bug)}E")
        for name in ("block_sums", "double_rows", "reverse_lanes")
    ]
    random = np.random.default_rng(0)
    n, rows, width = 300, 10, 8
    x, table = (
        random.standard_normal(n).astype(np.float32),
        random.standard_normal((rows, width)).astype(np.float32),
    )
    out, total, reverse = np.empty_like(x), np.zeros(1, np.float32), np.empty(32, np.float32)
    doubled = table.copy()
    ptx.launch(kernels[0], 3, 128, [x, out, total, n], uninitialised=[1], seed=seed)
    ptx.launch(kernels[1], 1, 32, [doubled, rows, width], seed=seed)
    ptx.launch(kernels[2], 1, 32, [x, reverse], uninitialised=[1], seed=seed)
    sums = [x[begin : begin + 128].astype(np.float64).sum() for begin in range(0, n, 128)]
    np.testing.assert_allclose(out, np.repeat(sums, 128)[:n], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(total[0], sum(sums), rtol=1e-4)
    np.testing.assert_array_equal(doubled, 2 * table)
    np.testing.assert_array_equal(reverse, x[31::-1])


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_75", "sm_90"])
def test_right_kernels_pass_as_ptx_in_every_order(arch):
    for seed in (None, 1):
        run_ptx("", arch, seed)


@needs_nvcc
@pytest.mark.parametrize(
    ("bug", "error", "message"),
    [
        ("missing mask", ptx.OutOfBounds, "global load .* outside of argument 0"),
        ("past the end", ptx.OutOfBounds, "global load .* outside of argument 0"),
        ("misaligned vector", ptx.Misaligned, "16 bytes"),
        ("divergent barrier", ptx.DivergentBarrier, "exited"),
        ("missing barrier", (ptx.Race, ptx.Uninitialised), "shared memory"),
        ("missing warp barrier", ptx.Race, "shared memory"),
        ("plain sum", ptx.Race, "argument 2"),
    ],
)
def test_bugs_are_found_in_ptx(bug, error, message):
    with pytest.raises(error, match=message) as caught:
        run_ptx(bug, "sm_90")
    assert re.search(r"source file \d line \d+", str(caught.value))


@needs_nvcc
def test_nvcc_says_what_is_wrong(tmp_path):
    with pytest.raises(RuntimeError, match="nvcc failed"):
        ptx.nvcc.compile("this is not C++")


def test_without_nvcc_the_reason_is_given(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert not ptx.nvcc.available()
    with pytest.raises(RuntimeError, match="nvcc is not installed"):
        ptx.nvcc.compile("")
