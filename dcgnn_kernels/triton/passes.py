r"""Passes of global_sinkhorn over its matrix of costs ``[N, Ω]``; a program holds whole rows.

Columns are reduced in two stages: each of a fixed number of programs adds its rows into a partial result
``[P, Ω]``, then ``column_potential`` or ``column_sum`` combines these in order. The number of programs
follows from N alone, so the bits do not depend on the GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcgnn_kernels.triton.device import log_sum_exp, whole_number


@triton.jit
def squared_distances(
    z,
    centroids,
    costs,
    num_rows,
    num_columns,
    num_channels,
    B: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Sums of squared differences, on a grid of (rows, columns).

    Dot products would need fewer instructions, but lose digits where points lie further from the origin than
    from each other.
    """
    accumulate = costs.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here, there = row < num_rows, column < num_columns
    total = tl.zeros([B, COLUMNS, FEATURES], dtype=accumulate)
    for start in range(0, num_channels, FEATURES):
        channel = start + tl.arange(0, FEATURES)
        has = channel < num_channels
        points = tl.load(
            z + row[:, None] * num_channels + channel[None, :], mask=here[:, None] & has[None, :], other=0.0
        )
        centres = tl.load(
            centroids + column[:, None] * num_channels + channel[None, :],
            mask=there[:, None] & has[None, :],
            other=0.0,
        )
        difference = points.to(accumulate)[:, None, :] - centres.to(accumulate)[None, :, :]
        total += difference * difference
    place = row[:, None] * num_columns + column[None, :]
    tl.store(costs + place, tl.sum(total, 2), mask=here[:, None] & there[None, :])


