"""Tree-NeighborsMatch, the over-squashing problem of Alon and Yahav (arXiv 2006.05205)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dcgnn.data.graph_data import UNLABELLED


def tree_neighbors_match(
    *,
    depth: int = 3,
    num_trees: int = 1000,
    bidirectional: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Many binary trees; every root asks for the value that the leaf with its key carries.

    Each tree is complete with :math:`L = 2^{depth}` leaves and :math:`2L - 1` nodes in heap
    order: node 0 is the root, the children of node :math:`v` are :math:`2v + 1` and
    :math:`2v + 2`, the leaves are the last :math:`L`. Leaf :math:`l` (from 0) carries key
    :math:`l + 1` and value :math:`\pi(l)`, with :math:`\pi` a random permutation of
    :math:`1..L`. The root carries a random key :math:`k \in 1..L` and no value; inner nodes carry
    neither. The features of a node are two one-hot vectors side by side, in which 0 stands for
    "none":

    .. math::
        x = [\mathrm{onehot}_{0..L}(\text{key}),\ \mathrm{onehot}_{0..L}(\text{value})]

    The label of the root is :math:`\pi(k - 1) - 1 \in 0..L-1`; all other nodes are unlabelled
    (``-1``). No two trees have both the same permutation and the same root key, so nothing of
    the test set is seen in training. An answer needs at least ``depth`` layers, and the root has
    to receive what all leaves say: that is the bottleneck which the problem measures.

    The graph is the disjoint union of the trees; node :math:`v` of tree :math:`t` is node
    :math:`t (2L - 1) + v`. Edges go from child to parent.

    Args:
        depth: Depth of the trees.
        num_trees: Number of trees; there are at most :math:`L! \cdot L` different ones, and asking
            for more gives all of them.
        bidirectional: If set, edges from parent to child are there, too.
        seed: Seed of permutations and keys.

    Returns:
        ``x`` :math:`[N, 2(L + 1)]`, ``edge_index`` :math:`[2, E]` and ``y`` :math:`[N]`.
    """
    if not 1 <= depth <= 12:
        raise ValueError(f"depth must be between 1 and 12, got {depth}")
    if num_trees < 1:
        raise ValueError(f"num_trees must be positive, got {num_trees}")
    num_leaves = 2**depth
    tree_size = 2 * num_leaves - 1
    num_trees = min(num_trees, math.factorial(num_leaves) * num_leaves)

    problems = _distinct_problems(num_trees, num_leaves, torch.Generator().manual_seed(seed))
    root_key, value = problems[:, 0], problems[:, 1:]

    keys = torch.zeros(num_trees, tree_size, dtype=torch.int64)
    keys[:, 0] = root_key
    keys[:, num_leaves - 1 :] = torch.arange(1, num_leaves + 1)
    values = torch.zeros_like(keys)
    values[:, num_leaves - 1 :] = value
    columns = torch.stack([keys.view(-1), values.view(-1) + num_leaves + 1], dim=1)
    x = torch.zeros(columns.size(0), 2 * (num_leaves + 1)).scatter_(1, columns, 1.0)

    child = torch.arange(1, tree_size)
    tree_edges = torch.stack([child, (child - 1) // 2])
    if bidirectional:
        tree_edges = torch.cat([tree_edges, tree_edges.flip(0)], dim=1)
    offset = torch.arange(num_trees).view(1, -1, 1) * tree_size
    edge_index = (tree_edges.view(2, 1, -1) + offset).reshape(2, -1)

    y = torch.full((num_trees, tree_size), UNLABELLED)
    y[:, 0] = value.gather(1, root_key.view(-1, 1) - 1).view(-1) - 1
    return x, edge_index, y.view(-1)


def _distinct_problems(count: int, num_leaves: int, generator: torch.Generator) -> Tensor:
    """``count`` distinct rows ``[root key, value of leaf 0, ..., value of leaf L-1]``."""
    rows = torch.empty(0, num_leaves + 1, dtype=torch.int64)
    while rows.size(0) < count:
        noise = torch.rand(count + 16, num_leaves, generator=generator, dtype=torch.float64)
        key = torch.randint(1, num_leaves + 1, (count + 16, 1), generator=generator)
        rows = torch.cat([rows, torch.cat([key, noise.argsort(dim=1) + 1], dim=1)]).unique(dim=0)
    return rows[torch.randperm(rows.size(0), generator=generator)[:count]]
