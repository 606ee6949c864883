r"""local_sinkhorn with two cluster-nodes, whole egos in registers: one gather of each member's row.

With :math:`s_u = \lambda (M_{u2} - M_{u1})` and one scalar :math:`t = g_1 - g_2` a problem, the share of
row u in column 1 is :math:`a_u = \sigma(s_u + t)`, and an iteration is

.. math::
    g_1 \leftarrow g_1 + \log n - \log 2 - \log \sum_u a_u, \quad
    g_2 \leftarrow g_2 + \log n - \log 2 - \log \sum_u (1 - a_u)

A program holds E egos of at most M members as a tile ``[E, M, F]``: many small egos or one large.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcgnn_kernels.triton.device import (
    first_maximum,
    inverse_root,
    log_sigmoid,
    log_sum_exp,
    segments,
    sigmoid,
    whole_number,
)


@triton.jit
def member_rows(z, member, start, size, num_channels, M: tl.constexpr, FEATURES: tl.constexpr):
    """The members' rows ``[E, M, F]`` (0 outside), and what is inside."""
    place = tl.arange(0, M)[None, :]
    inside = place < size[:, None]
    node = tl.load(member + start[:, None] + place, mask=inside, other=0).to(tl.int64)
    channel = tl.arange(0, FEATURES)
    mask = inside[:, :, None] & (channel < num_channels)[None, None, :]
    rows = tl.load(z + node[:, :, None] * num_channels + channel[None, None, :], mask=mask, other=0.0)
    return rows, inside


@triton.jit
def two_centroids(
    z, centroids, ego, rows, inside, size, num_channels, FRESH: tl.constexpr, FEATURES: tl.constexpr
):
    """``[E, F]`` each. Fresh: the node itself and the mean of its neighbours (itself, if it has none).

    The mean is that of differences to the node, exactly 0 where all rows are equal.
    """
    channel = tl.arange(0, FEATURES)[None, :]
    mask = (size > 0)[:, None] & (channel < num_channels)
    if FRESH:
        near = tl.load(z + ego[:, None] * num_channels + channel, mask=mask, other=0.0).to(rows.dtype)
        apart = tl.sum(tl.where(inside[:, :, None], rows - near[:, None, :], 0.0), 1)
        far = near + apart / tl.maximum(size - 1, 1).to(rows.dtype)[:, None]
    else:
        base = centroids + ego[:, None] * (2 * num_channels) + channel
        near = tl.load(base, mask=mask, other=0.0).to(rows.dtype)
        far = tl.load(base + num_channels, mask=mask, other=0.0).to(rows.dtype)
    return near, far


@triton.jit
def scaled_logits(rows, near, far, inside, size, lam, SCALE: tl.constexpr):
    r"""The logits :math:`s` ``[E, M]``, the scale ``[E]`` (1: none) and the first maximum's position."""
    if SCALE == 0:
        middle = 0.5 * (near + far)
        half = 0.5 * (near - far)
        difference = 4.0 * tl.sum((rows - middle[:, None, :]) * half[:, None, :], 2)
        scale = tl.sum(0.0 * half, 1) + 1.0
        position = tl.zeros_like(size).to(tl.int32)
    else:
        to_near = rows - near[:, None, :]
        to_far = rows - far[:, None, :]
        near_cost = tl.where(inside, tl.sum(to_near * to_near, 2), 0.0)
        far_cost = tl.where(inside, tl.sum(to_far * to_far, 2), 0.0)
        difference = far_cost - near_cost
        if SCALE == 1:
            scale = tl.sum(near_cost + far_cost, 1) / (2 * tl.maximum(size, 1)).to(rows.dtype)
            position = tl.zeros_like(size).to(tl.int32)
        else:
            place = 2 * tl.arange(0, rows.shape[1])[None, :]
            near_max, near_place = first_maximum(near_cost, inside, place, 1)
            far_max, far_place = first_maximum(far_cost, inside, place + 1, 1)
            scale = tl.maximum(near_max, far_max)
            position = tl.minimum(
                tl.where(near_max == scale, near_place, 2147483647),
                tl.where(far_max == scale, far_place, 2147483647),
            )
        divisor = tl.where(scale == 0, 1.0, scale)
        difference = tl.where((scale == 0)[:, None], 0.0, difference / divisor[:, None])
    return tl.where(inside, lam * difference, 0.0), scale, position


@triton.jit
def total(values, inside):
    """Over the members. The choice between value and 0 also keeps products from fusing with the sum."""
    return tl.sum(tl.where(inside, values, 0.0), 1)


