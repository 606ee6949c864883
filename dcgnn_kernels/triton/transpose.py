r"""The half of local_sinkhorn's backward that runs over the transpose: nodes sum over their egos.

No atomics: a node's gradient is a sum over ``colptr[i]:colptr[i + 1]`` of rows of its egos, weighted by
numbers that the first half wrote for each slot.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcgnn_kernels.triton.device import segments
from dcgnn_kernels.triton.rows import channels


@triton.jit(do_not_specialize=["first", "last"])
def pair_gather(
    weights,
    grad_clusters,
    half_rows,
    scale_root,
    near_rows,
    grad_near,
    grad_far,
    z,
    begins,
    ends,
    ego,
    slot,
    order,
    bounds,
    out,
    first,
    last,
    num_channels,
    near_stride,
    SCALE: tl.constexpr,
    FRESH: tl.constexpr,
    HAS_CLUSTERS: tl.constexpr,
    TILED: tl.constexpr,
    ACC: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    FEATURES: tl.constexpr,
):
    r"""K = 2: three rows an entry, :math:`dC_1, dC_2, \hat h`; see ``pair_backward`` for the weights.

    The fourth weight belongs to the cost scale and, with the maximum, is 0 but for one member of an ego; rows
    whose weight is 0 are not read. Fresh centroids add the row that each ego sends to its neighbours.
    """
    index, node, start, size = segments(order, bounds, begins, ends, first, last, E, TILED)
    channel, has = channels(num_channels, FEATURES)
    live = size > 0
    own_place = node[:, None] * num_channels + channel[None, :]
    own_mask = live[:, None] & has[None, :]
    total = tl.zeros([E, FEATURES], dtype=ACC)
    own = total
    if SCALE != 0:
        own = tl.load(z + own_place, mask=own_mask, other=0.0).to(ACC)
    for chunk in range(0, tl.max(size, 0), M):
        place = chunk + tl.arange(0, M)[None, :]
        inside = place < size[:, None]
        entry = start[:, None] + place
        owner = tl.load(ego + entry, mask=inside, other=0).to(tl.int64)
        where = tl.load(slot + entry, mask=inside, other=0).to(tl.int64)
        mask = inside[:, :, None] & has[None, None, :]
        line = owner[:, :, None] * num_channels + channel[None, None, :]
        half = tl.load(half_rows + line, mask=mask, other=0.0).to(ACC)
        weight = tl.load(weights + 4 * where + 2, mask=inside, other=0.0)
        total += tl.sum(weight[:, :, None] * half, 1)
        if HAS_CLUSTERS:
            double = owner[:, :, None] * (2 * num_channels) + channel[None, None, :]
            weight = tl.load(weights + 4 * where, mask=inside, other=0.0)
            rows = tl.load(grad_clusters + double, mask=mask, other=0.0).to(ACC)
            total += tl.sum(weight[:, :, None] * rows, 1)
            weight = tl.load(weights + 4 * where + 1, mask=inside, other=0.0)
            rows = tl.load(grad_clusters + double + num_channels, mask=mask, other=0.0).to(ACC)
            total += tl.sum(weight[:, :, None] * rows, 1)
        if SCALE != 0:
            weight = tl.load(weights + 4 * where + 3, mask=inside, other=0.0)
            used = weight != 0
            root = tl.load(scale_root + owner, mask=inside & used, other=0.0)
            near = owner[:, :, None] * near_stride + channel[None, None, :]
            rows = tl.load(near_rows + near, mask=mask & used[:, :, None], other=0.0).to(ACC)
            away = (own[:, None, :] - rows) * root[:, :, None] + half
            total += tl.sum(tl.where(used[:, :, None], weight[:, :, None] * away, 0.0), 1)
        if FRESH:
            other = inside & (owner != node[:, None])
            rows = tl.load(grad_far + line, mask=other[:, :, None] & has[None, None, :], other=0.0)
            total += tl.sum(rows.to(ACC), 1)
    mask = own_mask
    if FRESH and not TILED:
        total += tl.load(grad_near + own_place, mask=own_mask, other=0.0).to(ACC)
    if TILED:
        mask = (index < last)[:, None] & has[None, :]
    tl.store(
        out + index[:, None] * num_channels + channel[None, :], total.to(out.dtype.element_ty), mask=mask
    )


@triton.jit(do_not_specialize=["first", "last"])
def many_gather(
    weights,
    grad_clusters,
    centroids,
    scale_root,
    z,
    begins,
    ends,
    ego,
    slot,
    order,
    bounds,
    out,
    first,
    last,
    num_channels,
    num_clusters,
    HAS_CLUSTERS: tl.constexpr,
    TILED: tl.constexpr,
    ACC: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    FEATURES: tl.constexpr,
):
    r"""Any K: :math:`\sum_u \sum_j K P_{ij} dC_j + 2 dM_{ij} (z_i - c_j)` over the egos u that hold i."""
    index, node, start, size = segments(order, bounds, begins, ends, first, last, E, TILED)
    channel, has = channels(num_channels, FEATURES)
    own_place = node[:, None] * num_channels + channel[None, :]
    own_mask = (size > 0)[:, None] & has[None, :]
    own = tl.load(z + own_place, mask=own_mask, other=0.0).to(ACC)
    total = tl.zeros([E, FEATURES], dtype=ACC)
    for chunk in range(0, tl.max(size, 0), M):
        place = chunk + tl.arange(0, M)[None, :]
        inside = place < size[:, None]
        entry = start[:, None] + place
        owner = tl.load(ego + entry, mask=inside, other=0).to(tl.int64)
        where = tl.load(slot + entry, mask=inside, other=0).to(tl.int64)
        root = tl.load(scale_root + owner, mask=inside, other=0.0)
        mask = inside[:, :, None] & has[None, None, :]
        for cluster in range(num_clusters):
            line = (owner * num_clusters + cluster)[:, :, None] * num_channels + channel[None, None, :]
            here = weights + where * (2 * num_clusters) + cluster
            if HAS_CLUSTERS:
                weight = tl.load(here, mask=inside, other=0.0)
                rows = tl.load(grad_clusters + line, mask=mask, other=0.0).to(ACC)
                total += tl.sum(weight[:, :, None] * rows, 1)
            weight = tl.load(here + num_clusters, mask=inside, other=0.0)
            rows = tl.load(centroids + line, mask=mask, other=0.0).to(ACC)
            away = (own[:, None, :] - rows) * root[:, :, None]
            total += tl.sum(weight[:, :, None] * away, 1)
    mask = own_mask
    if TILED:
        mask = (index < last)[:, None] & has[None, :]
    tl.store(
        out + index[:, None] * num_channels + channel[None, :], total.to(out.dtype.element_ty), mask=mask
    )
