r"""Op kernels in plain PyTorch, with explicit backward formulas: what runs where no native kernel does.

The forwards are those of :mod:`dcgnn_kernels.reference`. The backwards are written out, not left to
autograd, because an op's kernel runs below autograd; they are also the readable form of what the fused
kernels compute. Memory is :math:`O(S K F)`, as in the reference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dcgnn_kernels import reference
from dcgnn_kernels._checks import check_finite
from dcgnn_kernels.graph import EgoGraph
from dcgnn_kernels.reference import Segments, accumulate_dtype


def solve_backward(
    cost: Tensor,
    potentials: Tensor,
    grad_assign: Tensor,
    segments: Segments,
    lam: float,
    num_iters: int | None,
) -> tuple[Tensor, Tensor]:
    r"""The assignment, and the gradient of the scaled cost, from the potentials ``[problems, T, K]``.

    Unrolled: with :math:`W = P \odot dP` start from dL = W, df = Σ_j W, dg = Σ_u W and walk
    :math:`t = T..1`; then dM = −λ dL. Implicit (``num_iters=None``): one K×K solve for each problem.
    """
    logits = -lam * cost
    sizes = segments.expand(segments.sizes.to(cost.dtype))[:, None]
    if num_iters is None:
        g = segments.expand(potentials[:, 0])
        row_softmax = torch.softmax(logits + g, dim=1)
        assign = row_softmax / sizes
        inner = (row_softmax * grad_assign).sum(1, keepdim=True)
        grad_logits = assign * (grad_assign - inner)
        step = reference.newton_step(row_softmax, segments.sum(grad_logits), segments)
        step = segments.expand(step)
        grad_logits = grad_logits - assign * (step - (row_softmax * step).sum(1, keepdim=True))
        return assign, -lam * grad_logits

    def potentials_at(t: int) -> tuple[Tensor, Tensor, Tensor]:
        before = potentials[:, t - 1] if t > 0 else torch.zeros_like(potentials[:, 0])
        f = reference.row_potential(logits, before, segments)[:, None]
        return segments.expand(before), f, segments.expand(potentials[:, t])

    _, f, g = potentials_at(num_iters - 1)
    assign = (logits + f + g).exp()
    grad_logits = assign * grad_assign
    grad_f = grad_logits.sum(1, keepdim=True)
    grad_g = segments.sum(grad_logits)
    for t in range(num_iters - 1, -1, -1):
        before, f, g = potentials_at(t)
        column = (logits + f + g).exp() * cost.size(1) * segments.expand(grad_g)
        grad_logits = grad_logits - column
        grad_f = grad_f - column.sum(1, keepdim=True)
        row = (logits + before + f).exp() * sizes * grad_f
        grad_logits = grad_logits - row
        grad_g = -segments.sum(row)
        grad_f = torch.zeros_like(grad_f)
    return assign, -lam * grad_logits


def scale_backward(
    distance: Tensor, cost: Tensor, grad_cost: Tensor, segments: Segments, cost_scale: str
) -> tuple[Tensor, Tensor]:
    """The gradient of the squared distances, as a numerator ``[rows, K]`` and a divisor ``[rows]``.

    They are kept apart because the divisor may be so small (features of 1e-20 in float32) that only
    difference / divisor, and not 1 / divisor, is a number.
    """
    if cost_scale == "none":
        return grad_cost, torch.ones_like(grad_cost[:, 0])
    entries = segments.sizes.to(distance.dtype) * distance.size(1)
    if cost_scale == "mean":
        scale = segments.sum(distance).sum(1) / entries
    else:
        scale = segments.first_max(distance)
    grad_scale = -segments.sum(grad_cost * cost).sum(1)
    if cost_scale == "mean":
        grad = grad_cost + segments.expand(grad_scale / entries)[:, None]
    else:
        grad = segments.add_at_first_max(grad_cost, distance, grad_scale)
    grad = torch.where(segments.expand(scale > 0)[:, None], grad, 0.0)
    return grad, segments.expand(torch.where(scale > 0, scale, 1.0))


def _sinkhorn_backward(
    grad_assign: Tensor | None,
    grad_clusters: Tensor | None,
    rows: Tensor,
    centroids: Tensor,
    potentials: Tensor,
    segments: Segments,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of the gathered rows ``[rows, F]`` and of the centroids ``[problems, K, F]``."""
    num_clusters = centroids.size(1)
    difference = rows[:, None, :] - segments.expand(centroids)
    distance = difference.square().sum(-1)
    cost = reference.scale_cost(distance, segments, cost_scale)
    grad_p = torch.zeros_like(cost) if grad_assign is None else grad_assign.to(cost.dtype)
    spread = None
    if grad_clusters is not None:
        spread = num_clusters * segments.expand(grad_clusters.to(cost.dtype))
        grad_p = grad_p + (spread * rows[:, None, :]).sum(-1)
    assign, grad_cost = solve_backward(cost, potentials, grad_p, segments, lam, num_iters)
    grad_distance, divisor = scale_backward(distance, cost, grad_cost, segments, cost_scale)
    pull = 2 * grad_distance[:, :, None] * (difference / divisor[:, None, None])
    grad_rows = pull.sum(1)
    if spread is not None:
        grad_rows = grad_rows + (assign[:, :, None] * spread).sum(1)
    return grad_rows, -segments.sum(pull)


