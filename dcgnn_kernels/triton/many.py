r"""local_sinkhorn with any number K of cluster-nodes, whole egos in registers.

A program holds E egos of at most M members: their rows ``[E, M, F]`` and their logits ``[E, M, K]``.
Iterations run in the log domain: :math:`f = -\log n - \mathrm{lse}_j(L + g)`,
:math:`g = -\log K - \mathrm{lse}_u(L + f)`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcgnn_kernels.triton.device import inverse_root, log_sum_exp, segments, whole_number
from dcgnn_kernels.triton.pair import member_rows


@triton.jit
def centroid_row(centroids, ego, index, size, num_clusters, num_channels, FEATURES: tl.constexpr):
    """Row ``index`` of each ego's K rows, ``[E, F]``."""
    channel = tl.arange(0, FEATURES)[None, :]
    mask = (size > 0)[:, None] & (channel < num_channels)
    place = (ego * num_clusters + index)[:, None] * num_channels + channel
    return tl.load(centroids + place, mask=mask, other=0.0)


@triton.jit
def column(matrix, index, COLUMNS: tl.constexpr):
    """Column ``index`` of ``[E, M, K]``."""
    chosen = tl.arange(0, COLUMNS)[None, None, :] == index
    return tl.sum(tl.where(chosen, matrix, 0.0), 2)


