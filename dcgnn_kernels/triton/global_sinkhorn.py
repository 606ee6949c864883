"""global_sinkhorn and its backward on the GPU: costs and iterations by ``passes``, sums of rows by torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from dcgnn_kernels import fallback
from dcgnn_kernels.reference import accumulate_dtype
from dcgnn_kernels.triton import config, passes
from dcgnn_kernels.triton.launcher import start
from dcgnn_kernels.triton.sweep import compiler_options, in_two_parts

MOST_CLUSTERS = 16384  # columns that a program of 16 warps holds
MOST_PROGRAMS = 1024
BLOCK = 2048  # costs that a program of 4 warps holds


def _served_by_fallback(z: Tensor, centroids: Tensor, num_iters: int | None) -> bool:
    """Convergence needs a dense solve."""
    return num_iters is None or z.numel() == 0 or centroids.size(0) > MOST_CLUSTERS


@dataclass(frozen=True)
class _Problem:
    """The (unscaled) costs, their scale, and how the passes over them are launched."""

    costs: Tensor  # [N, Ω]
    scale: Tensor  # [1]
    lam: float

    @classmethod
    def of(cls, z: Tensor, centroids: Tensor, lam: float, cost_scale: str) -> _Problem:
        accumulate = accumulate_dtype(z.dtype)
        z, centroids = z.contiguous(), centroids.contiguous()
        (num_rows, num_channels), num_columns = z.shape, centroids.size(0)
        costs = z.new_empty(num_rows, num_columns, dtype=accumulate)
        shape = _distance_shape(num_columns, num_channels, accumulate)
        start(
            passes.squared_distances,
            (triton.cdiv(num_rows, shape["B"]), triton.cdiv(num_columns, shape["COLUMNS"])),
            z=z,
            centroids=centroids,
            costs=costs,
            num_rows=num_rows,
            num_columns=num_columns,
            num_channels=num_channels,
            **shape,
        )
        scale = z.new_ones(1, dtype=accumulate)
        if cost_scale == "mean":
            scale = costs.mean().view(1)
        elif cost_scale == "max":
            scale = costs.max().view(1)
        return cls(costs, scale, lam)

    def first_maximum(self) -> Tensor:
        """``[1]``: where the largest cost is, the first by row and then by column, in the flattened costs."""
        row = self.costs.amax(1).argmax().view(1)  # argmax gives the first of equals
        return row * self.costs.size(1) + self.costs.index_select(0, row).argmax(1)

    @property
    def num_programs(self) -> int:
        return min(
            MOST_PROGRAMS, triton.cdiv(self.costs.size(0), _shape(self.costs.size(1), self.costs.dtype)["B"])
        )

    def arguments(self) -> dict[str, Any]:
        num_rows, num_columns = self.costs.shape
        return {
            "costs": self.costs,
            "scale": self.scale,
            "num_rows": num_rows,
            "num_columns": num_columns,
            **in_two_parts(self.lam),
            **_shape(num_columns, self.costs.dtype),
        }

    def combine(self, kernel: Any, partial: Tensor, out: Tensor) -> None:
        """Second stage of a reduction over rows."""
        num_columns = self.costs.size(1)
        width = min(config.features(num_columns), 128)
        start(
            kernel,
            (triton.cdiv(num_columns, width),),
            partial=partial,
            out=out,
            num_programs=self.num_programs,
            num_columns=num_columns,
            M=max(1, BLOCK // width),
            COLUMNS=width,
            **compiler_options(4),
        )


def _shape(num_columns: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile of the passes over costs."""
    columns = config.features(num_columns)
    height = max(1, (BLOCK // 4 if dtype == torch.float64 else BLOCK) // columns)
    return {"B": height, "COLUMNS": columns, **compiler_options(min(16, max(4, columns // 512)))}


def _distance_shape(num_columns: int, num_channels: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile of the distances: 2 · BLOCK differences a program, or a quarter of them in float64."""
    size = BLOCK // 2 if dtype == torch.float64 else 2 * BLOCK
    columns = min(config.features(num_columns), 32)
    width = min(config.features(num_channels), max(4, size // (8 * columns)))
    height = max(1, size // (columns * width))
    return {"B": height, "COLUMNS": columns, "FEATURES": width, **compiler_options(4)}


def global_sinkhorn(
    z: Tensor,
    centroids: Tensor,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
    tol: float,
    max_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """CUDA kernel of ``dcgnn::global_sinkhorn``."""
    if _served_by_fallback(z, centroids, num_iters):
        return fallback.global_sinkhorn(z, centroids, lam, num_iters, cost_scale, tol, max_iters)
    assert num_iters is not None
    with torch.cuda.device_of(z):
        problem = _Problem.of(z, centroids, lam, cost_scale)
        num_columns, programs = centroids.size(0), problem.num_programs
        potentials = problem.costs.new_empty(num_iters, num_columns)
        partial = problem.costs.new_empty(programs, 2, num_columns)
        for step in range(num_iters):
            before = potentials[max(0, step - 1)]
            start(
                passes.forward_step,
                (programs,),
                before=before,
                partial=partial,
                FIRST=step == 0,
                **problem.arguments(),
            )
            problem.combine(passes.column_potential, partial, potentials[step])
        share = torch.empty_like(problem.costs)
        _shares(problem, potentials, share, None, share, partial)
        clusters = num_columns * (share.mT @ z.to(share.dtype))
        return share.to(z.dtype), clusters.to(z.dtype), potentials


def _shares(
    problem: _Problem,
    potentials: Tensor,
    out: Tensor,
    grads: Tensor | None,
    weighted: Tensor,
    partial: Tensor,
) -> None:
    start(
        passes.shares,
        (problem.num_programs,),
        before=potentials[max(0, potentials.size(0) - 2)],
        after=potentials[-1],
        grads=out if grads is None else grads,
        out=out,
        weighted=weighted,
        partial=partial,
        FIRST=potentials.size(0) == 1,
        BACKWARD=grads is not None,
        **problem.arguments(),
    )


def global_sinkhorn_backward(
    grad_assign: Tensor | None,
    grad_clusters: Tensor | None,
    z: Tensor,
    centroids: Tensor,
    potentials: Tensor,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
) -> tuple[Tensor, Tensor]:
    """CUDA kernel of ``dcgnn::global_sinkhorn_backward``."""
    if _served_by_fallback(z, centroids, num_iters):
        return fallback.global_sinkhorn_backward(
            grad_assign, grad_clusters, z, centroids, potentials, lam, num_iters, cost_scale
        )
    with torch.cuda.device_of(z):
        problem = _Problem.of(z, centroids, lam, cost_scale)
        num_rows, num_columns = problem.costs.shape
        # Gradients are sums over z_u − c_j and depend on nothing else: an offset that all points share is
        # taken off, so that it costs no digits.
        centroids = centroids.to(problem.costs.dtype)
        centre = centroids.mean(0)
        rows, centroids = z.to(centre.dtype) - centre, centroids - centre
        grads = problem.costs.new_zeros(1) if grad_assign is None else grad_assign.to(problem.costs.dtype)
        spread = None
        if grad_clusters is not None:
            spread = num_columns * grad_clusters.to(problem.costs.dtype)
            # Columns of P sum to 1 / Ω whatever the costs are: what is added to a whole column of its
            # gradient, as the centre would be here, changes nothing.
            grads = rows @ spread.mT + grads
        share, grad_logits = _walk_back(problem, potentials.contiguous(), grads.contiguous())

        grad = -lam * grad_logits
        flat = problem.scale == 0
        if cost_scale != "none":
            divisor = torch.where(flat, 1.0, problem.scale)
            grad_scale = -(grad * (problem.costs / divisor)).sum().view(1)
            if cost_scale == "mean":
                grad = grad + grad_scale / (num_rows * num_columns)
            else:
                grad.view(-1).index_add_(0, problem.first_maximum(), grad_scale)
            grad = torch.where(flat, 0.0, grad)
        # Half of the division by the scale goes to either factor: 1 / scale may overflow.
        root = torch.where(flat, 1.0, problem.scale).rsqrt()
        grad = 2.0 * grad * root
        grad_z = grad.sum(1, keepdim=True) * rows * root - grad @ (centroids * root)
        grad_centroids = (grad.sum(0)[:, None] * centroids - grad.mT @ rows) * root
        if spread is not None:
            grad_z = grad_z.addmm_(share, spread)
        return grad_z.to(z.dtype), grad_centroids.to(z.dtype)


def _walk_back(problem: _Problem, potentials: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """P and the gradient of the logits, from the gradient of P."""
    programs, num_columns = problem.num_programs, problem.costs.size(1)
    share, past, grad_logits = (torch.empty_like(problem.costs) for _ in range(3))
    partial = problem.costs.new_empty(programs, num_columns)
    column_grad = problem.costs.new_empty(num_columns)
    _shares(problem, potentials, share, grads, past, partial)
    num_iters = potentials.size(0)
    for step in reversed(range(num_iters)):
        problem.combine(passes.column_sum, partial, column_grad)
        start(
            passes.backward_step,
            (programs,),
            before=potentials[max(0, step - 1)],
            after=potentials[step],
            column_grad=column_grad,
            past=past,
            grad_logits=grad_logits,
            partial=partial,
            FIRST=step == 0,
            LAST=step == num_iters - 1,
            **problem.arguments(),
        )
        past, grad_logits = grad_logits, past
    return share, past
