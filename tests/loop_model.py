"""The model in plain loops: float64 NumPy, one ego at a time, written from the formulas alone.

Nothing here imports the packages under test, so a mistake there cannot hide here. It is slow on purpose:
every sum over a neighbourhood is a Python loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Edges = Iterable[tuple[int, int]]

ACTIVATIONS = {
    None: lambda v: v,
    "none": lambda v: v,
    "tanh": np.tanh,
    "relu": lambda v: np.maximum(v, 0.0),
    "sigmoid": lambda v: 1 / (1 + np.exp(-v)),
}


def array(tensor: Any) -> Array:
    """A float64 NumPy array from a tensor or anything array-like."""
    if hasattr(tensor, "detach"):
        tensor = tensor.detach().cpu().double().numpy()
    return np.asarray(tensor, dtype=np.float64)


# Structure ---------------------------------------------------------------------------------------------


def egos(edges: Edges, num_nodes: int) -> list[list[int]]:
    """Members of every ego, ascending: the node itself and the sources of its incoming edges."""
    members = [{i} for i in range(num_nodes)]
    for source, target in edges:
        members[int(target)].add(int(source))
    return [sorted(group) for group in members]


def egos_that_hold(members: list[list[int]]) -> list[list[int]]:
    """For every node the egos that it is a member of, ascending."""
    return [[u for u, group in enumerate(members) if i in group] for i in range(len(members))]


# One transport problem ---------------------------------------------------------------------------------


def cost_matrix(z: Array, centroids: Array, cost_scale: str = "none") -> Array:
    """Squared distances ``[n, K]``, divided by their mean or maximum; all 0 where that is 0."""
    cost = np.zeros((len(z), len(centroids)))
    for u in range(len(z)):
        for j in range(len(centroids)):
            cost[u, j] = float(((z[u] - centroids[j]) ** 2).sum())
    scale = {"none": 1.0, "mean": cost.mean(), "max": cost.max()}[cost_scale]
    return cost / scale if scale > 0 else np.zeros_like(cost)


def log_sum_exp(values: Array, axis: int) -> Array:
    """Shifted by the maximum, so that nothing overflows."""
    top = values.max(axis=axis, keepdims=True)
    return (np.log(np.exp(values - top).sum(axis=axis, keepdims=True)) + top).squeeze(axis)


def sinkhorn(cost: Array, lam: float, num_iters: int | None) -> Array:
    """Plan ``[n, K]`` with row mass 1/n and column mass 1/K after ``num_iters`` iterations from g = 0.

    None: until no potential moves by more than 1e-13.
    """
    n, num_clusters = cost.shape
    log_kernel = -lam * cost
    f, g = np.zeros(n), np.zeros(num_clusters)
    for _ in range(200_000 if num_iters is None else num_iters):
        f = -math.log(n) - log_sum_exp(log_kernel + g[None, :], axis=1)
        moved = -math.log(num_clusters) - log_sum_exp(log_kernel + f[:, None], axis=0)
        step = float(np.abs(moved - g).max())
        g = moved
        if num_iters is None and step < 1e-13:
            break
    else:
        if num_iters is None:
            raise AssertionError("the loop's own Sinkhorn did not converge: choose a milder problem")
    return np.exp(log_kernel + f[:, None] + g[None, :])


def aggregate(assign: Array, z: Array) -> Array:
    """C_j = K Σ_u P_uj z_u."""
    num_clusters = assign.shape[1]
    clusters = np.zeros((num_clusters, z.shape[1]))
    for j in range(num_clusters):
        for u in range(len(z)):
            clusters[j] += num_clusters * assign[u, j] * z[u]
    return clusters


def initial_centroids(z: Array, members: list[list[int]], num_local: int) -> Array:
    """Where the local cluster-nodes start, ``[N, K, F]``."""
    start = np.zeros((len(members), num_local, z.shape[1]))
    for i, group in enumerate(members):
        if num_local == 1:
            start[i, 0] = z[group].mean(axis=0)
            continue
        neighbours = [u for u in group if u != i]
        start[i, 0] = z[i]
        for part in range(num_local - 1):
            chosen = [u for p, u in enumerate(neighbours) if p % (num_local - 1) == part]
            start[i, 1 + part] = z[chosen or neighbours or [i]].mean(axis=0)
    return start


def broadcast(assigns: list[Array], messages: Array, members: list[list[int]]) -> Array:
    """B_i = Σ_{u ∋ i} Σ_j P^u_ij C^u_j; ``assigns[u]`` is ``[n_u, K]``, in the order of the members."""
    out = np.zeros((len(members), messages.shape[2]))
    for u, group in enumerate(members):
        for row, i in enumerate(group):
            for j in range(messages.shape[1]):
                out[i] += assigns[u][row, j] * messages[u, j]
    return out


def local_share(members: list[list[int]], holders: list[int], mass: str, aggr: str) -> float:
    """The local mass that a node gets from the egos that hold it, once its rows of P sum to 1/n."""
    if aggr == "mean":
        return 1.0
    if aggr == "symmetric":
        return sum(1 / math.sqrt(len(members[u]) * len(holders)) for u in holders)
    return sum(1.0 if mass == "node" else 1 / len(members[u]) for u in holders)


def node_update(
    x: Array,
    members: list[list[int]],
    global_plan: Array | None,
    global_messages: Array | None,
    local_plans: list[Array] | None,
    local_messages: Array | None,
    *,
    alpha: float,
    beta: float,
    gamma: str,
    mass: str,
    aggr: str,
) -> Array:
    """z_i = γ_i [β x_i + α m_Ω (P^Ω φ(C^Ω))_i + (1−α) B_i / a_i], node by node."""
    num_nodes = len(members)
    holders = egos_that_hold(members)
    global_mass = num_nodes if mass == "node" else 1
    if alpha < 1:
        if aggr == "symmetric":
            ego_masses = [math.sqrt(len(group)) for group in members]
        else:
            ego_masses = [len(group) if mass == "node" else 1 for group in members]
        local_total = broadcast(
            [ego_masses[u] * plan for u, plan in enumerate(local_plans)], local_messages, members
        )
    z = np.zeros_like(x)
    for i in range(num_nodes):
        total = beta * x[i]
        if alpha > 0:
            for j in range(len(global_messages)):
                total = total + alpha * global_mass * global_plan[i, j] * global_messages[j]
        if aggr == "symmetric":
            divisor = math.sqrt(len(holders[i]))
        else:
            divisor = local_share(members, holders[i], mass, "sum") if aggr == "mean" else 1.0
        if alpha < 1:
            total = total + (1 - alpha) * local_total[i] / divisor
        local_weight = local_share(members, holders[i], mass, aggr) if gamma == "exact" else 1.0
        z[i] = total / (alpha * global_mass / num_nodes + beta + (1 - alpha) * local_weight)
    return z


# A stack of layers -------------------------------------------------------------------------------------


@dataclass
class LoopLayer:
    """What one layer computed; local plans are also stacked slot by slot, as the ops return them."""

    z: Array
    global_plan: Array | None
    global_clusters: Array | None
    local_plans: list[Array] | None
    local_clusters: Array | None

    @property
    def local_assign(self) -> Array | None:
        """``[S, K]``."""
        return None if self.local_plans is None else np.concatenate(self.local_plans)


def linear(values: Array, module: Any) -> Array:
    """X Wᵀ + b with the weights of a linear module."""
    out = values @ array(module.weight).T
    return out if module.bias is None else out + array(module.bias)


def layer_norm(values: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Array:
    """Every node on its own."""
    out = np.zeros_like(values)
    for i, row in enumerate(values):
        out[i] = (row - row.mean()) / math.sqrt(row.var() + eps) * weight + bias
    return out


def batch_norm(values: Array, norm: Any, training: bool, eps: float = 1e-5) -> Array:
    """Every channel on its own: with the batch's statistics in training, the running ones otherwise."""
    mean, var = array(norm.running_mean), array(norm.running_var)
    if training:
        mean, var = values.mean(axis=0), values.var(axis=0)
    return (values - mean) / np.sqrt(var + eps) * array(norm.weight) + array(norm.bias)


