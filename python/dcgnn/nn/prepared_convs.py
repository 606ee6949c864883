"""PyG's convolutions and LINKX on graphs that are prepared once, without what every step would repeat.

PyTorch's product with a sparse matrix sorts the edges anew in every backward, to transpose the matrix; over
``edge_index`` PyG keeps a message for every edge. Both cost several times what the sums themselves do.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import LINKX, GATConv, GCNConv, GINConv, Linear, SAGEConv
from torch_geometric.nn.models.linkx import SparseLinear
from torch_geometric.utils import add_remaining_self_loops, coalesce, scatter

from dcgnn.nn.sparse_input import dropout_linear
from dcgnn_kernels import EgoGraph, cluster_scatter


def prepared_graph(form: str | None, edge_index: Tensor, num_nodes: int) -> Any:
    """The graph in a form that gives the same results up to rounding, without a message for every edge.

    Parallel edges, which the forms would join, stay in ``edge_index``.

    Args:
        form: ``"sum"`` or ``"mean"`` over the neighbours, or ``"gcn"``, with GCN's weights and self-loops:
            :class:`PreparedMatrix`; ``"egos"``: :func:`source_egos`; None: ``edge_index`` as it is.
        edge_index: ``[2, E]``.
        num_nodes: Number of nodes.
    """
    if form is None or edge_index.size(1) == 0:
        return edge_index
    if coalesce(edge_index, num_nodes=num_nodes).size(1) != edge_index.size(1):
        return edge_index
    return (
        source_egos(edge_index, num_nodes) if form == "egos" else PreparedMatrix(form, edge_index, num_nodes)
    )


class PreparedMatrix:
    r"""A constant sparse matrix :math:`A`, an entry :math:`a_{ij}` for every edge :math:`j \to i`, and its
    transpose.

    Weights are computed in float64 and converted once for a product in float32. Half precision is multiplied
    in float32, since the CPU has no sparse products for it.

    Args:
        form: ``"sum"``: :math:`a_{ij} = 1`; ``"mean"``: :math:`1 / d_i`, with :math:`d_i` the edges into
            :math:`i`; ``"gcn"``: with self-loops, :math:`1 / \sqrt{d_i d_j}`.
        edge_index: ``[2, E]``, without parallel edges.
        num_nodes: Number of nodes.
    """

    def __init__(self, form: str, edge_index: Tensor, num_nodes: int) -> None:
        if form == "gcn":
            edge_index, _ = add_remaining_self_loops(edge_index, num_nodes=num_nodes)
        source, target = edge_index
        degree = scatter(torch.ones_like(target), target, dim_size=num_nodes, reduce="sum").double()
        weight = torch.ones(target.numel(), dtype=torch.float64, device=target.device)
        if form == "mean":
            weight = 1 / degree[target]
        elif form == "gcn":
            weight = (degree[target] * degree[source]).rsqrt()
        elif form != "sum":
            raise ValueError(f"form must be sum, mean or gcn, got {form!r}")
        size = num_nodes, num_nodes
        self._pairs = {
            torch.float64: (_csr(target, source, weight, size), _csr(source, target, weight, size))
        }

    def product(self, rows: Tensor) -> Tensor:
        """:math:`A` times ``rows`` ``[N, F]``."""
        dtype = torch.promote_types(rows.dtype, torch.float32)
        if dtype not in self._pairs:
            matrix, transpose = self._pairs[torch.float64]
            self._pairs[dtype] = matrix.to(dtype), transpose.to(dtype)
        return _Product.apply(rows.to(dtype), *self._pairs[dtype]).to(rows.dtype)


class _Product(torch.autograd.Function):
    """A constant sparse matrix times rows; the backward multiplies with the transpose that is given."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, transpose: Tensor) -> Tensor:
        ctx.transpose = transpose
        return _times(matrix, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _times(ctx.transpose, grad), None, None


def _times(matrix: Tensor, rows: Tensor) -> Tensor:
    with torch.autocast(rows.device.type, enabled=False):
        return matrix @ rows


def _csr(row: Tensor, column: Tensor, value: Tensor, size: tuple[int, int]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly")
        return torch.sparse_coo_tensor(torch.stack([row, column]), value, size).to_sparse_csr()


class PreparedGCNConv(GCNConv):
    """``GCNConv``; a graph is given as :class:`PreparedMatrix` ``"gcn"``, or as ``edge_index``."""

    def __init__(self, channels: int, cached: bool = False) -> None:
        super().__init__(channels, channels, cached=cached)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        if not isinstance(graph, PreparedMatrix):
            return super().forward(x, graph)
        return graph.product(self.lin(x)) + self.bias


class PreparedSAGEConv(SAGEConv):
    """``SAGEConv``; a graph is given as :class:`PreparedMatrix` ``"mean"``, or as ``edge_index``."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        if not isinstance(graph, PreparedMatrix):
            return super().forward(x, graph)
        return self.lin_l(graph.product(x)) + self.lin_r(x)


class PreparedGINConv(GINConv):
    """``GINConv``; a graph is given as :class:`PreparedMatrix` ``"sum"``, or as ``edge_index``."""

    def __init__(self, maps: nn.Module) -> None:
        super().__init__(maps, train_eps=True)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        if not isinstance(graph, PreparedMatrix):
            return super().forward(x, graph)
        return self.nn(graph.product(x) + (1 + self.eps) * x)


class _PreparedSparseLinear(SparseLinear):
    """``SparseLinear``, the adjacency matrix times a weight; likewise with ``"sum"``."""

    def forward(self, graph: Any, edge_weight: Tensor | None = None) -> Tensor:
        if not isinstance(graph, PreparedMatrix):
            return super().forward(graph, edge_weight)
        return graph.product(self.weight) + self.bias


class _SparseInputLinear(Linear):
    """``Linear`` that leaves out the zeros of bags of words."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout_linear(x, self.weight, self.bias, 0.0, self.training)


class PreparedLINKX(LINKX):
    """``LINKX``; a graph is given as :class:`PreparedMatrix` ``"sum"``, or as ``edge_index``."""

    edge_lin: SparseLinear

    def __init__(
        self, num_nodes: int, in_channels: int, hidden_channels: int, *sizes: Any, **more: Any
    ) -> None:
        super().__init__(num_nodes, in_channels, hidden_channels, *sizes, **more)
        first = self.node_mlp.lins[0]
        with torch.random.fork_rng(devices=[]):  # the weights are those that LINKX drew
            edge_lin = _PreparedSparseLinear(num_nodes, hidden_channels)
            node_lin = _SparseInputLinear(in_channels, hidden_channels)
        for ours, theirs in ((edge_lin, self.edge_lin), (node_lin, first)):
            ours.load_state_dict(theirs.state_dict())
        self.edge_lin, self.node_mlp.lins[0] = edge_lin, node_lin

    def graph_of(self, edge_index: Tensor, num_nodes: int) -> Any:
        """The graph in the fastest form that the model takes, see :func:`prepared_graph`."""
        return prepared_graph("sum", edge_index, num_nodes)


class PreparedGATConv(GATConv):
    r"""``GATConv``; a graph is given as :func:`source_egos`, or as ``edge_index``.

    With :math:`e_{ij} = \mathrm{LeakyReLU}(a_s \cdot v_j + a_t \cdot v_i)` for every edge :math:`j \to i`,
    each head is

    .. math:: \sum_j \exp(e_{ij}) v_j \, / \sum_j \exp(e_{ij})

    where the numerator is :func:`~dcgnn_kernels.cluster_scatter` with the node :math:`j` as the only cluster
    of the ego of its targets: there is a weight for every edge, but no message.
    """

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__(channels, channels // heads, heads=heads)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        if not isinstance(graph, EgoGraph):
            return super().forward(x, graph)
        values = self.lin(x).view(-1, self.heads, self.out_channels)
        as_source, as_target = ((values * weight).sum(dim=-1) for weight in (self.att_src, self.att_dst))
        source, target = graph.ego_of_slot().long(), graph.member.long()
        score = as_source.index_select(0, source) + as_target.index_select(0, target)
        score = functional.leaky_relu(score, self.negative_slope)
        # The softmax does not change when the highest score of a node becomes 0, and nothing overflows.
        highest = torch.full_like(as_target, -torch.inf).scatter_reduce_(
            0, target[:, None].expand_as(score), score.detach(), "amax"
        )
        weight = (score - highest.index_select(0, target)).exp()
        total = torch.zeros_like(as_target).index_add(0, target, weight)
        heads = [
            cluster_scatter(weight[:, head, None], values[:, head, None], graph) for head in range(self.heads)
        ]
        out = torch.stack(heads, dim=1) / total[:, :, None]
        return out.flatten(1) + self.bias


def source_egos(edge_index: Tensor, num_nodes: int) -> EgoGraph:
    """The egos whose members are a node and the targets of its edges, for :class:`PreparedGATConv`."""
    return EgoGraph.from_edge_index(edge_index.flip(0), num_nodes)
