r"""The ops in plain PyTorch, differentiable by autograd, on any device and dtype.

This is the oracle of the tests and is written for clarity: it materialises :math:`O(S K F)` numbers
(``S`` slots, ``K`` cluster-nodes, ``F`` channels). float16 and bfloat16 are computed in float32.

**Problem.** Rows :math:`u = 1..n`, columns :math:`j = 1..K`, cost :math:`M_{uj} = \|z_u - c_j\|^2`,
divided by one scale for each problem if asked. :math:`T` Sinkhorn iterations from :math:`g^0 = 0`:

.. math::
    f_u^t = -\log n - \operatorname{logsumexp}_j(-\lambda M_{uj} + g_j^{t-1}), \quad
    g_j^t = -\log K - \operatorname{logsumexp}_u(-\lambda M_{uj} + f_u^t), \quad
    P_{uj} = \exp(-\lambda M_{uj} + f_u^T + g_j^T)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dcgnn_kernels._checks import check_sinkhorn_options
from dcgnn_kernels.graph import EgoGraph

DEFAULT_TOL = 1e-10
DEFAULT_MAX_ITERS = 1000


class Segments:
    """Rows of a tall matrix grouped into problems, and the reductions over each group."""

    def __init__(self, index: Tensor, sizes: Tensor) -> None:
        self.index = index  # [rows] -> problem
        self.sizes = sizes  # [problems]
        self.num_problems = sizes.size(0)

    @classmethod
    def of_graph(cls, graph: EgoGraph) -> Segments:
        """One problem for every ego; its rows are the ego's slots."""
        return cls(graph.ego_of_slot(), graph.ego_sizes())

    @classmethod
    def single(cls, num_rows: int, device: torch.device) -> Segments:
        """One problem that holds all rows."""
        return cls(
            torch.zeros(num_rows, dtype=torch.int64, device=device),
            torch.full((1,), num_rows, device=device),
        )

    def log_sizes(self, like: Tensor) -> Tensor:
        """``[rows]``: log n of the row's problem."""
        return self.sizes.to(like.dtype).log()[self.index]

    def sum(self, rows: Tensor) -> Tensor:
        """``[rows, ...] -> [problems, ...]``."""
        return rows.new_zeros(self.num_problems, *rows.shape[1:]).index_add(0, self.index, rows)

    def max(self, rows: Tensor) -> Tensor:
        """``[rows, K] -> [problems, K]``, not differentiated."""
        index = self.index[:, None].expand_as(rows)
        smallest = rows.new_full((self.num_problems, rows.size(1)), -math.inf)
        return smallest.scatter_reduce(0, index, rows.detach(), "amax")

    def expand(self, problems: Tensor) -> Tensor:
        """``[problems, ...] -> [rows, ...]``."""
        return problems[self.index]

    def logsumexp(self, rows: Tensor) -> Tensor:
        """``[rows, K] -> [problems, K]``."""
        shift = self.max(rows)
        return self.sum((rows - self.expand(shift)).exp()).log() + shift

    def first_argmax(self, rows: Tensor) -> Tensor:
        """``[problems]``: index into ``rows.flatten()`` of the first maximum of every problem."""
        num_rows, width = rows.shape
        is_max = rows == self.expand(self.max(rows).amax(1, keepdim=True))
        position = torch.arange(num_rows * width, device=rows.device).view(num_rows, width)
        candidates = torch.where(is_max, position, num_rows * width).amin(1)
        first = candidates.new_full((self.num_problems,), num_rows * width)
        return first.scatter_reduce(0, self.index, candidates, "amin")

    def first_max(self, rows: Tensor) -> Tensor:
        """``[rows, K] -> [problems]``: the maximum; its gradient goes to the first one."""
        return rows.flatten()[self.first_argmax(rows)]

    def add_at_first_max(self, rows: Tensor, values: Tensor, amounts: Tensor) -> Tensor:
        """``rows`` with ``amounts`` ``[problems]`` added where ``values`` have their first maximum."""
        return rows.flatten().index_add(0, self.first_argmax(values), amounts).view_as(rows)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that arithmetic runs in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def scale_cost(cost: Tensor, segments: Segments, cost_scale: str) -> Tensor:
    """Divides the cost by its mean or maximum over each problem; 0 where that is 0."""
    if cost_scale == "none":
        return cost
    if cost_scale == "mean":
        entries = segments.sizes.to(cost.dtype) * cost.size(1)
        scale = segments.sum(cost).sum(1) / entries
    else:
        scale = segments.first_max(cost)
    positive = segments.expand(scale > 0)[:, None]
    divisor = segments.expand(torch.where(scale > 0, scale, 1.0))[:, None]
    return torch.where(positive, cost / divisor, 0.0)


