"""cluster_scatter, node_update and their backwards on the GPU, where the native extension has no CUDA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcgnn_kernels import fallback
from dcgnn_kernels.reference import accumulate_dtype
from dcgnn_kernels.triton import config
from dcgnn_kernels.triton.launcher import start
from dcgnn_kernels.triton.plan import Tiles
from dcgnn_kernels.triton.rows import ego_sums, finish_update, member_sums, slot_products
from dcgnn_kernels.triton.sweep import (
    Segments,
    Work,
    accumulator,
    channel_blocks,
    compiler_options,
    partial_sums_at_a_time,
    reduce,
)

_UPDATE = ("x", "x_factor", "global_assign", "global_message", "global_factor", "local_factor", "ego_factor")
ACTIVATIONS = {"none": 0, "relu": 1, "tanh": 2}


def cluster_scatter(
    assign: Tensor,
    clusters: Tensor,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
) -> Tensor:
    """CUDA kernel of ``dcgnn::cluster_scatter``."""
    if clusters.numel() == 0:
        return fallback.cluster_scatter(assign, clusters, rowptr, member, colptr, ego, slot)
    with torch.cuda.device_of(clusters):
        assign, clusters = assign.contiguous(), clusters.contiguous()
        out = clusters.new_empty(colptr.size(0) - 1, clusters.size(2))
        left = _broadcast(assign, clusters, out, (colptr, ego, slot), None)
        if left is not None:
            reduce(*left, out)
        return out


def _broadcast(
    assign: Tensor,
    clusters: Tensor,
    out: Tensor,
    transpose: tuple[Tensor, Tensor, Tensor],
    update: dict[str, Any] | None,
) -> tuple[Tiles, Tensor] | None:
    """Sums over the transpose; ``update`` holds what node_update adds. Gives what tiles left to add."""
    colptr, ego, slot = (array.contiguous() for array in transpose)
    nodes = Segments.of(colptr, ego.size(0))
    extra = dict.fromkeys(_UPDATE, out) | {"num_global": 0, "ACTIVATION": 0} if update is None else update

    def run(work: Work, out: Tensor, width: int, blocks: int) -> None:
        start(
            ego_sums,
            (work.programs, blocks),
            assign=assign,
            clusters=clusters,
            ego=ego,
            slot=slot,
            out=out,
            num_channels=clusters.size(2),
            num_clusters=clusters.size(1),
            UPDATE=update is not None,
            TILED=work.tiled,
            ACC=accumulator(clusters.dtype),
            FEATURES=width,
            **extra,
            **work.arguments(),
        )

    return nodes.sums(str(("ego_sums", clusters.size(1), update is None)), 1, out, clusters, run)


def cluster_scatter_backward(
    grad: Tensor,
    assign: Tensor,
    clusters: Tensor,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
) -> tuple[Tensor, Tensor]:
    """CUDA kernel of ``dcgnn::cluster_scatter_backward``."""
    if clusters.numel() == 0 or clusters.size(1) > config.MOST_CLUSTERS:
        return fallback.cluster_scatter_backward(grad, assign, clusters, rowptr, member, colptr, ego, slot)
    with torch.cuda.device_of(clusters):
        return _messages_backward(grad, assign, clusters, rowptr, member, None, None)


def _messages_backward(
    grad: Tensor,
    assign: Tensor,
    message: Tensor,
    rowptr: Tensor,
    member: Tensor,
    member_factor: Tensor | None,
    ego_factor: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of assign and of the messages, in one visit to the members where a row fits into a tile."""
    grad, assign, message = grad.contiguous(), assign.contiguous(), message.contiguous()
    rowptr, member = rowptr.contiguous(), member.contiguous()
    num_clusters, num_channels = message.shape[1:]
    egos = Segments.of(rowptr, member.size(0))
    grad_assign, grad_message = torch.empty_like(assign), torch.empty_like(message)
    one_tile = channel_blocks(num_channels)[1] == 1
    factors = {
        "member_factor": grad if member_factor is None else member_factor.contiguous(),
        "ego_factor": grad if ego_factor is None else ego_factor.contiguous(),
        "FACTORS": member_factor is not None,
    }
    common = {
        "x": grad,
        "sources": message,
        "member": member,
        "source_index": member,
        "num_channels": num_channels,
        "num_clusters": num_clusters,
        "COMPACT": False,
        "ACC": accumulator(message.dtype),
        **factors,
    }

    def sums(work: Work, out: Tensor, width: int, blocks: int) -> None:
        start(
            member_sums,
            (work.programs, blocks),
            weights=assign,
            out=out,
            dots=grad_assign,
            centre_root=grad,
            DOTS=one_tile,
            CENTRED=False,
            TILED=work.tiled,
            COLUMNS=config.power_of_two(num_clusters),
            FEATURES=width,
            **common,
            **work.arguments(),
        )

    def dots(work: Work, out: Tensor, width: int, blocks: int) -> None:
        start(
            slot_products,
            (work.programs,),
            out=grad_assign,
            addend=grad,
            gain=1.0,
            DISTANCE=False,
            ADD=False,
            TILED=work.tiled,
            FEATURES=width,
            BLOCKS=blocks,
            **common,
            **work.arguments(),
        )

    left = egos.sums(str(("member_sums", num_clusters)), num_clusters, grad_message, message, sums)
    if left is not None:
        reduce(*left, grad_message, factor=ego_factor)
    if not one_tile:
        egos.sums("slot_products", 1, grad_message, message, dots)
    return grad_assign, grad_message


