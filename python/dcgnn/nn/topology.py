"""Which nodes a layer works on: a whole graph, a batch of graphs, or a rank's part of a graph.

A layer asks its topology for everything that reaches beyond a node: the rows that egos read, the global
problem and the sums that end at a node. So that there is one layer, whatever the graph is cut into.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dcgnn_kernels import EgoGraph, cluster_scatter, global_sinkhorn, node_update
from dcgnn_kernels.graph import check_graph, filled_graphs

if TYPE_CHECKING:
    from dcgnn.partition import Part


class Topology:
    """One graph in one process, and the base of the others.

    Attributes:
        graph: the ego-neighbourhoods of the rows that :meth:`members` gives.
    """

    def __init__(self, graph: EgoGraph) -> None:
        check_graph(graph, ego_of_every_node=True)
        self.graph = graph

    @property
    def num_nodes(self) -> int:
        """Number of rows of the features that a layer takes here."""
        return self.graph.num_nodes

    @property
    def is_whole(self) -> bool:
        """Whether the rows are all nodes of one graph."""
        return True

    def members(self, z: Tensor) -> Tensor:
        """The rows that egos read, from the nodes' own ``[N, F]``."""
        return z

    def own(self, rows: Tensor) -> Tensor:
        """The nodes' own rows among those of ``graph``."""
        return rows

    @property
    def own_rows(self) -> Tensor | None:
        """The nodes' own rows among those of ``graph``, ascending; None: all rows are."""
        return None

    def spread(self, own: Tensor) -> Tensor:
        """The nodes' own ``own`` at their rows, 0 at the others."""
        return own

    def complete(self, rows: Tensor) -> Tensor:
        """Sums over egos that are whole, from those over the egos that are here."""
        return rows

    def transport(self, z: Tensor, centroids: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        """The global problem, see :func:`dcgnn_kernels.global_sinkhorn`."""
        return global_sinkhorn(z, centroids, *options)

    def mean_clusters(self, clusters: Tensor) -> Tensor:
        """``[Ω, F]``: global clusters, of a batch the mean over its graphs."""
        return clusters

    def restricted(self, part: Part) -> Topology:
        """A topology for the rows of a part of ``graph``, with the global problems of this one."""
        return Topology(part.graph)

    def update(
        self,
        x: Tensor,
        global_assign: Tensor,
        global_message: Tensor,
        assign: Tensor,
        message: Tensor,
        factors: Mapping[str, Tensor],
    ) -> Tensor:
        """The node update; ``x`` is what :meth:`members` gave for the input. See :func:`node_update`."""
        parts = global_assign, global_message, assign, message
        return node_update(x, *parts, self.graph, activation="none", **factors)

    def problem_sizes(self) -> Tensor | int:
        """The number of nodes in the global problem, of all or of every node."""
        return self.graph.num_nodes

    def ego_sizes(self) -> Tensor:
        """Float64, the members of every ego of ``graph``; 0 for a row whose ego is elsewhere."""
        return self.graph.ego_sizes().double()

    def egos_per_node(self) -> Tensor:
        """Float64, the number of egos that hold each row of ``graph``."""
        return self.graph.egos_per_node().double()

    def reached(self, ego_mass: Tensor) -> Tensor:
        """Float64, the sum of ``ego_mass`` over the egos that hold each row of ``graph``."""
        graph = self.graph
        nodes = torch.arange(graph.num_nodes, device=graph.device)
        node_of_entry = torch.repeat_interleave(nodes, graph.egos_per_node(), output_size=graph.num_slots)
        return torch.zeros_like(ego_mass).index_add(0, node_of_entry, ego_mass[graph.ego.long()])

    def masked(self, factor: Tensor) -> Tensor:
        """``factor`` where a row is a node of this topology, 0 elsewhere."""
        return factor

    def normalise(self, norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``norm(x)``, with statistics over all nodes."""
        return norm(x)


class BatchTopology(Topology):
    """Disjoint union of graphs: every graph is a global problem of its own.

    Global clusters have a row for every graph, ``[G, Ω, F]``; those of a graph without nodes are 0.

    Attributes:
        graphs: the graphs that have nodes, as egos.
        filled: the numbers of these graphs; None: all have nodes.
    """

    def __init__(self, graph: EgoGraph, batch: Tensor, num_graphs: int | None = None) -> None:
        super().__init__(graph)
        if not isinstance(batch, Tensor) or batch.numel() != graph.num_nodes:
            raise ValueError(f"batch must have an entry for each of the {graph.num_nodes} nodes")
        if batch.device != graph.device:
            raise ValueError(f"batch is on {batch.device}, but edge_index is on {graph.device}")
        self.batch = batch
        self.graphs, self.num_graphs, self.filled = filled_graphs(batch, num_graphs)

    @property
    def is_whole(self) -> bool:
        return False

    def transport(self, z: Tensor, centroids: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        if centroids.dim() == 3:
            centroids = self.of_filled(centroids)
        assign, clusters = global_sinkhorn(z, centroids, *options, batch=self.graphs)
        if self.filled is not None:
            rows = clusters.new_zeros(self.num_graphs, *clusters.shape[1:])
            clusters = rows.index_copy(0, self.filled, clusters)
        return assign, clusters

    def of_filled(self, clusters: Tensor) -> Tensor:
        """The rows ``[G, ...]`` of the graphs that have nodes."""
        return clusters if self.filled is None else clusters[self.filled]

    def mean_clusters(self, clusters: Tensor) -> Tensor:
        return self.of_filled(clusters).mean(0)

    def restricted(self, part: Part) -> BatchTopology:
        return BatchTopology(part.graph, self.batch[part.nodes], self.num_graphs)

    def update(
        self,
        x: Tensor,
        global_assign: Tensor,
        global_message: Tensor,
        assign: Tensor,
        message: Tensor,
        factors: Mapping[str, Tensor],
    ) -> Tensor:
        nothing = x.new_empty(x.size(0), 0), x.new_empty(0, x.size(1))
        updated = node_update(x, *nothing, assign, message, self.graph, activation="none", **factors)
        if global_assign.size(1) == 0:
            return updated
        by_slot = global_assign[self.graphs.member.long()]
        broadcast = cluster_scatter(by_slot, self.of_filled(global_message), self.graphs)
        return updated + (factors["global_factor"][:, None] * broadcast).to(updated.dtype)

    def problem_sizes(self) -> Tensor:
        return self.graphs.ego_sizes().double()[self.graphs.ego.long()]


def as_topology(
    edge_index: Any, num_nodes: int, batch: Tensor | None = None, num_graphs: int | None = None
) -> Topology:
    """A layer's second argument as a topology of ``num_nodes`` rows."""
    if isinstance(edge_index, Topology):
        if batch is not None:
            raise ValueError("batch must be given with edge_index, not with a topology")
        if edge_index.num_nodes != num_nodes:
            raise ValueError(f"x has {num_nodes} rows, but edge_index has {edge_index.num_nodes} nodes")
        return edge_index
    graph = EgoGraph.from_edge_index(edge_index, num_nodes)
    if batch is None and num_graphs is not None:
        raise ValueError("num_graphs must be given with batch")
    return Topology(graph) if batch is None else BatchTopology(graph, batch, num_graphs)