def row_potential(logits: Tensor, g: Tensor, segments: Segments) -> Tensor:
    """F from g: makes every row sum to 1 / n."""
    return -segments.log_sizes(logits) - torch.logsumexp(logits + segments.expand(g), dim=1)


def column_potential(logits: Tensor, f: Tensor, segments: Segments) -> Tensor:
    """G from f: makes every column sum to 1 / K."""
    return -math.log(logits.size(1)) - segments.logsumexp(logits + f[:, None])


def column_residual(row_softmax: Tensor, segments: Segments) -> Tensor:
    """``[problems, K]``: column sums of row_softmax / n, minus the 1 / K that they should be."""
    sizes = segments.sizes.to(row_softmax.dtype)[:, None]
    return segments.sum(row_softmax) / sizes - 1 / row_softmax.size(1)


def newton_step(row_softmax: Tensor, residual: Tensor, segments: Segments) -> Tensor:
    r"""``[problems, K]``: :math:`J^{-1} r` with the last entry held at 0, which fixes g's free constant.

    :math:`J` is the derivative of the column sums by g with f eliminated: a graph Laplacian whose edge
    weights are :math:`w_{jk} = \frac1n \sum_u r_{uj} r_{uk}` for row-stochastic :math:`r`. Diagonals as
    sums of weights keep full relative accuracy where assignments are sharp and all weights tiny; below
    rounding noise, where weights carry no information, a floor keeps the solution bounded.
    """
    columns = row_softmax.size(1)
    if columns == 1:
        return torch.zeros_like(residual)
    weights = segments.sum(row_softmax[:, :, None] * row_softmax[:, None, :])
    weights = weights / segments.sizes.to(weights.dtype)[:, None, None]
    weights = weights * (1 - torch.eye(columns, dtype=weights.dtype, device=weights.device))
    floor = torch.finfo(weights.dtype).eps
    laplacian = torch.diag_embed(weights.sum(-1) + floor) - weights
    step = torch.linalg.solve(laplacian[:, :-1, :-1], residual[:, :-1])
    return torch.nn.functional.pad(step, (0, 1))


def largest(columns: Tensor) -> Tensor:
    """``[problems, K] -> [problems, 1]``: the largest absolute value."""
    return columns.abs().amax(1, keepdim=True)


