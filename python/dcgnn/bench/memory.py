"""Memory: what is free, and how far a run raises the high-water mark of a process of its own.

    python -m dcgnn.bench.memory < request.json

measures in this process and prints bytes as JSON; :func:`peak_bytes` starts it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from dcgnn.bench.cases import Case, find_cases
from dcgnn.bench.gate import one_line
from dcgnn.bench.phases import Run, make_runs
from dcgnn.bench.problem import Problem, Settings
from dcgnn_kernels import release_memory

GIGA = 1e9
USABLE = 0.9  # of the free memory; the rest is left to others


def available_bytes(device: torch.device) -> float:
    """Memory that can still be used: on the device, or in this machine or container."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit, used = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].isdigit():
        free = min(free, int(limit[0]) - int(used[0]))
    return float(free)


def too_large(what: str, need: float, device: torch.device) -> str | None:
    """A reason when ``need`` bytes for ``what`` do not fit, leaving a tenth for others."""
    free = available_bytes(device)
    available = USABLE * free
    if need <= available:
        return None
    return (
        f"{what} would need about {need / GIGA:.1f} GB of memory, {available / GIGA:.1f} GB are available "
        f"({USABLE:.0%} of {free / GIGA:.1f} GB that are free)"
    )


def case_too_large(case: Case, problem: Problem) -> str | None:
    """A reason when forward and backward of a case do not fit beside what is there already."""
    need = case.fit(problem).settings.torch_dtype.itemsize * case.working_floats(problem)
    return too_large("forward and backward", need, problem.device)


def peak_bytes(
    case: Case, problem: Problem, phases: tuple[str, ...], edges_file: Path | None, patience: float = 600.0
) -> dict[str, int | str]:
    """Bytes above the level before the run, or a reason, for each phase.

    On CUDA ``max_memory_allocated``; else in a child process, which reads the edges from ``edges_file``
    and is given up after ``patience`` seconds.
    """
    if problem.device.type == "cuda":
        try:
            return {phase: _rise_cuda(run) for phase, run in make_runs(case, problem, phases).items()}
        except Exception as error:
            return dict.fromkeys(phases, one_line(error))
    request = {
        "case": case.name,
        "name": problem.name,
        "num_nodes": problem.num_nodes,
        "settings": asdict(problem.settings),
        "phases": phases,
        "edges": str(edges_file),
        "threads": torch.get_num_threads(),
    }
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        child = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "dcgnn.bench.memory"],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            env=environment,
            timeout=patience,
        )
    except subprocess.TimeoutExpired:
        return dict.fromkeys(phases, f"the child process was given up after {patience:.0f} s")
    if child.returncode:
        lines = child.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"the child process ended with code {child.returncode}"
        return dict.fromkeys(phases, reason)
    return json.loads(child.stdout)


@contextmanager
def edges_file(problem: Problem) -> Iterator[Path]:
    """The edges in a file, as long as it is wanted."""
    with tempfile.TemporaryDirectory(prefix="dcgnn-bench-") as folder:
        path = Path(folder) / "edges.npy"
        np.save(path, problem.edge_index.cpu().numpy(), allow_pickle=False)
        yield path


def _rise_cuda(run: Run) -> int:
    _call(run)
    if run.prepare is not None:
        run.prepare()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run.timed()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _rise_cpu(run: Run) -> int:
    """Rise of the high-water mark by the second run; the first one fills what libraries keep for good."""
    if reset_high_water_mark():
        _call(run)
        if run.prepare is not None:
            run.prepare()
        release_memory()  # what is kept for later would hide a rise
        _trim()
        reset_high_water_mark()
        before = high_water_mark()
    else:  # the mark only rises here, so that the first run is the one that shows
        if run.prepare is not None:
            run.prepare()
        before = high_water_mark()
    run.timed()
    return high_water_mark() - before


def high_water_mark() -> int:
    """Largest resident size of this process so far, in bytes."""
    for line in _lines("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_high_water_mark() -> bool:
    """Set the mark to the present size, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _call(run: Run) -> None:
    if run.prepare is not None:
        run.prepare()
    run.timed()


def _trim() -> None:
    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def main() -> None:
    """Answer one request from stdin."""
    request = json.load(sys.stdin)
    torch.set_num_threads(request["threads"])
    edges = torch.from_numpy(np.load(request["edges"], allow_pickle=False))
    problem = Problem(request["name"], edges, request["num_nodes"], Settings(**request["settings"]))
    (case,) = find_cases([request["case"]])
    phases = tuple(request["phases"])
    answer: dict[str, int | str] = {}
    for phase in phases:
        # One phase at a time: what another one keeps would count.
        for name, run in make_runs(case, problem, (phase,)).items():
            answer[name] = _rise_cpu(run)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