@triton.jit
def scaled_costs(
    rows,
    centroids,
    ego,
    inside,
    size,
    num_clusters,
    num_channels,
    SCALE: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Costs ``[E, M, K]`` (0 outside), the scale ``[E]`` (1: none) and the first maximum's position."""
    columns = tl.arange(0, COLUMNS)[None, None, :]
    cost = tl.zeros([rows.shape[0], rows.shape[1], COLUMNS], dtype=rows.dtype)
    for index in range(num_clusters):
        centroid = centroid_row(centroids, ego, index, size, num_clusters, num_channels, FEATURES)
        difference = rows - centroid.to(rows.dtype)[:, None, :]
        distance = tl.sum(difference * difference, 2)
        cost = tl.where(columns == index, distance[:, :, None], cost)
    valid = inside[:, :, None] & (columns < num_clusters)
    cost = tl.where(valid, cost, 0.0)
    scale = tl.sum(0.0 * tl.sum(cost, 2), 1) + 1.0
    position = tl.zeros_like(size).to(tl.int32)
    if SCALE == 1:
        scale = tl.sum(tl.sum(cost, 2), 1) / (num_clusters * tl.maximum(size, 1)).to(rows.dtype)
    if SCALE == 2:
        scale = tl.max(tl.max(cost, 2), 1)
        place = num_clusters * tl.arange(0, rows.shape[1])[None, :, None] + columns
        is_largest = valid & (cost == scale[:, None, None])
        position = tl.min(tl.min(tl.where(is_largest, place, 2147483647), 2), 1)
    if SCALE != 0:
        divisor = tl.where(scale == 0, 1.0, scale)
        cost = tl.where((scale == 0)[:, None, None], 0.0, cost / divisor[:, None, None])
    return cost, valid, scale, position


@triton.jit
def row_potential(logits, g, valid, inside, size):
    """``[E, M]``, 0 outside."""
    count = tl.maximum(size, 1).to(logits.dtype)
    f = -tl.log(count)[:, None] - log_sum_exp(logits + g[:, None, :], valid, 2)
    return tl.where(inside, f, 0.0)


@triton.jit
def column_potential(logits, f, valid, num_clusters):
    """``[E, K]``, 0 outside."""
    constant = tl.log(tl.cast(num_clusters, logits.dtype))
    g = -constant - log_sum_exp(logits + f[:, :, None], valid, 1)
    return tl.where(tl.arange(0, logits.shape[2])[None, :] < num_clusters, g, 0.0)


@triton.jit
def masked_exp(values, valid):
    return tl.exp(tl.where(valid, values, -float("inf")))


@triton.jit(do_not_specialize=["first", "last", "num_iters", "num_clusters"])
def many_forward(
    z,
    centroids,
    begins,
    ends,
    member,
    order,
    bounds,
    assign,
    clusters,
    potentials,
    first,
    last,
    num_channels,
    num_clusters,
    num_iters,
    lam,
    lam_rest,
    SCALE: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    _, ego, start, size = segments(order, bounds, begins, ends, first, last, E, False)
    stored, inside = member_rows(z, member, start, size, num_channels, M, FEATURES)
    accumulate = potentials.dtype.element_ty
    rows = stored.to(accumulate)
    lam = whole_number(lam, lam_rest, accumulate)
    cost, valid, _, _ = scaled_costs(
        rows, centroids, ego, inside, size, num_clusters, num_channels, SCALE, COLUMNS, FEATURES
    )
    logits = -lam * cost
    columns = tl.arange(0, COLUMNS)
    mask = (size > 0)[:, None] & (columns < num_clusters)[None, :]
    g = tl.sum(0.0 * logits, 1)
    f = tl.sum(0.0 * logits, 2)
    for step in range(num_iters):
        f = row_potential(logits, g, valid, inside, size)
        g = column_potential(logits, f, valid, num_clusters)
        place = (ego * num_iters + step)[:, None] * num_clusters + columns[None, :]
        tl.store(potentials + place, g, mask=mask)

    share = masked_exp(logits + f[:, :, None] + g[:, None, :], valid)
    slot = start[:, None] + tl.arange(0, M)[None, :]
    storage = assign.dtype.element_ty
    tl.store(assign + slot[:, :, None] * num_clusters + columns[None, None, :], share.to(storage), mask=valid)
    channel = tl.arange(0, FEATURES)[None, :]
    for index in range(num_clusters):
        weight = num_clusters * column(share, index, COLUMNS)
        moved = tl.sum(weight[:, :, None] * rows, 1)
        place = (ego * num_clusters + index)[:, None] * num_channels + channel
        tl.store(clusters + place, moved.to(storage), mask=(size > 0)[:, None] & (channel < num_channels))


@triton.jit(do_not_specialize=["first", "last", "num_iters", "num_clusters"])
def many_backward(
    grad_assign,
    grad_clusters,
    z,
    centroids,
    potentials,
    begins,
    ends,
    member,
    order,
    bounds,
    weights,
    scale_root,
    grad_centroids,
    first,
    last,
    num_channels,
    num_clusters,
    num_iters,
    lam,
    lam_rest,
    SCALE: tl.constexpr,
    HAS_ASSIGN: tl.constexpr,
    HAS_CLUSTERS: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    r"""The part of the backward that runs over egos; ``many_gather`` does the rest over the transpose.

    Writes for each slot 2K weights, :math:`K P_{uj}` and :math:`2 dM_{uj} \sqrt{1 / \sigma}`, for each ego
    :math:`\sqrt{1 / \sigma}` of its cost scale and the gradients of its centroids.
    """
    _, ego, start, size = segments(order, bounds, begins, ends, first, last, E, False)
    stored, inside = member_rows(z, member, start, size, num_channels, M, FEATURES)
    accumulate = potentials.dtype.element_ty
    rows = stored.to(accumulate)
    lam = whole_number(lam, lam_rest, accumulate)
    cost, valid, scale, position = scaled_costs(
        rows, centroids, ego, inside, size, num_clusters, num_channels, SCALE, COLUMNS, FEATURES
    )
    logits = -lam * cost
    columns = tl.arange(0, COLUMNS)
    place = tl.arange(0, M)
    slot = start[:, None] + place[None, :]
    grad = tl.zeros_like(cost)
    if HAS_ASSIGN:
        entry = slot[:, :, None] * num_clusters + columns[None, None, :]
        grad += tl.load(grad_assign + entry, mask=valid, other=0.0).to(accumulate)
    if HAS_CLUSTERS:
        for index in range(num_clusters):
            spread = centroid_row(grad_clusters, ego, index, size, num_clusters, num_channels, FEATURES)
            dots = num_clusters * tl.sum(rows * spread.to(accumulate)[:, None, :], 2)
            grad += tl.where(columns[None, None, :] == index, dots[:, :, None], 0.0)

    mask = (size > 0)[:, None] & (columns < num_clusters)[None, :]
    count = tl.maximum(size, 1).to(accumulate)
    history = potentials + (ego * num_iters)[:, None] * num_clusters + columns[None, :]
    share = tl.zeros_like(cost)
    grad_logits = tl.zeros_like(cost)
    grad_g = tl.sum(0.0 * cost, 1)
    for back in range(num_iters):
        step = num_iters - 1 - back
        after = tl.load(history + step * num_clusters, mask=mask, other=0.0)
        before = tl.load(
            history + (step - 1) * num_clusters,
            mask=mask & (step + tl.zeros_like(columns) > 0)[None, :],
            other=0.0,
        )
        f = row_potential(logits, before, valid, inside, size)
        soft = masked_exp(logits + f[:, :, None] + after[:, None, :], valid)
        moved = tl.zeros_like(cost)
        if back == 0:
            share = soft
            moved = soft * grad
            grad_g = tl.sum(moved, 1)
        moved -= num_clusters * soft * grad_g[:, None, :]
        grad_f = tl.sum(moved, 2)
        row = masked_exp(logits + before[:, None, :] + f[:, :, None], valid) * count[:, None, None]
        row = row * grad_f[:, :, None]
        grad_logits += moved - row
        grad_g = -tl.sum(row, 1)

    grad = -lam * grad_logits
    if SCALE != 0:
        grad_scale = -tl.sum(tl.sum(grad * cost, 2), 1)
        if SCALE == 1:
            grad += (grad_scale / (num_clusters * count))[:, None, None]
        else:
            flat = num_clusters * place[None, :, None] + columns[None, None, :]
            grad += tl.where(flat == position[:, None, None], grad_scale[:, None, None], 0.0)
        grad = tl.where(valid & (scale != 0)[:, None, None], grad, 0.0)
    root = inverse_root(tl.where(scale == 0, 1.0, scale))

    entry = weights + slot[:, :, None] * (2 * num_clusters) + columns[None, None, :]
    tl.store(entry, num_clusters * share, mask=valid)
    tl.store(entry + num_clusters, 2.0 * grad * root[:, None, None], mask=valid)
    tl.store(scale_root + ego, root, mask=size > 0)
    channel = tl.arange(0, FEATURES)[None, :]
    for index in range(num_clusters):
        centroid = centroid_row(centroids, ego, index, size, num_clusters, num_channels, FEATURES)
        difference = (rows - centroid.to(accumulate)[:, None, :]) * root[:, None, None]
        pull = -2.0 * root[:, None] * tl.sum(column(grad, index, COLUMNS)[:, :, None] * difference, 1)
        target = (ego * num_clusters + index)[:, None] * num_channels + channel
        tl.store(
            grad_centroids + target,
            pull.to(grad_centroids.dtype.element_ty),
            mask=(size > 0)[:, None] & (channel < num_channels),
        )
