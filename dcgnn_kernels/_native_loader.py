"""Loads the native extension once and remembers why it is absent, if it is."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import torch


def _release(version: str) -> list[str]:
    """Major and minor version: torch's C++ interface is stable only within a minor release."""
    return version.split("+")[0].split(".")[:2]


def _load() -> tuple[ModuleType | None, str]:
    info_file = Path(__file__).with_name("_build_info.json")
    if not info_file.is_file():
        return None, "it was not built (the package is used from its sources without an install)"
    info = json.loads(info_file.read_text())
    if info["native_not_built"] is not None:
        return None, info["native_not_built"]
    if _release(info["torch_version"]) != _release(torch.__version__):
        return None, (
            f"it was built against torch {info['torch_version']}, but torch {torch.__version__} is "
            "running; reinstall dcgnn-kernels with 'pip install --no-build-isolation "
            "--force-reinstall --no-deps'"
        )
    if importlib.util.find_spec("dcgnn_kernels._native") is None:
        return None, "the extension module is missing from the installed package"
    try:
        return importlib.import_module("dcgnn_kernels._native"), ""
    except ImportError as error:
        return None, f"the extension does not load with torch {torch.__version__}: {error}"


def cuda_missing_reason() -> str:
    """Why the loaded extension has no CUDA kernels."""
    info = json.loads(Path(__file__).with_name("_build_info.json").read_text())
    return info.get("cuda_not_built") or "the extension was built without them"


module, missing_reason = _load()


def release_memory() -> int:
    """Gives the memory of freed outputs that the native kernels keep for reuse back to the system.

    They keep at most an eighth of the machine's memory and 2 GiB, or ``DCGNN_KEEP_MB`` megabytes where that
    environment variable is set. Returns the number of bytes.
    """
    return 0 if module is None else module.release_memory()
