"""``dcgnn info``: versions, machine and backends, for bug reports and result files."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from dcgnn_kernels import backends


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("info", help="versions, machine, and which backends run and why")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--kernels",
        nargs="?",
        const="sm_80,sm_90",
        metavar="GPUS",
        help="compile the Triton kernels for these GPUs (default sm_80,sm_90; or all; no GPU is "
        "needed) and print registers, spills, shared memory and occupancy of each",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print what is known about this installation."""
    if arguments.kernels is not None:
        print(kernel_table(arguments.kernels))
        return
    facts = environment()
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return
    for name, version in facts["versions"].items():
        print(f"{name + ':':<18} {version}")
    for name in ("cpu", "cores", "threads", "cuda"):
        print(f"{name + ':':<18} {facts[name]}")
    print("backends:")
    for name, backend in facts["backends"].items():
        state = "available" if backend["available"] else "not available"
        reason = f": {backend['reason']}" if backend["reason"] else ""
        print(f"  {name + ':':<16} {state}{reason}")


def kernel_table(targets: str) -> str:
    """Resources of every Triton kernel in its default configurations; float32 and bfloat16, 64 channels."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError("--kernels: the package triton is not installed")
    from dcgnn_kernels.triton import catalogue, inspect

    chosen = inspect.TARGETS if targets == "all" else tuple(targets.split(","))
    for target in chosen:
        if target not in inspect.TARGETS:
            raise ValueError(f"--kernels {target}: wanted all, or some of {', '.join(inspect.TARGETS)}")
    entries = catalogue.entries([torch.float32, torch.bfloat16])
    return catalogue.table((entry, entry.compile(target)) for entry in entries for target in chosen)


def environment() -> dict[str, Any]:
    """Versions, machine and backends as plain values."""
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "no device"
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "torch-geometric": _version("torch-geometric"),
            "dcgnn-kernels": _version("dcgnn-kernels"),
        },
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": cuda,
        "backends": {
            name: {"available": bool(backend.available), "reason": str(backend.reason)}
            for name, backend in backends().items()
        },
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed (running from a source tree)"


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
