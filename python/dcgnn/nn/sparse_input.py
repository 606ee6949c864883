"""The first linear map on sparse input features, such as bags of words, without their zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

#: Up to this share of non-zeros the zeros are left out. Pubmed, with a tenth, trains faster that way; where a
#: dense product begins to be faster was not measured.
MAX_DENSITY = 0.2

#: Below this size the zeros cost less than looking for them.
MIN_ENTRIES = 1 << 16


@dataclass
class _Bags:
    """The non-zeros of a matrix ``[N, F]`` row by row, and the order that sorts them by columns."""

    version: int
    column: Tensor  # [nnz]
    value: Tensor  # [nnz]
    offset: Tensor  # [N]
    by_column: Tensor  # [nnz]
    row: Tensor  # [nnz], in that order
    column_offset: Tensor  # [F]


_BAGS = WeakIdKeyDictionary()  # x to its bags, or to its version where it is not sparse


def dropout_linear(x: Tensor, weight: Tensor, bias: Tensor | None, p: float, training: bool) -> Tensor:
    r""":math:`\mathrm{dropout}_p(x) W^\top + b`, over the non-zeros of a constant, sparse :math:`x`.

    Dropping a zero changes nothing, so both ways draw from the same distribution (not the same random
    numbers).

    Args:
        x: ``[N, F]`` features.
        weight: ``[H, F]``.
        bias: ``[H]``, or None.
        p: dropout probability.
        training: whether to drop.
    """
    bags = _bags(x)
    if bags is None or bags.value.dtype != weight.dtype:
        return functional.linear(functional.dropout(x, p, training), weight, bias)
    value = functional.dropout(bags.value, p, training)
    out = _SparseProduct.apply(value, weight, bags)
    return out if bias is None else out + bias


class _SparseProduct(torch.autograd.Function):
    """The product with a weight ``[H, F]``; the backward of ``embedding_bag`` would sort every time."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bags: _Bags) -> Tensor:
        ctx.save_for_backward(value)
        ctx.bags = bags
        rows = weight.t().contiguous()  # the gather reads one row for each non-zero
        return functional.embedding_bag(bags.column, rows, bags.offset, mode="sum", per_sample_weights=value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        (value,), bags = ctx.saved_tensors, ctx.bags
        columns = functional.embedding_bag(
            bags.row,
            grad.contiguous(),
            bags.column_offset,
            mode="sum",
            per_sample_weights=value[bags.by_column],
        )
        return None, columns.t(), None


def _bags(x: Tensor) -> _Bags | None:
    """The kept non-zeros of ``x``; None where the dense product is right."""
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.requires_grad or x.dim() != 2:
        return None
    if x.numel() < MIN_ENTRIES or x.is_inference() or torch.is_autocast_enabled("cpu"):
        return None
    kept = _BAGS.get(x)
    if kept is None or getattr(kept, "version", kept) != x._version:
        kept = _BAGS[x] = _read(x)
    return kept if isinstance(kept, _Bags) else None


def _read(x: Tensor) -> _Bags | int:
    if not 0 < int(torch.count_nonzero(x)) <= MAX_DENSITY * x.numel():
        return x._version
    row, column = x.nonzero(as_tuple=True)
    offset = torch.searchsorted(row, torch.arange(x.size(0)))
    sorted_column, by_column = torch.sort(column, stable=True)
    column_offset = torch.searchsorted(sorted_column, torch.arange(x.size(1)))
    return _Bags(x._version, column, x[row, column], offset, by_column, row[by_column], column_offset)