@triton.jit
def balance(logits, inside, size, tol, max_iters):
    r"""The root t of :math:`\sum_u \sigma(s_u + t) = n / 2` by Newton's method inside a bracket, ``[E]``."""
    count = tl.maximum(size, 1).to(logits.dtype)
    eps = 2.3e-16 if logits.dtype == tl.float64 else 1.2e-7
    low = -tl.max(tl.where(inside, logits, -float("inf")), 1)
    high = -tl.min(tl.where(inside, logits, float("inf")), 1)
    low = tl.where(size > 0, low, 0.0)
    high = tl.where(size > 0, high, 0.0)
    t = tl.minimum(tl.maximum(0.0 * low, low), high)
    step = 0
    running = 1
    while (step < max_iters) & (running > 0):
        x = logits + t[:, None]
        e = tl.exp(-tl.abs(x))
        # tanh(x / 2) / 2 instead of sigmoid(x) - 1 / 2: exact near the root.
        half = tl.where(x >= 0, 0.5, -0.5) * (1.0 - e) / (1.0 + e)
        value = total(half, inside) / count
        slope = total(e / ((1.0 + e) * (1.0 + e)), inside) / count
        low = tl.where(value < 0, t, low)
        high = tl.where(value > 0, t, high)
        newton = t - value / tl.maximum(slope, 1e-30)
        following = tl.where((newton >= low) & (newton <= high), newton, 0.5 * (low + high))
        moved = tl.abs(following - t)
        done = (tl.abs(value) <= 4 * eps) | (moved <= tl.maximum(tol, 4 * eps * (1.0 + tl.abs(t))))
        t = tl.where(tl.abs(value) <= 4 * eps, t, following)
        running = tl.sum(tl.where(done, 0, 1), 0)
        step += 1
    return t


@triton.jit
def iterate(g, h, logits, inside, size):
    """One full iteration: the new potentials, and the logarithms of both columns' shares and sums."""
    near = log_sigmoid(logits + (g - h)[:, None])
    far = log_sigmoid(-(logits + (g - h)[:, None]))
    near_sum = log_sum_exp(near, inside, 1)
    far_sum = log_sum_exp(far, inside, 1)
    constant = tl.log(tl.maximum(size, 1).to(logits.dtype) * 0.5)
    return g + constant - near_sum, h + constant - far_sum, near, far, near_sum, far_sum


@triton.jit(do_not_specialize=["first", "last", "num_iters", "lam", "lam_rest"])
def pair_forward(
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
    num_iters,
    max_iters,
    lam,
    lam_rest,
    tol,
    SCALE: tl.constexpr,
    CONVERGE: tl.constexpr,
    FRESH: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    FEATURES: tl.constexpr,
):
    _, ego, start, size = segments(order, bounds, begins, ends, first, last, E, False)
    stored, inside = member_rows(z, member, start, size, num_channels, M, FEATURES)
    accumulate = potentials.dtype.element_ty
    rows = stored.to(accumulate)
    lam = whole_number(lam, lam_rest, accumulate)
    near, far = two_centroids(z, centroids, ego, rows, inside, size, num_channels, FRESH, FEATURES)
    logits, _, _ = scaled_logits(rows, near, far, inside, size, lam, SCALE)

    g = tl.sum(0.0 * near, 1)
    h = g
    if CONVERGE:
        g = balance(logits, inside, size, tol, max_iters)
    history = potentials + ego * (2 * num_iters)
    live = size > 0
    near_log = logits
    far_log = logits
    near_sum = g
    far_sum = g
    for step in range(num_iters):
        g, h, near_log, far_log, near_sum, far_sum = iterate(g, h, logits, inside, size)
        tl.store(history + 2 * step, g, mask=live)
        tl.store(history + 2 * step + 1, h, mask=live)

    near_share = tl.where(inside, tl.exp(near_log - near_sum[:, None]), 0.0)
    far_share = tl.where(inside, tl.exp(far_log - far_sum[:, None]), 0.0)
    slot = start[:, None] + tl.arange(0, M)[None, :]
    storage = assign.dtype.element_ty
    tl.store(assign + 2 * slot, (0.5 * near_share).to(storage), mask=inside)
    tl.store(assign + 2 * slot + 1, (0.5 * far_share).to(storage), mask=inside)

    channel = tl.arange(0, FEATURES)[None, :]
    mask = live[:, None] & (channel < num_channels)
    base = clusters + ego[:, None] * (2 * num_channels) + channel
    tl.store(base, tl.sum(near_share[:, :, None] * rows, 1).to(storage), mask=mask)
    tl.store(base + num_channels, tl.sum(far_share[:, :, None] * rows, 1).to(storage), mask=mask)