def balance(logits: Tensor, g: Tensor, segments: Segments, tol: float, max_iters: int) -> Tensor:
    r"""Moves g towards the solution of r(g) = 0, r being the column residual.

    :math:`-r` is the gradient of the concave dual
    :math:`D(g) = \frac1K \sum_j g_j - \frac1n \sum_u \operatorname{logsumexp}_j(L_{uj} + g_j)`. Each
    iteration takes, for every problem, the Newton step (whole or a quarter, never longer than a bound)
    or the Sinkhorn iteration, whichever raises D most; Newton's also when it lowers max |r|, since D is
    flat near its top. It ends when every problem's Newton step is within ``tol`` or its residual is
    rounding noise, or when no problem has improved for a while (the precision is used up).
    """
    eps = torch.finfo(logits.dtype).eps
    noise, longest_step, patience = 4 * eps, 5.0, 20
    sizes = segments.sizes.to(logits.dtype)[:, None]

    def at(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shifted = logits + segments.expand(g)
        log_sums = torch.logsumexp(shifted, dim=1, keepdim=True)
        row_softmax = (shifted - log_sums).exp()
        dual = g.mean(1, keepdim=True) - segments.sum(log_sums) / sizes
        return row_softmax, column_residual(row_softmax, segments), dual

    row_softmax, residual, dual = at(g)
    best, best_dual, waited = largest(residual), dual, 0
    for _ in range(max_iters):
        size = largest(residual)
        step = newton_step(row_softmax, residual, segments)
        length = largest(step)
        done = (length <= max(tol, noise)) | (size <= noise)
        step = step * (longest_step / length).clamp(max=1.0)
        following = column_potential(logits, row_potential(logits, g, segments), segments)
        highest = at(following)[2]
        following = torch.where(done, g, following)
        for fraction in (0.25, 1.0):
            candidate = g - fraction * step
            _, candidate_residual, candidate_dual = at(candidate)
            better = (candidate_dual > highest) | (largest(candidate_residual) < size)
            following = torch.where(better, candidate, following)
            highest = torch.where(better, torch.maximum(candidate_dual, highest), highest)
        g = following
        if bool(done.all()):
            break
        row_softmax, residual, dual = at(g)
        improved = (largest(residual) < best) | (dual > best_dual + 4 * eps * dual.abs())
        best, best_dual = torch.minimum(best, largest(residual)), torch.maximum(best_dual, dual)
        waited = 0 if bool((improved & ~done).any()) else waited + 1
        if waited == patience:
            break
    return g


def converged_potential(logits: Tensor, segments: Segments, tol: float, max_iters: int) -> Tensor:
    """Column potential of the converged problem, with the implicit gradient.

    Sharp problems are approached by doubling the logits from a smooth start, since from afar both
    Sinkhorn and Newton advance by a bounded step. The last Newton step is recorded: its derivative by
    the logits is that of the implicit function.
    """
    with torch.no_grad():
        g = logits.new_zeros(segments.num_problems, logits.size(1))
        span = (
            float(segments.max((logits.amax(1) - logits.amin(1))[:, None]).max()) if logits.numel() else 0.0
        )
        for halvings in range(max(0, math.ceil(math.log2(span / 8))) if span > 8 else 0, 0, -1):
            g = 2 * balance(logits * 0.5**halvings, g, segments, tol, 8)
        g = balance(logits, g, segments, tol, max_iters)
    row_softmax = torch.softmax(logits + segments.expand(g), dim=1)
    step = newton_step(row_softmax.detach(), column_residual(row_softmax, segments), segments)
    return g - step + step.detach()


def solve(
    cost: Tensor, segments: Segments, lam: float, num_iters: int | None, tol: float, max_iters: int
) -> tuple[Tensor, Tensor]:
    """Sinkhorn on ``cost`` ``[rows, K]``: the assignment ``[rows, K]`` and the history of g
    ``[problems, T, K]`` (``T = 1``, the solution, when run to convergence).
    """
    logits = -lam * cost
    history = []
    if num_iters is None:
        g = converged_potential(logits, segments, tol, max_iters)
        f = row_potential(logits, g, segments)
        g = column_potential(logits, f, segments)
        history.append(g)
    else:
        g = logits.new_zeros(segments.num_problems, cost.size(1))
        for _ in range(num_iters):
            f = row_potential(logits, g, segments)
            g = column_potential(logits, f, segments)
            history.append(g)
    assign = (logits + f[:, None] + segments.expand(g)).exp()
    return assign, torch.stack(history, dim=1)


def local_sinkhorn(
    z: Tensor,
    centroids: Tensor | None,
    graph: EgoGraph,
    lam: float = 2.0,
    num_iters: int | None = 3,
    cost_scale: str = "none",
    *,
    num_clusters: int = 2,
    tol: float = DEFAULT_TOL,
    max_iters: int = DEFAULT_MAX_ITERS,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`dcgnn_kernels.local_sinkhorn`; same arguments, same results."""
    check_sinkhorn_options(lam, num_iters, cost_scale, tol, max_iters)
    if centroids is None:
        centroids = local_centroids(z.to(accumulate_dtype(z.dtype)), graph, num_clusters)
    assign, clusters, _ = local_sinkhorn_with_potentials(
        z, centroids, graph, lam, num_iters, cost_scale, tol, max_iters
    )
    return assign, clusters


def local_sinkhorn_with_potentials(
    z: Tensor,
    centroids: Tensor,
    graph: EgoGraph,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
    tol: float,
    max_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Also gives the history of g, ``[N, T, K]``."""
    compute = accumulate_dtype(z.dtype)
    segments = Segments.of_graph(graph)
    rows = z.to(compute)[graph.member.long()]
    cost = (rows[:, None, :] - segments.expand(centroids.to(compute))).square().sum(-1)
    cost = scale_cost(cost, segments, cost_scale)
    assign, potentials = solve(cost, segments, lam, num_iters, tol, max_iters)
    clusters = centroids.size(1) * segments.sum(assign[:, :, None] * rows[:, None, :])
    return assign.to(z.dtype), clusters.to(z.dtype), potentials


def cluster_scatter(assign: Tensor, clusters: Tensor, graph: EgoGraph) -> Tensor:
    """Reference of :func:`dcgnn_kernels.cluster_scatter`; same arguments, same result."""
    compute = accumulate_dtype(clusters.dtype)
    messages = torch.einsum("sk,skf->sf", assign.to(compute), clusters.to(compute)[graph.ego_of_slot()])
    out = messages.new_zeros(graph.num_nodes, clusters.size(2))
    return out.index_add(0, graph.member.long(), messages).to(clusters.dtype)


def node_update(
    x: Tensor,
    global_assign: Tensor,
    global_message: Tensor,
    assign: Tensor,
    message: Tensor,
    graph: EgoGraph,
    *,
    x_factor: Tensor,
    global_factor: Tensor,
    local_factor: Tensor,
    ego_factor: Tensor,
    activation: str = "none",
) -> Tensor:
    """Reference of :func:`dcgnn_kernels.node_update`; same arguments, same result."""
    compute = accumulate_dtype(x.dtype)
    weighted = ego_factor.to(compute)[:, None, None] * message.to(compute)
    broadcast = cluster_scatter(assign.to(compute), weighted, graph)
    whole = global_assign.to(compute) @ global_message.to(compute)
    parts = (x_factor, x.to(compute)), (global_factor, whole), (local_factor, broadcast)
    total = torch.stack([factor.to(compute)[:, None] * part for factor, part in parts]).sum(0)
    if activation != "none":
        total = torch.relu(total) if activation == "relu" else torch.tanh(total)
    return total.to(x.dtype)


def global_sinkhorn(
    z: Tensor,
    centroids: Tensor,
    lam: float = 2.0,
    num_iters: int | None = 5,
    cost_scale: str = "none",
    *,
    batch: Tensor | EgoGraph | None = None,
    tol: float = DEFAULT_TOL,
    max_iters: int = DEFAULT_MAX_ITERS,
) -> tuple[Tensor, Tensor]:
    """Reference of :func:`dcgnn_kernels.global_sinkhorn`; same arguments, same results."""
    check_sinkhorn_options(lam, num_iters, cost_scale, tol, max_iters)
    if batch is not None:
        graph_of_node = batch.ego.long() if isinstance(batch, EgoGraph) else batch
        assign, each = z.new_zeros(z.size(0), centroids.size(-2)), []
        num_graphs = centroids.size(0) if centroids.dim() == 3 else int(graph_of_node.max()) + 1
        for index in range(num_graphs):
            nodes = (graph_of_node == index).nonzero()[:, 0]
            start = centroids if centroids.dim() == 2 else centroids[index]
            if nodes.numel() == 0:
                each.append(torch.zeros_like(start))
                continue
            part, clusters, _ = global_sinkhorn_with_potentials(
                z[nodes], start, lam, num_iters, cost_scale, tol, max_iters
            )
            assign = assign.index_copy(0, nodes, part)
            each.append(clusters)
        return assign, torch.stack(each)
    assign, clusters, _ = global_sinkhorn_with_potentials(
        z, centroids, lam, num_iters, cost_scale, tol, max_iters
    )
    return assign, clusters


def global_sinkhorn_with_potentials(
    z: Tensor,
    centroids: Tensor,
    lam: float,
    num_iters: int | None,
    cost_scale: str,
    tol: float,
    max_iters: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Also gives the history of g, ``[T, K]``."""
    compute = accumulate_dtype(z.dtype)
    segments = Segments.single(z.size(0), z.device)
    rows = z.to(compute)
    cost = (rows[:, None, :] - centroids.to(compute)).square().sum(-1)
    cost = scale_cost(cost, segments, cost_scale)
    assign, potentials = solve(cost, segments, lam, num_iters, tol, max_iters)
    clusters = centroids.size(0) * (assign.mT @ rows)
    return assign.to(z.dtype), clusters.to(z.dtype), potentials[0]


def local_centroids(z: Tensor, graph: EgoGraph, num_local: int = 2) -> Tensor:
    """Reference of :func:`dcgnn_kernels.local_centroids`; same arguments, same result."""
    if num_local < 1:
        raise ValueError(f"num_local must be an int of at least 1, got {num_local!r}")
    compute = accumulate_dtype(z.dtype)
    own = z.to(compute)
    segments = Segments.of_graph(graph)
    member = graph.member.long()
    sizes = graph.ego_sizes().to(compute)
    if num_local == 1:
        return (segments.sum(own[member]) / sizes[:, None])[:, None, :].to(z.dtype)

    num_groups = num_local - 1
    is_self = member == segments.index
    start = graph.rowptr.long()[segments.index]
    position = torch.arange(graph.num_slots, device=z.device) - start
    position = position - (member > segments.index).long()
    group = segments.index * num_groups + position % num_groups
    neighbour, group = member[~is_self], group[~is_self]
    # Of differences to the node: equal rows give equal centroids, whose distance is 0 and not rounding. The
    # mean of one row is that row.
    apart = own[neighbour] - own[segments.index[~is_self]]
    counts = torch.bincount(group, minlength=graph.num_nodes * num_groups).to(compute)
    counts = counts.view(graph.num_nodes, num_groups, 1)
    zeros = own.new_zeros(graph.num_nodes * num_groups, z.size(1))
    sums = zeros.index_add(0, group, apart).view(graph.num_nodes, num_groups, z.size(1))
    rows = zeros.index_add(0, group, own[neighbour]).view_as(sums)
    near = own[:, None, :]
    every = near + sums.sum(1, keepdim=True) / (sizes - 1).clamp(min=1)[:, None, None]
    every = torch.where((sizes == 2)[:, None, None], rows[:, :1], every)
    means = torch.where(counts == 1, rows, near + sums / counts.clamp(min=1))
    return torch.cat([near, torch.where(counts > 0, means, every)], dim=1).to(z.dtype)
