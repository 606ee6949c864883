r"""A model, not a measurement: bytes and flops of every kernel from a graph's degrees, and the time of these.

**What is counted.** Rows that are gathered, by table; index arrays, scratch and outputs that are streamed;
floating point operations. A gathered number smaller than a memory sector (32 bytes) costs a sector.

**What a GPU could reach.** Everything passes through L2. A table that fits into the L2 cache is read from
DRAM once; of a larger one, the share that does not fit is missed by every gather. The time of a kernel is the
largest of DRAM bytes, L2 bytes and flops over the GPU's rate for each. Launches, latencies and imbalance are
not in it: it is a bound from below, for our kernels and for the layers that they are compared with alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dcgnn_kernels.triton import config

SECTOR = 32
INDEX = 4  # bytes of an index of ours
EDGE_INDEX = 8  # bytes of an index in PyG's edge_index
FLOAT = 4
WEIGHTS = 16  # bytes that the backward keeps for a slot
L2_SHARE = 0.8  # of the cache that a table can count on


@dataclass(frozen=True)
class Gpu:
    """Peak rates a second, from the vendor's data sheets; L2 bandwidth is not in them and is assumed."""

    name: str
    dram: float
    l2: float
    l2_bytes: float
    flops: float  # float32, without tensor cores


A100 = Gpu("A100 80GB", 2.039e12, 5.0e12, 40e6, 19.5e12)
H100 = Gpu("H100 SXM", 3.352e12, 7.0e12, 50e6, 66.9e12)


@dataclass(frozen=True)
class Gather:
    """``rows`` reads of ``width`` bytes at random places of a table of ``table`` bytes."""

    rows: float
    width: float
    table: float

    @property
    def l2_bytes(self) -> float:
        return self.rows * max(self.width, SECTOR)

    def dram_bytes(self, gpu: Gpu) -> float:
        missed = max(0.0, 1.0 - L2_SHARE * gpu.l2_bytes / self.table) if self.table else 0.0
        return max(min(self.table, self.l2_bytes), self.l2_bytes * missed)


@dataclass(frozen=True)
class Kernel:
    """What one kernel, or a few that belong together, moves and computes."""

    name: str
    gathers: tuple[Gather, ...]
    streamed: float
    flops: float

    def bytes(self) -> float:
        """All bytes that pass through L2."""
        return self.streamed + sum(gather.l2_bytes for gather in self.gathers)

    def seconds(self, gpu: Gpu) -> float:
        dram = self.streamed + sum(gather.dram_bytes(gpu) for gather in self.gathers)
        return max(dram / gpu.dram, self.bytes() / gpu.l2, self.flops / gpu.flops)


