"""local_centroids and its backward on the GPU: gathers by kernels, the small rest in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from dcgnn_kernels import fallback
from dcgnn_kernels.reference import accumulate_dtype
from dcgnn_kernels.triton import config
from dcgnn_kernels.triton.launcher import start
from dcgnn_kernels.triton.rows import centroid_sums, group_gather
from dcgnn_kernels.triton.sweep import Segments, Work, accumulator, reduce


def _group_sizes(sizes: Tensor, num_groups: int) -> Tensor:
    """``[N, groups]``: neighbours at positions g, g + groups, ..., from the egos' sizes."""
    groups = torch.arange(num_groups, device=sizes.device)
    return ((sizes[:, None] - 1 - groups + num_groups - 1) // num_groups).clamp(min=0)


def local_centroids(
    z: Tensor, rowptr: Tensor, member: Tensor, colptr: Tensor, ego: Tensor, slot: Tensor, num_local: int
) -> Tensor:
    """CUDA kernel of ``dcgnn::local_centroids``."""
    if z.numel() == 0 or num_local > config.MOST_CLUSTERS:
        return fallback.local_centroids(z, rowptr, member, colptr, ego, slot, num_local)
    with torch.cuda.device_of(z):
        z, rowptr, member = z.contiguous(), rowptr.contiguous(), member.contiguous()
        num_nodes, num_channels = z.shape
        num_groups = max(1, num_local - 1)
        egos = Segments.of(rowptr, member.size(0))
        sums = z.new_empty(num_nodes, num_groups, num_channels, dtype=accumulate_dtype(z.dtype))

        def run(work: Work, out: Tensor, width: int, blocks: int) -> None:
            start(
                centroid_sums,
                (work.programs, blocks),
                z=z,
                member=member,
                rowptr=rowptr,
                out=out,
                num_channels=num_channels,
                num_groups=num_groups,
                WHOLE=num_local == 1,
                TILED=work.tiled,
                ACC=accumulator(z.dtype),
                COLUMNS=config.power_of_two(num_groups),
                FEATURES=width,
                **work.arguments(),
            )

        left = egos.sums(str(("centroid_sums", num_local)), num_groups, sums, z, run)
        if left is not None:
            reduce(*left, sums)
        sizes = rowptr.diff()
        if num_local == 1:
            return (sums / sizes[:, None, None]).to(z.dtype)
        counts = _group_sizes(sizes, num_groups)[..., None]
        own = z.to(sums.dtype)[:, None]
        # Sums of groups of one are plain rows, others those of differences to the node.
        apart = torch.where(counts == 1, sums - own, sums).sum(1, keepdim=True)
        every = own + apart / (sizes - 1).clamp(min=1)[:, None, None]
        every = torch.where((sizes == 2)[:, None, None], sums[:, :1], every)
        means = torch.where(counts == 1, sums, own + sums / counts.clamp(min=1))
        return torch.cat([own, torch.where(counts > 0, means, every)], dim=1).to(z.dtype)


def local_centroids_backward(
    grad: Tensor, rowptr: Tensor, member: Tensor, colptr: Tensor, ego: Tensor, slot: Tensor, num_local: int
) -> Tensor:
    """CUDA kernel of ``dcgnn::local_centroids_backward``: one row of each ego that holds the node."""
    if grad.numel() == 0 or num_local > config.MOST_CLUSTERS:
        return fallback.local_centroids_backward(grad, rowptr, member, colptr, ego, slot, num_local)
    with torch.cuda.device_of(grad):
        rowptr, colptr, ego, slot = (array.contiguous() for array in (rowptr, colptr, ego, slot))
        num_nodes, _, num_channels = grad.shape
        num_groups = max(1, num_local - 1)
        sizes = rowptr.diff()[:, None, None]
        wide = grad.to(accumulate_dtype(grad.dtype))
        if num_local == 1:
            rows, own = wide / sizes, wide[:, 0]
        else:
            counts = _group_sizes(rowptr.diff(), num_groups)[..., None]
            given = wide[:, 1:]
            rest = torch.where(counts > 0, 0.0, given).sum(1, keepdim=True)
            rows = torch.where(counts > 0, given / counts.clamp(min=1), 0.0)
            rows = rows + rest / (sizes - 1).clamp(min=1)
            own = wide[:, 0] + torch.where(sizes[:, 0] == 1, rest[:, 0], 0.0)
        # Gathered once an entry, so in the storage dtype; float16 has too little range.
        rows = rows.to(torch.float32 if grad.dtype == torch.float16 else grad.dtype).contiguous()
        own = own.contiguous()
        nodes = Segments.of(colptr, ego.size(0))
        out = grad.new_empty(num_nodes, num_channels)

        def run(work: Work, out: Tensor, width: int, blocks: int) -> None:
            start(
                group_gather,
                (work.programs, blocks),
                rows_of_groups=rows,
                own=own,
                ego=ego,
                slot=slot,
                rowptr=rowptr,
                out=out,
                num_channels=num_channels,
                num_groups=num_groups,
                WHOLE=num_local == 1,
                TILED=work.tiled,
                ACC=accumulator(grad.dtype),
                FEATURES=width,
                **work.arguments(),
            )

        left = nodes.sums("group_gather", 1, out, rows, run)
        if left is not None:
            reduce(*left, out, addend=None if num_local == 1 else own)
        return out
