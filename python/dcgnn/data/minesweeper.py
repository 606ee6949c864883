"""Embedded Minesweeper graph, after the description of Platonov et al. (arXiv 2302.11640)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

#: The eight steps from a cell to its neighbours.
_STEPS = [(dr, dc) for dr in (-1, 0, 1) for dc in (-1, 0, 1) if (dr, dc) != (0, 0)]


def minesweeper(
    *,
    rows: int = 100,
    cols: int = 100,
    mine_share: float = 0.2,
    hidden_share: float = 0.5,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""A board of Minesweeper as a graph: find the mines from partly hidden counts.

    Every cell is a node with edges from and to its (up to) eight neighbours. Exactly
    :math:`\mathrm{round}(0.2 \cdot N)` cells are mines. The features of cell :math:`i` are

    .. math::
        x_i = [u_i,\ (1 - u_i)\,\mathrm{onehot}_{0..8}(m_i)]

    with :math:`m_i` the number of mines among its neighbours and :math:`u_i = 1` for exactly
    :math:`\mathrm{round}(0.5 \cdot N)` hidden cells. The label is 1 for a mine.

    Args:
        rows: Rows of the board.
        cols: Columns of the board; cell :math:`(r, c)` is node :math:`r \cdot cols + c`.
        mine_share: Share of the cells that are mines.
        hidden_share: Share of the cells whose count is hidden.
        seed: Seed of mines and hidden cells.

    Returns:
        ``x`` :math:`[N, 10]`, ``edge_index`` :math:`[2, E]` (both directions) and ``y``
        :math:`[N]`.
    """
    if rows < 1 or cols < 1 or rows * cols < 2:
        raise ValueError(f"rows and cols must give at least two cells, got {rows} x {cols}")
    for name, share in (("mine_share", mine_share), ("hidden_share", hidden_share)):
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"{name} must be between 0 and 1, got {share}")

    num_nodes = rows * cols
    generator = torch.Generator().manual_seed(seed)
    mine = _choose(num_nodes, round(mine_share * num_nodes), generator)
    hidden = _choose(num_nodes, round(hidden_share * num_nodes), generator)

    edge_index = grid_edges(rows, cols)
    count = torch.zeros(num_nodes, dtype=torch.int64)
    count.index_add_(0, edge_index[1], mine.long()[edge_index[0]])
    x = torch.cat([hidden.view(-1, 1), one_hot(count, 9) * ~hidden.view(-1, 1)], dim=1).float()
    return x, edge_index, mine.long()


def grid_edges(rows: int, cols: int) -> Tensor:
    r"""Edges of a grid with eight neighbours, both directions, sorted by target.

    Returns:
        ``edge_index`` :math:`[2, E]`.
    """
    cell = torch.arange(rows * cols).view(rows, cols)
    sources, targets = [], []
    for dr, dc in _STEPS:
        r0, r1 = max(0, -dr), rows - max(0, dr)
        c0, c1 = max(0, -dc), cols - max(0, dc)
        targets.append(cell[r0:r1, c0:c1].reshape(-1))
        sources.append(cell[r0 + dr : r1 + dr, c0 + dc : c1 + dc].reshape(-1))
    source, target = torch.cat(sources), torch.cat(targets)
    order = torch.argsort(target * rows * cols + source)
    return torch.stack([source[order], target[order]])


def _choose(size: int, count: int, generator: torch.Generator) -> Tensor:
    chosen = torch.randperm(size, generator=generator)[:count]
    return torch.zeros(size, dtype=torch.bool).index_fill_(0, chosen, True)
