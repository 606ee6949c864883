"""Argument checks shared by the public functions.

Shapes, dtypes and devices are checked here, on real and fake tensors alike; values (NaN, infinity)
are checked by the kernels, because a traced program has no values.
"""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COST_SCALES = ("none", "mean", "max")


def check_float(name: str, tensor: Tensor, ndim: int) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be a floating point tensor, got {tensor.dtype}")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got layout {tensor.layout}")
    if tensor.dim() != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {list(tensor.shape)}")


def check_same(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Same dtype and device. Under autocast the dtypes may differ: the op casts them."""
    if tensor.device != other.device:
        raise ValueError(
            f"{name} is on {tensor.device}, but {other_name} is on {other.device}; move one of them"
        )
    if tensor.dtype != other.dtype and not torch.is_autocast_enabled(tensor.device.type):
        raise ValueError(f"{name} is {tensor.dtype}, but {other_name} is {other.dtype}")


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {meaning} = {list(shape)}, got {list(tensor.shape)}")


def check_sinkhorn_options(
    lam: float, num_iters: int | None, cost_scale: str, tol: float, max_iters: int
) -> None:
    if not isinstance(lam, (Real, torch.SymFloat)):
        raise TypeError(f"lam must be a Python number, got {type(lam).__name__}")
    if not 0 <= lam < math.inf:
        raise ValueError(f"lam must be finite and not negative, got {lam}")
    if num_iters is not None:
        if isinstance(num_iters, bool) or not isinstance(num_iters, int):
            raise TypeError(f"num_iters must be an int or None, got {num_iters!r}")
        if num_iters < 1:
            raise ValueError(f"num_iters must be at least 1 (or None: to convergence), got {num_iters}")
    if cost_scale not in COST_SCALES:
        raise ValueError(f"cost_scale must be one of {COST_SCALES}, got {cost_scale!r}")
    if not tol > 0:
        raise ValueError(f"tol must be positive, got {tol}")
    if isinstance(max_iters, bool) or not isinstance(max_iters, int) or max_iters < 1:
        raise ValueError(f"max_iters must be an int of at least 1, got {max_iters!r}")


def check_finite(name: str, tensor: Tensor) -> None:
    """Value check for kernels that run on real data."""
    if tensor.numel() and not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} contains NaN or infinity")
