"""How an op is registered: one place for what every op needs.

Schemas belong to Python, so that they exist with and without the native extension. The plain PyTorch
kernel is the fallback of every device (CompositeExplicitAutograd); native kernels register themselves
for their device and win over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LIBRARY = torch.library.Library("dcgnn", "DEF")

GRAPH_ARGS = "Tensor rowptr, Tensor member, Tensor colptr, Tensor ego, Tensor slot"


def define(schema: str, *, fallback: Callable[..., Any], fake: Callable[..., Any]) -> str:
    """Defines `dcgnn::<schema>` with its plain PyTorch kernel and its fake kernel; returns the name."""
    name = schema.split("(", 1)[0]
    LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order,))
    LIBRARY.impl(name, fallback, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcgnn::{name}", fake, lib=LIBRARY)
    return f"dcgnn::{name}"


def define_autograd(name: str, setup_context: Callable[..., None], backward: Callable[..., Any]) -> None:
    def without_autocast(ctx: Any, *grads: Any) -> Any:
        """The backward of a float32 op is float32, also where the user calls it inside autocast."""
        device = next((grad.device.type for grad in grads if isinstance(grad, torch.Tensor)), "cpu")
        if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
            return backward(ctx, *grads)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    torch.library.register_autograd(name, without_autocast, setup_context=setup_context, lib=LIBRARY)


def forbid_double_backward(name: str) -> None:
    """The backward op `name` says clearly that it has no derivative of its own."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(
            f"{name}: double backward is not implemented by the fused kernels; use the functions of "
            "dcgnn_kernels.reference where second derivatives are needed"
        )

    torch.library.register_autograd(name, backward, lib=LIBRARY)


def autocast_to_float32(name: str) -> None:
    """Under autocast the op runs in float32, as softmax and cdist do: P is of the order 1 / (n K),
    below the smallest normal float16 on a large graph.
    """
    for device in ("cpu", "cuda"):
        torch.library.register_autocast(name, device, torch.float32, lib=LIBRARY)
