r"""Rows that ranks hold for each other, exchanged in forward and backward.

Two maps, each the transpose of the other, so that each is the other's backward:

- *gather*: the rows of a part, from those of its own nodes and of their owners;
- *reduce*: sums at the nodes, from what every part adds to its own rows and to its halo.

Both send :math:`F` numbers for every halo row, by one ``all_to_all``. A layer takes one of each: it gathers
the embeddings that its egos read, and sends to their owners what its egos' clusters give them, which is
:math:`K` times less than sending the clusters.

The gradient convention of everything here: the loss is the **sum of the ranks' losses**. What is the same
on all ranks (parameters, global clusters) has on each rank that rank's share of its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcgnn.partition import Part


class Traffic:
    """Counts what this rank sends: bytes and calls, by kind."""

    def __init__(self) -> None:
        self.bytes: dict[str, int] = {}
        self.calls: dict[str, int] = {}

    def count(self, kind: str, tensor: Tensor) -> None:
        """One call that sends ``tensor``."""
        self.bytes[kind] = self.bytes.get(kind, 0) + tensor.numel() * tensor.element_size()
        self.calls[kind] = self.calls.get(kind, 0) + 1

    def reset(self) -> None:
        """Forget what was counted."""
        self.bytes.clear()
        self.calls.clear()


class Halo:
    """A rank's exchange plan.

    Args:
        part: the rank's part.
        group: process group; None: all ranks.
    """

    def __init__(self, part: Part, group: Any = None) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.traffic = Traffic()
        self.num_own, self.num_rows = part.own_rows.numel(), part.nodes.numel()
        self.own_rows = part.own_rows
        # Halo rows are ascending in their node, not in their owner; the wire goes by owner.
        by_owner = torch.argsort(part.halo_owner, stable=True)
        self.halo_rows = part.halo_rows[by_owner]
        self.receives = torch.bincount(part.halo_owner, minlength=self.world).tolist()
        wanted = part.nodes[self.halo_rows]
        self.sends = self._exchange_sizes(self.receives)
        asked = wanted.new_empty(sum(self.sends))
        _all_to_all(asked, wanted, self.sends, self.receives, group)
        #: Own nodes (positions among them) that others hold, by rank.
        self.sent = torch.searchsorted(part.own, asked)

    def _exchange_sizes(self, sizes: list[int]) -> list[int]:
        given = torch.tensor(sizes, device=self.own_rows.device)
        taken = torch.empty_like(given)
        dist.all_to_all_single(taken, given, group=self.group)
        return taken.tolist()

    def gather(self, own: Tensor) -> Tensor:
        """``[own nodes, ...] -> [rows, ...]``, differentiable."""
        return _Gather.apply(own, self)

    def reduce(self, rows: Tensor) -> Tensor:
        """``[rows, ...] -> [own nodes, ...]``, sums over all ranks that hold a node, differentiable."""
        return _Reduce.apply(rows, self)

    def _gather(self, own: Tensor) -> Tensor:
        rows = own.new_empty(self.num_rows, *own.shape[1:])
        rows[self.own_rows] = own
        received = own.new_empty(sum(self.receives), *own.shape[1:])
        sending = own[self.sent]
        self.traffic.count("gather", sending)
        _all_to_all(received, sending, self.receives, self.sends, self.group)
        rows[self.halo_rows] = received
        return rows

    def _reduce(self, rows: Tensor) -> Tensor:
        own = rows[self.own_rows]
        received = rows.new_empty(sum(self.sends), *rows.shape[1:])
        sending = rows[self.halo_rows]
        self.traffic.count("reduce", sending)
        _all_to_all(received, sending, self.sends, self.receives, self.group)
        # By rank, in order: the same sum in every run.
        begin = 0
        for size in self.sends:
            block = slice(begin, begin + size)
            own[self.sent[block]] += received[block]  # a rank asks for a node once
            begin += size
        return own


def _all_to_all(
    output: Tensor, given: Tensor, output_sizes: list[int], given_sizes: list[int], group: Any
) -> None:
    dist.all_to_all_single(output, given.contiguous(), output_sizes, given_sizes, group=group)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return halo._gather(own)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.halo._reduce(grads[0]), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return halo._reduce(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.halo._gather(grads[0]), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, halo: Halo) -> Tensor:
        ctx.halo = halo
        return all_sum(tensor, halo)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return all_sum(grads[0], ctx.halo), None


def sum_over_ranks(tensor: Tensor, halo: Halo) -> Tensor:
    """The sum of all ranks' tensors, on all of them, differentiable."""
    return _SumOverRanks.apply(tensor, halo)


def all_sum(tensor: Tensor, halo: Halo) -> Tensor:
    """The sum of all ranks' tensors, on all of them."""
    return _all_reduce(tensor, halo, dist.ReduceOp.SUM)


def all_max(tensor: Tensor, halo: Halo) -> Tensor:
    """The entries' maxima over all ranks."""
    return _all_reduce(tensor, halo, dist.ReduceOp.MAX)


def all_min(tensor: Tensor, halo: Halo) -> Tensor:
    """The entries' minima over all ranks."""
    return _all_reduce(tensor, halo, dist.ReduceOp.MIN)


def _all_reduce(tensor: Tensor, halo: Halo, operation: Any) -> Tensor:
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    halo.traffic.count("all_reduce", total)
    dist.all_reduce(total, op=operation, group=halo.group)
    return total
