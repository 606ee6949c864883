"""Entry point: parses the command line and turns errors into exit codes."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import torch

import dcgnn_kernels
from dcgnn.checkpoint import CheckpointError
from dcgnn.cli import bench, demo, graphs, info, report, reproduce, train, tune
from dcgnn.data import DatasetUnavailable
from dcgnn.distributed.launch import RankLost, Ranks
from dcgnn.training import TrainingDiverged

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the name of the program; by default those of the process.

    Returns:
        0 on success, 1 if training diverged, 2 on a mistake of the user (one line on stderr),
        130 after Ctrl-C or SIGTERM.
    """
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
        with _sigterm_as_interrupt():
            arguments.run(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    except (ValueError, OSError, DatasetUnavailable, CheckpointError) as error:
        return _fail(error, EXIT_USAGE)
    except (TrainingDiverged, RankLost) as error:
        return _fail(error, EXIT_FAILED)
    except (MemoryError, torch.OutOfMemoryError) as error:
        return _fail(f"out of memory: {error}", EXIT_FAILED)
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        return _fail(f"out of memory: {error}", EXIT_FAILED)  # torch's CPU allocator has no class of its own
    except KeyboardInterrupt as interrupt:
        return _fail(str(interrupt) or "interrupted", EXIT_INTERRUPTED)
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcgnn", description="Differentiable Cluster Graph Neural Network (DC-GNN)."
    )
    parser.add_argument("--version", action="version", version=f"dcgnn-kernels {dcgnn_kernels.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (train, tune, report, reproduce, bench, demo, graphs, info):
        command.add_parser(commands)
    return parser


def _fail(error: BaseException | str, code: int) -> int:
    ranks = Ranks.of_environment()
    who = f"dcgnn[rank {ranks.rank}]" if ranks.world > 1 else "dcgnn"
    print(f"{who}: {' '.join(str(error).split())}", file=sys.stderr)
    return code


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C where it would otherwise end the process without a word."""

    def handler(signum: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
