"""Exact inference of a whole graph, layer by layer and in chunks of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcgnn.nn.topology import Topology
from dcgnn.partition import Part, chunks

if TYPE_CHECKING:
    from dcgnn.nn.msg_passing import DCMsgPassing


@torch.no_grad()
def chunked_propagate(layers: DCMsgPassing, x: Tensor, whole: Topology, chunk_size: int) -> Tensor:
    """What ``layers`` give for ``x`` on the whole graph, batch or part, with at most ``chunk_size`` egos at a
    time.

    A chunk's egos give to all nodes that they hold; every ego is solved once, and the sums at the nodes are
    complete after the last chunk. The order of those sums is all that differs from one pass. Of a part that
    is one of several ranks', each rank goes through its own chunks; the ranks meet where they do in one pass.
    """
    if whole.num_nodes <= chunk_size:
        return layers(x, whole)
    parts = chunks(whole.graph, chunk_size, whole.own_rows)
    topologies = [whole.restricted(part) for part in parts]
    factors = [_factors_of(part, layers._factors(whole, x.dtype)) for part in parts]
    carried: list[Any] = [None] * len(parts)
    z, global_clusters = x, layers.global_embedding
    inputs: Any = None
    for index, block in enumerate(layers.blocks):
        global_assign, global_clusters = layers._solve_global(index, z, global_clusters, whole)
        if global_assign is not None:
            global_assign = whole.spread(global_assign)
        rows = whole.members(z)
        inputs = rows if index == 0 else inputs
        total: Any = None
        readouts: Any = None
        for number, part in enumerate(parts):
            share = None if global_assign is None else global_assign[part.nodes]
            start = _spread(part, carried[number])
            given = inputs[part.nodes], rows[part.nodes], share, global_clusters, start
            updated, _, clusters, readout = layers._update(index, *given, topologies[number], factors[number])
            if layers.local_init == "carry" and clusters is not None:
                carried[number] = clusters[part.own_rows]
            if total is None:  # not like z: autocast mixes dtypes
                total = updated.new_zeros(rows.size(0), *updated.shape[1:])
            total.index_add_(0, part.nodes, updated)
            if readout is not None:
                if readouts is None:
                    readouts = readout.new_zeros(rows.size(0), *readout.shape[1:])
                readouts[part.own] = readout[part.own_rows]
        updated = whole.complete(total)
        z = block(updated if readouts is None else updated + whole.own(readouts), z)
    return z


def _spread(part: Part, own: Tensor | None) -> Tensor | None:
    """Clusters of a part's own egos among those of all its rows; what stands at the halo is not read."""
    if own is None:
        return None
    return own.new_zeros(part.nodes.numel(), *own.shape[1:]).index_copy(0, part.own_rows, own)


def _factors_of(part: Part, whole: dict[str, Tensor]) -> dict[str, Tensor]:
    """Factors of a part's rows: only own nodes have a share of the input, and only own egos count."""
    rows = {name: factor[part.nodes] for name, factor in whole.items()}
    for name in ("x_factor", "global_factor", "ego_factor"):
        rows[name] = rows[name].index_fill(0, part.halo_rows, 0.0)
    return rows
