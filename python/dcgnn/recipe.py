"""A training run as plain values: a model by name, its options, and how to train it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dcgnn.baselines import BASELINES
from dcgnn.data.graph_data import GraphData
from dcgnn.nn.model import DCGNN
from dcgnn.training import TrainConfig, TrainResult, train

#: Every model that a recipe may name.
MODELS = ("dcgnn", *BASELINES)

#: How models are called where people read.
TITLES = {
    "dcgnn": "DC-GNN",
    "mlp": "MLP",
    "gcn": "GCN",
    "gat": "GAT",
    "sage": "SAGE",
    "gin": "GIN",
    "linkx": "LINKX",
}


@dataclass(frozen=True)
class Recipe:
    """Everything that a run needs besides graph, split and seed.

    Args:
        model: Name of the model, one of :data:`MODELS`.
        options: Arguments of the model that the graph does not fix.
        training: Fields of :class:`~dcgnn.training.TrainConfig` but the seed.
    """

    model: str = "dcgnn"
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {self.model!r}")
        known = {field.name for field in dataclasses.fields(TrainConfig)} - {"seed"}
        if unknown := set(self.training) - known:
            raise ValueError(f"training has no option {', '.join(sorted(unknown))}")

    def config(self, seed: int) -> TrainConfig:
        """How to train, for one seed."""
        return TrainConfig(seed=seed, **self.training)

    def build(self, data: GraphData) -> nn.Module:
        """The model for a graph, with fresh weights."""
        return build_model(
            self.options,
            self.model,
            channels=data.num_features,
            classes=data.num_classes,
            nodes=data.num_nodes,
        )

    def run(self, data: GraphData, seed: int = 0, **arguments: Any) -> tuple[nn.Module, TrainResult]:
        """Train on one graph and split; ``arguments`` go to :func:`dcgnn.training.train`."""
        torch.manual_seed(seed)
        model = self.build(data)
        return model, train(model, data, self.config(seed), model_options=self.options, **arguments)

    def replaced(self, options: Mapping[str, Any] | None = None, **training: Any) -> Recipe:
        """The same recipe with some options of the model, or of training, changed."""
        return Recipe(self.model, {**self.options, **(options or {})}, {**self.training, **training})

    def with_num_global(self, classes: int) -> Recipe:
        """The same recipe of DC-GNN with the number of global clusters stated, also where it is left open."""
        return self.replaced({"num_global": self.options.get("num_global") or default_num_global(classes)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"model": self.model, "options": dict(self.options), "training": dict(self.training)}


def build_model(
    options: Mapping[str, Any], model: str = "dcgnn", *, channels: int, classes: int, nodes: int
) -> Any:
    """The model for a graph with these input channels, classes and nodes."""
    arguments = dict(options)
    if model == "linkx" or arguments.get("adjacency_embedding"):
        arguments["num_nodes"] = nodes
    if model != "dcgnn":
        hidden = arguments.pop("hidden_channels")
        return BASELINES[model](channels, hidden, classes, **arguments)
    arguments["num_global"] = arguments.get("num_global") or default_num_global(classes)
    return DCGNN(channels, out_channels=classes, **arguments)


def default_num_global(classes: int) -> int:
    """About eight: a multiple of the classes, so that the similarity loss can be switched on."""
    return classes * max(1, round(8 / classes))
