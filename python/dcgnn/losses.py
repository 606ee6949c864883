"""Training losses: cross entropy, orthogonal global clusters, nodes near the clusters of their class."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dcgnn.nn.msg_passing import DCState
from dcgnn.nn.topology import BatchTopology

SIMILARITY_AGGRS = ("max", "mean", "sum")
SIMILARITY_METRICS = ("cosine", "distance")


def orthogonality_loss(clusters: Tensor) -> Tensor:
    r"""Distance of the clusters' Gram matrix from a multiple of the identity, in [0, 2]:

    .. math:: L_{ortho} = \big\| G / \|G\|_F - I / \sqrt{|\Omega|} \big\|_F, \qquad G = C C^\top

    Args:
        clusters: ``[Ω, F]`` global cluster-nodes :math:`C`; of a batch of graphs ``[G, Ω, F]``, whose losses
            are averaged.
    """
    if clusters.dim() == 3 and clusters.size(0) > 0:
        return torch.stack([orthogonality_loss(one) for one in clusters]).mean()
    if clusters.dim() != 2 or clusters.size(0) < 1:
        raise ValueError(f"clusters must have shape [Ω, F] with Ω >= 1, got {list(clusters.shape)}")
    # The loss does not change with the clusters' size; without this the Gram matrix may overflow.
    largest = clusters.detach().abs().max()
    clusters = clusters / torch.where(largest > 0, largest, 1.0)
    gram = clusters @ clusters.mT
    identity = torch.eye(clusters.size(0), dtype=clusters.dtype, device=clusters.device)
    norm = torch.linalg.matrix_norm(gram)
    normalised = gram / norm.clamp(min=torch.finfo(gram.dtype).tiny)
    difference = normalised - identity / math.sqrt(clusters.size(0))
    # The derivative of the norm at 0 (exactly orthogonal clusters) is taken as 0.
    square = difference.square().sum()
    zero = square == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, square).sqrt())


def similarity_loss(
    z: Tensor,
    clusters: Tensor,
    y: Tensor,
    num_classes: int | None = None,
    aggr: str = "max",
    metric: str = "cosine",
) -> Tensor:
    r"""Pulls nodes towards the global clusters of their class and pushes them from the others'.

    Cluster :math:`j` belongs to class :math:`\lfloor j\, n_{classes} / |\Omega| \rfloor`. With
    :math:`s_i^\tau` the similarity of node :math:`i` to the clusters of class :math:`\tau`, aggregated:

    - ``metric="cosine"``: :math:`\operatorname{mean}_i [-s_i^{y_i} + \log \sum_{\tau \ne y_i} e^{s_i^\tau}]`
    - ``metric="distance"``: the form printed in the paper, whose sign fits a Euclidean distance
      :math:`d`: :math:`\operatorname{mean}_i [d_i^{y_i} - \log \sum_{\tau \ne y_i} e^{d_i^\tau}]`. It has no
      lower bound.

    Args:
        z: ``[n, F]`` node embeddings.
        clusters: ``[Ω, F]`` global cluster-nodes; Ω must be a multiple of ``num_classes``.
        y: ``[n]`` labels; rows with a negative one (unlabelled) are left out.
        num_classes: by default one more than the largest label.
        aggr: how similarities to the clusters of one class join: ``"max"`` (the most similar; with
            ``"distance"`` the nearest), ``"mean"`` or ``"sum"``.
        metric: ``"cosine"`` or ``"distance"``.
    """
    if aggr not in SIMILARITY_AGGRS:
        raise ValueError(f"aggr must be one of {SIMILARITY_AGGRS}, got {aggr!r}")
    if metric not in SIMILARITY_METRICS:
        raise ValueError(f"metric must be one of {SIMILARITY_METRICS}, got {metric!r}")
    if z.dim() != 2:
        raise ValueError(f"z must have shape [n, F], got {list(z.shape)}")
    if clusters.dim() != 2 or clusters.size(1) != z.size(1):
        raise ValueError(f"clusters must have shape [Ω, {z.size(1)}], got {list(clusters.shape)}")
    if y.shape != z.shape[:1]:
        raise ValueError(f"y must have shape [{z.size(0)}], got {list(y.shape)}")
    if y.dtype != torch.int64:
        raise ValueError(f"y must be int64, got {y.dtype}")
    labelled = y >= 0
    z, y = z[labelled], y[labelled]
    if num_classes is None:
        num_classes = int(y.max()) + 1 if y.numel() else 0
    if y.numel() and int(y.max()) >= num_classes:
        raise ValueError(f"y holds label {int(y.max())}, but num_classes is {num_classes}")
    if num_classes < 2:
        raise ValueError(f"num_classes must be at least 2, got {num_classes}")
    if clusters.size(0) % num_classes:
        raise ValueError(
            f"clusters: their number ({clusters.size(0)}) must be a multiple of num_classes ({num_classes})"
        )
    if y.numel() == 0:
        return z.sum() * 0.0
    if metric == "cosine":
        similarity = functional.normalize(z, dim=1) @ functional.normalize(clusters, dim=1).mT
    else:
        # The matrix-product form loses the digits of small distances.
        similarity = -torch.cdist(z, clusters, compute_mode="donot_use_mm_for_euclid_dist")
    by_class = similarity.view(z.size(0), num_classes, -1)
    if aggr == "max":
        score = by_class.amax(-1)
    elif aggr == "mean":
        score = by_class.mean(-1)
    else:
        score = by_class.sum(-1)
    own = score.gather(1, y[:, None])
    is_own = functional.one_hot(y, num_classes).bool()
    if metric == "cosine":
        others = score.masked_fill(is_own, -math.inf).logsumexp(1)
        return (others - own[:, 0]).mean()
    others = (-score).masked_fill(is_own, -math.inf).logsumexp(1)
    return (-own[:, 0] - others).mean()


def training_loss(
    logits: Tensor,
    y: Tensor,
    state: DCState | None = None,
    *,
    mask: Tensor | None = None,
    ortho_weight: float = 0.0,
    sim_weight: float = 0.0,
    sim_aggr: str = "max",
    sim_metric: str = "cosine",
) -> Tensor:
    r""":math:`L = CE + \omega_1 L_{ortho} + \omega_2 L_{sim}` over the labelled nodes of ``mask``.

    Args:
        logits: ``[N, C]``.
        y: ``[N]`` labels; negative ones are unlabelled.
        state: of the model's last forward; needed when a weight is not 0.
        mask: ``[N]`` bool, the training nodes; None: all.
        ortho_weight: :math:`\omega_1`.
        sim_weight: :math:`\omega_2`.
        sim_aggr: see :func:`similarity_loss`.
        sim_metric: see :func:`similarity_loss`.
    """
    if y.shape != logits.shape[:1] or y.dtype != torch.int64:
        raise ValueError(f"y must be int64 of shape [{logits.size(0)}], got {y.dtype} {list(y.shape)}")
    if y.numel() and int(y.max()) >= logits.size(1):
        raise ValueError(f"y holds label {int(y.max())}, but logits has {logits.size(1)} classes")
    for name, weight in (("ortho_weight", ortho_weight), ("sim_weight", sim_weight)):
        if not 0 <= weight < math.inf:
            raise ValueError(f"{name} must be finite and not negative, got {weight}")
    chosen = y >= 0
    if mask is not None:
        if mask.shape != y.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"mask must be bool of shape {list(y.shape)}, got {mask.dtype} {list(mask.shape)}"
            )
        chosen = chosen & mask
    if not bool(chosen.any()):
        raise ValueError("mask selects no labelled node")
    loss = functional.cross_entropy(logits[chosen], y[chosen])
    if ortho_weight == 0 and sim_weight == 0:
        return loss
    if state is None or state.global_clusters is None:
        raise ValueError(
            "state with global clusters (alpha > 0) is needed unless ortho_weight and sim_weight are 0"
        )
    clusters, topology = state.global_clusters, state.layers[-1].topology
    if isinstance(topology, BatchTopology):
        clusters = topology.of_filled(clusters)
    if ortho_weight != 0:
        loss = loss + ortho_weight * orthogonality_loss(clusters)
    if sim_weight != 0:
        options = (logits.size(1), sim_aggr, sim_metric)
        loss = loss + sim_weight * _similarity_of_state(state, clusters, y, chosen, *options)
    return loss


def _similarity_of_state(
    state: DCState, clusters: Tensor, y: Tensor, chosen: Tensor, *options: Any
) -> Tensor:
    """Mean over the chosen nodes, each with the clusters of its own graph."""
    topology = state.layers[-1].topology
    if not isinstance(topology, BatchTopology):
        return similarity_loss(state.z[chosen], clusters, y[chosen], *options)
    graph_of_node, total = topology.graphs.ego.long(), state.z.new_zeros(())
    for index in graph_of_node[chosen].unique().tolist():
        nodes = chosen & (graph_of_node == index)
        share = nodes.sum() / chosen.sum()
        total = total + share * similarity_loss(state.z[nodes], clusters[index], y[nodes], *options)
    return total
