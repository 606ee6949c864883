"""What happens to cluster embeddings on their way to the nodes, and to nodes between layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import BatchNorm, LayerNorm
from torch_geometric.nn import Linear as PyGLinear
from torch_geometric.nn.dense.linear import is_uninitialized_parameter
from torch_geometric.nn.inits import glorot, zeros
from torch_geometric.nn.resolver import activation_resolver

from dcgnn.nn.checks import check_choice, check_count, check_number
from dcgnn.nn.topology import Topology
from dcgnn_kernels import linear

TRANSFORMS = (None, "shared", "per-cluster")
NORMS = (None, "batch", "layer")


def resolve_activation(name: str, activation: str | Callable | None) -> Callable[[Tensor], Tensor] | None:
    """A name known to PyG (``"tanh"``, ``"relu"``, …), a callable, or None; ``name`` is the argument's."""
    if activation is None:
        return None
    if callable(activation) and not isinstance(activation, type):
        return activation
    try:
        if not isinstance(activation, str):
            raise ValueError("neither a name nor a function or module")
        return activation_resolver(activation)
    except ValueError as error:
        raise ValueError(
            f"{name} must be None, a callable or the name of an activation such as 'tanh', got {activation!r}"
        ) from error


class Linear(PyGLinear):
    """PyG's linear map; a matrix of features goes through :func:`dcgnn_kernels.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 2 or is_uninitialized_parameter(self.weight):
            return super().forward(x)
        return linear(x, self.weight, self.bias)


class ClusterMessage(torch.nn.Module):
    r"""The message :math:`\sigma(W c + b)` of a cluster-node.

    Args:
        channels: number of channels ``F``.
        num_local: number of local cluster-nodes ``K``.
        transform: None (the identity), ``"shared"`` (one map for all cluster-nodes) or ``"per-cluster"``
            (one for each local cluster index, so that centre-like and neighbour-like messages stay
            apart, and one for the global cluster-nodes).
        activation: :math:`\sigma`, or None.
    """

    def __init__(
        self,
        channels: int,
        num_local: int,
        transform: str | None = None,
        activation: str | Callable | None = None,
    ) -> None:
        super().__init__()
        check_choice("transform", transform, TRANSFORMS)
        self.activation = resolve_activation("activation", activation)
        self.shared = Linear(channels, channels) if transform is not None else None
        if transform == "per-cluster":
            self.weight = torch.nn.Parameter(torch.empty(num_local, channels, channels))
            self.bias = torch.nn.Parameter(torch.empty(num_local, channels))
        else:
            self.register_parameter("weight", None)
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.shared is not None:
            self.shared.reset_parameters()
        glorot(self.weight)
        zeros(self.bias)

    def forward(self, clusters: Tensor, of_ego: bool = True) -> Tensor:
        """Local cluster-nodes ``[N, K, F]``, or global ones, ``[Ω, F]`` or ``[G, Ω, F]``; the shape stays."""
        if self.weight is not None and of_ego:
            clusters = torch.einsum("nkf,kfg->nkg", clusters, self.weight) + self.bias
        elif self.shared is not None:
            clusters = self.shared(clusters)
        return clusters if self.activation is None else self.activation(clusters)


def repeat(modules: Iterable[torch.nn.Module], num_layers: int) -> torch.nn.ModuleList:
    """One entry for each of ``num_layers`` layers, the same modules over and over."""
    distinct = list(modules)
    return torch.nn.ModuleList(distinct[layer % len(distinct)] for layer in range(num_layers))


def check_period(weight_period: int | None, num_layers: int) -> int:
    """After how many layers the maps repeat; None: never, every layer has its own."""
    if weight_period is None:
        return num_layers
    return min(check_count("weight_period", weight_period), num_layers)


class NodeBlock(torch.nn.Module):
    r"""What a deep model puts between layers: :math:`\mathrm{dropout}(\sigma(\mathrm{norm}(z' + W z)))`,
    with :math:`z` the layer's input and :math:`z'` its output; every part is optional.
    """

    def __init__(
        self,
        channels: int,
        residual: bool = False,
        norm: str | None = None,
        node_activation: str | Callable | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("norm", norm, NORMS)
        self.residual = Linear(channels, channels) if residual else None
        self.norm = None
        if norm == "batch":
            self.norm = BatchNorm(channels)
        elif norm == "layer":
            self.norm = LayerNorm(channels, mode="node")
        self.node_activation = resolve_activation("node_activation", node_activation)
        self.dropout = check_number("dropout", dropout, lambda p: 0 <= p < 1, "in [0, 1)")

    @classmethod
    def stack(cls, num_layers: int, weight_period: int, *args: Any, **kwargs: Any) -> torch.nn.ModuleList:
        """The blocks of a model whose linear maps repeat after ``weight_period`` layers.

        Norms do not: what a layer puts out has a mean and a scale of its own.
        """
        blocks = [cls(*args, **kwargs) for _ in range(num_layers)]
        for layer, block in enumerate(blocks):
            block.residual = blocks[layer % weight_period].residual
        return torch.nn.ModuleList(blocks)

    def reset_parameters(self) -> None:
        for module in (self.residual, self.norm):
            if module is not None:
                module.reset_parameters()

    @property
    def is_identity(self) -> bool:
        """Whether the block returns the very tensor that it gets."""
        parts = (self.residual, self.norm, self.node_activation)
        return all(part is None for part in parts) and not (self.training and self.dropout > 0)

    def forward(self, updated: Tensor, z: Tensor, topology: Topology | None = None) -> Tensor:
        if self.residual is not None:
            updated = updated + self.residual(z)
        if self.norm is not None:
            updated = self.norm(updated) if topology is None else topology.normalise(self.norm, updated)
        if self.node_activation is not None:
            updated = self.node_activation(updated)
        return torch.nn.functional.dropout(updated, self.dropout, self.training)
