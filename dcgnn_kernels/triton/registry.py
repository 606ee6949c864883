"""Registers the kernels as the CUDA implementation of the ops, and says why they cannot run.

Triton is imported by the first call on a CUDA tensor, so that the registration costs nothing. ROCm builds of
torch call their devices "cuda", too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from dcgnn_kernels import fallback
from dcgnn_kernels._library import LIBRARY

OLDEST = (7, 5)  # compute capability

# Ops by the module that launches their kernels; each comes with its backward.
MODULES = {
    "local_sinkhorn": "local_sinkhorn",
    "local_centroids": "local_centroids",
    "global_sinkhorn": "global_sinkhorn",
    "cluster_scatter": "cluster_scatter",
    "node_update": "cluster_scatter",
}


def why_not_registered() -> str | None:
    """What is missing for a registration; None if nothing is."""
    if not torch.backends.cuda.is_built() and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def why_not_running() -> str | None:
    """What is missing on this machine's first GPU; None if nothing is."""
    if (reason := why_not_registered()) is not None:
        return reason
    if not torch.cuda.is_available():
        return "no CUDA device is visible"
    return _why_not_on(torch.device("cuda", torch.cuda.current_device()))


@functools.cache
def _why_not_on(device: torch.device) -> str | None:
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST:
        has, wanted = (".".join(map(str, pair)) for pair in (capability, OLDEST))
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {has}; Triton wants {wanted}"
    return None


def kernel(name: str) -> Callable[..., Any]:
    """The function that launches the kernels of op ``name``."""
    module = importlib.import_module(f"dcgnn_kernels.triton.{MODULES[name.removesuffix('_backward')]}")
    return getattr(module, name)


def _entry(name: str) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
        if _why_not_on(device) is not None:
            return getattr(fallback, name)(*arguments)
        return kernel(name)(*arguments)

    return run


def register() -> tuple[str, ...]:
    """Registers what the native extension has not registered for CUDA; the names of the ops."""
    if why_not_registered() is not None:
        return ()
    served = []
    for op in MODULES:
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"dcgnn::{op}", "CUDA"):
            continue
        for name in (op, f"{op}_backward"):
            LIBRARY.impl(name, _entry(name), "CUDA")
        served.append(op)
    return tuple(served)


SERVED = register()