@triton.jit(do_not_specialize=["first", "last", "num_iters", "lam", "lam_rest"])
def pair_backward(
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
    half_rows,
    scale_root,
    grad_near,
    grad_far,
    first,
    last,
    num_channels,
    grad_stride,
    num_iters,
    lam,
    lam_rest,
    SCALE: tl.constexpr,
    CONVERGE: tl.constexpr,
    FRESH: tl.constexpr,
    HAS_ASSIGN: tl.constexpr,
    HAS_CLUSTERS: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    FEATURES: tl.constexpr,
):
    r"""The part of the backward that runs over egos; ``pair_gather`` does the rest over the transpose.

    Writes for each slot four weights :math:`(2P_{u1}, 2P_{u2}, w_h, w_m)` such that the member's gradient is

    .. math:: 2 P_{u1} dC_1 + 2 P_{u2} dC_2 + w_h \hat h + w_m (z_u - m) / \sqrt\sigma

    with :math:`m = (c_1 + c_2) / 2`, :math:`\hat h = (c_1 - c_2) / (2 \sqrt\sigma)` and the cost scale
    :math:`\sigma`. Dividing half here and half there keeps every factor a number even where
    :math:`1 / \sigma` overflows. Writes also :math:`\hat h`, :math:`1 / \sqrt\sigma` and the gradients of
    the two centroids; fresh: that of the mean already divided among the neighbours.
    """
    _, ego, start, size = segments(order, bounds, begins, ends, first, last, E, False)
    stored, inside = member_rows(z, member, start, size, num_channels, M, FEATURES)
    accumulate = potentials.dtype.element_ty
    rows = stored.to(accumulate)
    lam = whole_number(lam, lam_rest, accumulate)
    near, far = two_centroids(z, centroids, ego, rows, inside, size, num_channels, FRESH, FEATURES)
    logits, scale, position = scaled_logits(rows, near, far, inside, size, lam, SCALE)

    live = size > 0
    place = tl.arange(0, M)[None, :]
    slot = start[:, None] + place
    channel = tl.arange(0, FEATURES)[None, :]
    mask = live[:, None] & (channel < num_channels)
    grad_p = tl.zeros_like(logits)
    grad_q = tl.zeros_like(logits)
    if HAS_ASSIGN:
        grad_p += tl.load(grad_assign + 2 * slot, mask=inside, other=0.0).to(accumulate)
        grad_q += tl.load(grad_assign + 2 * slot + 1, mask=inside, other=0.0).to(accumulate)
    if HAS_CLUSTERS:
        base = grad_clusters + ego[:, None] * (2 * num_channels) + channel
        spread = tl.load(base, mask=mask, other=0.0).to(accumulate)
        grad_p += 2.0 * tl.sum(rows * spread[:, None, :], 2)
        spread = tl.load(base + num_channels, mask=mask, other=0.0).to(accumulate)
        grad_q += 2.0 * tl.sum(rows * spread[:, None, :], 2)

    share_p, share_q, grad_logit = grad_of_logits(
        logits, grad_p, grad_q, inside, size, potentials + ego * (2 * num_iters), num_iters, live, CONVERGE
    )

    # Gradients of both (scaled) costs of each slot: the iterations give opposite ones, the scale adds.
    grad_p = -lam * grad_logit
    grad_q = lam * grad_logit
    if SCALE != 0:
        grad_scale = -total(grad_logit * logits, inside)
        if SCALE == 1:
            each = (grad_scale / (2 * tl.maximum(size, 1)).to(accumulate))[:, None]
            grad_p += each
            grad_q += each
        else:
            grad_p += tl.where(2 * place == position[:, None], grad_scale[:, None], 0.0)
            grad_q += tl.where(2 * place + 1 == position[:, None], grad_scale[:, None], 0.0)
        flat = (scale == 0)[:, None]
        grad_p = tl.where(inside & (~flat), grad_p, 0.0)
        grad_q = tl.where(inside & (~flat), grad_q, 0.0)
    root = inverse_root(tl.where(scale == 0, 1.0, scale))

    tl.store(weights + 4 * slot, 2.0 * share_p, mask=inside)
    tl.store(weights + 4 * slot + 1, 2.0 * share_q, mask=inside)
    tl.store(weights + 4 * slot + 2, -2.0 * (grad_p - grad_q) * root[:, None], mask=inside)
    tl.store(weights + 4 * slot + 3, 2.0 * (grad_p + grad_q) * root[:, None], mask=inside)
    tl.store(scale_root + ego, root, mask=live)
    here = ego[:, None] * num_channels + channel
    half = 0.5 * (near - far) * root[:, None]
    tl.store(half_rows + here, half.to(half_rows.dtype.element_ty), mask=mask)

    to_near = (rows - near[:, None, :]) * root[:, None, None]
    to_far = (rows - far[:, None, :]) * root[:, None, None]
    pull_near = -2.0 * root[:, None] * tl.sum(grad_p[:, :, None] * to_near, 1)
    pull_far = -2.0 * root[:, None] * tl.sum(grad_q[:, :, None] * to_far, 1)
    if FRESH:
        alone = (size <= 1)[:, None]
        pull_near = tl.where(alone, pull_near + pull_far, pull_near)
        pull_far = tl.where(alone, 0.0, pull_far / tl.maximum(size - 1, 1).to(accumulate)[:, None])
    target = ego[:, None] * grad_stride + channel
    tl.store(grad_near + target, pull_near.to(grad_near.dtype.element_ty), mask=mask)
    tl.store(grad_far + target, pull_far.to(grad_far.dtype.element_ty), mask=mask)


