"""linear: the dense map in front of a layer, written where the kernels read it fastest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dcgnn_kernels._library import define, define_autograd


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    r"""``torch.nn.functional.linear`` of a matrix: :math:`X W^\top + b`.

    On the CPU the product is written to memory that is reused and lies in huge pages, where
    :func:`local_sinkhorn` gathers rows faster. Elsewhere, under autocast and for other shapes it is
    torch's own function.
    """
    native = x.device.type == "cpu" and x.dim() == 2 and weight.dtype == x.dtype
    if not native or torch.is_autocast_enabled("cpu"):
        return functional.linear(x, weight, bias)
    return torch.ops.dcgnn.linear(x, weight, bias)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.size(0), weight.size(0))


FORWARD = define(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", fallback=functional.linear, fake=_fake
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    grad_x = torch.ops.dcgnn.linear(grad, weight.t(), None) if needs_x else None
    grad_weight = torch.ops.dcgnn.linear(grad.t(), x.t(), None) if needs_weight else None
    grad_bias = grad.sum(0) if ctx.has_bias and needs_bias else None
    return grad_x, grad_weight, grad_bias


define_autograd(FORWARD, _setup_context, _backward)
