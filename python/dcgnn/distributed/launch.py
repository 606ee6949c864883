"""Processes that ``torchrun`` started: how they find each other, agree, and fail."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcgnn.checkpoint import CheckpointError

#: Seconds that a rank waits for the others before it takes them for lost.
DEFAULT_TIMEOUT = 600

#: Eleven days: beyond any use, and below 2**31 milliseconds.
MAX_TIMEOUT = 1_000_000

#: Seconds that the ranks which are left have to report, so that the lost ones can be named.
_ROLL_CALL = 3.0


class RankLost(RuntimeError):
    """Another rank ended or cannot be reached."""


@dataclass(frozen=True)
class Ranks:
    """This process among all; of one process outside ``torchrun``."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    restarts: int = 0
    launched: bool = False

    @classmethod
    def of_environment(cls) -> Ranks:
        """As ``torchrun`` tells by environment variables."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        return cls(
            rank=int(os.environ["RANK"]),
            world=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            launched=True,
        )

    @property
    def is_main(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0


@contextmanager
def process_group(
    ranks: Ranks, device: torch.device, timeout: float = DEFAULT_TIMEOUT
) -> Iterator[frozenset[str]]:
    """Connected ranks: by gloo on CPUs, by nccl on GPUs; nothing outside ``torchrun``.

    Args:
        ranks: this process among all.
        device: what the ranks compute on.
        timeout: seconds that a collective waits for the other ranks.

    Yields:
        The names of the ``torchrun`` processes (one a machine) that started the ranks. They outlive the ranks
        that they restart: starts that have one in common are of the same job. Empty without ``torchrun``.

    Raises:
        RankLost: If the transport fails: this rank is whole, another one is not.
    """
    if not ranks.launched:
        yield frozenset()
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    longest = timedelta(seconds=timeout)
    store: dist.Store | None = None
    try:
        store, rank, world = next(iter(dist.rendezvous("env://", timeout=longest)))
        store = dist.PrefixStore(_meet(store, ranks, timeout), store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=longest)
        try:
            starters: list[Any] = [None] * world
            dist.all_gather_object(starters, _starter())
            yield frozenset(name for name in starters if name)
        finally:
            # Closed connections tell ranks that wait for this one.
            dist.destroy_process_group()
    except RankLost:
        raise
    except RuntimeError as error:
        text = str(error)
        if not _of_transport(error, text):
            raise
        lost = _lost_ranks(store, ranks)
        first = re.sub(r"\[[^\]]*\.(cc|cpp):\d+\] ?", "", text.strip().splitlines()[0]).split(". ")[0][:120]
        raise RankLost(f"rank {ranks.rank} of {ranks.world} lost {_names(lost)} ({first})") from error


def _meet(store: dist.Store, ranks: Ranks, timeout: float) -> str:
    """A name for this group of ranks: the same on all of them, and another one after a restart.

    ``torchrun`` keeps its store over restarts, and on several machines its restart counts differ: neither
    tells the addresses of this group from those of ranks that are gone. Hence every rank shows a number that
    it draws, and rank 0 answers to it with the name.
    """
    end = time.monotonic() + timeout

    def pause(others: list[int]) -> None:
        if time.monotonic() > end:
            lost = f"{_names(others)} (not heard of for {timeout:g} seconds)"
            raise RankLost(f"rank {ranks.rank} of {ranks.world} lost {lost}")
        time.sleep(0.02)  # signals are heard, other than in a wait of the store

    if not ranks.is_main:
        drawn = uuid.uuid4().hex
        store.set(f"dcgnn/drawn/{ranks.rank}", drawn)
        while not store.check([f"dcgnn/answer/{drawn}"]):
            pause([0])
        name = store.get(f"dcgnn/answer/{drawn}").decode()
        store.set(f"{name}/met/{ranks.rank}", "")
        return name
    name = f"dcgnn/{uuid.uuid4().hex}"
    missing = list(range(1, ranks.world))
    while missing:
        for other in missing:
            if store.check([f"dcgnn/drawn/{other}"]):
                drawn = store.get(f"dcgnn/drawn/{other}").decode()
                store.set(f"dcgnn/answer/{drawn}", name)
        pause(missing)
        missing = [other for other in missing if not store.check([f"{name}/met/{other}"])]
    return name


def _starter() -> str | None:
    """The name of the ``torchrun`` process that started this one: no other process has had it."""
    if not dist.is_torchelastic_launched():
        return None
    parent = os.getppid()
    name = f"{socket.gethostname()}:{parent}"
    try:  # Linux: numbers of processes are used again, after a reboot at the latest
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        ticks = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return name
    return f"{name}:{boot}:{ticks}"


def _lost_ranks(store: dist.Store | None, ranks: Ranks) -> list[int]:
    """The ranks that do not report in the store, which torchrun keeps; none where it is gone, too."""
    if threading.current_thread() is threading.main_thread():
        # torchrun ends the ranks that are left; this one ends by itself in a moment, with a message.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    silent = [other for other in range(ranks.world) if other != ranks.rank]
    if store is None:
        return []
    try:
        store.set_timeout(timedelta(seconds=_ROLL_CALL))
        store.set(f"left/{ranks.rank}", "")
        end = time.monotonic() + _ROLL_CALL
        while silent and time.monotonic() < end:
            silent = [other for other in silent if not store.check([f"left/{other}"])]
            time.sleep(0.05)
    except RuntimeError:
        return []
    return silent


def _names(lost: list[int]) -> str:
    if not lost:
        return "another rank"
    return f"rank{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"


def _of_transport(error: RuntimeError, text: str) -> bool:
    if isinstance(error, getattr(dist, "DistError", ())):
        return True
    words = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out waiting")
    return any(word in text.lower() for word in words)


def connected() -> bool:
    """Whether this process is one of several connected ones, or the only one of a group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This rank; 0 outside a group."""
    return dist.get_rank() if connected() else 0


def world_size() -> int:
    """Number of ranks; 1 outside a group."""
    return dist.get_world_size() if connected() else 1


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any rank."""
    if not connected():
        return flag
    value = torch.tensor([int(flag)], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def sum_of_ranks(values: list[float], device: torch.device) -> list[float]:
    """The sums of all ranks' numbers; one collective for all of them."""
    if not connected():
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def broadcast_object(value: Any, device: torch.device) -> Any:
    """Rank 0's value, on all ranks."""
    if not connected():
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0, device=device)
    return held[0]


