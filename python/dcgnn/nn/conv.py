"""DCConv: one DC-GNN layer, a drop-in beside GCNConv."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.inits import zeros

from dcgnn.nn.checks import check_count, check_features, check_finite
from dcgnn.nn.messages import Linear
from dcgnn.nn.msg_passing import DCMsgPassing
from dcgnn.nn.topology import Topology
from dcgnn_kernels import EgoGraph


class DCConv(torch.nn.Module):
    r"""One differentiable cluster layer on linearly mapped features,
    :math:`X' = \mathrm{DCMsgPassing}(X W) + b`; see :class:`DCMsgPassing`.

    Args:
        in_channels: size of each input, or -1 to take it from the first input.
        out_channels: size of each output.
        num_global: number :math:`|\Omega|` of global cluster-nodes.
        cached: keep the :class:`~dcgnn_kernels.EgoGraph` of the first call, for transductive use on one
            graph. To share one graph among layers, build it once and pass it as ``edge_index``.
        bias: add a learnable bias.
        **kwargs: further options of :class:`DCMsgPassing`.

    Shapes:
        - **input:** node features :math:`(N, F_{in})`, edge indices :math:`(2, E)` or an
          :class:`~dcgnn_kernels.EgoGraph`; optionally ``batch`` :math:`(N)`, the graph of every node,
          and ``num_graphs``, where the last graphs have no nodes
        - **output:** node features :math:`(N, F_{out})`; with ``return_state=True`` also a
          :class:`~dcgnn.nn.msg_passing.DCState`

    Example:
        >>> conv = DCConv(16, 32, num_global=8)
        >>> conv(x, edge_index).shape  # doctest: +SKIP
        torch.Size([100, 32])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_global: int,
        *,
        cached: bool = False,
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        if "num_layers" in kwargs:
            raise TypeError("DCConv is one layer; use DCMsgPassing for num_layers")
        self.in_channels = in_channels if in_channels == -1 else check_count("in_channels", in_channels)
        self.out_channels = check_count("out_channels", out_channels)
        self.cached = cached
        self.lin = Linear(in_channels, out_channels, bias=False, weight_initializer="glorot")
        self.message_passing = DCMsgPassing(out_channels, num_global, **kwargs)
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(out_channels))
        else:
            self.register_parameter("bias", None)
        self._graph: EgoGraph | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws all parameters anew and forgets a cached graph."""
        self.lin.reset_parameters()
        self.message_passing.reset_parameters()
        zeros(self.bias)
        self._graph = None

    def forward(
        self,
        x: Tensor,
        edge_index: Any,
        return_state: bool = False,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
    ) -> Any:
        """Runs the layer; see the class for the shapes."""
        check_features(x, self.in_channels)
        graph = edge_index
        if self.cached and not isinstance(edge_index, Topology):  # which keeps its graph itself
            if self._graph is None:
                self._graph = EgoGraph.from_edge_index(edge_index, x.size(0))
            graph = self._graph
        try:
            result = self.message_passing(self.lin(x), graph, return_state, batch, num_graphs)
        except ValueError:
            check_finite("x", x)
            raise
        out, state = result if return_state else (result, None)
        if self.bias is not None:
            # In place where nobody else holds the tensor: a fresh one costs more than the sum.
            in_place = self.message_passing.returns_new_tensor and not return_state
            out = out.add_(self.bias) if in_place else out + self.bias
        return (out, state) if return_state else out

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.in_channels}, {self.out_channels}, "
            f"num_global={self.message_passing.num_global}, num_local={self.message_passing.num_local})"
        )
