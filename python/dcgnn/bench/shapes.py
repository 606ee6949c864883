r"""Random graphs with the size and the spread of degrees of published ones.

**Degrees.** Node :math:`i` has the expected degree :math:`1 + D_i`, where the :math:`D_i` are the
:math:`N` quantiles of a generalised Pareto distribution of shape :math:`\xi` and mean
:math:`2E/N - 1`, given to the nodes in random order:

.. math::
    P(D > d) = (1 + \xi d / \sigma)^{-1/\xi}, \qquad \sigma = (2E/N - 1)(1 - \xi)

Small :math:`\xi` is nearly exponential, as the friendship graphs are: Cornell5's own degrees have the
quantiles 8, 64, 186 and 343 at 10, 50, 90 and 99 %, the random graph of its shape has 8, 53, 198 and 463.
Large :math:`\xi` is a power law, :math:`P(D > d) \sim d^{-1/\xi}`, with hubs of some :math:`N^\xi` edges.

**Edges.** Both ends of an edge are drawn with probability proportional to the expected degree
(Chung and Lu's degree-corrected random graph). Loops and repetitions are dropped and drawn again, so
that the graph is simple and has exactly the published number of edges; hubs lose a few that way. There
are no communities, no triangles beyond chance and no locality: neighbours are anywhere in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 22


@dataclass(frozen=True)
class Shape:
    r"""Size of a graph and :math:`\xi`, the tail of its degrees; ``num_edges`` are undirected."""

    num_nodes: int
    num_edges: int
    tail: float


# Nodes and edges as published. The tails are choices: the two friendship graphs get the one that suits
# Cornell5's own degrees, the others one that gives hubs of some ten thousand edges.
SHAPES = {
    "penn94": Shape(41_554, 1_362_229, 0.15),
    "cornell5": Shape(18_660, 790_777, 0.15),
    "genius": Shape(421_961, 984_979, 0.6),
    "ogbn-arxiv": Shape(169_343, 1_157_799, 0.6),
    "ogbn-products": Shape(2_449_029, 61_859_140, 0.35),
}


def scaled_shape(num_edges: int, like: str = "ogbn-products") -> Shape:
    """``num_edges`` undirected edges at the mean degree and tail of a named shape."""
    shape = SHAPES[like]
    return Shape(max(2, round(shape.num_nodes * num_edges / shape.num_edges)), num_edges, shape.tail)


def expected_degrees(shape: Shape) -> np.ndarray:
    """``[N]``, descending."""
    mean = 2 * shape.num_edges / shape.num_nodes
    below = (np.arange(shape.num_nodes) + 0.5) / shape.num_nodes  # share of nodes with a larger degree
    spread = max(mean - 1, 0.0)
    degrees = (below**-shape.tail - 1) / shape.tail
    return 1 + degrees * (spread / degrees.mean())


def generation_bytes(shape: Shape) -> int:
    """Peak memory of :func:`make_edges`: stubs, sorted keys of both directions and the result."""
    return 56 * shape.num_edges + 64 * CHUNK


def make_edges(shape: Shape, seed: int = 0) -> Tensor:
    """``[2, 2 E]`` int64: both directions of every edge, in the order that PyG's coalesce leaves.

    Time is O(E log E), memory that of :func:`generation_bytes`.
    """
    num_nodes, wanted = shape.num_nodes, shape.num_edges
    if not 0 < wanted <= num_nodes * (num_nodes - 1) // 4:
        raise ValueError(f"num_edges must be positive and at most half of all pairs, got {wanted}")
    rng = np.random.Generator(np.random.PCG64(seed))
    stubs = _stubs(expected_degrees(shape), rng)
    keys = np.empty(0, dtype=np.int64)
    while keys.size < wanted:
        count = (wanted - keys.size) * 17 // 16 + 16
        drawn = [_draw(stubs, num_nodes, min(CHUNK, count - start), rng) for start in range(0, count, CHUNK)]
        keys = _distinct(np.concatenate([keys, *drawn]))
        del drawn
    if keys.size > wanted:
        # Which ones go must not depend on their place: the keys are sorted.
        keys = np.delete(keys, rng.choice(keys.size, keys.size - wanted, replace=False))
    del stubs
    both = np.empty(2 * wanted, dtype=np.int64)
    low, high = np.divmod(keys, num_nodes)
    both[:wanted] = keys
    np.multiply(high, num_nodes, out=both[wanted:])
    both[wanted:] += low
    del low, high, keys
    both.sort()
    edge_index = torch.empty(2, both.size, dtype=torch.int64)
    source, target = edge_index.numpy()
    for start in range(0, both.size, CHUNK):
        part = slice(start, start + CHUNK)
        np.divmod(both[part], num_nodes, out=(source[part], target[part]))
    return edge_index


def _stubs(degrees: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Every node as often as its expected degree, rounded at random; nodes in random order."""
    counts = np.floor(degrees).astype(np.int64)
    counts += rng.random(degrees.size) < degrees - counts
    return np.repeat(rng.permutation(degrees.size).astype(np.int32), counts)


def _draw(stubs: np.ndarray, num_nodes: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Keys ``low · N + high`` of random pairs without loops."""
    ends = stubs[rng.integers(0, stubs.size, size=(2, count))].astype(np.int64)
    low, high = np.minimum(ends[0], ends[1]), np.maximum(ends[0], ends[1])
    return (low * num_nodes + high)[low != high]


def _distinct(keys: np.ndarray) -> np.ndarray:
    """The different values, sorted; in place as far as possible."""
    keys.sort()
    fresh = np.empty(keys.size, dtype=bool)
    fresh[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    return keys if fresh.all() else keys[fresh]
