"""Arguments that several commands check before they start to work."""

from __future__ import annotations

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
