"""Stochastic block model with an exact number of edges and an exact edge homophily."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def stochastic_block_model(
    *,
    num_nodes: int = 1000,
    num_classes: int = 2,
    homophily: float = 0.5,
    avg_degree: float = 10.0,
    num_features: int = 16,
    signal: float = 1.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""A random graph of equal blocks whose edges agree with the labels as often as asked.

    It has :math:`M = \mathrm{round}(N d / 2)` distinct undirected edges without self-loops, of
    which :math:`\mathrm{round}(h M)` join nodes of the same class (all such pairs equally likely)
    and the others nodes of different classes. The features are

    .. math::
        x_i = s\,\mu_{y_i} + \varepsilon_i, \qquad \varepsilon_i \sim \mathcal{N}(0, I)

    with random unit vectors :math:`\mu_1, \ldots, \mu_C`. Time and memory are linear in nodes
    and edges.

    Args:
        num_nodes: Number of nodes :math:`N`.
        num_classes: Number of classes :math:`C`; node :math:`i` has class :math:`i \bmod C`.
        homophily: Share :math:`h` of the edges whose ends have the same class.
        avg_degree: Average degree :math:`d`.
        num_features: Number of feature channels.
        signal: Distance :math:`s` of the class means from the origin.
        seed: Seed of edges and features.

    Returns:
        ``x`` :math:`[N, F]`, ``edge_index`` :math:`[2, 2M]` (both directions) and ``y``
        :math:`[N]`.
    """
    if not 1 <= num_classes <= num_nodes:
        raise ValueError(f"num_classes must be between 1 and {num_nodes} nodes, got {num_classes}")
    if not 0.0 <= homophily <= 1.0:
        raise ValueError(f"homophily must be between 0 and 1, got {homophily}")
    if not 0.0 <= avg_degree < num_nodes:
        raise ValueError(f"avg_degree must not be negative nor reach num_nodes, got {avg_degree}")
    if num_features < 1:
        raise ValueError(f"num_features must be positive, got {num_features}")

    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(num_nodes) % num_classes
    sizes = torch.bincount(y, minlength=num_classes)
    pairs_within = int((sizes * (sizes - 1)).sum()) // 2
    pairs_across = num_nodes * (num_nodes - 1) // 2 - pairs_within
    num_edges = round(num_nodes * avg_degree / 2)
    num_within = round(homophily * num_edges)
    for kind, wanted, pairs in (
        ("the same class", num_within, pairs_within),
        ("different classes", num_edges - num_within, pairs_across),
    ):
        if wanted > pairs:
            raise ValueError(
                f"avg_degree={avg_degree} and homophily={homophily} want {wanted} edges between "
                f"nodes of {kind}, but there are only {pairs} such pairs"
            )

    def draw_within(count: int) -> tuple[Tensor, Tensor]:
        # A node's chance is proportional to its possible partners: uniform over ordered pairs.
        weight = (sizes * (sizes - 1)).double()
        block = torch.multinomial(weight, count, replacement=True, generator=generator)
        first = _below(sizes[block], generator)
        second = _below(sizes[block] - 1, generator)
        second += (second >= first).long()
        return block + num_classes * first, block + num_classes * second

    def draw_across(count: int) -> tuple[Tensor, Tensor]:
        first = torch.randint(num_nodes, (count,), generator=generator)
        second = torch.randint(num_nodes, (count,), generator=generator)
        keep = y[first] != y[second]
        return first[keep], second[keep]

    edges = torch.cat(
        [
            _distinct_pairs(draw_within, num_within, num_nodes, generator),
            _distinct_pairs(draw_across, num_edges - num_within, num_nodes, generator),
        ]
    )
    source, target = edges // num_nodes, edges % num_nodes
    edge_index = torch.stack([torch.cat([source, target]), torch.cat([target, source])])

    means = torch.randn(num_classes, num_features, generator=generator)
    means = torch.nn.functional.normalize(means, dim=1)
    x = signal * means[y] + torch.randn(num_nodes, num_features, generator=generator)
    return x, edge_index, y


def _below(bound: Tensor, generator: torch.Generator) -> Tensor:
    """One uniform integer in ``0..bound-1`` for each element."""
    drawn = torch.rand(bound.numel(), generator=generator, dtype=torch.float64) * bound
    return torch.minimum(drawn.long(), bound - 1)


def _distinct_pairs(
    draw: Callable[[int], tuple[Tensor, Tensor]],
    count: int,
    num_nodes: int,
    generator: torch.Generator,
) -> Tensor:
    """``count`` distinct unordered pairs as keys ``low * num_nodes + high``."""
    keys = torch.empty(0, dtype=torch.int64)
    while keys.numel() < count:
        # Whole rounds, however few are missing: near a complete block only many draws hit the gap.
        first, second = draw(count + 16)
        drawn = torch.minimum(first, second) * num_nodes + torch.maximum(first, second)
        keys = torch.cat([keys, drawn]).unique()
    return keys[torch.randperm(keys.numel(), generator=generator)[:count]]
