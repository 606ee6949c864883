r"""Transport problems that no program can hold in registers: their costs lie in a scratch array ``[S, K]``.

Costs, sums and gradients of rows are made in tiles by many programs (``rows.member_sums``); the iterations in
between need only K numbers a member and are done here by one program for each hub, B members at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcgnn_kernels.triton.device import inverse_root, log_sum_exp, whole_number
from dcgnn_kernels.triton.rows import channels, tile_sum


@triton.jit
def hub_of(hubs, begins, pointer):
    """The segment, first slot and number of slots of this program's hub; 0 slots in padding."""
    hub = tl.program_id(0)
    segment = tl.load(hubs + hub).to(tl.int64)
    start = tl.load(begins + segment).to(tl.int64)
    size = tl.load(begins + segment + 1).to(tl.int64) - start
    used = tl.load(pointer + hub + 1) > tl.load(pointer + hub)
    return segment, start, tl.where(used, size, 0)


@triton.jit
def entries(start, size, chunk, num_clusters, B: tl.constexpr, COLUMNS: tl.constexpr):
    """Places of a block ``[B, K]`` in the scratch array, which of them exist, and which rows do."""
    member = chunk + tl.arange(0, B)
    columns = tl.arange(0, COLUMNS)
    inside = member < size
    place = (start + member)[:, None] * num_clusters + columns[None, :]
    return place, inside[:, None] & (columns < num_clusters)[None, :], inside


@triton.jit
def scale_of(costs, start, size, num_clusters, SCALE: tl.constexpr, B: tl.constexpr, COLUMNS: tl.constexpr):
    """The cost scale (1: none) and the position of the first maximum."""
    accumulate = costs.dtype.element_ty
    total = tl.zeros([COLUMNS], dtype=accumulate)
    scale = tl.sum(total, 0) + 1.0
    position = tl.zeros([COLUMNS], dtype=tl.int64)
    if SCALE == 1:
        for chunk in range(0, size, B):
            place, valid, _inside = entries(start, size, chunk, num_clusters, B, COLUMNS)
            total += tl.sum(tl.load(costs + place, mask=valid, other=0.0), 0)
        scale = tl.sum(total, 0) / (num_clusters * tl.maximum(size, 1)).to(accumulate)
    if SCALE == 2:
        for chunk in range(0, size, B):
            place, valid, _inside = entries(start, size, chunk, num_clusters, B, COLUMNS)
            cost = tl.load(costs + place, mask=valid, other=0.0)
            here = tl.max(cost, 0)
            first = tl.min(
                tl.where(valid & (cost == here[None, :]), place - start * num_clusters, 9223372036854775807),
                0,
            )
            position = tl.where(here > total, first, position)
            total = tl.maximum(total, here)
        scale = tl.max(total, 0)
        columns = tl.arange(0, COLUMNS)
        # A column that is 0 throughout keeps position 0; it never wins against a positive maximum.
        position = tl.where((total == scale) & (columns < num_clusters), position, 9223372036854775807)
    return scale, tl.min(position, 0)


@triton.jit
def block_logits(costs, place, valid, scale, lam):
    cost = tl.load(costs + place, mask=valid, other=0.0)
    return -lam * tl.where(scale == 0, 0.0, cost / tl.where(scale == 0, 1.0, scale))


@triton.jit
def row_potential(logits, g, valid, size):
    count = tl.maximum(size, 1).to(logits.dtype)
    return -tl.log(count) - log_sum_exp(logits + g[None, :], valid, 1)


