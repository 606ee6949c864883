"""What the tests of the Triton kernels share: graphs, ops that run the kernels on the CPU, comparisons."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import test_ops
import torch
from torch import Tensor

from dcgnn_kernels import EgoGraph
from dcgnn_kernels.triton import registry

_T = TypeVar("_T")

FULL = os.environ.get("DCGNN_GPU_CODE") == "full"
"""Whether everything runs (`make test-gpu-code`), or the quick part of `make test`."""

RESOURCES = os.environ.get("DCGNN_GPU_CODE") == "resources"
"""Whether the default configurations are compiled, to see if one spills (`make triton-resources`)."""

only_full = pytest.mark.skipif(not FULL, reason="runs with make test-gpu-code")


def mixed(num_nodes: int = 24 if FULL else 14, hub: int = 20 if FULL else 11) -> EgoGraph:
    """Directed, with a node of many in-edges, one of many out-edges, self-loops, isolated nodes."""
    generator = torch.Generator().manual_seed(5)
    edges = torch.randint(0, num_nodes - 2, (2, num_nodes), generator=generator)
    others = torch.arange(hub)
    inwards = torch.stack([others, torch.full_like(others, 3)])
    outwards = torch.stack([torch.full_like(others, 7), others])
    return EgoGraph.from_edge_index(torch.cat([edges, inwards, outwards], dim=1), num_nodes)


@contextlib.contextmanager
def on_cpu(how: Callable[[], contextlib.AbstractContextManager[_T]]) -> Iterator[_T]:
    """The ops of CPU tensors launch the Triton kernels, which ``how()`` executes; gives what that gives.

    The same functions are registered for the same ops as on a GPU: checks, autograd and dispatch are shared.
    """
    library = torch.library.Library("dcgnn", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a native kernel is replaced
        for op in registry.MODULES:
            for name in (op, f"{op}_backward"):
                library.impl(name, registry.kernel(name), "CPU", allow_override=True)
    try:
        with how() as launches:
            yield launches
    finally:
        library._destroy()


def close(op: Callable, oracle: Callable, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    """As the ops' own tests compare; they have no float16, which rounds to 11 bits once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(test_ops.TOLERANCE, torch.float16, 4e-3)
        test_ops.compare_with_reference(op, oracle, inputs, dtype)


def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Egos of more than 4 members, sums of more than 8 slots are hubs; rows span several tiles, the
    iterations of a hub several blocks of members, and second stages take several turns.
    """
    from dcgnn_kernels.triton import config, global_sinkhorn, sweep

    monkeypatch.setattr(config, "LONGEST", 4)
    monkeypatch.setattr(config, "HUB_TILE", 8)
    monkeypatch.setattr(config, "HUB_BLOCK", 8)
    monkeypatch.setattr(config, "WIDEST", 8)
    monkeypatch.setattr(sweep, "WHOLE_SEGMENT", 8)
    monkeypatch.setattr(sweep, "REDUCE", 1)
    monkeypatch.setattr(global_sinkhorn, "BLOCK", 16)
    monkeypatch.setattr(global_sinkhorn, "MOST_PROGRAMS", 3)


def node_update_inputs(graph: EgoGraph, num_global: int, num_clusters: int, num_channels: int):
    """Differentiable inputs and factors of node_update."""
    number = graph.num_nodes
    shapes = (
        (number, num_channels),
        (number, num_global),
        (num_global, num_channels),
        (graph.num_slots, num_clusters),
        (number, num_clusters, num_channels),
    )
    names = ("x_factor", "global_factor", "local_factor", "ego_factor")
    inputs: tuple[Tensor, ...] = tuple(torch.randn(*shape, dtype=torch.float64) for shape in shapes)
    return inputs, {name: torch.rand(number, dtype=torch.float64) for name in names}
