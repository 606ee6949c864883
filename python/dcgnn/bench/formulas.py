"""The layers' outputs at some nodes, in float64 and by other means: what the correctness gate compares with.

Every function takes a float64 copy of the layer, the problem with float64 features, and the nodes whose rows
are wanted; it reads the weights and nothing else of the layer. Work and memory are those of the nodes'
neighbourhoods.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dcgnn.bench.problem import Problem
from dcgnn.bench.shapes import CHUNK
from dcgnn_kernels import EgoGraph, reference
from dcgnn_kernels.reference import Segments


def neighbourhoods(problem: Problem, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Members of the egos of ``nodes``, and for each the position of its ego in ``nodes``.

    Read from ``edge_index``, not from the ego-graph that is checked by it.
    """
    place = nodes.new_full((problem.num_nodes,), -1)
    place[nodes] = torch.arange(nodes.numel(), device=nodes.device)
    members, owners = [nodes], [place[nodes]]
    for source, target in zip(*(row.split(CHUNK) for row in problem.edge_index), strict=True):
        owner = place[target]
        hit = owner >= 0
        members.append(source[hit])
        owners.append(owner[hit])
    return torch.cat(members), torch.cat(owners)


def ego_sizes(problem: Problem) -> Tensor:
    """``[N]`` float64 members of every ego, counted in ``edge_index``."""
    return 1.0 + torch.bincount(problem.edge_index[1], minlength=problem.num_nodes).double()


def gcn_rows(layer: Any, problem: Problem, nodes: Tensor) -> Tensor:
    r""":math:`b + W \sum_{u ∈ N_i^+} x_u / \sqrt{n_i n_u}`; the graph is undirected."""
    return _gcn(problem, nodes) @ layer.lin.weight.T + layer.bias


def dgl_rows(layer: Any, problem: Problem, nodes: Tensor) -> Tensor:
    """The same with DGL's names."""
    return _gcn(problem, nodes) @ layer.conv.weight + layer.conv.bias


def _gcn(problem: Problem, nodes: Tensor) -> Tensor:
    member, owner = neighbourhoods(problem, nodes)
    sizes = ego_sizes(problem)
    weight = (sizes[member] * sizes[nodes][owner]).rsqrt()
    out = problem.x.new_zeros(nodes.numel(), problem.x.size(1))
    return out.index_add(0, owner, weight[:, None] * problem.x[member])


def sage_rows(layer: Any, problem: Problem, nodes: Tensor) -> Tensor:
    """Mean of the neighbours without the node itself, and the node, each with its map."""
    member, owner = neighbourhoods(problem, nodes)
    out = problem.x.new_zeros(nodes.numel(), problem.x.size(1)).index_add(0, owner, problem.x[member])
    own = problem.x[nodes]
    count = (ego_sizes(problem)[nodes] - 1).clamp(min=1)
    return (
        ((out - own) / count[:, None]) @ layer.lin_l.weight.T + layer.lin_l.bias + own @ layer.lin_r.weight.T
    )


def gat_rows(layer: Any, problem: Problem, nodes: Tensor) -> Tensor:
    """Attention with one head over the ego: softmax of LeakyReLU(a·Wx_u + b·Wx_i)."""
    member, owner = neighbourhoods(problem, nodes)
    rows = problem.x[member] @ layer.lin.weight.T
    own = problem.x[nodes] @ layer.lin.weight.T
    score = rows @ layer.att_src.flatten() + (own @ layer.att_dst.flatten())[owner]
    score = nn.functional.leaky_relu(score, layer.negative_slope)
    weight = (score - score.max()).exp()
    total = weight.new_zeros(nodes.numel()).index_add(0, owner, weight)
    out = rows.new_zeros(own.shape).index_add(0, owner, (weight / total[owner])[:, None] * rows)
    return out + layer.bias


def dense_rows(layer: Any, problem: Problem, nodes: Tensor) -> Tensor:
    """:math:`W x_i + b`."""
    return problem.x[nodes] @ layer.weight.T + layer.bias


