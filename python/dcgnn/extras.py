"""Packages that only studies need: named in a message rather than in a traceback when they are missing."""

from __future__ import annotations

import importlib.util


def require(module: str) -> None:
    """Check that a package of the extra ``study`` is installed.

    Raises:
        ValueError: Saying how to install it.
    """
    if importlib.util.find_spec(module) is None:
        raise ValueError(f'{module} is not installed; pip install "dcgnn-kernels[study]" brings it')
