"""The guard around interpreted Triton kernels: results, every check, and the planted bugs."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: Triton kernels cannot be emulated here")

import triton.language as tl

from emulation import kernels, triton_guard
from emulation.triton_guard import OutOfBounds, Race, guard

SEEDS = [None, 0, 1, 2]


def rows(dtype=torch.float32):
    lengths = torch.tensor([3, 0, 7, 1, 16, 5])
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int()
    return rowptr, torch.randn(int(rowptr[-1])).to(dtype)


def softmax(bug="", dtype=torch.float32):
    rowptr, x = rows(dtype)
    y = torch.full_like(x, float("nan"))
    kernels.segment_softmax[(len(rowptr) - 1,)](rowptr, x, y, BLOCK=16, BUG=bug)
    pieces = [x[a:b].double().softmax(0) for a, b in pairwise(rowptr)]
    return y.double(), torch.cat(pieces)


def sums(bug="", n=20, num_targets=6):
    index, x = torch.randint(0, num_targets, (n,)), torch.randn(n, 4)
    out = torch.zeros(num_targets, 4)
    kernels.scatter_sum[(-(-n // 8),)](index, x, out, n, F=4, BLOCK=8, BUG=bug)
    return out, torch.zeros_like(out).index_add(0, index, x)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_kernels_give_what_they_should(seed, dtype):
    with guard(seed=seed) as report:
        y, expected = softmax(dtype=dtype)
        torch.testing.assert_close(y, expected, rtol=2e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-4)
        torch.testing.assert_close(*sums())
    assert (report.launches, report.programs) == (2, 6 + 3)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bug", ["no mask", "past the end"])
def test_accesses_past_the_end_are_found(seed, bug):
    with guard(seed=seed), pytest.raises(OutOfBounds, match=r"elements outside of every tensor; .* x \("):
        softmax(bug)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_without_atomics_are_found(seed):
    with guard(seed=seed), pytest.raises(Race, match="of out by program"):
        sums("plain sum")
    with guard(seed=seed, races=False):
        sums("plain sum")
    with guard(seed=seed):
        sums("plain sum", n=8)


def test_an_unmasked_store_into_the_next_row_is_a_race():
    with guard(races=False), pytest.raises(OutOfBounds, match="store by program"):
        softmax("unmasked store")
    rowptr, x = rows()
    y = torch.zeros(len(x) + 16)
    x = torch.cat([x, torch.zeros(16)])
    with guard(seed=1), pytest.raises(Race, match="store of y"):
        kernels.segment_softmax[(6,)](rowptr, x, y, BLOCK=16, BUG="unmasked store")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_write_after_the_own_read_after_that_of_another_program(seed):
    with guard(seed=seed), pytest.raises(Race, match="of values by program"):
        kernels.last_one_writes[(3,)](torch.zeros(1))
    with guard(seed=seed):
        kernels.last_one_writes[(1,)](torch.zeros(1))


def test_a_view_counts_with_its_own_extent():
    whole, out = torch.randn(64), torch.zeros(64)
    with guard():
        kernels.copy_all[(1,)](whole[8:24], out[8:24], 16)
        with pytest.raises(OutOfBounds, match="load by program 0: 1 active"):
            kernels.copy_all[(1,)](whole[8:24], out, 17)
    torch.testing.assert_close(out[8:24], whole[8:24])


def test_arguments_that_overlap_share_their_history():
    memory = torch.zeros(40)
    with guard(), pytest.raises(Race):
        kernels.row_dot[(2,)](memory[:16], memory[16:32], memory[8:16], 8, 2, F=2, BLOCK=4)


def test_the_seed_shuffles_and_covers_a_grid_of_three_dimensions():
    orders = []
    for seed in (None, 1, 2):
        out = torch.full((24,), -1, dtype=torch.int32)
        with guard(seed=seed):
            kernels.program_numbers[(2, 3, 4)](out)
        assert out.tolist() == list(range(24))
        flag, old = torch.zeros(1, dtype=torch.int32), torch.zeros(6, dtype=torch.int32)
        with guard(seed=seed):
            kernels.compare_and_swap[(6,)](flag, old)
        assert (old == 0).sum() == 1
        assert set(old.tolist()) == {0, int(flag)}
        orders.append(int(flag))
    assert orders[0] == 1
    assert len(set(orders)) > 1


def test_language_and_launches_are_as_before_afterwards():
    functions = tl.load, tl.sum, tl.core.load, tl.math.exp, tl.tensor.__add__
    with guard():
        softmax()
    with pytest.raises(OutOfBounds), guard():
        softmax("no mask")
    assert functions == (tl.load, tl.sum, tl.core.load, tl.math.exp, tl.tensor.__add__)
    assert "TRITON_INTERPRET" not in os.environ
    with pytest.raises(RuntimeError, match="scope of a kernel"):
        kernels.logsumexp(1, 2)


def test_errors_of_a_kernel_are_not_hidden():
    with guard(), pytest.raises(TypeError):
        kernels.segment_softmax[(1,)](1, 2)
    assert issubclass(OutOfBounds, triton_guard.GuardError)
    assert issubclass(Race, triton_guard.GuardError)
