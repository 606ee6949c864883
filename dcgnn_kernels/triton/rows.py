"""Sums of gathered rows over segments of slots, the memory pattern of everything but the transport itself.

Every kernel takes its segments whole (E of them in a program, M slots at a time) or in tiles of large ones;
tiles write partial sums, which ``reduce_tiles`` adds in order: the same bits in every run, and no atomics.
The second grid axis walks the channels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dcgnn_kernels.triton.device import segments


@triton.jit
def channels(num_channels, FEATURES: tl.constexpr):
    """Numbers and mask of this program's channels."""
    channel = tl.program_id(1) * FEATURES + tl.arange(0, FEATURES)
    return channel, channel < num_channels


@triton.jit(do_not_specialize=["first", "last"])
def ego_sums(
    assign,
    clusters,
    begins,
    ends,
    ego,
    slot,
    order,
    bounds,
    out,
    ego_factor,
    x,
    x_factor,
    global_assign,
    global_message,
    global_factor,
    local_factor,
    first,
    last,
    num_channels,
    num_clusters,
    num_global,
    ACTIVATION: tl.constexpr,
    UPDATE: tl.constexpr,
    TILED: tl.constexpr,
    ACC: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    FEATURES: tl.constexpr,
):
    r"""cluster_scatter, :math:`B_i = \sum_{u \ni i} \sum_j P^u_{ij} C^u_j`, over the transpose.

    ``UPDATE``: node_update, with a factor for each ego and, where the sum is complete, everything else.
    """
    index, node, start, size = segments(order, bounds, begins, ends, first, last, E, TILED)
    channel, has = channels(num_channels, FEATURES)
    total = tl.zeros([E, FEATURES], dtype=ACC)
    for chunk in range(0, tl.max(size, 0), M):
        place = chunk + tl.arange(0, M)[None, :]
        inside = place < size[:, None]
        entry = start[:, None] + place
        owner = tl.load(ego + entry, mask=inside, other=0).to(tl.int64)
        where = tl.load(slot + entry, mask=inside, other=0).to(tl.int64)
        mask = inside[:, :, None] & has[None, None, :]
        if UPDATE:
            factor = tl.load(ego_factor + owner, mask=inside, other=0.0)
        for cluster in range(num_clusters):
            weight = tl.load(assign + where * num_clusters + cluster, mask=inside, other=0.0).to(ACC)
            if UPDATE:
                weight = weight * factor
            row = (owner * num_clusters + cluster)[:, :, None] * num_channels + channel[None, None, :]
            rows = tl.load(clusters + row, mask=mask, other=0.0).to(ACC)
            total += tl.sum(weight[:, :, None] * rows, 1)
    if UPDATE and not TILED:
        total = updated(
            total, node, size, channel, has, x, x_factor, global_assign, global_message, global_factor,
            local_factor, num_channels, num_global, ACTIVATION,
        )  # fmt: skip
    target = index[:, None] * num_channels + channel[None, :]
    mask = (size > 0)[:, None] & has[None, :]
    if TILED:
        mask = (index >= 0)[:, None] & (index < last)[:, None] & has[None, :]
    tl.store(out + target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def updated(
    broadcast,
    node,
    size,
    channel,
    has,
    x,
    x_factor,
    global_assign,
    global_message,
    global_factor,
    local_factor,
    num_channels,
    num_global,
    ACTIVATION: tl.constexpr,
):
    """The node update, from the sum over the egos, ``[E, F]``."""
    live = size > 0
    accumulate = broadcast.dtype
    own = node[:, None] * num_channels + channel[None, :]
    mask = live[:, None] & has[None, :]
    whole = tl.zeros_like(broadcast)
    for cluster in range(num_global):
        weight = tl.load(global_assign + node * num_global + cluster, mask=live, other=0.0).to(accumulate)
        row = tl.load(global_message + cluster * num_channels + channel, mask=has, other=0.0).to(accumulate)
        whole += weight[:, None] * row[None, :]
    result = tl.load(x_factor + node, mask=live, other=0.0)[:, None] * tl.load(
        x + own, mask=mask, other=0.0
    ).to(accumulate)
    result += tl.load(global_factor + node, mask=live, other=0.0)[:, None] * whole
    result += tl.load(local_factor + node, mask=live, other=0.0)[:, None] * broadcast
    if ACTIVATION == 1:
        result = tl.where(result < 0, 0.0, result)
    if ACTIVATION == 2:
        # Of |x|: exp never overflows. A series where the difference would cancel.
        size_of = tl.abs(result)
        e = tl.exp(-2.0 * size_of)
        square = result * result
        series = size_of * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        small = 0.05 if accumulate == tl.float32 else 0.002
        magnitude = tl.where(size_of < small, series, (1.0 - e) / (1.0 + e))
        result = tl.where(result < 0, -magnitude, magnitude)
    return result


@triton.jit
def finish_update(
    partial,
    pointer,
    hubs,
    out,
    x,
    x_factor,
    global_assign,
    global_message,
    global_factor,
    local_factor,
    num_channels,
    num_global,
    ACTIVATION: tl.constexpr,
    ACC: tl.constexpr,
    M: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """node_update of a hub from the sums of its tiles."""
    hub = tl.program_id(0)
    channel, has = channels(num_channels, FEATURES)
    total, tiles = tile_sum(partial, pointer, hub, 0, 1, num_channels, channel, has, ACC, M)
    node = tl.load(hubs + hub + tl.arange(0, 1)).to(tl.int64)
    size = tiles + tl.arange(0, 1)
    result = updated(
        total[None, :], node, size, channel, has, x, x_factor, global_assign, global_message, global_factor,
        local_factor, num_channels, num_global, ACTIVATION,
    )  # fmt: skip
    mask = (size > 0)[:, None] & has[None, :]
    target = node[:, None] * num_channels + channel[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "last"])
def member_sums(
    weights,
    x,
    sources,
    begins,
    ends,
    member,
    order,
    bounds,
    out,
    dots,
    source_index,
    centre_root,
    member_factor,
    ego_factor,
    first,
    last,
    num_channels,
    num_clusters,
    DOTS: tl.constexpr,
    CENTRED: tl.constexpr,
    COMPACT: tl.constexpr,
    FACTORS: tl.constexpr,
    TILED: tl.constexpr,
    ACC: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    r"""One visit to the members' rows :math:`x_u`, for K weights and K rows :math:`r_j` of each ego.

    out_j = Σ_u w_uj x_u. ``CENTRED``: of (x_u − r_j) ρ instead, ρ of the ego.
    ``DOTS``: dots_uj = x_u·r_j; needs all channels in one tile.
    ``COMPACT``: the rows r are those of ``source_index[tile]`` instead of the ego's.
    ``FACTORS``: x_u times a factor of the member, sums and dots times one of the ego.
    """
    index, ego, start, size = segments(order, bounds, begins, ends, first, last, E, TILED)
    channel, has = channels(num_channels, FEATURES)
    columns = tl.arange(0, COLUMNS)
    live = size > 0
    owner = ego
    if COMPACT:
        owner = tl.load(source_index + index, mask=live, other=0).to(tl.int64)
    total = tl.zeros([E, COLUMNS, FEATURES], dtype=ACC)
    for chunk in range(0, tl.max(size, 0), M):
        place = chunk + tl.arange(0, M)[None, :]
        inside = place < size[:, None]
        entry = start[:, None] + place
        node = tl.load(member + entry, mask=inside, other=0).to(tl.int64)
        source = node[:, :, None] * num_channels + channel[None, None, :]
        rows = tl.load(x + source, mask=inside[:, :, None] & has[None, None, :], other=0.0).to(ACC)
        if FACTORS:
            rows = rows * tl.load(member_factor + node, mask=inside, other=0.0)[:, :, None]
        for cluster in range(num_clusters):
            if DOTS or CENTRED:
                place_of = (owner * num_clusters + cluster)[:, None] * num_channels + channel[None, :]
                centre = tl.load(sources + place_of, mask=live[:, None] & has[None, :], other=0.0).to(ACC)
            if DOTS:
                product = tl.sum(rows * centre[:, None, :], 2)
                if FACTORS:
                    product = product * tl.load(ego_factor + ego, mask=live, other=0.0)[:, None]
                tl.store(
                    dots + entry * num_clusters + cluster, product.to(dots.dtype.element_ty), mask=inside
                )
            weight = tl.load(weights + entry * num_clusters + cluster, mask=inside, other=0.0).to(ACC)
            if CENTRED:
                root = tl.load(centre_root + ego, mask=live, other=0.0)
                away = (rows - centre[:, None, :]) * root[:, None, None]
                part = tl.sum(weight[:, :, None] * away, 1)
            else:
                part = tl.sum(weight[:, :, None] * rows, 1)
            total += tl.where((columns == cluster)[None, :, None], part[:, None, :], 0.0)
    if FACTORS and not TILED:
        total = total * tl.load(ego_factor + ego, mask=live, other=0.0)[:, None, None]
    line = index[:, None] * num_clusters + columns[None, :]
    target = line[:, :, None] * num_channels + channel[None, None, :]
    keep = live
    if TILED:
        keep = index < last
    mask = keep[:, None, None] & (columns < num_clusters)[None, :, None] & has[None, None, :]
    tl.store(out + target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "last"])
def slot_products(
    x,
    sources,
    begins,
    ends,
    member,
    order,
    bounds,
    out,
    addend,
    source_index,
    member_factor,
    ego_factor,
    first,
    last,
    num_channels,
    num_clusters,
    gain,
    DISTANCE: tl.constexpr,
    ADD: tl.constexpr,
    COMPACT: tl.constexpr,
    FACTORS: tl.constexpr,
    TILED: tl.constexpr,
    ACC: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    r"""out_uj = gain x_u·r_j (+ ``addend``), or :math:`\|x_u - r_j\|^2`, for every slot; rows of any width.

    ``BLOCKS`` tiles of channels are walked inside the program; a row of one tile is read once for all j.
    """
    index, ego, start, size = segments(order, bounds, begins, ends, first, last, E, TILED)
    live = size > 0
    owner = ego
    if COMPACT:
        owner = tl.load(source_index + index, mask=live, other=0).to(tl.int64)
    for chunk in range(0, tl.max(size, 0), M):
        place = chunk + tl.arange(0, M)[None, :]
        inside = place < size[:, None]
        entry = start[:, None] + place
        node = tl.load(member + entry, mask=inside, other=0).to(tl.int64)
        channel = tl.arange(0, FEATURES)
        has = channel < num_channels
        source = x + node[:, :, None] * num_channels + channel[None, None, :]
        rows = tl.load(source, mask=inside[:, :, None] & has[None, None, :], other=0.0).to(ACC)
        for cluster in range(num_clusters):
            line = sources + (owner * num_clusters + cluster)[:, None] * num_channels
            product = tl.zeros([E, M], dtype=ACC)
            for block in range(BLOCKS):
                channel = block * FEATURES + tl.arange(0, FEATURES)
                has = channel < num_channels
                if BLOCKS > 1:
                    source = x + node[:, :, None] * num_channels + channel[None, None, :]
                    rows = tl.load(source, mask=inside[:, :, None] & has[None, None, :], other=0.0).to(ACC)
                centre = tl.load(line + channel[None, :], mask=live[:, None] & has[None, :], other=0.0).to(
                    ACC
                )
                if DISTANCE:
                    away = rows - centre[:, None, :]
                    product += tl.sum(away * away, 2)
                else:
                    product += gain * tl.sum(rows * centre[:, None, :], 2)
            if FACTORS:
                product = product * tl.load(member_factor + node, mask=inside, other=0.0)
                product = product * tl.load(ego_factor + ego, mask=live, other=0.0)[:, None]
            target = entry * num_clusters + cluster
            if ADD:
                product += tl.load(addend + target, mask=inside, other=0.0).to(ACC)
            tl.store(out + target, product.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["first", "last"])
def centroid_sums(
    z,
    begins,
    ends,
    member,
    order,
    bounds,
    rowptr,
    out,
    first,
    last,
    num_channels,
    num_groups,
    WHOLE: tl.constexpr,
    TILED: tl.constexpr,
    ACC: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Sums of the members' rows by group, ``[rows, groups, F]``; see local_centroids. ``WHOLE``: K = 1.

    Otherwise the node's own row is taken off the rows of groups of more than one.
    """
    index, ego, start, size = segments(order, bounds, begins, ends, first, last, E, TILED)
    channel, has = channels(num_channels, FEATURES)
    columns = tl.arange(0, COLUMNS)
    base = tl.load(rowptr + ego, mask=size > 0, other=0).to(tl.int64)
    neighbours = tl.load(rowptr + ego + 1, mask=size > 0, other=0).to(tl.int64) - base - 1
    own = tl.zeros([E, FEATURES], dtype=ACC)
    if not WHOLE:
        line = ego[:, None] * num_channels + channel[None, :]
        own = tl.load(z + line, mask=(size > 0)[:, None] & has[None, :], other=0.0).to(ACC)
    total = tl.zeros([E, COLUMNS, FEATURES], dtype=ACC)
    for chunk in range(0, tl.max(size, 0), M):
        place = chunk + tl.arange(0, M)[None, :]
        inside = place < size[:, None]
        entry = start[:, None] + place
        node = tl.load(member + entry, mask=inside, other=0).to(tl.int64)
        group = tl.zeros([E, M], dtype=tl.int64)
        if not WHOLE:
            inside = inside & (node != ego[:, None])
            group = (entry - base[:, None] - tl.where(node > ego[:, None], 1, 0)) % num_groups
        source = node[:, :, None] * num_channels + channel[None, None, :]
        rows = tl.load(z + source, mask=inside[:, :, None] & has[None, None, :], other=0.0).to(ACC)
        if not WHOLE:
            shared = inside & (neighbours[:, None] - group > num_groups)
            rows -= tl.where(shared[:, :, None], own[:, None, :], 0.0)
        if COLUMNS == 1:
            total += tl.sum(rows, 1)[:, None, :]
        else:
            for column in range(num_groups):
                part = tl.sum(tl.where((group == column)[:, :, None], rows, 0.0), 1)
                total += tl.where((columns == column)[None, :, None], part[:, None, :], 0.0)
    line = index[:, None] * num_groups + columns[None, :]
    target = line[:, :, None] * num_channels + channel[None, None, :]
    keep = size > 0
    if TILED:
        keep = index < last
    mask = keep[:, None, None] & (columns < num_groups)[None, :, None] & has[None, None, :]
    tl.store(out + target, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "last"])
def group_gather(
    rows_of_groups,
    own,
    begins,
    ends,
    ego,
    slot,
    rowptr,
    order,
    bounds,
    out,
    first,
    last,
    num_channels,
    num_groups,
    WHOLE: tl.constexpr,
    TILED: tl.constexpr,
    ACC: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Backward of local_centroids: each node sums the row of its group in every ego that holds it."""
    index, node, start, size = segments(order, bounds, begins, ends, first, last, E, TILED)
    channel, has = channels(num_channels, FEATURES)
    total = tl.zeros([E, FEATURES], dtype=ACC)
    for chunk in range(0, tl.max(size, 0), M):
        place = chunk + tl.arange(0, M)[None, :]
        inside = place < size[:, None]
        entry = start[:, None] + place
        owner = tl.load(ego + entry, mask=inside, other=0).to(tl.int64)
        group = tl.zeros([E, M], dtype=tl.int64)
        if not WHOLE:
            where = tl.load(slot + entry, mask=inside, other=0).to(tl.int64)
            base = tl.load(rowptr + owner, mask=inside, other=0).to(tl.int64)
            inside = inside & (owner != node[:, None])
            group = (where - base - tl.where(node[:, None] > owner, 1, 0)) % num_groups
        row = (owner * num_groups + group)[:, :, None] * num_channels + channel[None, None, :]
        mask = inside[:, :, None] & has[None, None, :]
        total += tl.sum(tl.load(rows_of_groups + row, mask=mask, other=0.0).to(ACC), 1)
    mask = (size > 0)[:, None] & has[None, :]
    if not TILED and not WHOLE:
        place_of = node[:, None] * num_channels + channel[None, :]
        total += tl.load(own + place_of, mask=mask, other=0.0).to(ACC)
    if TILED:
        mask = (index < last)[:, None] & has[None, :]
    tl.store(
        out + index[:, None] * num_channels + channel[None, :], total.to(out.dtype.element_ty), mask=mask
    )


@triton.jit
def tile_sum(
    partial, pointer, hub, row, num_rows, num_channels, channel, has, ACC: tl.constexpr, M: tl.constexpr
):
    """The sum of row ``row`` of all tiles of a hub, ``[F]``, and how many there are."""
    begin = tl.load(pointer + hub)
    end = tl.load(pointer + hub + 1)
    total = tl.zeros_like(channel).to(ACC)
    for tile in range(begin, end, M):
        tiles = tile + tl.arange(0, M).to(tl.int64)
        place = (tiles * num_rows + row)[:, None] * num_channels + channel[None, :]
        values = tl.load(partial + place, mask=(tiles < end)[:, None] & has[None, :], other=0.0)
        total += tl.sum(values, 0)
    return total, end - begin


@triton.jit
def reduce_tiles(
    partial,
    pointer,
    hubs,
    out,
    addend,
    factor,
    num_rows,
    num_channels,
    gain,
    ADD: tl.constexpr,
    FACTOR: tl.constexpr,
    COMPACT: tl.constexpr,
    ACC: tl.constexpr,
    M: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """out[segment, row] = gain · Σ_tiles partial[tile, row] (+ addend[segment]), for every hub and row."""
    hub = tl.program_id(0) // num_rows
    row = tl.program_id(0) % num_rows
    channel, has = channels(num_channels, FEATURES)
    total, tiles = tile_sum(partial, pointer, hub, row, num_rows, num_channels, channel, has, ACC, M)
    segment = tl.load(hubs + hub).to(tl.int64)
    total = total * gain
    if FACTOR:
        total = total * tl.load(factor + segment)
    mask = has & (tiles + tl.zeros_like(channel) > 0)
    if ADD:
        total += tl.load(addend + segment * num_channels + channel, mask=mask, other=0.0).to(ACC)
    place = segment
    if COMPACT:
        place = hub.to(tl.int64)
    target = (place * num_rows + row) * num_channels + channel
    tl.store(out + target, total.to(out.dtype.element_ty), mask=mask)
