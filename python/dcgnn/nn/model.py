"""DCGNN: the full model, MLP -> DCMsgPassing -> readout."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import MLP
from torch_geometric.nn.dense.linear import is_uninitialized_parameter
from torch_geometric.nn.inits import kaiming_uniform, zeros

from dcgnn.nn.checks import check_count, check_features, check_finite, check_number
from dcgnn.nn.inference import chunked_propagate
from dcgnn.nn.msg_passing import DCMsgPassing
from dcgnn.nn.sparse_input import dropout_linear
from dcgnn.nn.topology import Topology, as_topology
from dcgnn_kernels import EgoGraph


class _MemberSums(torch.autograd.Function):
    """The sum of the rows of every ego's members; ``embedding_bag``'s own backward sorts them every time."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, member: Tensor, rowptr: Tensor, ego: Tensor, colptr: Tensor
    ) -> Tensor:
        ctx.save_for_backward(ego, colptr)
        return functional.embedding_bag(member, rows, rowptr[:-1], mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        ego, colptr = ctx.saved_tensors
        return functional.embedding_bag(ego, grad, colptr[:-1], mode="sum"), None, None, None, None


class AdjacencyEmbedding(torch.nn.Module):
    r"""A linear map of a node's adjacency row, :math:`(A W)_i = \sum_{j \to i} W_j`, as in LINKX.

    Self-loops do not count and parallel edges count once, as everywhere here. Bound to one graph's nodes.
    """

    def __init__(self, num_nodes: int, channels: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(num_nodes, channels))
        self.bias = torch.nn.Parameter(torch.empty(channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        kaiming_uniform(self.weight, fan=max(1, self.weight.size(0)), a=math.sqrt(5))
        zeros(self.bias)

    def forward(self, graph: EgoGraph) -> Tensor:
        if graph.num_nodes != self.weight.size(0):
            raise ValueError(
                f"edge_index has {graph.num_nodes} nodes, but the adjacency embedding was made for "
                f"num_nodes = {self.weight.size(0)}"
            )
        # The bags are whole egos; taking the node's own row off leaves its neighbours.
        bags = _MemberSums.apply(self.weight, graph.member, graph.rowptr, graph.ego, graph.colptr)
        return bags - self.weight + self.bias


class DCGNN(torch.nn.Module):
    r"""The Differentiable Cluster Graph Neural Network for node classification:
    an MLP on the input features, :class:`DCMsgPassing`, and a linear readout.

    Args:
        in_channels: size of the input features, or -1 to take it from the first input.
        hidden_channels: width of everything in between.
        out_channels: number of classes.
        num_global: number :math:`|\Omega|` of global cluster-nodes.
        num_layers: number of message passing layers.
        num_mlp_layers: number of linear layers before the message passing.
        dropout: probability on the input, between layers and before the readout.
        input_dropout: probability on the input features; None: that of ``dropout``.
        adjacency_embedding: add :math:`A W`, a learnable embedding of the adjacency rows, to the MLP's
            output (LINKX); needs ``num_nodes`` and binds the model to one graph.
        num_nodes: number of nodes of that graph.
        **kwargs: further options of :class:`DCMsgPassing`.

    Shapes:
        - **input:** node features :math:`(N, F_{in})`, edge indices :math:`(2, E)` or an
          :class:`~dcgnn_kernels.EgoGraph`; optionally ``batch`` :math:`(N)`, the graph of every node,
          and ``num_graphs``, where the last graphs have no nodes
        - **output:** logits :math:`(N, C)`; with ``return_state=True`` also a
          :class:`~dcgnn.nn.msg_passing.DCState`
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        num_global: int,
        *,
        num_layers: int = 2,
        num_mlp_layers: int = 1,
        dropout: float = 0.0,
        input_dropout: float | None = None,
        adjacency_embedding: bool = False,
        num_nodes: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        check_count("num_mlp_layers", num_mlp_layers)
        if adjacency_embedding and num_nodes is None:
            raise ValueError("num_nodes must be given with adjacency_embedding=True")
        self.in_channels = in_channels if in_channels == -1 else check_count("in_channels", in_channels)
        self.hidden_channels = check_count("hidden_channels", hidden_channels)
        self.out_channels = check_count("out_channels", out_channels)
        self.dropout = check_number("dropout", dropout, lambda p: 0 <= p < 1, "in [0, 1)")
        self.input_dropout = self.dropout
        if input_dropout is not None:
            self.input_dropout = check_number(
                "input_dropout", input_dropout, lambda p: 0 <= p < 1, "in [0, 1)"
            )
        widths = [in_channels] + [hidden_channels] * num_mlp_layers
        between = [dropout] * (num_mlp_layers - 1)
        self.encoder = MLP(widths, dropout=[*between, 0.0], norm=None, plain_last=True)
        self.adjacency = None
        if adjacency_embedding:
            assert num_nodes is not None
            self.adjacency = AdjacencyEmbedding(num_nodes, hidden_channels)
        self.message_passing = DCMsgPassing(
            hidden_channels, num_global, num_layers=num_layers, dropout=dropout, **kwargs
        )
        self.readout = torch.nn.Linear(hidden_channels, out_channels)

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        self.encoder.reset_parameters()
        if self.adjacency is not None:
            self.adjacency.reset_parameters()
        self.message_passing.reset_parameters()
        self.readout.reset_parameters()

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        return_state: bool = False,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
    ) -> Any:
        """Runs the model; see the class for the shapes."""
        check_features(x, self.in_channels)
        topology = as_topology(edge_index, x.size(0), batch, num_graphs)
        h = self.encode(x, topology)
        try:
            result = self.message_passing(h, topology, return_state)
        except ValueError:
            check_finite("x", x)
            raise
        z, state = result if return_state else (result, None)
        logits = self.readout(z)
        return (logits, state) if return_state else logits

    def _encode(self, x: Tensor) -> Tensor:
        first, *others = self.encoder.lins
        if is_uninitialized_parameter(first.weight):
            return self.encoder(functional.dropout(x, self.input_dropout, self.training))
        h = dropout_linear(x, first.weight, first.bias, self.input_dropout, self.training)
        for lin in others:
            h = lin(functional.dropout(functional.relu(h), self.dropout, self.training))
        return h

    @torch.no_grad()
    def inference(
        self,
        x: Tensor,
        edge_index: Any,
        chunk_size: int = 65536,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
    ) -> Tensor:
        """Logits ``[N, C]`` of the whole graph, batch or part as in evaluation mode, with all neighbours,
        layer by layer and at most ``chunk_size`` egos at a time: equal to one forward, but assignments and,
        unless they are carried from layer to layer, clusters are in memory for one chunk alone.
        """
        was_training = self.training
        self.eval()
        try:
            check_features(x, self.in_channels)
            topology = as_topology(edge_index, x.size(0), batch, num_graphs)
            h = self.encode(x, topology)
            return self.readout(chunked_propagate(self.message_passing, h, topology, chunk_size))
        finally:
            self.train(was_training)

    def encode(self, x: Tensor, topology: Topology) -> Tensor:
        """What message passing starts from: ``[N, hidden_channels]``."""
        h = self._encode(x)
        if self.adjacency is not None:
            if not topology.is_whole:
                raise ValueError("adjacency_embedding needs the whole graph, not a batch or a part of it")
            h = h + self.adjacency(topology.graph)
        return functional.dropout(functional.relu(h), self.dropout, self.training)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.in_channels}, {self.hidden_channels}, {self.out_channels}, "
            f"num_global={self.message_passing.num_global}, num_layers={self.message_passing.num_layers})"
        )
