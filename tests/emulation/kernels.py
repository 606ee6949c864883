"""Small Triton kernels that are right, and wrong on request: the bugs that the emulators must find."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def logsumexp(values, mask):
    """A device function: kernels that call it are interpreted and compiled like others."""
    highest = tl.max(tl.where(mask, values, -float("inf")))
    return highest + tl.log(tl.sum(tl.where(mask, tl.exp(values - highest), 0.0)))


@triton.jit
def segment_softmax(rowptr, x, y, BLOCK: tl.constexpr, BUG: tl.constexpr):
    """Softmax of x over every CSR row; rows are no longer than BLOCK. Bugs: ``no mask``, ``past the end``."""
    row = tl.program_id(0)
    begin, end = tl.load(rowptr + row), tl.load(rowptr + row + 1)
    at = begin + tl.arange(0, BLOCK)
    inside = at < end
    if BUG == "no mask":
        values = tl.load(x + at).to(tl.float32)
    elif BUG == "past the end":
        values = tl.load(x + at + 1, mask=inside, other=0.0).to(tl.float32)
    else:
        values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    result = tl.exp(values - logsumexp(values, inside))
    if BUG == "unmasked store":
        tl.store(y + at, result)
    else:
        tl.store(y + at, result, mask=inside)


@triton.jit
def scatter_sum(index, x, out, n, F: tl.constexpr, BLOCK: tl.constexpr, BUG: tl.constexpr):
    """out[index[i]] += x[i], rows of F. Bug ``plain sum``: no atomics."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.arange(0, F)
    inside = rows < n
    target = tl.load(index + rows, mask=inside, other=0)
    mask = inside[:, None]
    values = tl.load(x + rows[:, None] * F + channels[None, :], mask=mask, other=0.0)
    places = out + target[:, None] * F + channels[None, :]
    if BUG == "plain sum":
        tl.store(places, tl.load(places, mask=mask, other=0.0) + values, mask=mask)
    else:
        tl.atomic_add(places, values, mask=mask)


@triton.jit
def row_dot(x, y, out, n, stride, F: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = x[i] · y[i] over a grid of (blocks, 1, 1), through a reduction that uses shared memory."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    channels = tl.arange(0, F)
    mask = (rows < n)[:, None]
    a = tl.load(x + rows[:, None] * stride + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    b = tl.load(y + rows[:, None] * stride + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + rows, tl.sum(a * b, axis=1), mask=rows < n)


@triton.jit
def program_numbers(out):
    """Writes its own number, in a grid of three dimensions."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = (z * tl.num_programs(1) + y) * tl.num_programs(0) + x
    tl.store(out + number, number)


@triton.jit
def last_one_writes(values):
    """All programs read one element, and the last one then changes it: a race."""
    value = tl.load(values)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(values, value + 1)


@triton.jit
def compare_and_swap(flags, out):
    """Every program tries to take the flag once."""
    old = tl.atomic_cas(flags, 0, tl.program_id(0) + 1)
    tl.store(out + tl.program_id(0), old)


@triton.heuristics({"BLOCK": lambda arguments: triton.next_power_of_2(arguments["n"])})
@triton.jit
def copy_all(x, y, n, BLOCK: tl.constexpr):
    """A kernel behind a decorator."""
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)
