"""The ``dcgnn`` command and its subcommands."""

from dcgnn.cli.main import main

__all__ = ["main"]