def local_sinkhorn(
    z: Tensor,
    centroids: Tensor | None,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
    num_clusters: int,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
    tol: float,
    max_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    check_finite("local_sinkhorn: z", z)
    graph = EgoGraph._trusted(rowptr, member, colptr, ego, slot)
    if centroids is None:
        centroids = reference.local_centroids(z.to(accumulate_dtype(z.dtype)), graph, num_clusters)
    else:
        check_finite("local_sinkhorn: centroids", centroids)
    return reference.local_sinkhorn_with_potentials(
        z, centroids, graph, lam, num_iters, cost_scale, tol, max_iters
    )


def local_sinkhorn_backward(
    grad_assign: Tensor | None,
    grad_clusters: Tensor | None,
    z: Tensor,
    centroids: Tensor | None,
    potentials: Tensor,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
    num_clusters: int,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
) -> tuple[Tensor, Tensor]:
    """Without centroids their gradient flows on into ``grad_z``, and ``grad_centroids`` has size 0."""
    compute = accumulate_dtype(z.dtype)
    graph = EgoGraph._trusted(rowptr, member, colptr, ego, slot)
    segments = Segments.of_graph(graph)
    index = member.long()
    wide = z.to(compute)
    start = reference.local_centroids(wide, graph, num_clusters) if centroids is None else centroids
    rows = wide[index]
    grad_rows, grad_centroids = _sinkhorn_backward(
        grad_assign,
        grad_clusters,
        rows,
        start.to(compute),
        potentials,
        segments,
        lam,
        num_iters,
        cost_scale,
    )
    grad_z = torch.zeros_like(z, dtype=compute, memory_format=torch.contiguous_format)
    grad_z = grad_z.index_add(0, index, grad_rows)
    if centroids is None:
        grad_z = grad_z + local_centroids_backward(grad_centroids, *graph.arrays(), num_clusters)
        grad_centroids = grad_z.new_empty(0)
    return grad_z.to(z.dtype), grad_centroids.to(z.dtype)


def cluster_scatter(
    assign: Tensor,
    clusters: Tensor,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
) -> Tensor:
    return reference.cluster_scatter(assign, clusters, EgoGraph._trusted(rowptr, member, colptr, ego, slot))


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
    compute = accumulate_dtype(clusters.dtype)
    segments = Segments.of_graph(EgoGraph._trusted(rowptr, member, colptr, ego, slot))
    rows = grad.to(compute)[member.long()]
    wide = assign.to(compute)
    grad_assign = torch.einsum("sf,skf->sk", rows, segments.expand(clusters.to(compute)))
    grad_clusters = segments.sum(wide[:, :, None] * rows[:, None, :])
    return grad_assign.to(assign.dtype), grad_clusters.to(clusters.dtype)


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
    return reference.node_update(
        x,
        global_assign,
        global_message,
        assign,
        message,
        EgoGraph._trusted(rowptr, member, colptr, ego, slot),
        x_factor=x_factor,
        global_factor=global_factor,
        local_factor=local_factor,
        ego_factor=ego_factor,
        activation=activation,
    )


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
    *arrays: Tensor,
) -> tuple[Tensor, ...]:
    wide = grad.to(x_factor.dtype)
    dense = global_factor[:, None] * wide
    weighted = ego_factor[:, None, None] * message.to(wide.dtype)
    grad_assign, grad_weighted = cluster_scatter_backward(
        local_factor[:, None] * wide, assign.to(wide.dtype), weighted, *arrays
    )
    grads = (
        x_factor[:, None] * wide,
        dense @ global_message.to(wide.dtype).mT,
        global_assign.to(wide.dtype).mT @ dense,
        grad_assign,
        ego_factor[:, None, None] * grad_weighted,
    )
    return tuple(tensor.to(message.dtype) for tensor in grads)


