"""The ``dcgnn`` command: ``train``, ``demo``, ``graphs`` and ``info``."""

from dcgnn.cli.main import main

__all__ = ["main"]
