"""Which implementations can run here, and why the others cannot."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

import torch

from dcgnn_kernels import _native_loader

OPS = ("local_sinkhorn", "cluster_scatter", "global_sinkhorn", "local_centroids", "node_update")

NATIVE_CUDA_OPS = ("cluster_scatter", "node_update")


@dataclass(frozen=True)
class Backend:
    """One implementation: whether it is live, what it serves, and a reason or a detail."""

    available: bool
    ops: tuple[str, ...]
    reason: str


class Backends(dict[str, Backend]):
    """Mapping from a backend's name to its :class:`Backend`; prints as a table."""

    def __str__(self) -> str:
        lines = []
        for name, backend in self.items():
            state = "live" if backend.available else "off"
            serves = f" [{', '.join(backend.ops)}]" if backend.ops else ""
            lines.append(f"{name:<12} {state:<5} {backend.reason}{serves}")
        return "\n".join(lines)


def _has_kernel(op: str, dispatch_key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"dcgnn::{op}", dispatch_key)


def _native_cpu() -> Backend:
    module = _native_loader.module
    if module is None:
        return Backend(False, (), _native_loader.missing_reason)
    ops = tuple(op for op in ("ego_graph", *OPS) if _has_kernel(op, "CPU"))
    return Backend(True, ops, f"{module.instruction_set}, {module.compiler}, torch {module.torch_version}")


def _native_cuda() -> Backend:
    module = _native_loader.module
    if not torch.backends.cuda.is_built():
        return Backend(False, (), f"torch {torch.__version__} is built without CUDA")
    if module is None or module.cuda_version is None:
        return Backend(False, (), _native_loader.why_no_cuda() or "")
    built = f"CUDA {module.cuda_version}, {module.cuda_architectures}"
    if not torch.cuda.is_available():
        return Backend(False, NATIVE_CUDA_OPS, f"built ({built}), but torch finds no CUDA device here")
    if (reason := _native_loader.why_no_cuda()) is not None:
        return Backend(False, NATIVE_CUDA_OPS, reason)
    return Backend(True, NATIVE_CUDA_OPS, f"{torch.cuda.get_device_name()}, {built}")


def _triton() -> Backend:
    from dcgnn_kernels.triton import registry  # registers when imported, after all ops are defined

    if (reason := registry.why_not_running()) is not None:
        return Backend(False, (), reason)
    name = torch.cuda.get_device_name()
    return Backend(True, registry.served(), f"triton {importlib.metadata.version('triton')}, {name}")


def backends() -> Backends:
    """The state of every backend: ``native-cpu``, ``triton``, ``native-cuda`` and ``reference``.

    PyTorch's dispatcher chooses by device: native kernels where they are live, then Triton, plain PyTorch
    elsewhere.

    Example:
        >>> backends()["reference"].available
        True
    """
    return Backends(
        {
            "native-cpu": _native_cpu(),
            "triton": _triton(),
            "native-cuda": _native_cuda(),
            "reference": Backend(True, OPS, "plain PyTorch, any device"),
        }
    )