@triton.jit
def block(number, num_rows, num_columns, B: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.cast(number, tl.int64) * B + tl.arange(0, B)
    columns = tl.arange(0, COLUMNS)
    valid = (row < num_rows)[:, None] & (columns < num_columns)[None, :]
    return row[:, None] * num_columns + columns[None, :], valid, row, columns


@triton.jit
def block_logits(costs, scale, place, valid, lam):
    cost = tl.load(costs + place, mask=valid, other=0.0)
    divisor = tl.load(scale)
    return -lam * tl.where(divisor == 0, 0.0, cost / tl.where(divisor == 0, 1.0, divisor))


@triton.jit
def row_potential(logits, g, valid, num_rows):
    count = tl.cast(num_rows, logits.dtype)
    return -tl.log(count) - log_sum_exp(logits + g[None, :], valid, 1)


@triton.jit
def load_columns(pointer, num_columns, GIVEN: tl.constexpr, ACC: tl.constexpr, COLUMNS: tl.constexpr):
    """A vector over the columns, or 0 where none is given."""
    columns = tl.arange(0, COLUMNS)
    if GIVEN:
        return tl.load(pointer + columns, mask=columns < num_columns, other=0.0)
    return tl.zeros([COLUMNS], dtype=ACC)


@triton.jit
def forward_step(
    costs,
    scale,
    before,
    partial,
    num_rows,
    num_columns,
    lam,
    lam_rest,
    FIRST: tl.constexpr,
    B: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Each program's columns of :math:`L + f`: their maximum and the sum of exponentials, ``[P, 2, Ω]``."""
    accumulate = costs.dtype.element_ty
    lam = whole_number(lam, lam_rest, accumulate)
    g = load_columns(before, num_columns, not FIRST, accumulate, COLUMNS)
    shift = tl.full([COLUMNS], -float("inf"), dtype=accumulate)
    total = tl.zeros([COLUMNS], dtype=accumulate)
    for number in range(tl.program_id(0), tl.cdiv(num_rows, B), tl.num_programs(0)):
        place, valid, _row, columns = block(number, num_rows, num_columns, B, COLUMNS)
        logits = block_logits(costs, scale, place, valid, lam)
        values = logits + row_potential(logits, g, valid, num_rows)[:, None]
        higher = tl.maximum(shift, tl.max(tl.where(valid, values, -float("inf")), 0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        terms = tl.exp(tl.where(valid, values - safe[None, :], -float("inf")))
        total = total * tl.exp(shift - safe) + tl.sum(terms, 0)
        shift = higher
    columns = tl.arange(0, COLUMNS)
    here = partial + tl.program_id(0) * 2 * num_columns + columns
    tl.store(here, shift, mask=columns < num_columns)
    tl.store(here + num_columns, total, mask=columns < num_columns)


@triton.jit
def column_potential(partial, out, num_programs, num_columns, M: tl.constexpr, COLUMNS: tl.constexpr):
    """G from all programs' maxima and sums."""
    accumulate = partial.dtype.element_ty
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < num_columns
    shift = tl.full([COLUMNS], -float("inf"), dtype=accumulate)
    total = tl.zeros([COLUMNS], dtype=accumulate)
    for start in range(0, num_programs, M):
        program = start + tl.arange(0, M)
        place = program[:, None] * (2 * num_columns) + columns[None, :]
        valid = (program < num_programs)[:, None] & mask[None, :]
        shifts = tl.load(partial + place, mask=valid, other=-float("inf"))
        sums = tl.load(partial + place + num_columns, mask=valid, other=0.0)
        higher = tl.maximum(shift, tl.max(shifts, 0))
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(shift - safe) + tl.sum(sums * tl.exp(shifts - safe[None, :]), 0)
        shift = higher
    g = -tl.log(tl.cast(num_columns, accumulate)) - shift - tl.log(tl.where(total == 0, 1.0, total))
    tl.store(out + columns, g, mask=mask)


@triton.jit
def column_sum(partial, out, num_programs, num_columns, M: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds all programs' partial sums ``[P, Ω]``."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < num_columns
    total = tl.zeros([COLUMNS], dtype=partial.dtype.element_ty)
    for start in range(0, num_programs, M):
        program = start + tl.arange(0, M)
        place = program[:, None] * num_columns + columns[None, :]
        valid = (program < num_programs)[:, None] & mask[None, :]
        total += tl.sum(tl.load(partial + place, mask=valid, other=0.0), 0)
    tl.store(out + columns, total, mask=mask)


@triton.jit
def shares(
    costs,
    scale,
    before,
    after,
    grads,
    out,
    weighted,
    partial,
    num_rows,
    num_columns,
    lam,
    lam_rest,
    FIRST: tl.constexpr,
    BACKWARD: tl.constexpr,
    B: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """P in full precision; backward: also :math:`W = P ⊙ dP` and its columns' partial sums."""
    accumulate = costs.dtype.element_ty
    lam = whole_number(lam, lam_rest, accumulate)
    g = load_columns(before, num_columns, not FIRST, accumulate, COLUMNS)
    last = load_columns(after, num_columns, True, accumulate, COLUMNS)
    total = tl.zeros([COLUMNS], dtype=accumulate)
    for number in range(tl.program_id(0), tl.cdiv(num_rows, B), tl.num_programs(0)):
        place, valid, _row, columns = block(number, num_rows, num_columns, B, COLUMNS)
        logits = block_logits(costs, scale, place, valid, lam)
        f = row_potential(logits, g, valid, num_rows)
        share = tl.exp(tl.where(valid, logits + f[:, None] + last[None, :], -float("inf")))
        tl.store(out + place, share, mask=valid)
        if BACKWARD:
            moved = share * tl.load(grads + place, mask=valid, other=0.0)
            tl.store(weighted + place, moved, mask=valid)
            total += tl.sum(moved, 0)
    if BACKWARD:
        columns = tl.arange(0, COLUMNS)
        tl.store(partial + tl.program_id(0) * num_columns + columns, total, mask=columns < num_columns)


@triton.jit
def backward_step(
    costs,
    scale,
    before,
    after,
    column_grad,
    past,
    grad_logits,
    partial,
    num_rows,
    num_columns,
    lam,
    lam_rest,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    B: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    r"""One iteration backwards: dL from ``past`` to ``grad_logits``, and the partial sums of −Σ_u R ⊙ df.

    ``FIRST``: the first iteration of the forward, before which g is 0. ``LAST``: its last, where df
    begins with Σ_j W.
    """
    accumulate = costs.dtype.element_ty
    lam = whole_number(lam, lam_rest, accumulate)
    g = load_columns(before, num_columns, not FIRST, accumulate, COLUMNS)
    next_g = load_columns(after, num_columns, True, accumulate, COLUMNS)
    grad_g = load_columns(column_grad, num_columns, True, accumulate, COLUMNS)
    total = tl.zeros([COLUMNS], dtype=accumulate)
    for number in range(tl.program_id(0), tl.cdiv(num_rows, B), tl.num_programs(0)):
        place, valid, _row, columns = block(number, num_rows, num_columns, B, COLUMNS)
        logits = block_logits(costs, scale, place, valid, lam)
        f = row_potential(logits, g, valid, num_rows)
        soft = tl.exp(tl.where(valid, logits + f[:, None] + next_g[None, :], -float("inf")))
        moved = -num_columns * soft * grad_g[None, :]
        earlier = tl.load(past + place, mask=valid, other=0.0)
        grad_f = tl.sum(moved, 1)
        if LAST:
            grad_f += tl.sum(earlier, 1)
        rows = tl.exp(tl.where(valid, logits + g[None, :] + f[:, None], -float("inf")))
        rows = rows * num_rows * grad_f[:, None]
        tl.store(grad_logits + place, earlier + moved - rows, mask=valid)
        total -= tl.sum(rows, 0)
    columns = tl.arange(0, COLUMNS)
    tl.store(partial + tl.program_id(0) * num_columns + columns, total, mask=columns < num_columns)
