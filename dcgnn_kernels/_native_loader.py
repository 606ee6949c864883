"""Loads the native extension once and remembers why it is absent, if it is."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
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


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether one part of the build, "sm_86" or "PTX of 120", runs on a GPU of that compute capability.

    Machine code runs on the same major version from its minor version on, PTX on everything newer; a letter
    ties code to one GPU (a) or to its major version (f).
    """
    match = re.fullmatch(r"(sm_|PTX of )(\d+)(\d)([af]?)", architecture)
    if match is None:
        return False
    kind, major, minor, letter = match.groups()
    built = (int(major), int(minor))
    if letter == "a":
        return capability == built
    same_family = capability[0] == built[0]
    return capability >= built and (same_family or (kind == "PTX of " and not letter))


def why_no_cuda() -> str | None:
    """Why the extension's CUDA kernels cannot serve the GPUs of this machine; None if they can.

    They serve all visible GPUs or none, so that an op has one implementation in a process. The answer needs
    CUDA to be initialised.
    """
    if module is None:
        return missing_reason
    if module.cuda_version is None:
        return cuda_missing_reason()
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if not any(_runs_on(part, capability) for part in module.cuda_architectures.split(", ")):
            number = ".".join(map(str, capability))
            return (
                f"{torch.cuda.get_device_name(index)} has compute capability {number}, for which the build "
                f"holds no code ({module.cuda_architectures}); reinstall with TORCH_CUDA_ARCH_LIST={number}"
            )
    return None


def release_memory() -> int:
    """Gives the memory of freed outputs that the native kernels keep for reuse back to the system.

    They keep at most a quarter of the machine's memory and 8 GiB, or ``DCGNN_KEEP_MB`` megabytes where that
    environment variable is set. Returns the number of bytes.
    """
    return 0 if module is None else module.release_memory()