def dc_rows(layer: Any, problem: Problem, nodes: Tensor) -> Tensor:
    r"""DCConv with the default mass, γ and aggregation:

    .. math::
        b + \frac{1}{1 + β} \Big[ β z_i + α N (P^Ω C^Ω)_i
        + (1 − α) \frac{1}{w_i} \sum_{u ∋ i} n_u \sum_j P^u_{ij} C^u_j \Big]

    Only the egos that hold one of the nodes are solved, by :mod:`dcgnn_kernels.reference`, on a graph of
    their members; the global problem is solved whole, without its N × Ω × F differences.
    """
    options = layer.message_passing
    z = problem.x @ layer.lin.weight.T

    centroids = options.global_embedding
    squares = torch.einsum("if,if->i", z, z)  # without the N × F squares
    cost = squares[:, None] - 2 * (z @ centroids.T) + centroids.square().sum(1)
    whole = Segments.single(z.size(0), z.device)
    cost = reference.scale_cost(cost, whole, options.global_cost_scale)
    limits = reference.DEFAULT_TOL, reference.DEFAULT_MAX_ITERS
    assign, _ = reference.solve(cost, whole, options.lam, options.global_iters, *limits)
    clusters = options.num_global * (assign.mT @ z)
    from_global = z.size(0) * (assign[nodes] @ clusters)

    small, kept, places = _egos_of(problem, nodes)
    assign, clusters = reference.local_sinkhorn(
        z[kept],
        None,
        small,
        options.lam,
        options.local_iters,
        options.local_cost_scale,
        num_clusters=options.num_local,
    )
    weighted = small.ego_sizes().double()[:, None, None] * clusters
    broadcast = reference.cluster_scatter(assign, weighted, small)[places]
    egos = small.egos_per_node().double()[places]
    alpha, beta = options.alpha, options.beta
    total = beta * z[nodes] + alpha * from_global + (1 - alpha) * broadcast / egos[:, None]
    return total / (1 + beta) + layer.bias


def egos_holding(problem: Problem, nodes: Tensor) -> Tensor:
    """The egos that hold one of ``nodes``, ascending."""
    wanted = torch.zeros(problem.num_nodes, dtype=torch.bool, device=nodes.device)
    wanted[nodes] = True
    parts = [nodes]
    for source, target in zip(*(row.split(CHUNK) for row in problem.edge_index), strict=True):
        parts.append(target[wanted[source]])
    return torch.cat(parts).unique()


def _egos_of(problem: Problem, nodes: Tensor) -> tuple[EgoGraph, Tensor, Tensor]:
    """A graph of the egos that hold ``nodes``, the nodes that it keeps, and the places of ``nodes`` in them.

    Kept nodes whose own ego is not among them have an ego of themselves alone, which no wanted node reads.
    """
    egos = egos_holding(problem, nodes)
    member, owner = neighbourhoods(problem, egos)
    kept = torch.cat([member, egos]).unique()
    ego, alone = torch.searchsorted(kept, egos)[owner], torch.ones(kept.numel(), dtype=torch.bool)
    alone = alone.to(ego.device).index_fill(0, ego, False).nonzero()[:, 0]
    graph = plain_graph(
        torch.cat([torch.searchsorted(kept, member), alone]), torch.cat([ego, alone]), kept.numel()
    )
    return graph, kept, torch.searchsorted(kept, nodes)


def plain_graph(member: Tensor, ego: Tensor, num_nodes: int) -> EgoGraph:
    """The ego-graph of distinct pairs (member, ego), self-loops among them, by sorting."""
    order = torch.argsort(ego * num_nodes + member)
    member, ego = member[order], ego[order]
    slot = torch.argsort(member, stable=True)

    def offsets(index: Tensor) -> Tensor:
        counts = torch.bincount(index, minlength=num_nodes)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    arrays = offsets(ego), member, offsets(member), ego[slot], slot
    return EgoGraph(*(array.to(torch.int32) for array in arrays))
