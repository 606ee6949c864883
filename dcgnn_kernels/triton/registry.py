"""Registers the kernels as the CUDA implementation of the ops, and says why they cannot run.

Triton is imported by the first call on a CUDA tensor, so that the registration costs nothing. ROCm builds of
torch call their devices "cuda", too. What the native extension serves is left to it, unless it holds no code
for a GPU of this machine: that is known when CUDA is initialised, which an import must not do.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dcgnn_kernels import _native_loader, fallback
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
    if (reason := why_not_registered()) is not None:
        return reason
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST:
        has, wanted = (".".join(map(str, pair)) for pair in (capability, OLDEST))
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {has}; Triton wants {wanted}"
    if not os.environ.get("CC") and not any(map(shutil.which, ("gcc", "clang"))):
        return "Triton compiles its launcher when it runs, and found no C compiler (CC, gcc or clang)"
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
    """Registers for CUDA what the native extension has not registered; gives the ops that it has."""
    native = tuple(
        op for op in MODULES if torch._C._dispatch_has_kernel_for_dispatch_key(f"dcgnn::{op}", "CUDA")
    )
    if why_not_registered() is None:
        _implement(op for op in MODULES if op not in native)
    if native:
        torch.cuda._lazy_call(functools.partial(_replace, native))
    return native


def _implement(ops: Iterable[str]) -> None:
    for op in ops:
        for name in (op, f"{op}_backward"):
            LIBRARY.impl(name, _entry(name), "CUDA")


def _replace(native: Iterable[str]) -> None:
    """Runs when CUDA is initialised: takes over from native kernels that hold no code for a GPU here."""
    if _native_loader.why_no_cuda() is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that kernels are replaced
            _implement(native)


def served() -> tuple[str, ...]:
    """The ops of CUDA tensors that run here."""
    native = _NATIVE if _NATIVE and _native_loader.why_no_cuda() is None else ()
    return tuple(op for op in MODULES if op not in native)


_NATIVE = register()
