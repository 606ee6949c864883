"""Arguments that several commands check before they start to work."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch


def find_device(name: str) -> torch.device:
    """The device of ``--device``; ``auto`` is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.ones(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--device {name} cannot be used: {reason}") from None
    return device


def check_writable(path: Path) -> None:
    """Fail before hours of work rather than after them."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder, a file is wanted")
    if path.exists() and not path.is_file():
        return  # a device or a pipe
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{path.parent} cannot be written to: {error.strerror}") from None
