"""Functions that several kernels call: which segments a program owns, and safe sums of logarithms."""

from __future__ import annotations

import triton
import triton.language as tl

NONE, MEAN, MAX = 0, 1, 2  # cost scales
COST_SCALE = {"none": NONE, "mean": MEAN, "max": MAX}


@triton.jit
def segments(order, bounds, begins, ends, first, last, E: tl.constexpr, TILED: tl.constexpr):
    """The E segments of this program: row in tiled buffers, segment number, first slot, size (0: none).

    Untiled: ``order[bounds[first]:bounds[last]]`` lists the segments, ``begins`` and ``ends`` their slots.
    Tiled: ``order``, ``begins`` and ``ends`` have one entry for each tile, of which there are ``last``.
    """
    item = tl.program_id(0) * E + tl.arange(0, E)
    if TILED:
        live = item < last
        owner = tl.load(order + item, mask=live, other=0).to(tl.int64)
        index = item.to(tl.int64)
    else:
        item += tl.load(bounds + first)
        live = item < tl.load(bounds + last)
        owner = tl.load(order + item, mask=live, other=0).to(tl.int64)
        index = owner
    start = tl.load(begins + index, mask=live, other=0).to(tl.int64)
    size = tl.load(ends + index, mask=live, other=0).to(tl.int64) - start
    return index, owner, start, size


@triton.jit
def log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid(x):
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def inverse_root(x):
    """1 / sqrt(x) for any x > 0. The approximate square root of a GPU takes a subnormal number for 0."""
    tiny = x < 1e-20
    return tl.where(tiny, 1073741824.0, 1.0) / tl.sqrt(tl.where(tiny, x * 1152921504606846976.0, x))


@triton.jit
def log_sum_exp(values, inside, axis: tl.constexpr):
    """Over ``axis`` of the entries that are ``inside``; 0 where there are none."""
    shift = tl.max(tl.where(inside, values, -float("inf")), axis)
    shift = tl.where(shift == -float("inf"), 0.0, shift)
    terms = tl.exp(tl.where(inside, values - tl.expand_dims(shift, axis), -float("inf")))
    total = tl.sum(terms, axis)
    return tl.log(tl.where(total == 0, 1.0, total)) + shift  # NaN passes


@triton.jit
def first_maximum(values, inside, position, axis: tl.constexpr):
    """The largest entry and its smallest ``position``."""
    largest = tl.max(tl.where(inside, values, 0.0), axis)
    is_largest = inside & (values == tl.expand_dims(largest, axis))
    return largest, tl.min(tl.where(is_largest, position, 2147483647), axis)


@triton.jit
def whole_number(value, rest, ACC: tl.constexpr):
    """A Python float reaches a kernel as float32; float64 kernels get it in two parts."""
    return tl.cast(value, ACC) + tl.cast(rest, ACC)
