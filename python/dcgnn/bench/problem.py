"""What is timed: a graph with features, and the settings of a layer on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dcgnn.bench.shapes import SHAPES, Shape, make_edges
from dcgnn.data import GraphData, load_graph, random_split
from dcgnn_kernels import EgoGraph

NUM_CLASSES = 8


@dataclass(frozen=True)
class Settings:
    """Sizes of a layer, in the words of :class:`~dcgnn.DCMsgPassing`; ``dtype`` by its name in torch."""

    channels: int = 64
    num_local: int = 2
    num_global: int = 8
    local_iters: int = 3
    global_iters: int = 5
    dtype: str = "float32"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.dtype)


@dataclass
class Problem:
    """One graph on one device; features are random, of the settings' width and dtype.

    Args:
        name: Name in the tables.
        edge_index: ``[2, E]``, coalesced, without self-loops.
        num_nodes: ``N``.
        settings: Sizes of the layer.
        device: Where everything lies.
        seed: That of a random graph; 0 for others.
        made: What :meth:`once` keeps.
    """

    name: str
    edge_index: Tensor
    num_nodes: int
    settings: Settings = field(default_factory=Settings)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    made: dict[Callable[[Problem], Any], Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, make: Callable[[Problem], Any]) -> Any:
        """``make(self)``, made by the first call and kept: large graphs take longer to build than to use."""
        if make not in self.made:
            self.made[make] = make(self)
        return self.made[make]

    @property
    def graph(self) -> EgoGraph:
        """The ego-neighbourhoods."""
        return self.once(ego_graph)

    @cached_property
    def x(self) -> Tensor:
        """``[N, F]`` features."""
        return self.random(1)

    @property
    def num_slots(self) -> int:
        """``S``; the edges are simple, so that it needs no graph."""
        return self.edge_index.size(1) + self.num_nodes

    def random(self, seed: int) -> Tensor:
        """``[N, F]`` normal numbers."""
        generator = torch.Generator().manual_seed(seed)
        size = self.num_nodes, self.settings.channels
        return torch.randn(size, generator=generator).to(self.device, self.settings.torch_dtype)

    def with_settings(self, settings: Settings) -> Problem:
        """The same graph for other sizes of the layer; a graph that was built is kept."""
        other = replace(self, settings=settings, made=dict(self.made))
        other.forget()
        return other

    def forget(self) -> None:
        """Drop all that was made but the ego-neighbourhoods, which fit any settings."""
        for make in list(self.made):
            if make is not ego_graph:
                del self.made[make]

    def data(self) -> GraphData:
        """For training: random labels, half of the nodes to train on."""
        labels = torch.randint(NUM_CLASSES, (self.num_nodes,), generator=torch.Generator().manual_seed(3))
        train_mask, val_mask, test_mask = random_split(labels, 0)
        return GraphData(
            name=self.name,
            x=self.x.cpu(),
            edge_index=self.edge_index.cpu(),
            y=labels,
            train_mask=train_mask,
            val_mask=val_mask,
            test_mask=test_mask,
            num_classes=NUM_CLASSES,
            metric="accuracy",
            num_splits=1,
        )


def ego_graph(problem: Problem) -> EgoGraph:
    """What DCConv takes as its graph."""
    return EgoGraph.from_edge_index(problem.edge_index, problem.num_nodes)


def shape_name(name: str) -> str:
    """How a random graph of a published shape is called in the tables."""
    return f"{name} shape"


def shaped_problem(
    name: str, settings: Settings, device: torch.device, *, shape: Shape | None = None, seed: int = 0
) -> Problem:
    """A random graph of a published shape, or of any other that is given."""
    known = shape or SHAPES.get(name)
    if known is None:
        raise ValueError(f"unknown shape {name!r}; known are {', '.join(SHAPES)}")
    edge_index = make_edges(known, seed).to(device)
    title = shape_name(name) if shape is None else name
    return Problem(title, edge_index, known.num_nodes, settings, device, seed)


def loaded_problem(
    name: str, settings: Settings, device: torch.device, *, data_root: str | None = None
) -> Problem:
    """A graph that :func:`dcgnn.data.load_graph` knows; only its edges are used."""
    from torch_geometric.utils import coalesce, remove_self_loops

    data = load_graph(name, data_root=data_root)
    edge_index = coalesce(remove_self_loops(data.edge_index)[0], num_nodes=data.num_nodes)
    return Problem(data.name, edge_index.to(device), data.num_nodes, settings, device)
