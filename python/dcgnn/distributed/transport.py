r"""The global transport problem with its rows spread over ranks.

The solver is that of :mod:`dcgnn_kernels.reference`; only its sums and maxima over rows are taken over all
ranks. An iteration's column update, :math:`g_j = -\log K - \operatorname{logsumexp}_u(\cdot)`, is a maximum
and a sum of :math:`|\Omega|` numbers; nothing of the size of the rows is sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcgnn.distributed.halo import Halo, all_max, all_min, all_sum
from dcgnn_kernels import fallback, reference
from dcgnn_kernels.reference import Segments, accumulate_dtype


class ShardedRows(Segments):
    """All rows of all ranks as one problem; ``sum`` and ``max`` give the same numbers on all ranks.

    Args:
        nodes: the numbers of the rows that are here, in the whole graph.
        num_nodes: rows of all ranks together.
        halo: the ranks.
    """

    def __init__(self, nodes: Tensor, num_nodes: int, halo: Halo) -> None:
        super().__init__(torch.zeros_like(nodes), torch.full((1,), num_nodes, device=nodes.device))
        self.nodes, self.num_nodes, self.halo = nodes, num_nodes, halo

    def sum(self, rows: Tensor) -> Tensor:
        return all_sum(rows.sum(0, keepdim=True), self.halo)

    def max(self, rows: Tensor) -> Tensor:
        return all_max(rows.amax(0, keepdim=True), self.halo)

    def expand(self, problems: Tensor) -> Tensor:
        return problems.expand(self.nodes.numel(), *problems.shape[1:])

    def first_max(self, rows: Tensor) -> Tensor:
        return self.max(rows).amax(1)

    def add_at_first_max(self, rows: Tensor, values: Tensor, amounts: Tensor) -> Tensor:
        """The first maximum is that of the lowest node of all ranks."""
        width = values.size(1)
        is_max = values == self.first_max(values)
        columns = torch.arange(width, device=values.device)
        position = torch.where(is_max, self.nodes[:, None] * width + columns, self.num_nodes * width)
        first = all_min(position.amin().view(1), self.halo)
        return rows + torch.where(position == first, amounts, 0.0)


def sharded_sinkhorn(
    z: Tensor,
    centroids: Tensor,
    rows: ShardedRows,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
) -> tuple[Tensor, Tensor]:
    """:func:`dcgnn_kernels.global_sinkhorn` of all ranks' rows: this rank's rows of the assignment, and the
    clusters, which are the same on all ranks.
    """
    return _ShardedSinkhorn.apply(z, centroids, rows, lam, num_iters, cost_scale)


def _distances(z: Tensor, centroids: Tensor) -> Tensor:
    # The matrix-product form loses the digits of small distances.
    return torch.cdist(z, centroids, compute_mode="donot_use_mm_for_euclid_dist").square()


class _ShardedSinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        centroids: Tensor,
        rows: ShardedRows,
        lam: float,
        num_iters: int | None,
        cost_scale: str,
    ) -> tuple[Tensor, Tensor]:
        wide = accumulate_dtype(z.dtype)
        values, start = z.to(wide), centroids.to(wide)
        cost = reference.scale_cost(_distances(values, start), rows, cost_scale)
        limits = reference.DEFAULT_TOL, reference.DEFAULT_MAX_ITERS
        assign, potentials = reference.solve(cost, rows, lam, num_iters, *limits)
        clusters = start.size(0) * all_sum(assign.mT @ values, rows.halo)
        ctx.save_for_backward(z, centroids, potentials)
        ctx.rows, ctx.options = rows, (lam, num_iters, cost_scale)
        return assign.to(z.dtype), clusters.to(z.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        z, centroids, potentials = ctx.saved_tensors
        rows, (lam, num_iters, cost_scale) = ctx.rows, ctx.options
        wide = accumulate_dtype(z.dtype)
        values, start = z.to(wide), centroids.to(wide)
        distance = _distances(values, start)
        cost = reference.scale_cost(distance, rows, cost_scale)
        # Every rank holds its share of the gradient of the clusters, which are one for all.
        spread = start.size(0) * all_sum(grads[1].to(wide), rows.halo)
        grad_assign = grads[0].to(wide) + values @ spread.mT
        assign, grad_cost = fallback.solve_backward(cost, potentials, grad_assign, rows, lam, num_iters)
        grad_distance, divisor = fallback.scale_backward(distance, cost, grad_cost, rows, cost_scale)
        pull = 2 * grad_distance
        grad_z = (pull.sum(1, keepdim=True) * values - pull @ start) / divisor[:, None] + assign @ spread
        # This rank's share: the sum over ranks is taken with that of the parameters.
        grad_centroids = (pull.sum(0)[:, None] * start - pull.mT @ values) / divisor[0]
        return grad_z.to(z.dtype), grad_centroids.to(z.dtype), None, None, None, None
