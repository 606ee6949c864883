"""cluster_scatter: the broadcast from the cluster-nodes of every ego back to the nodes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dcgnn_kernels import fallback
from dcgnn_kernels._checks import check_float, check_same, check_shape
from dcgnn_kernels._library import (
    GRAPH_ARGS,
    autocast_to_float32,
    define,
    define_autograd,
    forbid_double_backward,
)
from dcgnn_kernels.graph import EgoGraph, check_graph


def cluster_scatter(assign: Tensor, clusters: Tensor, graph: EgoGraph) -> Tensor:
    r"""Sums for every node the cluster-nodes that it belongs to, over all egos that hold it:

    .. math:: B_i = \sum_{u : i \in \mathcal N_u^+} \sum_j P^u_{ij} C^u_j

    A gather over the transpose of the graph: no atomics, the same bits for any number of threads.

    Args:
        assign: ``[S, K]`` weights :math:`P`, one row for every slot.
        clusters: ``[egos, K, F]`` cluster-nodes :math:`C` of every ego, same dtype and device.
        graph: the ego-neighbourhoods, ``N`` nodes and ``S`` slots; ``N`` egos, or as many as there are
            graphs in :meth:`EgoGraph.from_batch`.

    Returns:
        ``[N, F]``.
    """
    check_graph(graph)
    check_float("assign", assign, 2)
    check_float("clusters", clusters, 3)
    check_same("assign", assign, "clusters", clusters)
    num_egos, num_clusters, num_channels = graph.num_egos, clusters.size(1), clusters.size(2)
    check_shape("clusters", clusters, (num_egos, num_clusters, num_channels), "[N, K, F]")
    check_shape("assign", assign, (graph.num_slots, num_clusters), "[graph.num_slots, K]")
    if graph.device != clusters.device:
        raise ValueError(
            f"graph is on {graph.device}, but clusters is on {clusters.device}; use graph.to(device)"
        )
    return torch.ops.dcgnn.cluster_scatter(assign, clusters, *graph.arrays())


def _fake(
    assign: Tensor, clusters: Tensor, rowptr: Tensor, member: Tensor, colptr: Tensor, *_: Any
) -> Tensor:
    return clusters.new_empty(colptr.size(0) - 1, clusters.size(2))


def _fake_backward(grad: Tensor, assign: Tensor, clusters: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return assign.new_empty(assign.shape), clusters.new_empty(clusters.shape)


FORWARD = define(
    f"cluster_scatter(Tensor assign, Tensor clusters, {GRAPH_ARGS}) -> Tensor",
    fallback=fallback.cluster_scatter,
    fake=_fake,
)
BACKWARD = define(
    f"cluster_scatter_backward(Tensor grad, Tensor assign, Tensor clusters, {GRAPH_ARGS})"
    " -> (Tensor grad_assign, Tensor grad_clusters)",
    fallback=fallback.cluster_scatter_backward,
    fake=_fake_backward,
)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.dcgnn.cluster_scatter_backward(grad, *ctx.saved_tensors)
    return (*grads, *((None,) * 5))


define_autograd(FORWARD, _setup_context, _backward)
forbid_double_backward(BACKWARD)
autocast_to_float32(FORWARD)