@triton.jit
def balance_hub(costs, start, size, scale, lam, tol, max_iters, B: tl.constexpr):
    """K = 2: the converged g_1 − g_2, as ``pair.balance``."""
    accumulate = costs.dtype.element_ty
    eps = 2.3e-16 if accumulate == tl.float64 else 1.2e-7
    count = tl.maximum(size, 1).to(accumulate)
    near = tl.arange(0, 2)[None, :] == 0
    low = tl.max(tl.full([B], -float("inf"), dtype=accumulate), 0)
    high = low
    for chunk in range(0, size, B):
        place, valid, inside = entries(start, size, chunk, 2, B, 2)
        logits = block_logits(costs, place, valid, scale, lam)
        s = tl.sum(tl.where(near, logits, -logits), 1)
        low = tl.maximum(low, tl.max(tl.where(inside, s, -float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(inside, -s, -float("inf")), 0))
    low = tl.where(size > 0, -low, 0.0)
    high = tl.where(size > 0, high, 0.0)
    t = tl.minimum(tl.maximum(0.0 * low, low), high)
    step = 0
    running = tl.where(size > 0, 1, 0)
    while (step < max_iters) & (running > 0):
        value = 0.0 * t
        slope = 0.0 * t
        for chunk in range(0, size, B):
            place, valid, inside = entries(start, size, chunk, 2, B, 2)
            logits = block_logits(costs, place, valid, scale, lam)
            x = tl.sum(tl.where(near, logits, -logits), 1) + t
            e = tl.exp(-tl.abs(x))
            half = tl.where(x >= 0, 0.5, -0.5) * (1.0 - e) / (1.0 + e)
            value += tl.sum(tl.where(inside, half, 0.0), 0) / count
            slope += tl.sum(tl.where(inside, e / ((1.0 + e) * (1.0 + e)), 0.0), 0) / count
        low = tl.where(value < 0, t, low)
        high = tl.where(value > 0, t, high)
        newton = t - value / tl.maximum(slope, 1e-30)
        following = tl.where((newton >= low) & (newton <= high), newton, 0.5 * (low + high))
        exact = tl.abs(value) <= 4 * eps
        still = tl.abs(following - t) <= tl.maximum(tol, 4 * eps * (1.0 + tl.abs(t)))
        running = tl.where(exact | still, 0, 1)
        t = tl.where(exact, t, following)
        step += 1
    return t


@triton.jit(do_not_specialize=["num_iters", "num_clusters", "max_iters"])
def hub_forward(
    costs,
    hubs,
    begins,
    pointer,
    shares,
    assign,
    potentials,
    num_clusters,
    num_iters,
    max_iters,
    lam,
    lam_rest,
    tol,
    SCALE: tl.constexpr,
    CONVERGE: tl.constexpr,
    B: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """From squared distances to assign (and, in full precision, ``shares``) and potentials."""
    segment, start, size = hub_of(hubs, begins, pointer)
    scale, _position = scale_of(costs, start, size, num_clusters, SCALE, B, COLUMNS)
    accumulate = costs.dtype.element_ty
    lam = whole_number(lam, lam_rest, accumulate)
    columns = tl.arange(0, COLUMNS)
    mask = (columns < num_clusters) & (size + tl.zeros_like(columns) > 0)
    g = tl.zeros([COLUMNS], dtype=accumulate)
    # Not "before = g": Triton would take the assignment inside the loop for no change.
    before = tl.zeros([COLUMNS], dtype=accumulate)
    if CONVERGE:
        g = tl.where(columns == 0, balance_hub(costs, start, size, scale, lam, tol, max_iters, B), 0.0)
    for step in range(num_iters):
        before = g
        shift = tl.full([COLUMNS], -float("inf"), dtype=accumulate)
        total = tl.zeros([COLUMNS], dtype=accumulate)
        for chunk in range(0, size, B):
            place, valid, _inside = entries(start, size, chunk, num_clusters, B, COLUMNS)
            logits = block_logits(costs, place, valid, scale, lam)
            values = logits + row_potential(logits, g, valid, size)[:, None]
            higher = tl.maximum(shift, tl.max(tl.where(valid, values, -float("inf")), 0))
            safe = tl.where(higher == -float("inf"), 0.0, higher)
            terms = tl.exp(tl.where(valid, values - safe[None, :], -float("inf")))
            total = total * tl.exp(shift - safe) + tl.sum(terms, 0)
            shift = higher
        g = -tl.log(tl.cast(num_clusters, accumulate)) - shift - tl.log(tl.where(total == 0, 1.0, total))
        g = tl.where(mask, g, 0.0)
        tl.store(potentials + (segment * num_iters + step) * num_clusters + columns, g, mask=mask)
    for chunk in range(0, size, B):
        place, valid, _inside = entries(start, size, chunk, num_clusters, B, COLUMNS)
        logits = block_logits(costs, place, valid, scale, lam)
        f = row_potential(logits, before, valid, size)
        share = tl.exp(tl.where(valid, logits + f[:, None] + g[None, :], -float("inf")))
        tl.store(shares + place, share, mask=valid)
        tl.store(assign + place, share.to(assign.dtype.element_ty), mask=valid)


@triton.jit
def potentials_after(history, step, num_clusters, mask):
    """G after iteration ``step``, counted from 0; 0 before the first."""
    steps = step + tl.zeros_like(mask.to(tl.int32))
    return tl.load(history + steps * num_clusters, mask=mask & (steps >= 0), other=0.0)


@triton.jit(do_not_specialize=["num_iters", "num_clusters"])
def hub_backward(
    costs,
    grads,
    hubs,
    begins,
    pointer,
    potentials,
    shares,
    grad_logits,
    weights,
    pulls,
    scale_root,
    num_clusters,
    num_iters,
    lam,
    lam_rest,
    SCALE: tl.constexpr,
    CONVERGE: tl.constexpr,
    PAIR: tl.constexpr,
    B: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    r"""From the gradient of P to the weights of the transpose's gather, and what the centroids need.

    ``PAIR``: weights of ``pair_gather``, else of ``many_gather``. ``pulls``: :math:`dM_{uj} / \sqrt\sigma`.
    """
    segment, start, size = hub_of(hubs, begins, pointer)
    scale, position = scale_of(costs, start, size, num_clusters, SCALE, B, COLUMNS)
    accumulate = costs.dtype.element_ty
    lam = whole_number(lam, lam_rest, accumulate)
    columns = tl.arange(0, COLUMNS)
    mask = (columns < num_clusters) & (size + tl.zeros_like(columns) > 0)
    count = tl.maximum(size, 1).to(accumulate)
    history = potentials + segment * num_iters * num_clusters + columns
    grad_g = tl.zeros([COLUMNS], dtype=accumulate)
    grad_scale = tl.sum(grad_g, 0)
    if CONVERGE:
        # K = 2, the implicit gradient: x = a b / n (dP_1 − dP_2 − step).
        g = tl.load(history, mask=mask, other=0.0)
        near = columns[None, :] == 0
        moved = tl.sum(grad_g, 0)
        product_sum = moved
        eps = 2.220446049250313e-16 if accumulate == tl.float64 else 1.1920928955078125e-07
        for chunk in range(0, size, B):
            place, valid, inside = entries(start, size, chunk, num_clusters, B, COLUMNS)
            logits = block_logits(costs, place, valid, scale, lam)
            f = row_potential(logits, g, valid, size)
            # In the order in which f was summed up: rounding then keeps it a softmax, whatever the size.
            share = tl.exp(tl.where(valid, (logits + g[None, :]) + f[:, None], -float("inf")))
            other = tl.sum(share, 1)[:, None] - share
            grad = tl.load(grads + place, mask=valid, other=0.0)
            product = tl.where(inside, tl.sum(tl.where(near, share * other, 0.0), 1) * count, 0.0)
            moved += tl.sum(product * tl.sum(tl.where(near, grad, -grad), 1), 0)
            product_sum += tl.sum(product, 0)
        move = moved / (product_sum + eps)
        for chunk in range(0, size, B):
            place, valid, inside = entries(start, size, chunk, num_clusters, B, COLUMNS)
            logits = block_logits(costs, place, valid, scale, lam)
            f = row_potential(logits, g, valid, size)
            # In the order in which f was summed up: rounding then keeps it a softmax, whatever the size.
            share = tl.exp(tl.where(valid, (logits + g[None, :]) + f[:, None], -float("inf")))
            other = tl.sum(share, 1)[:, None] - share
            grad = tl.load(grads + place, mask=valid, other=0.0)
            product = tl.where(inside, tl.sum(tl.where(near, share * other, 0.0), 1) * count, 0.0)
            x = product * (tl.sum(tl.where(near, grad, -grad), 1) - move)
            value = tl.where(near, x[:, None], -x[:, None])
            grad_scale += tl.sum(tl.sum(value * logits, 1), 0)
            tl.store(shares + place, share, mask=valid)
            tl.store(grad_logits + place, value, mask=valid)
    else:
        after = potentials_after(history, num_iters - 1, num_clusters, mask)
        before = potentials_after(history, num_iters - 2, num_clusters, mask)
        for chunk in range(0, size, B):
            place, valid, inside = entries(start, size, chunk, num_clusters, B, COLUMNS)
            logits = block_logits(costs, place, valid, scale, lam)
            f = row_potential(logits, before, valid, size)
            share = tl.exp(tl.where(valid, logits + f[:, None] + after[None, :], -float("inf")))
            grad = share * tl.load(grads + place, mask=valid, other=0.0)
            grad_g += tl.sum(grad, 0)
            tl.store(shares + place, share, mask=valid)
            tl.store(grad_logits + place, grad, mask=valid)
        tl.debug_barrier()
        for back in range(num_iters):
            step = num_iters - 1 - back
            after = potentials_after(history, step, num_clusters, mask)
            before = potentials_after(history, step - 1, num_clusters, mask)
            following = tl.zeros([COLUMNS], dtype=accumulate)
            grad_scale = tl.sum(following, 0)
            for chunk in range(0, size, B):
                place, valid, inside = entries(start, size, chunk, num_clusters, B, COLUMNS)
                logits = block_logits(costs, place, valid, scale, lam)
                f = row_potential(logits, before, valid, size)
                soft = tl.exp(tl.where(valid, logits + f[:, None] + after[None, :], -float("inf")))
                past = tl.load(grad_logits + place, mask=valid, other=0.0)
                moved = -num_clusters * soft * grad_g[None, :]
                grad_f = tl.sum(moved, 1)
                if back == 0:
                    grad_f += tl.sum(past, 1)
                row = tl.exp(tl.where(valid, logits + before[None, :] + f[:, None], -float("inf")))
                row = row * count * grad_f[:, None]
                following -= tl.sum(row, 0)
                value = past + moved - row
                grad_scale += tl.sum(tl.sum(value * logits, 1), 0)
                tl.debug_barrier()
                tl.store(grad_logits + place, value, mask=valid)
            grad_g = following
            tl.debug_barrier()
    tl.debug_barrier()

    # grad_scale = −Σ dM ⊙ M with dM = −λ dL and λ M = −L.
    grad_scale = -grad_scale
    root = inverse_root(tl.where(scale == 0, 1.0, scale))
    tl.store(scale_root + segment, root, mask=size > 0)
    for chunk in range(0, size, B):
        place, valid, inside = entries(start, size, chunk, num_clusters, B, COLUMNS)
        grad = -lam * tl.load(grad_logits + place, mask=valid, other=0.0)
        share = tl.load(shares + place, mask=valid, other=0.0)
        if SCALE == 1:
            grad += grad_scale / (num_clusters * count)
        if SCALE == 2:
            grad += tl.where(place - start * num_clusters == position, grad_scale, 0.0)
        if SCALE != 0:
            grad = tl.where(valid, tl.where(scale == 0, 0.0, grad), 0.0)
        member = start + chunk + tl.arange(0, B)
        line = weights + member[:, None] * (2 * num_clusters) + columns[None, :]
        tl.store(line, num_clusters * share, mask=valid)
        tl.store(pulls + place, grad * root, mask=valid)
        if PAIR:
            difference = tl.sum(tl.where(columns[None, :] == 0, grad, -grad), 1)
            tl.store(weights + member * 4 + 2, -2.0 * root * difference, mask=inside)
            tl.store(weights + member * 4 + 3, 2.0 * root * tl.sum(grad, 1), mask=inside)
        else:
            tl.store(line + num_clusters, 2.0 * root * grad, mask=valid)


@triton.jit
def hub_pair_rows(
    partial,
    pointer,
    hubs,
    rowptr,
    centroids,
    scale_root,
    half_rows,
    grad_near,
    grad_far,
    num_channels,
    grad_stride,
    FRESH: tl.constexpr,
    ACC: tl.constexpr,
    M: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """K = 2: a hub's gradients of both centroids and its half difference, as ``pair_backward`` writes them.

    Centroids are ``[H, 2, F]`` when fresh, else ``[N, 2, F]``.
    """
    hub = tl.program_id(0)
    channel, has = channels(num_channels, FEATURES)
    segment = tl.load(hubs + hub).to(tl.int64)
    size = tl.load(rowptr + segment + 1) - tl.load(rowptr + segment)
    near_pull, tiles = tile_sum(partial, pointer, hub, 0, 2, num_channels, channel, has, ACC, M)
    far_pull, _ = tile_sum(partial, pointer, hub, 1, 2, num_channels, channel, has, ACC, M)
    mask = has & (tiles + tl.zeros_like(channel) > 0)
    root = tl.load(scale_root + segment)
    place = segment
    if FRESH:
        place = hub.to(tl.int64)
        far_pull = far_pull / tl.maximum(size - 1, 1).to(ACC)
    line = centroids + place * (2 * num_channels) + channel
    near = tl.load(line, mask=mask, other=0.0).to(ACC)
    far = tl.load(line + num_channels, mask=mask, other=0.0).to(ACC)
    half = 0.5 * (near - far) * root
    tl.store(half_rows + segment * num_channels + channel, half.to(half_rows.dtype.element_ty), mask=mask)
    target = segment * grad_stride + channel
    tl.store(grad_near + target, (-2.0 * near_pull).to(grad_near.dtype.element_ty), mask=mask)
    tl.store(grad_far + target, (-2.0 * far_pull).to(grad_far.dtype.element_ty), mask=mask)