@triton.jit
def undone(logits, inside, count, after, live, before):
    """The shares (a, b) before an iteration and both columns' softmaxes.

    ``after`` points to its potentials, ``before`` is the number of iterations before it, ``[E]``.
    """
    earlier = live & (before > 0)
    g_after = tl.load(after, mask=live, other=0.0)
    h_after = tl.load(after + 1, mask=live, other=0.0)
    g = tl.load(after - 2, mask=earlier, other=0.0)
    h = tl.load(after - 1, mask=earlier, other=0.0)
    x = logits + (g - h)[:, None]
    near = log_sigmoid(x)
    far = log_sigmoid(-x)
    constant = tl.log(2.0 / count)
    soft_p = tl.exp(tl.where(inside, near + (g_after - g + constant)[:, None], -float("inf")))
    soft_q = tl.exp(tl.where(inside, far + (h_after - h + constant)[:, None], -float("inf")))
    a = tl.where(inside, tl.exp(near), 0.0)
    b = tl.where(inside, tl.exp(far), 0.0)
    return a, b, soft_p, soft_q


@triton.jit
def grad_of_logits(logits, grad_p, grad_q, inside, size, history, num_iters, live, CONVERGE: tl.constexpr):
    r"""P in both columns and the gradient of s, which is that of :math:`-\lambda M_{u1}`, ``[E, M]``.

    Unrolled, for t = T..1: with :math:`(a, b) = (\sigma(s + t), 1 - a)` before the iteration and column
    softmaxes A, B after it, w = (W_1 − A dg_1, W_2 − B dg_2), ds += b w_1 − a w_2,
    dg = −(Σ a (w_1 + w_2), Σ b (w_1 + w_2)), and W = P ⊙ dP only at first.
    """
    count = tl.maximum(size, 1).to(logits.dtype)
    last = history + 2 * (num_iters - 1)
    if CONVERGE:
        g = tl.load(last, mask=live, other=0.0)
        h = tl.load(last + 1, mask=live, other=0.0)
        share = sigmoid(logits + (g - h)[:, None])
        other = sigmoid(-(logits + (g - h)[:, None]))
        product = tl.where(inside, share * other / count[:, None], 0.0)
        eps = 2.220446049250313e-16 if logits.dtype == tl.float64 else 1.1920928955078125e-07
        step = total(product * (grad_p - grad_q), inside) / (total(product, inside) + eps)
        share_p = tl.where(inside, share / count[:, None], 0.0)
        share_q = tl.where(inside, other / count[:, None], 0.0)
        grad_logit = product * (grad_p - grad_q - step[:, None])
    else:
        before = tl.zeros_like(size) + num_iters - 1
        # The last iteration by itself: grad_p and grad_q are not kept in registers through the others.
        a, b, soft_p, soft_q = undone(logits, inside, count, last, live, before)
        share_p = 0.5 * soft_p
        share_q = 0.5 * soft_q
        move_p = share_p * grad_p
        move_q = share_q * grad_q
        move_p -= soft_p * total(move_p, inside)[:, None]
        move_q -= soft_q * total(move_q, inside)[:, None]
        grad_logit = b * move_p - a * move_q
        column_p = -total(a * (move_p + move_q), inside)
        column_q = -total(b * (move_p + move_q), inside)
        for back in range(1, num_iters):
            a, b, soft_p, soft_q = undone(logits, inside, count, last - 2 * back, live, before - back)
            move_p = -soft_p * column_p[:, None]
            move_q = -soft_q * column_q[:, None]
            grad_logit += b * move_p - a * move_q
            column_p = -total(a * (move_p + move_q), inside)
            column_q = -total(b * (move_p + move_q), inside)
    return share_p, share_q, grad_logit
