"""CUDA C++ to PTX, where nvcc is installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

MISSING = "nvcc is not installed: CUDA C++ cannot be compiled to PTX here"


def available() -> bool:
    """Whether nvcc is on the PATH."""
    return shutil.which("nvcc") is not None


def compile(source: str | Path, arch: str = "sm_80", options: Sequence[str] = ()) -> str:
    """The PTX of a CUDA source: a path, or the text itself."""
    if not available():
        raise RuntimeError(MISSING)
    with tempfile.TemporaryDirectory() as folder:
        path = source
        if isinstance(source, str):
            path = Path(folder, "kernel.cu")
            path.write_text(source, encoding="utf-8")
        target = Path(folder, "kernel.ptx")
        command = [
            "nvcc",
            "-std=c++17",
            "-O3",
            "-lineinfo",
            f"-arch={arch}",
            "-ptx",
            "-o",
            str(target),
            *options,
        ]
        done = subprocess.run([*command, str(path)], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"nvcc failed:\n{done.stderr}")
        return target.read_text(encoding="utf-8")