def seconds(kernels: Iterable[Kernel], gpu: Gpu) -> float:
    """Kernels run one after the other."""
    return sum(kernel.seconds(gpu) for kernel in kernels)


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer on one graph: K = 2, fresh centroids, cost scale "max"."""

    ego_sizes: Tensor
    num_channels: int = 64
    num_global: int = 8
    local_iters: int = 3
    global_iters: int = 5
    dtype: torch.dtype = torch.float32

    @property
    def nodes(self) -> int:
        return self.ego_sizes.numel()

    @property
    def slots(self) -> int:
        return int(self.ego_sizes.sum())

    @property
    def item(self) -> int:
        return torch.empty(0, dtype=self.dtype).element_size()

    @property
    def row(self) -> float:
        """Bytes of one row of features."""
        return self.num_channels * self.item

    @property
    def table(self) -> float:
        """Bytes of all rows."""
        return self.nodes * self.row

    def hub_slots(self, backward: bool) -> int:
        """Slots of egos that do not fit into the registers of a program."""
        limit = config.resident_limit(self.num_channels, 2, self.dtype, backward)
        return int(self.ego_sizes[self.ego_sizes > limit].sum())

    def linear(self) -> Kernel:
        """The linear map of a layer, forward."""
        return Kernel("linear map", (), 2 * self.table, 2.0 * self.nodes * self.num_channels**2)

    def local_sinkhorn(self) -> Kernel:
        """One visit to each member; hubs three (mean, cost, sum), their costs and shares in scratch."""
        hubs = self.hub_slots(backward=False)
        visits = self.slots + 2 * hubs
        scratch = hubs * 2 * FLOAT * (self.local_iters + 5)
        streamed = self.slots * (INDEX + 2 * self.item) + self.nodes * (3 * INDEX + 8 * self.local_iters)
        return Kernel(
            "local_sinkhorn",
            (Gather(visits, self.row, self.table),),
            streamed + scratch + 3 * self.table,  # own rows in, two clusters out
            visits * 7.0 * self.num_channels + self.slots * self.local_iters * 40.0,
        )

    def node_update(self) -> Kernel:
        """Two rows and two weights for every entry of the transpose."""
        entries = (
            Gather(2 * self.slots, self.row, 2 * self.table),
            Gather(self.slots, 2 * self.item, self.slots * 2 * self.item),
        )
        streamed = self.slots * 2 * INDEX + self.nodes * (4 * FLOAT + self.num_global * self.item)
        flops = 4.0 * self.slots * self.num_channels + 2.0 * self.nodes * self.num_global * self.num_channels
        return Kernel("node_update", entries, streamed + 2 * self.table, flops)

    def global_sinkhorn(self) -> Kernel:
        """Rows are read twice, for costs and for clusters; 16-bit ones in float32 the second time.

        Costs are written, searched for their maximum, read by every iteration and for the shares; these are
        written, read for the clusters, and if 16-bit ones are wanted read again and written as such.
        """
        costs = self.nodes * self.num_global * FLOAT
        streamed = 2 * self.table + costs * (5 + self.global_iters)
        if self.item < FLOAT:
            streamed += 2 * self.nodes * self.num_channels * FLOAT
            streamed += costs + self.nodes * self.num_global * self.item
        flops = (
            5.0 * self.nodes * self.num_channels * self.num_global + 20.0 * self.global_iters * costs / FLOAT
        )
        return Kernel("global_sinkhorn", (), streamed, flops)

    def forward(self) -> list[Kernel]:
        """All kernels of a DCConv layer."""
        return [self.linear(), self.local_sinkhorn(), self.global_sinkhorn(), self.node_update()]

    def backward(self) -> list[Kernel]:
        """All kernels of its backward."""
        hubs = self.hub_slots(backward=True)
        visits = self.slots + 3 * hubs
        per_slot = self.slots * (INDEX + 2 * self.item)
        scratch = hubs * 2 * FLOAT * (4 * self.local_iters + 12)
        over_egos = Kernel(
            "local_sinkhorn_backward, egos",
            (Gather(visits, self.row, self.table),),
            per_slot + self.slots * WEIGHTS + 6 * self.table + scratch,
            visits * 16.0 * self.num_channels + self.slots * self.local_iters * 60.0,
        )
        over_nodes = Kernel(
            "local_sinkhorn_backward, transpose",
            (
                Gather(2 * self.slots, self.row, 2 * self.table),
                Gather(2 * self.slots, self.row, 2 * self.table),
                Gather(self.slots, WEIGHTS, self.slots * WEIGHTS),
            ),
            self.slots * 2 * INDEX + 3 * self.table,
            8.0 * self.slots * self.num_channels,
        )
        update = Kernel(
            "node_update_backward",
            (Gather(self.slots, self.row, self.table),),
            per_slot + self.slots * 2 * self.item + 6 * self.table,
            8.0 * self.slots * self.num_channels,
        )
        wide = self.nodes * self.num_channels * FLOAT
        costs = self.nodes * self.num_global * FLOAT
        # Of the size of the costs: made and searched for the maximum and its place (3), their gradient's
        # start (4), shares (4), three an iteration, elementwise torch with the scale (14), products and sums
        # (5). Of that of the rows in float32: elementwise torch (9) and products (5).
        converted = 0.0
        if self.item < FLOAT:
            converted = 2 * self.table + 2 * wide + costs + self.nodes * self.num_global * self.item
        whole = Kernel(
            "global_sinkhorn_backward",
            (),
            self.table + 14 * wide + converted + costs * (30 + 3 * self.global_iters),
            8.0 * self.nodes * self.num_channels * self.num_global,
        )
        linear = Kernel("linear map, backward", (), 4 * self.table, 4.0 * self.nodes * self.num_channels**2)
        return [update, over_nodes, over_egos, whole, linear]

    def spmm(self) -> Kernel:
        """The product with the normalised adjacency by cuSPARSE: one row, one index, one value a slot."""
        return Kernel(
            "SpMM",
            (Gather(self.slots, self.row, self.table),),
            self.slots * (INDEX + self.item) + self.nodes * INDEX + self.table,
            2.0 * self.slots * self.num_channels,
        )

    def gcn(self) -> list[Kernel]:
        """A GCN layer on a CSR matrix."""
        return [self.linear(), self.spmm()]

    def _messages(self) -> list[Kernel]:
        """Gather into a slots × channels tensor, scale it, add it up by atomics, as PyG does unfused."""
        edges = self.slots * self.row
        return [
            Kernel(
                "gather", (Gather(self.slots, self.row, self.table),), self.slots * EDGE_INDEX + edges, 0.0
            ),
            Kernel("scale", (), 2 * edges + self.slots * self.item, self.slots * self.num_channels),
            Kernel(
                "scatter",
                (Gather(2 * self.slots, self.row, self.table),),
                edges + self.slots * EDGE_INDEX + self.table,
                self.slots * self.num_channels,
            ),
        ]

    def gcn_unfused(self) -> list[Kernel]:
        """PyG's GCNConv on edge_index, with cached normalisation."""
        return [self.linear(), *self._messages()]

    def gat_unfused(self) -> list[Kernel]:
        """PyG's GATConv, one head: scores of nodes, then ten passes over the edges' scores (softmax)."""
        streamed = 2 * self.table + 4 * self.nodes * self.item
        scores = Kernel("scores", (), streamed, 4.0 * self.nodes * self.num_channels)
        softmax = Kernel(
            "softmax",
            (Gather(6 * self.slots, self.item, self.nodes * self.item),),
            self.slots * (10 * self.item + 6 * EDGE_INDEX),
            10.0 * self.slots,
        )
        return [self.linear(), scores, softmax, *self._messages()]
