"""Models to compare with, in the skeleton of :class:`~dcgnn.DCGNN`, for comparisons on equal terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import MLP

from dcgnn.nn.messages import NodeBlock, check_period, repeat
from dcgnn.nn.prepared_convs import (
    PreparedGATConv,
    PreparedGCNConv,
    PreparedGINConv,
    PreparedLINKX,
    PreparedSAGEConv,
    prepared_graph,
)
from dcgnn.nn.sparse_input import dropout_linear


class ConvNet(nn.Module):
    r"""A linear input map, convolutions of one kind, and a linear readout.

    With :math:`h^0 = \mathrm{ReLU}(W_{in} x)` each of the :math:`L` layers computes

    .. math::
        h^{l+1} = \mathrm{dropout}(\mathrm{ReLU}(\mathrm{norm}(
        \mathrm{conv}(h^l) + [\text{residual}]\, W^l h^l)))

    (dropout also before the first map, there of ``input_dropout``) and the logits are :math:`W_{out} h^L`.

    Args:
        conv: Makes one convolution from its number of channels; called as ``conv(h, graph)``.
        in_channels: Input features :math:`F`.
        hidden_channels: Width of all layers.
        out_channels: Number of classes :math:`C`.
        num_layers: Number of convolutions :math:`L`.
        dropout: Dropout probability.
        input_dropout: The one of the input features; None: that of ``dropout``.
        norm: ``None``, ``"batch"`` or ``"layer"``.
        residual: Add a linear map of the node itself in every layer.
        weight_period: Convolutions and residual maps repeat after so many layers; None: never.
        prepared: In which form the convolution takes a graph that is prepared once, see
            :func:`~dcgnn.nn.prepared_convs.prepared_graph`; None: in none.

    Shapes:
        ``x`` :math:`[N, F]`, whatever graph the convolution takes, logits :math:`[N, C]`.
    """

    def __init__(
        self,
        conv: Callable[[int], nn.Module],
        in_channels: int,
        hidden_channels: int,
        out_channels: int,
        *,
        num_layers: int = 2,
        dropout: float = 0.0,
        input_dropout: float | None = None,
        norm: str | None = None,
        residual: bool = False,
        weight_period: int | None = None,
        prepared: str | None = None,
    ) -> None:
        super().__init__()
        self.prepared = prepared
        self.dropout = dropout
        self.input_dropout = dropout if input_dropout is None else input_dropout
        if not 0 <= self.input_dropout < 1:
            raise ValueError(f"input_dropout must be in [0, 1), got {input_dropout}")
        self.lin_in = nn.Linear(in_channels, hidden_channels)
        period = check_period(weight_period, num_layers)
        self.convs = repeat((conv(hidden_channels) for _ in range(period)), num_layers)
        self.blocks = NodeBlock.stack(num_layers, period, hidden_channels, residual, norm, "relu", dropout)
        self.lin_out = nn.Linear(hidden_channels, out_channels)

    def forward(self, x: Tensor, graph: Any) -> Tensor:
        """Logits of every node."""
        h = dropout_linear(x, self.lin_in.weight, self.lin_in.bias, self.input_dropout, self.training)
        h = self._drop(functional.relu(h))
        for conv, block in zip(self.convs, self.blocks, strict=True):
            h = block(conv(h, graph), h)
        return self.lin_out(h)

    def graph_of(self, edge_index: Tensor, num_nodes: int) -> Any:
        """The graph in the fastest form that the convolutions take, see :func:`prepared_graph`."""
        return prepared_graph(self.prepared, edge_index, num_nodes)

    def _drop(self, h: Tensor) -> Tensor:
        return functional.dropout(h, self.dropout, self.training)


def gcn(
    in_channels: int, hidden_channels: int, out_channels: int, cached: bool = True, **options: object
) -> ConvNet:
    """:class:`ConvNet` of PyG's ``GCNConv``.

    The normalised edges are computed once and kept, as an :class:`~dcgnn_kernels.EgoGraph` is, so
    a model serves one graph; ``cached=False`` is for batches.
    """
    return ConvNet(
        lambda channels: PreparedGCNConv(channels, cached),
        in_channels,
        hidden_channels,
        out_channels,
        prepared="gcn",
        **options,  # type: ignore[arg-type]
    )


def gat(
    in_channels: int, hidden_channels: int, out_channels: int, heads: int = 4, **options: object
) -> ConvNet:
    """:class:`ConvNet` of PyG's ``GATConv``; the heads share the width."""
    if hidden_channels % heads:
        raise ValueError(f"hidden_channels ({hidden_channels}) must be a multiple of heads ({heads})")
    return ConvNet(
        lambda channels: PreparedGATConv(channels, heads),
        in_channels,
        hidden_channels,
        out_channels,
        prepared="egos",
        **options,  # type: ignore[arg-type]
    )


class _NodeLinear(nn.Module):
    """A convolution that does not look at the graph."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.lin = nn.Linear(channels, channels)

    def forward(self, h: Tensor, graph: Tensor) -> Tensor:
        return self.lin(h)


def mlp(in_channels: int, hidden_channels: int, out_channels: int, **options: object) -> ConvNet:
    """:class:`ConvNet` without a graph."""
    return ConvNet(
        _NodeLinear,
        in_channels,
        hidden_channels,
        out_channels,
        **options,  # type: ignore[arg-type]
    )


def sage(in_channels: int, hidden_channels: int, out_channels: int, **options: object) -> ConvNet:
    """:class:`ConvNet` of PyG's ``SAGEConv`` (mean of the neighbours beside the node itself)."""
    return ConvNet(
        lambda channels: PreparedSAGEConv(channels),
        in_channels,
        hidden_channels,
        out_channels,
        prepared="mean",
        **options,  # type: ignore[arg-type]
    )


def gin(in_channels: int, hidden_channels: int, out_channels: int, **options: object) -> ConvNet:
    """:class:`ConvNet` of PyG's ``GINConv`` with two linear maps a layer."""
    return ConvNet(
        lambda channels: PreparedGINConv(MLP([channels, channels, channels], norm=None)),
        in_channels,
        hidden_channels,
        out_channels,
        prepared="sum",
        **options,  # type: ignore[arg-type]
    )


def linkx(
    in_channels: int,
    hidden_channels: int,
    out_channels: int,
    num_nodes: int,
    num_layers: int = 1,
    num_edge_layers: int = 1,
    num_node_layers: int = 1,
    dropout: float = 0.0,
) -> PreparedLINKX:
    """PyG's ``LINKX``, bound to a graph of ``num_nodes`` nodes."""
    return PreparedLINKX(
        num_nodes,
        in_channels,
        hidden_channels,
        out_channels,
        num_layers,
        num_edge_layers,
        num_node_layers,
        dropout,
    )


#: Every baseline by name.
BASELINES: Mapping[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "gcn": gcn,
    "gat": gat,
    "sage": sage,
    "gin": gin,
    "linkx": linkx,
}
