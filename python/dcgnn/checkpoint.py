"""Checkpoints that are complete or not there, and load without executing code."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

_FORMAT = "dcgnn-checkpoint"
_VERSION = 1


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another run."""


def atomic_write(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file so that ``path`` holds the old or the new content at any moment.

    The content goes to a temporary file in the same folder, reaches the disk, and then replaces
    ``path`` in one step. If ``write`` fails, ``path`` is as it was and the temporary file is gone.
    A symbolic link stays one: its target is replaced. What is not a regular file (a device, a pipe)
    is written to, never replaced.

    Args:
        path: The file; missing folders are made.
        write: Receives the open binary file.
    """
    path = Path(path).resolve()
    try:
        _write_or_replace(path, write)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say which file it was
        raise


def _write_or_replace(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    if path.exists() and not path.is_file():
        with open(path, "wb") as special:
            write(special)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def check_writable(path: str | Path) -> None:
    """Fail before hours of work rather than after them.

    Raises:
        ValueError: If a file cannot be written at ``path``. Missing folders are made.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder, a file is wanted")
    if path.exists() and not path.is_file():
        return  # a device or a pipe
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{path.parent} cannot be written to: {error.strerror}") from None


def save_checkpoint(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` (tensors, numbers, strings, lists and dicts of them) atomically."""
    stamped = {"format": _FORMAT, "version": _VERSION, **content}
    atomic_write(path, lambda file: torch.save(stamped, file))


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read what :func:`save_checkpoint` wrote, on the CPU.

    Raises:
        CheckpointError: If the file is missing, damaged or not one of ours.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        # torch does not compare the checksums of its archive: a flipped bit would be another weight.
        with zipfile.ZipFile(path) as archive:
            if (record := archive.testzip()) is not None:
                raise ValueError(f"{record} does not have its checksum")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # A damaged file can fail anywhere in the reader, with any exception and words of no use to the user.
        raise CheckpointError(f"{path} is damaged or not a checkpoint of dcgnn") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of dcgnn")
    if content["version"] != _VERSION:
        raise CheckpointError(
            f"{path} has version {content['version']}, this program reads version {_VERSION}"
        )
    return content


def check_same_run(path: str | Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose run differs from the current one.

    Raises:
        CheckpointError: Naming every difference.
    """
    absent = object()
    differences = [
        f"{key} is {_shown(saved.get(key))} in the checkpoint and {_shown(current.get(key))} here"
        for key in dict.fromkeys([*saved, *current])
        if saved.get(key, absent) != current.get(key, absent)
    ]
    if differences:
        raise CheckpointError(f"{path} belongs to another run: {'; '.join(differences)}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:16]}..."


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Make the new name durable; where a folder cannot be opened there is nothing to sync."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