def node_update(
    x: Tensor,
    global_assign: Tensor,
    global_message: Tensor,
    assign: Tensor,
    message: Tensor,
    x_factor: Tensor,
    global_factor: Tensor,
    local_factor: Tensor,
    ego_factor: Tensor,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
    activation: str,
) -> Tensor:
    """CUDA kernel of ``dcgnn::node_update``."""
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    with torch.cuda.device_of(x):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        extra = {
            "x": x.contiguous(),
            "x_factor": x_factor.contiguous(),
            "global_assign": global_assign.contiguous(),
            "global_message": global_message.contiguous(),
            "global_factor": global_factor.contiguous(),
            "local_factor": local_factor.contiguous(),
            "num_global": global_message.size(0),
            "ACTIVATION": ACTIVATIONS[activation],
        }
        scatter = extra | {"ego_factor": ego_factor.contiguous()}
        left = _broadcast(assign.contiguous(), message.contiguous(), out, (colptr, ego, slot), scatter)
        if left is not None:
            tiles, partial = left
            width, blocks = channel_blocks(x.size(1))
            start(
                finish_update,
                (tiles.num_hubs, blocks),
                partial=partial,
                pointer=tiles.pointer,
                hubs=tiles.hubs,
                out=out,
                num_channels=x.size(1),
                ACC=accumulator(x.dtype),
                M=partial_sums_at_a_time(width),
                FEATURES=width,
                **compiler_options(4),
                **extra,
            )
        return out


def node_update_backward(
    grad: Tensor,
    global_assign: Tensor,
    global_message: Tensor,
    assign: Tensor,
    message: Tensor,
    x_factor: Tensor,
    global_factor: Tensor,
    local_factor: Tensor,
    ego_factor: Tensor,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """CUDA kernel of ``dcgnn::node_update_backward``: the dense products are torch's."""
    with torch.cuda.device_of(grad):
        wide = grad.to(accumulate_dtype(grad.dtype))
        dense = global_factor[:, None] * wide
        grad_x = (x_factor[:, None] * wide).to(message.dtype)
        grad_global_assign = (dense @ global_message.to(wide.dtype).mT).to(message.dtype)
        grad_global_message = (global_assign.to(wide.dtype).mT @ dense).to(message.dtype)
        if message.numel() == 0 or message.size(1) > config.MOST_CLUSTERS:
            weighted = ego_factor[:, None, None] * message.to(wide.dtype)
            grad_assign, grad_message = fallback.cluster_scatter_backward(
                local_factor[:, None] * wide,
                assign.to(wide.dtype),
                weighted,
                rowptr,
                member,
                colptr,
                ego,
                slot,
            )
            grad_message = ego_factor[:, None, None] * grad_message
        else:
            grad_assign, grad_message = _messages_backward(
                grad, assign, message, rowptr, member, local_factor, ego_factor
            )
        return (
            grad_x,
            grad_global_assign,
            grad_global_message,
            grad_assign.to(message.dtype),
            grad_message.to(message.dtype),
        )