def from_rank_zero(find: Callable[[], Any], device: torch.device) -> Any:
    """What rank 0 finds, on all ranks; or the error that it meets, raised by all of them."""
    found: Any = None
    if rank() == 0:
        try:
            found = find()
        except (ValueError, OSError, CheckpointError) as error:
            found = error
    found = broadcast_object(found, device)
    if isinstance(found, Exception):
        raise found
    return found


def gather_rows(rows: Tensor) -> Tensor | None:
    """All ranks' rows one after the other on rank 0, None on the others."""
    if not connected():
        return rows
    sizes = [torch.zeros(1, dtype=torch.int64, device=rows.device) for _ in range(world_size())]
    dist.all_gather(sizes, torch.tensor([rows.size(0)], device=rows.device))
    counts = [int(size) for size in sizes]
    padded = rows.new_zeros(max(counts), *rows.shape[1:])
    padded[: rows.size(0)] = rows
    received = [torch.empty_like(padded) for _ in counts] if rank() == 0 else None
    dist.gather(padded, received, dst=0)
    if received is None:
        return None
    return torch.cat([block[:count] for block, count in zip(received, counts, strict=True)])


def sum_gradients(parameters: Iterator[torch.nn.Parameter]) -> None:
    """Gradients of all ranks, summed; one collective for all of them."""
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not grads:
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def broadcast_module(module: torch.nn.Module) -> None:
    """Rank 0's parameters and buffers, on all ranks."""
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, src=0)
