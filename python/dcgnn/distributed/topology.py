"""A rank's part of a graph, as the topology of the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import BatchNorm

from dcgnn.distributed.halo import Halo, sum_over_ranks
from dcgnn.distributed.transport import ShardedRows, sharded_sinkhorn
from dcgnn.nn.topology import Topology
from dcgnn.partition import Part


class PartTopology(Topology):
    """The layers on this topology compute, on every rank, the rows of that rank's own nodes, with the same
    numbers as on the whole graph. All ranks must run the same layers: each calls collectives.

    Args:
        part: the rank's part.
        group: process group; None: all ranks.
    """

    def __init__(self, part: Part, group: Any = None) -> None:
        super().__init__(part.graph)
        self.part = part
        self.halo = Halo(part, group)
        self.rows = ShardedRows(part.own, part.num_nodes, self.halo)
        is_own = torch.zeros(part.nodes.numel(), dtype=torch.float64, device=part.nodes.device)
        self.is_own = is_own.index_fill(0, part.own_rows, 1.0)

    def to(self, device: torch.device) -> PartTopology:
        """The same part on another device; itself when it is there already. All ranks must call it."""
        moved = self.part.to(device)
        return self if moved is self.part else PartTopology(moved, self.halo.group)

    @property
    def num_nodes(self) -> int:
        return self.part.own_rows.numel()

    @property
    def is_whole(self) -> bool:
        return False

    def members(self, z: Tensor) -> Tensor:
        return self.halo.gather(z)

    def own(self, rows: Tensor) -> Tensor:
        return rows[self.part.own_rows]

    @property
    def own_rows(self) -> Tensor:
        return self.part.own_rows

    def spread(self, own: Tensor) -> Tensor:
        rows = own.new_zeros(self.part.nodes.numel(), *own.shape[1:])
        return rows.index_copy(0, self.part.own_rows, own)

    def complete(self, rows: Tensor) -> Tensor:
        return self.halo.reduce(rows)

    def transport(self, z: Tensor, centroids: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        return sharded_sinkhorn(z, centroids, self.rows, *options)

    def update(
        self,
        x: Tensor,
        global_assign: Tensor,
        global_message: Tensor,
        assign: Tensor,
        message: Tensor,
        factors: Mapping[str, Tensor],
    ) -> Tensor:
        # Halo rows take part in no global sum here: their factor is 0.
        if global_assign.size(0) != x.size(0):
            global_assign = self.spread(global_assign)
        return super().update(x, global_assign, global_message, assign, message, factors)

    def problem_sizes(self) -> int:
        return self.part.num_nodes

    def ego_sizes(self) -> Tensor:
        return super().ego_sizes() * self.is_own

    def egos_per_node(self) -> Tensor:
        return self.reached(self.is_own)

    def reached(self, ego_mass: Tensor) -> Tensor:
        # Only the owner knows all egos that hold a node; everyone multiplies by its number.
        return self.halo.gather(self.halo.reduce(super().reached(ego_mass)))

    def masked(self, factor: Tensor) -> Tensor:
        return factor * self.is_own

    def normalise(self, norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not isinstance(norm, BatchNorm):
            return norm(x)  # of each node alone
        return sharded_batch_norm(norm.module, x, self.part.num_nodes, self.halo)


def sharded_batch_norm(norm: torch.nn.BatchNorm1d, x: Tensor, num_nodes: int, halo: Halo) -> Tensor:
    """Batch norm with the mean and variance of all ranks' rows; running statistics as in one process.

    ``torch.nn.SyncBatchNorm`` does the same for GPUs alone.
    """
    if not norm.training:
        return norm(x)
    mean = sum_over_ranks(x.sum(0), halo) / num_nodes
    centred = x - mean
    variance = sum_over_ranks(centred.square().sum(0), halo) / num_nodes
    if norm.track_running_stats:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        with torch.no_grad():
            assert norm.num_batches_tracked is not None
            norm.num_batches_tracked += 1
            weight = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), weight)
            unbiased = variance * (num_nodes / max(num_nodes - 1, 1))
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), weight)
    out = centred * (variance + norm.eps).rsqrt()
    return out if norm.weight is None else out * norm.weight + norm.bias
