"""The clustering objective that a layer descends, and its lower bound."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dcgnn_kernels import EgoGraph, cluster_scatter


@dataclass(frozen=True)
class ClusterObjective:
    r"""Value of :math:`L^\lambda_{cluster}`: three weighted terms and their sum, 0-dim float64 tensors."""

    global_term: Tensor
    local_term: Tensor
    fidelity: Tensor

    @property
    def total(self) -> Tensor:
        """Sum of the three terms."""
        return self.global_term + self.local_term + self.fidelity


def problem_masses(graph: EgoGraph, mass: str) -> tuple[float, Tensor]:
    """What each transport problem counts: the number for the global one and ``[N]`` for the egos'.

    In the paper's units every problem has total mass 1; with ``mass="node"`` each node of a problem
    has mass 1.
    """
    if mass == "paper":
        return 1.0, torch.ones(graph.num_nodes, dtype=torch.float64, device=graph.device)
    return float(graph.num_nodes), graph.ego_sizes().to(torch.float64)


def clustering_objective(
    z: Tensor,
    x: Tensor,
    graph: EgoGraph,
    global_assign: Tensor | None,
    global_clusters: Tensor | None,
    local_assign: Tensor | None,
    local_clusters: Tensor | None,
    *,
    alpha: float,
    beta: float,
    lam: float,
    mass: str = "paper",
) -> ClusterObjective:
    r"""Evaluates the objective whose blocks are minimised by assign, aggregate and broadcast:

    .. math::
        L = \alpha\, E(P^\Omega, C^\Omega) + (1 - \alpha) \sum_u E(P^u, C^u)
            + \beta \sum_i \|z_i - x_i\|^2, \qquad
        E(P, C) = \sum_{ij} P_{ij} \|z_i - c_j\|^2 + \tfrac1\lambda \sum_{ij} P_{ij} \log P_{ij}

    With ``mass="node"`` the problems are weighted by their number of nodes. Distances are raw, whatever
    the layer's cost scale. Not differentiated. A problem that is left out (None) counts 0.

    Args:
        z: ``[N, F]`` node embeddings.
        x: ``[N, F]`` input features.
        graph: the ego-neighbourhoods, ``S`` slots.
        global_assign: ``[N, Ω]``, or None.
        global_clusters: ``[Ω, F]``, or None.
        local_assign: ``[S, K]``, or None.
        local_clusters: ``[N, K, F]``, or None.
        alpha: weight of the global problem; the local ones have :math:`1 - \alpha`.
        beta: weight of the fidelity to the input.
        lam: inverse temperature.
        mass: ``"paper"`` or ``"node"``.
    """
    with torch.no_grad():
        z, x = z.double(), x.double()
        global_mass, ego_mass = problem_masses(graph, mass)
        zero = z.new_zeros(())
        global_term = local_term = zero
        if global_assign is not None and global_clusters is not None:
            p, c = global_assign.double(), global_clusters.double()
            cost = (p * torch.cdist(z, c, compute_mode="donot_use_mm_for_euclid_dist").square()).sum()
            entropy = torch.xlogy(p, p).sum()
            global_term = alpha * global_mass * (cost + entropy / lam)
        if local_assign is not None and local_clusters is not None:
            slot_mass = ego_mass[graph.ego_of_slot()][:, None]
            p, c = local_assign.double() * slot_mass, local_clusters.double()
            # Σ P‖z − c‖² from the row sums, the column sums and one broadcast: no S×K×F tensor.
            row = cluster_scatter(p, torch.ones_like(c[..., :1]), graph)
            column = torch.zeros_like(c[..., 0]).index_add(0, graph.ego_of_slot(), p)
            cross = cluster_scatter(p, c, graph)
            cost = (row * z.square()).sum() - 2 * (z * cross).sum() + (column * c.square().sum(-1)).sum()
            entropy = (torch.xlogy(local_assign.double(), local_assign.double()) * slot_mass).sum()
            local_term = (1 - alpha) * (cost + entropy / lam)
        return ClusterObjective(global_term, local_term, beta * (z - x).square().sum())


def objective_lower_bound(
    graph: EgoGraph, num_global: int, num_local: int, *, alpha: float, lam: float, mass: str = "paper"
) -> float:
    r"""A bound below every value of the objective.

    Distances are not negative, and :math:`\sum P \log P \ge -\log(nK)` for a plan of total mass 1 on
    :math:`n \times K` cells, so
    :math:`L \ge -\frac1\lambda [\alpha \log(N |\Omega|) + (1 - \alpha) \sum_u \log(n_u K)]`.
    """
    global_mass, ego_mass = problem_masses(graph, mass)
    local = (ego_mass * (graph.ego_sizes().double() * num_local).log()).sum().item()
    return -(alpha * global_mass * math.log(graph.num_nodes * num_global) + (1 - alpha) * local) / lam
