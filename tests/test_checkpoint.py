"""Checkpoints: atomic, checked, and loaded without executing code."""

from __future__ import annotations

import os
import pickle
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from dcgnn.checkpoint import (
    CheckpointError,
    atomic_write,
    check_same_run,
    load_checkpoint,
    save_checkpoint,
)

CONTENT = {"epoch": 3, "weights": {"w": torch.arange(6.0).view(2, 3)}, "history": [0.5, None]}


def test_round_trip_makes_folders(tmp_path):
    path = tmp_path / "deep" / "er" / "run.pt"
    save_checkpoint(path, CONTENT)
    loaded = load_checkpoint(str(path))
    assert loaded["epoch"] == 3
    assert loaded["history"] == [0.5, None]
    assert torch.equal(loaded["weights"]["w"], CONTENT["weights"]["w"])
    assert [entry.name for entry in path.parent.iterdir()] == ["run.pt"]


def test_permissions_follow_the_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        save_checkpoint(tmp_path / "run.pt", CONTENT)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "run.pt").stat().st_mode) == 0o640


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_keeps_the_old_file(tmp_path, error):
    path = tmp_path / "run.pt"
    save_checkpoint(path, CONTENT)

    def write(file):
        file.write(b"half of the new con")
        raise error

    with pytest.raises(type(error)):
        atomic_write(path, write)
    assert load_checkpoint(path)["epoch"] == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.pt"]


def test_a_process_killed_while_writing_keeps_the_old_file(tmp_path):
    path = tmp_path / "run.pt"
    save_checkpoint(path, CONTENT)
    program = (
        "import os, signal, sys\n"
        "from dcgnn.checkpoint import atomic_write\n"
        "def write(file):\n"
        "    file.write(b'half')\n"
        "    file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "atomic_write(sys.argv[1], write)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=False)
    assert done.returncode == -9
    assert load_checkpoint(path)["epoch"] == 3


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_refused(tmp_path, share):
    path = tmp_path / "run.pt"
    save_checkpoint(path, CONTENT)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CheckpointError, match=r"run\.pt is damaged or not a checkpoint"):
        load_checkpoint(path)


def test_a_flipped_bit_is_refused(tmp_path):
    """Torch alone would load another weight."""
    path = tmp_path / "run.pt"
    weights = torch.arange(64, dtype=torch.float32)
    save_checkpoint(path, {"weights": weights})
    whole = path.read_bytes()
    place = whole.index(weights.numpy().tobytes())
    path.write_bytes(whole[: place + 7] + bytes([whole[place + 7] ^ 1]) + whole[place + 8 :])
    assert not torch.equal(torch.load(path, weights_only=True)["weights"], weights)
    with pytest.raises(CheckpointError, match=r"run\.pt is damaged or not a checkpoint"):
        load_checkpoint(path)


class Mischief:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("writer", [torch.save, lambda obj, file: file.write(pickle.dumps(obj))])
def test_a_file_with_code_is_refused_and_not_run(tmp_path, writer):
    path, trace = tmp_path / "run.pt", tmp_path / "trace"
    with path.open("wb") as file:
        writer({"format": "dcgnn-checkpoint", "version": 1, "epoch": Mischief(trace)}, file)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert not trace.exists()


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "run.pt"
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_checkpoint(path)
    path.write_text("hello")
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        load_checkpoint(path)
    torch.save({"weights": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of dcgnn"):
        load_checkpoint(path)
    save_checkpoint(path, {"version": 99})
    with pytest.raises(CheckpointError, match="has version 99, this program reads version 1"):
        load_checkpoint(path)


def test_every_difference_is_named():
    saved = {"graph": "cora", "lr": 0.1, "data": "a" * 64, "old": 1}
    check_same_run("run.pt", saved, dict(saved))
    with pytest.raises(CheckpointError) as caught:
        check_same_run("run.pt", saved, {"graph": "sbm", "lr": 0.1, "data": "b" * 64})
    message = str(caught.value)
    assert "run.pt belongs to another run" in message
    assert "graph is 'cora' in the checkpoint and 'sbm' here" in message
    assert "old is 1 in the checkpoint and None here" in message
    assert "lr" not in message
    assert "a" * 20 not in message, "long values are shortened"


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    atomic_write(link, lambda file: file.write(b"new"))
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    received: list[bytes] = []
    reader.start()
    atomic_write(pipe, lambda file: file.write(b"content"))
    reader.join(timeout=20)
    assert received == [b"content"]
    assert pipe.is_fifo()