def message_passing(
    x: Any,
    edges: Edges,
    module: Any,
    *,
    num_layers: int = 1,
    num_local: int = 2,
    alpha: float = 0.5,
    beta: float = 0.5,
    lam: float = 2.0,
    global_iters: int | None = 5,
    local_iters: int | None = 3,
    local_cost_scale: str = "max",
    global_cost_scale: str = "none",
    gamma: str = "exact",
    mass: str = "node",
    aggr: str | None = None,
    local_init: str = "carry",
    activation: str | None = None,
    transform: str | None = None,
    ego_readout: bool = False,
    residual: bool = False,
    norm: str | None = None,
    node_activation: str | None = None,
    dropout: float = 0.0,
    weight_period: int | None = None,
) -> list[LoopLayer]:
    """All layers. ``module`` is read for its weights and its training mode, never called.

    The options are given again, with defaults of their own: a module that changes one of them silently
    disagrees with this.
    """
    x = array(x)
    members = egos(edges, len(x))
    if aggr is None:
        aggr = "mean" if mass == "node" else "sum"
    assert dropout == 0 or not module.training, "dropout is random: compare in eval mode"
    sigma, node_sigma = ACTIVATIONS[activation], ACTIVATIONS[node_activation]

    z = x
    global_clusters = array(module.global_embedding)
    local_clusters = None
    layers = []
    for index in range(num_layers):
        maps = index if weight_period is None else index % weight_period
        message, block = module.messages[maps], module.blocks[index]
        global_plan = global_messages = local_plans = local_messages = None
        if alpha > 0:
            global_plan = sinkhorn(cost_matrix(z, global_clusters, global_cost_scale), lam, global_iters)
            global_clusters = aggregate(global_plan, z)
            mapped = global_clusters if transform is None else linear(global_clusters, message.shared)
            global_messages = sigma(mapped)
        if alpha < 1 or ego_readout:
            if local_clusters is None or local_init == "fresh":
                local_clusters = initial_centroids(z, members, num_local)
            local_plans, moved, local_messages = [], np.zeros_like(local_clusters), None
            for u, group in enumerate(members):
                cost = cost_matrix(z[group], local_clusters[u], local_cost_scale)
                plan = sinkhorn(cost, lam, local_iters)
                local_plans.append(plan)
                moved[u] = aggregate(plan, z[group])
            local_clusters = moved
            local_messages = np.zeros_like(moved)
            for u in range(len(members)):
                for j in range(num_local):
                    mapped = moved[u, j]
                    if transform == "shared":
                        mapped = linear(mapped, message.shared)
                    elif transform == "per-cluster":
                        mapped = mapped @ array(message.weight)[j] + array(message.bias)[j]
                    local_messages[u, j] = sigma(mapped)
        updated = node_update(
            x,
            members,
            global_plan,
            global_messages,
            local_plans,
            local_messages,
            alpha=alpha,
            beta=beta,
            gamma=gamma,
            mass=mass,
            aggr=aggr,
        )
        if ego_readout:
            weight = array(module.readouts[maps].weight)
            width = x.shape[1]
            holders = egos_that_hold(members)
            for i in range(len(x)):
                share = local_share(members, holders[i], mass, aggr) if aggr == "symmetric" else 1.0
                for j in range(num_local):
                    updated[i] += share * weight[:, j * width : (j + 1) * width] @ local_messages[i, j]
        if residual:
            updated = updated + linear(z, module.blocks[maps].residual)
        if norm == "layer":
            updated = layer_norm(updated, array(block.norm.weight), array(block.norm.bias))
        elif norm == "batch":
            updated = batch_norm(updated, block.norm.module, module.training)
        z = node_sigma(updated)
        layers.append(
            LoopLayer(
                z,
                global_plan,
                global_clusters if alpha > 0 else None,
                local_plans,
                local_clusters if local_plans is not None else None,
            )
        )
    return layers


