"""The ``dcgnn`` command: ``train``, ``demo``, ``bench``, ``graphs`` and ``info``."""

from dcgnn.cli.main import main

__all__ = ["main"]
