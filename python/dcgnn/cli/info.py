"""``dcgnn info``: versions, machine and backends, for bug reports and result files."""

from __future__ import annotations

import argparse
import importlib.metadata
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
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Print what is known about this installation."""
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