# Objective ---------------------------------------------------------------------------------------------


def transport_energy(z: Array, plan: Array, clusters: Array, lam: float) -> float:
    """Σ P ‖z − c‖² + (1/λ) Σ P log P, with 0 log 0 = 0."""
    energy = 0.0
    for u in range(plan.shape[0]):
        for j in range(plan.shape[1]):
            p = float(plan[u, j])
            energy += p * float(((z[u] - clusters[j]) ** 2).sum())
            energy += p * math.log(p) / lam if p > 0 else 0.0
    return energy


def split_slots(assign: Any, members: list[list[int]]) -> list[Array]:
    """``[S, K]`` back into one plan for each ego."""
    assign, plans, start = array(assign), [], 0
    for group in members:
        plans.append(assign[start : start + len(group)])
        start += len(group)
    assert start == len(assign), "the number of slots is not the number of memberships"
    return plans


def objective(
    z: Any,
    x: Any,
    members: list[list[int]],
    global_plan: Any,
    global_clusters: Any,
    local_plans: list[Array] | None,
    local_clusters: Any,
    *,
    alpha: float,
    beta: float,
    lam: float,
    mass: str = "paper",
) -> tuple[float, float, float]:
    """The global term, the local term and the fidelity, each with its weight."""
    z, x = array(z), array(x)
    global_term = local_term = 0.0
    if global_plan is not None:
        global_mass = len(z) if mass == "node" else 1
        energy = transport_energy(z, array(global_plan), array(global_clusters), lam)
        global_term = alpha * global_mass * energy
    if local_plans is not None:
        clusters = array(local_clusters)
        for u, group in enumerate(members):
            ego_mass = len(group) if mass == "node" else 1
            energy = transport_energy(z[group], local_plans[u], clusters[u], lam)
            local_term += (1 - alpha) * ego_mass * energy
    return global_term, local_term, beta * float(((z - x) ** 2).sum())