def global_sinkhorn(
    z: Tensor,
    centroids: Tensor,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
    tol: float,
    max_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    check_finite("global_sinkhorn: z", z)
    check_finite("global_sinkhorn: centroids", centroids)
    return reference.global_sinkhorn_with_potentials(z, centroids, lam, num_iters, cost_scale, tol, max_iters)


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
    compute = accumulate_dtype(z.dtype)
    grad_z, grad_centroids = _sinkhorn_backward(
        grad_assign,
        None if grad_clusters is None else grad_clusters[None],
        z.to(compute),
        centroids.to(compute)[None],
        potentials[None],
        Segments.single(z.size(0), z.device),
        lam,
        num_iters,
        cost_scale,
    )
    return grad_z.to(z.dtype), grad_centroids[0].to(z.dtype)


def local_centroids(
    z: Tensor,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
    num_local: int,
) -> Tensor:
    return reference.local_centroids(z, EgoGraph._trusted(rowptr, member, colptr, ego, slot), num_local)


def local_centroids_backward(
    grad: Tensor,
    rowptr: Tensor,
    member: Tensor,
    colptr: Tensor,
    ego: Tensor,
    slot: Tensor,
    num_local: int,
) -> Tensor:
    """Transpose of the linear map of :func:`reference.local_centroids`."""
    graph = EgoGraph._trusted(rowptr, member, colptr, ego, slot)
    compute = accumulate_dtype(grad.dtype)
    wide = grad.to(compute)
    index = graph.ego_of_slot()
    nodes = member.long()
    sizes = graph.ego_sizes().to(compute)
    out = torch.zeros_like(wide[:, 0], memory_format=torch.contiguous_format)
    if num_local == 1:
        return out.index_add(0, nodes, (wide[:, 0] / sizes[:, None])[index]).to(grad.dtype)

    num_groups = num_local - 1
    neighbours = (sizes - 1)[:, None]
    groups = torch.arange(num_groups, device=grad.device)
    # Neighbours at positions g, g + K - 1, ...: the size of group g.
    counts = ((neighbours - groups + num_groups - 1) / num_groups).floor().clamp(min=0)
    filled = counts > 0
    group_grad = torch.where(filled[..., None], wide[:, 1:] / counts.clamp(min=1)[..., None], 0.0)
    rest = torch.where(filled[..., None], 0.0, wide[:, 1:]).sum(1)
    isolated = neighbours == 0
    rest_each = torch.where(isolated, 0.0, rest / neighbours.clamp(min=1))
    is_self = nodes == index
    position = torch.arange(graph.num_slots, device=grad.device) - rowptr.long()[index]
    group = (position - (nodes > index).long()) % num_groups
    grad_slots = group_grad[index, group] + rest_each[index]
    grad_slots = torch.where(is_self[:, None], 0.0, grad_slots)
    own = wide[:, 0] + torch.where(isolated, rest, 0.0)
    return (own.index_add(0, nodes, grad_slots)).to(grad.dtype)
