"""PyG's convolutions and LINKX on graphs that are prepared once, without what every step would repeat.

PyTorch's product with a sparse matrix sorts the edges anew in every backward, to transpose the matrix; over
``edge_index`` PyG keeps a message for every edge. Both cost several times what the sums themselves do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import LINKX, GATConv, GCNConv, GINConv, Linear, SAGEConv
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.models.linkx import SparseLinear
from torch_geometric.typing import Adj, OptPairTensor
from torch_geometric.utils import coalesce, remove_self_loops, to_torch_csr_tensor

from dcgnn.nn.sparse_input import dropout_linear
from dcgnn_kernels import EgoGraph, cluster_scatter


def prepared_graph(form: str | None, edge_index: Tensor, num_nodes: int) -> Any:
    """The graph in a form that gives the same results up to rounding, without a message for every edge.

    Parallel edges, which the forms would join, stay in ``edge_index``.

    Args:
        form: ``"matrix"``: :func:`adjacency_matrix`; ``"matrix without loops"``, for what adds its own;
            ``"egos"``: :func:`source_egos`; None: ``edge_index`` as it is.
        edge_index: ``[2, E]``.
        num_nodes: Number of nodes.
    """
    if form is None or edge_index.size(1) == 0:
        return edge_index
    edges = coalesce(edge_index.flip(0), num_nodes=num_nodes)
    if edges.size(1) != edge_index.size(1):
        return edge_index
    if form == "egos":
        return source_egos(edge_index, num_nodes)
    if form == "matrix without loops":
        edges, _ = remove_self_loops(edges)
    return adjacency_matrix(edges, num_nodes)


def adjacency_matrix(target_and_source: Tensor, num_nodes: int) -> Tensor:
    """The CSR matrix ``[N, N]`` with a row for every target, from sorted edges without parallel ones."""
    with _without_beta_warnings():
        return to_torch_csr_tensor(target_and_source, size=(num_nodes, num_nodes), is_coalesced=True)


class _Product(torch.autograd.Function):
    """A constant sparse matrix times rows; the backward multiplies with the transpose that is given."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrix: Tensor, transpose: Tensor) -> Tensor:
        ctx.transpose = transpose
        return matrix @ rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose @ grad, None, None


class _KeptTranspose(MessagePassing):
    """Sums or means over the neighbours by a sparse matrix whose transpose is made once."""

    _kept: tuple[Tensor, Tensor, Tensor] | None = None

    def _product(self, matrix: Tensor, rows: Tensor) -> Tensor:
        kept = self._kept
        if kept is None or kept[0] is not matrix or kept[1].dtype != rows.dtype:
            scaled = _scaled(matrix.to(rows.dtype), self.aggr == "mean")
            self._kept = kept = (matrix, scaled, _transposed(scaled))
        return _Product.apply(rows, kept[1], kept[2])

    def __getstate__(self) -> dict[str, Any]:
        """A copy keeps nothing: torch cannot copy sparse matrices yet."""
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}


class KeptGCNConv(_KeptTranspose, GCNConv):
    """``GCNConv``; a graph is given as :func:`adjacency_matrix` without self-loops, or as ``edge_index``."""

    def message_and_aggregate(self, adj_t: Adj, x: Tensor) -> Tensor:
        return self._product(adj_t, x)


class KeptSAGEConv(_KeptTranspose, SAGEConv):
    """``SAGEConv``; a graph is given as :func:`adjacency_matrix`, or as ``edge_index``."""

    def message_and_aggregate(self, adj_t: Adj, x: OptPairTensor) -> Tensor:
        return self._product(adj_t, x[0])


class KeptGINConv(_KeptTranspose, GINConv):
    """``GINConv``; a graph is given as :func:`adjacency_matrix`, or as ``edge_index``."""

    def message_and_aggregate(self, adj_t: Adj, x: OptPairTensor) -> Tensor:
        return self._product(adj_t, x[0])


class _KeptSparseLinear(_KeptTranspose, SparseLinear):
    """``SparseLinear``: the adjacency matrix times a weight."""

    def message_and_aggregate(self, adj_t: Adj, weight: Tensor) -> Tensor:
        return self._product(adj_t, weight)


class _SparseInputLinear(Linear):
    """``Linear`` that leaves out the zeros of bags of words."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout_linear(x, self.weight, self.bias, 0.0, self.training)


class KeptLINKX(LINKX):
    """``LINKX``; a graph is given as :func:`adjacency_matrix`, or as ``edge_index``."""

    edge_lin: SparseLinear

    def __init__(self, num_nodes: int, in_channels: int, hidden_channels: int, *arguments: Any) -> None:
        super().__init__(num_nodes, in_channels, hidden_channels, *arguments)
        first = self.node_mlp.lins[0]
        with torch.random.fork_rng(devices=[]):  # the weights are those that LINKX drew
            edge_lin = _KeptSparseLinear(num_nodes, hidden_channels)
            node_lin = _SparseInputLinear(in_channels, hidden_channels)
        for ours, theirs in ((edge_lin, self.edge_lin), (node_lin, first)):
            ours.load_state_dict(theirs.state_dict())
        self.edge_lin, self.node_mlp.lins[0] = edge_lin, node_lin

    def graph_of(self, edge_index: Tensor, num_nodes: int) -> Any:
        """The graph in the fastest form that the model takes, see :func:`prepared_graph`."""
        return prepared_graph("matrix", edge_index, num_nodes)


class SlotGATConv(GATConv):
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
    """The egos whose members are a node and the targets of its edges, for :class:`SlotGATConv`."""
    return EgoGraph.from_edge_index(edge_index.flip(0), num_nodes)


def _scaled(matrix: Tensor, mean: bool) -> Tensor:
    """The matrix, or each row divided by its number of entries."""
    if not mean:
        return matrix
    counts = matrix.crow_indices().diff()
    values = matrix.values() / counts.repeat_interleave(counts)
    with _without_beta_warnings():
        return torch.sparse_csr_tensor(matrix.crow_indices(), matrix.col_indices(), values, matrix.shape)


def _transposed(matrix: Tensor) -> Tensor:
    with _without_beta_warnings():
        by_column = matrix.to_sparse_csc()
        return torch.sparse_csr_tensor(
            by_column.ccol_indices(), by_column.row_indices(), by_column.values(), matrix.shape[::-1]
        )


@contextmanager
def _without_beta_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        for layout in ("CSR", "CSC"):
            warnings.filterwarnings("ignore", message=f"Sparse {layout} tensor support is in beta")
        warnings.filterwarnings("ignore", message="Sparse invariant checks are implicitly")
        yield
