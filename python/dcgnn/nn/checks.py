"""Checks of the layers' arguments: errors name the argument, what was given and what is wanted."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from dcgnn_kernels._checks import FLOAT_DTYPES, check_finite

__all__ = ["check_count", "check_choice", "check_features", "check_finite", "check_number"]


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}")
    return value


def check_count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
    return int(value)


def check_number(name: str, value: Any, allowed: Callable[[float], bool], wanted: str) -> float:
    """A real number that ``allowed`` accepts; ``wanted`` says in words what that is."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    number = float(value)
    if not allowed(number):
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return number


def check_features(x: Any, channels: int) -> None:
    """``x`` is a floating point matrix with at least one row and ``channels`` columns (-1: any)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in FLOAT_DTYPES:
        raise ValueError(f"x must be a floating point tensor, got {x.dtype}")
    width = "num_features" if channels == -1 else str(channels)
    if x.layout != torch.strided:
        raise ValueError(f"x must be a dense tensor, got layout {x.layout}")
    if x.dim() != 2 or (channels != -1 and x.size(1) != channels):
        raise ValueError(f"x must have shape [num_nodes, {width}], got {list(x.shape)}")
    if x.size(0) == 0:
        raise ValueError("x has no rows: the graph must have at least one node")