def lower_bound(
    members: list[list[int]],
    num_global: int,
    num_local: int,
    *,
    alpha: float,
    lam: float,
    mass: str = "paper",
) -> float:
    """No cost and the greatest entropy, log(nK), in every problem."""
    num_nodes = len(members)
    global_mass = num_nodes if mass == "node" else 1
    bound = alpha * global_mass * math.log(num_nodes * num_global)
    for group in members:
        ego_mass = len(group) if mass == "node" else 1
        bound += (1 - alpha) * ego_mass * math.log(len(group) * num_local)
    return -bound / lam


# Losses ------------------------------------------------------------------------------------------------


def orthogonality(clusters: Any) -> float:
    """‖ G/‖G‖_F − I/√Ω ‖_F, entry by entry."""
    clusters = array(clusters)
    count = len(clusters)
    gram = [[float(np.dot(clusters[a], clusters[b])) for b in range(count)] for a in range(count)]
    norm = math.sqrt(sum(entry**2 for row in gram for entry in row))
    total = 0.0
    for a in range(count):
        for b in range(count):
            wanted = 1 / math.sqrt(count) if a == b else 0.0
            total += (gram[a][b] / norm - wanted) ** 2
    return math.sqrt(total)


def similarity(
    z: Any, clusters: Any, y: Iterable[int], num_classes: int, aggr: str = "max", metric: str = "cosine"
) -> float:
    """Mean over the labelled nodes of the pull to the own class and the push from the others."""
    z, clusters = array(z), array(clusters)
    per_class = len(clusters) // num_classes
    terms = []
    for row, label in zip(z, (int(value) for value in y), strict=True):
        if label < 0:
            continue
        scores = []
        for tau in range(num_classes):
            values = []
            for c in clusters[tau * per_class : (tau + 1) * per_class]:
                if metric == "cosine":
                    values.append(float(row @ c) / (math.sqrt(float(row @ row)) * math.sqrt(float(c @ c))))
                else:
                    values.append(math.sqrt(float(((row - c) ** 2).sum())))
            if aggr == "max":  # the most similar cluster, which by distance is the nearest
                scores.append(max(values) if metric == "cosine" else min(values))
            else:
                scores.append(sum(values) / (len(values) if aggr == "mean" else 1))
        others = math.log(sum(math.exp(s) for tau, s in enumerate(scores) if tau != label))
        terms.append(others - scores[label] if metric == "cosine" else scores[label] - others)
    return sum(terms) / len(terms)


def cross_entropy(logits: Any, y: Iterable[int]) -> float:
    """Mean of −log softmax at the label."""
    terms = []
    for row, label in zip(array(logits), (int(value) for value in y), strict=True):
        terms.append(math.log(sum(math.exp(v) for v in row)) - row[label])
    return sum(terms) / len(terms)
