"""DCMsgPassing: message passing between nodes and cluster-nodes (Algorithm 1 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dcgnn.nn.checks import check_choice, check_count, check_features, check_finite, check_number
from dcgnn.nn.messages import ClusterMessage, NodeBlock, check_period, repeat
from dcgnn.nn.objective import ClusterObjective, clustering_objective
from dcgnn.nn.topology import BatchTopology, Topology, as_topology
from dcgnn_kernels import local_sinkhorn

COST_SCALES = ("none", "mean", "max")
AGGRS = ("mean", "sum", "symmetric")

_FACTORS = WeakIdKeyDictionary()  # EgoGraph to factors


@dataclass
class LayerState:
    """What one layer computed. Assignments and clusters of a problem of weight 0 are None."""

    z: Tensor  # [N, F], the layer's output
    global_assign: Tensor | None  # [N, Ω]
    global_clusters: Tensor | None  # [Ω, F]; of a batch [G, Ω, F], 0 for a graph without nodes
    local_assign: Tensor | None  # [S, K]
    local_clusters: Tensor | None  # [N, K, F]
    x: Tensor = field(repr=False)
    topology: Topology = field(repr=False)
    settings: dict[str, Any] = field(repr=False)

    @cached_property
    def objective(self) -> ClusterObjective:
        """The clustering objective after this layer, computed when it is first asked for."""
        if not self.topology.is_whole:
            raise ValueError("the objective is that of one whole graph, not of a batch or a part")
        return clustering_objective(
            self.z,
            self.x,
            self.topology.graph,
            self.global_assign,
            self.global_clusters,
            self.local_assign,
            self.local_clusters,
            **self.settings,
        )


@dataclass
class DCState:
    """The states of all layers; the short names are those of the last one."""

    layers: list[LayerState]

    @property
    def z(self) -> Tensor:
        """``[N, F]`` node embeddings."""
        return self.layers[-1].z

    @property
    def global_assign(self) -> Tensor | None:
        """``[N, Ω]``."""
        return self.layers[-1].global_assign

    @property
    def global_clusters(self) -> Tensor | None:
        """``[Ω, F]``; of a batch of ``G`` graphs ``[G, Ω, F]``."""
        return self.layers[-1].global_clusters

    @property
    def local_assign(self) -> Tensor | None:
        """``[S, K]``."""
        return self.layers[-1].local_assign

    @property
    def local_clusters(self) -> Tensor | None:
        """``[N, K, F]``."""
        return self.layers[-1].local_clusters

    @property
    def objectives(self) -> list[ClusterObjective]:
        """The objective after every layer."""
        return [layer.objective for layer in self.layers]


class DCMsgPassing(torch.nn.Module):
    r"""Differentiable cluster message passing from
    `"Differentiable Cluster Graph Neural Network" <https://arxiv.org/abs/2405.16185>`_ (Algorithm 1).

    Every layer assigns nodes to cluster-nodes by optimal transport, moves the cluster-nodes to the mean
    of their nodes and the nodes towards their cluster-nodes:

    .. math::
        z_i = \gamma_i \Big[ \beta x_i + \alpha\, m_\Omega \sum_j P^\Omega_{ij} \phi(c^\Omega_j)
        + (1 - \alpha)\, \frac{1}{a_i} \sum_{u : i \in \mathcal N_u^+} m_u \sum_j P^u_{ij} \phi(c^u_j) \Big]

    with :math:`P` and :math:`c` from :func:`dcgnn_kernels.global_sinkhorn` and
    :func:`dcgnn_kernels.local_sinkhorn`, :math:`\phi` the message (``transform``, ``activation``), and
    masses :math:`m_\Omega = m_u = 1` (``mass="paper"``) or :math:`m_\Omega = N, m_u = n_u`
    (``mass="node"``). With :math:`w_i` the local mass that reaches node :math:`i`
    (:math:`\sum_{u \ni i} 1/n_u`, or the number of egos that hold it), :math:`a_i = 1` for
    ``aggr="sum"`` and :math:`w_i` for ``aggr="mean"``. With ``aggr="symmetric"`` the local masses are
    those of GCN whatever ``mass`` says: :math:`m_u = \sqrt{n_u}`,
    :math:`w_i = \sum_{u \ni i} 1 / \sqrt{n_u}` and :math:`a_i` the root of the number of egos that hold the
    node, so that its degree shows in :math:`w_i / a_i`. Then


    .. math::
        \gamma_i = 1 / \big(\alpha\, m_\Omega / N + \beta + (1 - \alpha)\, w_i / a_i\big)

    is the exact minimiser (``gamma="exact"``). ``gamma="paper"`` is the printed constant, which takes
    :math:`w_i / a_i = 1`; with ``mass="paper"`` it diverges on irregular graphs.

    Args:
        channels: number of channels ``F``.
        num_global: number :math:`|\Omega|` of global cluster-nodes.
        num_layers: number of layers.
        num_local: number ``K`` of cluster-nodes of every ego.
        alpha: weight of the global problem, in [0, 1]; the local ones have :math:`1 - \alpha`. A problem
            of weight 0 is not computed.
        beta: weight :math:`\beta \ge 0` of the fidelity to the input features.
        lam: inverse temperature :math:`\lambda > 0` of both transport problems.
        global_iters: Sinkhorn iterations of the global problem; None: to convergence.
        local_iters: Sinkhorn iterations of the local problems; None: to convergence.
        local_cost_scale: ``"none"``, ``"mean"`` or ``"max"``; unscaled local costs lose accuracy.
        global_cost_scale: the same for the global problem; a scaled one loses the clusters.
        gamma: ``"exact"`` or ``"paper"``.
        mass: ``"node"`` or ``"paper"``.
        aggr: ``"mean"``, ``"sum"`` or ``"symmetric"``; None: ``"mean"`` with node mass, ``"sum"`` with the
            paper's.
        local_init: ``"carry"`` (local clusters pass from layer to layer) or ``"fresh"`` (they start from
            the current embeddings in every layer).
        activation: :math:`\sigma` of the messages by name or as a callable (``"tanh"`` in the paper).
        transform: learnable map of the messages: None, ``"shared"`` or ``"per-cluster"``.
        ego_readout: a node also reads the clusters of its own ego: adds
            :math:`\sum_j R_j \phi(c^i_j)` with learnable :math:`R_j` (an extension of the paper), with
            ``aggr="symmetric"`` times :math:`w_i / a_i`.
        residual: adds a linear map of the layer's input.
        norm: None, ``"batch"`` or ``"layer"``, after every layer.
        node_activation: activation of the nodes after every layer, by name or as a callable.
        dropout: probability, after every layer.
        weight_period: the learnable maps of the messages, the readout and the residual repeat after so many
            layers: 1 gives all layers the same ones, as the layers are steps of one optimisation. Norms
            stay their own. None: every layer has its own maps.
        global_momentum: None: the global cluster-nodes start at a trainable embedding. A number
            :math:`m` in [0, 1): they start at a moving average over the batches seen in training,
            :math:`E \leftarrow m E + (1 - m) C^\Omega` with the first layer's clusters, and have no
            gradient.

    Shapes:
        - **input:** node features :math:`(N, F)`; edge indices :math:`(2, E)`, an
          :class:`~dcgnn_kernels.EgoGraph` or anything that :meth:`EgoGraph.from_edge_index` takes;
          optionally ``batch`` :math:`(N)`, the graph of every node in a disjoint union: every graph is a
          global problem of its own; and ``num_graphs``, where the last graphs have no nodes
        - **output:** node embeddings :math:`(N, F)`; with ``return_state=True`` also a
          :class:`DCState`
    """

    def __init__(
        self,
        channels: int,
        num_global: int,
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
        activation: str | Callable | None = None,
        transform: str | None = None,
        ego_readout: bool = False,
        residual: bool = False,
        norm: str | None = None,
        node_activation: str | Callable | None = None,
        dropout: float = 0.0,
        weight_period: int | None = None,
        global_momentum: float | None = None,
    ) -> None:
        super().__init__()
        self.channels = check_count("channels", channels)
        self.num_global = check_count("num_global", num_global)
        self.num_layers = check_count("num_layers", num_layers)
        self.num_local = check_count("num_local", num_local)
        self.alpha = check_number("alpha", alpha, lambda a: 0 <= a <= 1, "in [0, 1]")
        self.beta = check_number("beta", beta, lambda b: 0 <= b < math.inf, "finite and not negative")
        self.lam = check_number("lam", lam, lambda v: 0 < v < math.inf, "finite and positive")
        self.global_iters = None if global_iters is None else check_count("global_iters", global_iters)
        self.local_iters = None if local_iters is None else check_count("local_iters", local_iters)
        self.local_cost_scale = check_choice("local_cost_scale", local_cost_scale, COST_SCALES)
        self.global_cost_scale = check_choice("global_cost_scale", global_cost_scale, COST_SCALES)
        self.gamma = check_choice("gamma", gamma, ("exact", "paper"))
        self.mass = check_choice("mass", mass, ("node", "paper"))
        if aggr is None:
            aggr = "mean" if mass == "node" else "sum"
        self.aggr = check_choice("aggr", aggr, AGGRS)
        self.local_init = check_choice("local_init", local_init, ("carry", "fresh"))
        if not isinstance(ego_readout, bool):
            raise TypeError(f"ego_readout must be True or False, got {ego_readout!r}")
        self.ego_readout = ego_readout

        self.global_momentum = global_momentum
        if global_momentum is None:
            self.global_embedding = torch.nn.Parameter(torch.empty(num_global, channels))
        else:
            check_number("global_momentum", global_momentum, lambda m: 0 <= m < 1, "in [0, 1)")
            self.register_buffer("global_embedding", torch.empty(num_global, channels))
        period = check_period(weight_period, num_layers)
        self.messages = repeat(
            (ClusterMessage(channels, num_local, transform, activation) for _ in range(period)), num_layers
        )
        self.blocks = NodeBlock.stack(num_layers, period, channels, residual, norm, node_activation, dropout)
        self.readouts = torch.nn.ModuleList()
        if ego_readout:
            maps = (torch.nn.Linear(num_local * channels, channels, bias=False) for _ in range(period))
            self.readouts = repeat(maps, num_layers)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew. The global cluster-nodes start orthogonal, of unit length."""
        torch.nn.init.orthogonal_(self.global_embedding)
        for module in (*self.messages, *self.blocks, *self.readouts):
            module.reset_parameters()

    def _factors(self, topology: Topology, dtype: torch.dtype) -> dict[str, Tensor]:
        """What :func:`node_update` multiplies its parts by; kept as long as the graph or the batch lives."""
        if torch.compiler.is_compiling():
            return self._compute_factors(topology, dtype)
        # One graph can be in several batches, but only in one partition.
        owner = topology.graphs if isinstance(topology, BatchTopology) else topology.graph
        kept = _FACTORS.setdefault(owner, {})
        key = (self.mass, self.gamma, self.aggr, self.alpha, self.beta, dtype)
        if key not in kept:
            kept[key] = self._compute_factors(topology, dtype)
        return kept[key]

    def _compute_factors(self, topology: Topology, dtype: torch.dtype) -> dict[str, Tensor]:
        """What :func:`node_update` multiplies its parts by: γβ, γα m_Ω, γ(1 − α) / a and m, each ``[N]``, and
        with symmetric aggregation what the ego readout is multiplied by.

        Computed in float64 and rounded once: sums over a hub pass the range of float16.
        """
        sizes = topology.ego_sizes()
        if self.aggr == "symmetric":
            ego_mass = sizes.sqrt()
        else:
            ego_mass = sizes if self.mass == "node" else (sizes > 0).double()
        if ego_mass is sizes:
            reached = topology.egos_per_node()  # every ego counts 1 at every node
        else:
            reached = topology.reached(ego_mass / sizes.clamp(min=1))
        divisor = reached if self.aggr == "mean" else torch.ones_like(reached)
        if self.aggr == "symmetric":
            divisor = topology.egos_per_node().sqrt()
        local_share = reached / divisor
        problem_sizes = topology.problem_sizes()
        global_share: Tensor | float = 1.0 if self.mass == "node" else 1 / problem_sizes
        gamma_share = local_share if self.gamma == "exact" else torch.ones_like(reached)
        gamma = 1 / (self.alpha * global_share + self.beta + (1 - self.alpha) * gamma_share)
        factors = {
            "x_factor": topology.masked(gamma * self.beta),
            "global_factor": topology.masked(
                gamma * self.alpha * (problem_sizes if self.mass == "node" else 1)
            ),
            "local_factor": gamma * (1 - self.alpha) / divisor,
            "ego_factor": ego_mass,
        }
        if self.aggr == "symmetric":
            factors["readout_factor"] = local_share
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return {name: factor.to(wide) for name, factor in factors.items()}

    @property
    def returns_new_tensor(self) -> bool:
        """Whether the output is held by nobody else, not even for a gradient."""
        return not self.ego_readout and bool(self.blocks[-1].is_identity)

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        return_state: bool = False,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
    ) -> Any:
        """Runs all layers; see the class for the shapes."""
        check_features(x, self.channels)
        topology = as_topology(edge_index, x.size(0), batch, num_graphs)
        if topology.graph.device != x.device:
            raise ValueError(f"edge_index is on {topology.graph.device}, but x is on {x.device}")
        try:
            z, states = self._propagate(x, topology, return_state)
        except ValueError:
            check_finite("x", x)  # if that is where a kernel's NaN comes from, the error says so
            raise
        return (z, DCState(states)) if return_state else z

    def _propagate(self, x: Tensor, topology: Topology, keep: bool) -> tuple[Tensor, list[LayerState]]:
        factors = self._factors(topology, x.dtype)
        z = x
        # Of type Any: what a problem of weight 0 leaves out is None and is not read below.
        global_clusters: Any = None
        if self.alpha > 0:
            # A copy of the moving average: it moves on before the backward.
            moving = self.global_momentum is not None
            global_clusters = self.global_embedding.clone() if moving else self.global_embedding
        local_clusters: Any = None
        input_rows: Any = None
        states = []
        for index, block in enumerate(self.blocks):
            global_assign, global_clusters = self._solve_global(index, z, global_clusters, topology)
            rows = topology.members(z)
            input_rows = rows if index == 0 else input_rows
            updated, local_assign, local_clusters, readout = self._update(
                index, input_rows, rows, global_assign, global_clusters, local_clusters, topology, factors
            )
            updated = topology.complete(updated)
            if readout is not None:
                updated = updated + topology.own(readout)
            z = block(updated, z, topology)
            if keep:
                settings = {"alpha": self.alpha, "beta": self.beta, "lam": self.lam, "mass": self.mass}
                clusters = (global_assign, global_clusters, local_assign, local_clusters)
                states.append(LayerState(z, *clusters, x, topology, settings))
        return z, states

    def _solve_global(self, index: int, z: Tensor, clusters: Any, topology: Topology) -> tuple[Any, Any]:
        """Assignment and clusters of the global problem; None where it has no weight."""
        if self.alpha == 0:
            return None, None
        options = (self.lam, self.global_iters, self.global_cost_scale)
        assign, clusters = topology.transport(z, clusters, *options)
        if self.global_momentum is not None and self.training and index == 0:
            with torch.no_grad():
                seen = topology.mean_clusters(clusters)
                self.global_embedding.lerp_(seen.to(self.global_embedding.dtype), 1 - self.global_momentum)
        return assign, clusters

    def _update(
        self,
        index: int,
        x: Tensor,
        z: Tensor,
        global_assign: Any,
        global_clusters: Any,
        local_clusters: Any,
        topology: Topology,
        factors: dict[str, Tensor],
    ) -> tuple[Tensor, Any, Any, Any]:
        """The local problems of layer ``index`` and the node update, on the rows of the topology's graph.

        Gives the update, the local assignment and clusters, and what the ego readout adds.
        """
        message = self.messages[index]
        graph = topology.graph
        # A problem of weight 0 has no cluster-nodes to read from.
        global_part = x.new_empty(x.size(0), 0), x.new_empty(0, x.size(1))
        local_part = x.new_empty(graph.num_slots, 0), x.new_empty(x.size(0), 0, x.size(1))
        local_assign = readout = None
        if global_assign is not None:
            global_part = global_assign, message(global_clusters, of_ego=False)
        if self.alpha < 1 or self.ego_readout:
            if self.local_init == "fresh":
                local_clusters = None
            local_assign, local_clusters = local_sinkhorn(
                z,
                local_clusters,
                graph,
                self.lam,
                self.local_iters,
                self.local_cost_scale,
                num_clusters=self.num_local,
            )
            local_message = message(local_clusters)
            if self.alpha < 1:
                local_part = local_assign, local_message
            if self.ego_readout:
                readout = self.readouts[index](local_message.flatten(1))
                if self.aggr == "symmetric":
                    readout = readout * factors["readout_factor"][:, None].to(readout.dtype)
        update_factors = {name: factor for name, factor in factors.items() if name != "readout_factor"}
        updated = topology.update(x, *global_part, *local_part, update_factors)
        return updated, local_assign, local_clusters, readout

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.channels}, num_global={self.num_global}, "
            f"num_local={self.num_local}, num_layers={self.num_layers})"
        )
