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

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

CHUNK = 1 << 22  # pairs that are drawn together: another number gives other graphs
BLOCK = 1 << 18  # values that are worked on together: small enough to stay in the cache


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
    """Peak memory of :func:`make_edges`: the result, inside which edges are sorted, and stubs or choices."""
    return 44 * shape.num_edges + 64 * shape.num_nodes + 64 * BLOCK + 8 * CHUNK


def make_edges(shape: Shape, seed: int = 0) -> Tensor:
    """``[2, 2 E]`` int64: both directions of every edge, in the order that PyG's coalesce leaves.

    Time is O(E log E), memory that of :func:`generation_bytes`. Fresh memory costs about as much as the
    sorting, so that all work is done inside the result, in blocks.
    """
    num_nodes, wanted = shape.num_nodes, shape.num_edges
    if not 0 < wanted <= num_nodes * (num_nodes - 1) // 4:
        raise ValueError(f"num_edges must be positive and at most half of all pairs, got {wanted}")
    rng = np.random.Generator(np.random.PCG64(seed))
    edge_index = torch.from_numpy(np.empty((2, 2 * wanted), dtype=np.int64))  # numpy asks for huge pages
    source, target = edge_index.numpy()
    keys = _simple_edges(shape, source, rng)
    # Every edge in both directions, sorted as one key; then the key is taken apart where it lies.
    both = target
    both[:wanted] = keys
    for part in _parts(wanted):
        low = keys[part] // num_nodes  # divmod takes many times as long
        high = keys[part] - low * num_nodes
        both[wanted:][part] = high * num_nodes + low
    both.sort()
    for part in _parts(2 * wanted):
        np.floor_divide(both[part], num_nodes, out=source[part])
        target[part] -= source[part] * num_nodes
    return edge_index


def _simple_edges(shape: Shape, room: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Keys ``low · N + high`` of the wanted number of different edges, sorted, at the front of ``room``."""
    wanted, found = shape.num_edges, 0
    stubs = _stubs(expected_degrees(shape), rng)
    while found < wanted:
        count = min((wanted - found) * 17 // 16 + 16, room.size - found)
        for start in range(0, count, CHUNK):
            found += _draw(stubs, shape.num_nodes, room[found:], min(CHUNK, count - start), rng)
        found = _distinct(room[:found])
    del stubs
    if found > wanted:
        # Which ones go must not depend on their place: the keys are sorted.
        stays = np.ones(found, dtype=bool)
        stays[rng.choice(found, found - wanted, replace=False)] = False
        _compress(room[:found], stays)
    return room[:wanted]


def _parts(size: int) -> Iterator[slice]:
    """``[0, size)`` in slices of BLOCK."""
    return (slice(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK))


def _stubs(degrees: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Every node as often as its expected degree, rounded at random; nodes in random order."""
    counts = np.floor(degrees).astype(np.int64)
    counts += rng.random(degrees.size) < degrees - counts
    return np.repeat(rng.permutation(degrees.size).astype(np.int32), counts)


def _draw(stubs: np.ndarray, num_nodes: int, room: np.ndarray, count: int, rng: np.random.Generator) -> int:
    """Draws ``count`` pairs, writes the keys of those that are no loops to ``room`` and counts them."""
    index = np.int32 if stubs.size < 2**31 else np.int64
    first = np.empty(count, dtype=np.int32)
    for part in _parts(count):
        first[part] = stubs[rng.integers(0, stubs.size, size=part.stop - part.start, dtype=index)]
    kept = 0
    for part in _parts(count):
        one, other = first[part], stubs[rng.integers(0, stubs.size, size=part.stop - part.start, dtype=index)]
        keys = np.minimum(one, other).astype(np.int64)
        keys *= num_nodes
        keys += np.maximum(one, other)
        keys = keys[one != other]
        room[kept : kept + keys.size] = keys
        kept += keys.size
    return kept


def _distinct(keys: np.ndarray) -> int:
    """Sorts in place, the different values at the front, and counts them."""
    keys.sort()
    fresh = np.empty(keys.size, dtype=bool)
    fresh[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=fresh[1:])
    return _compress(keys, fresh)


def _compress(values: np.ndarray, stays: np.ndarray) -> int:
    """Moves the values that stay to the front, in their order, and counts them."""
    kept = 0
    for part in _parts(values.size):
        some = values[part][stays[part]]
        values[kept : kept + some.size] = some
        kept += some.size
    return kept
