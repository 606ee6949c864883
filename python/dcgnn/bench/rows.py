"""The results: one flat row for each measurement, written as JSON and CSV."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dcgnn.bench.problem import Problem
from dcgnn.checkpoint import atomic_write
from dcgnn.timing import Samples

_FORMAT = "dcgnn-bench"
_VERSION = 1

# By the annotation of a field; no figure is negative.
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "str": ("text", (str,)),
    "int": ("a whole number from 0", (int,)),
    "float": ("a number from 0", (int, float)),
}


@dataclass(frozen=True)
class Row:
    """One measurement and everything that it depends on.

    ``suite`` is ``"layers"``, ``"kernels"``, ``"limits"`` or ``"sweep NAME"``. ``limit_ms`` is the least
    time at the measured rates and ``fraction`` its share of the median. ``rate`` is that of a limit, in GB/s
    or Gflop/s. Where a figure is missing, ``reason`` says why.
    """

    suite: str
    graph: str
    num_nodes: int
    num_slots: int
    case: str
    phase: str
    channels: int
    num_local: int
    num_global: int
    local_iters: int
    global_iters: int
    dtype: str
    device: str
    threads: int
    seed: int = 0  # of a random graph
    median_ms: float | None = None
    p20_ms: float | None = None
    p80_ms: float | None = None
    rounds: int = 0
    peak_bytes: int | None = None
    limit_ms: float | None = None
    fraction: float | None = None
    rate: float | None = None
    reason: str = ""
    machine: str = ""
    python: str = ""
    torch: str = ""
    torch_geometric: str = ""
    dcgnn_kernels: str = ""
    backend: str = ""
    commit: str = ""
    date: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """What a row of another run must agree in to be compared with this one."""
        fields = dataclasses.fields(self)
        end = next(place for place, field in enumerate(fields) if field.name == "median_ms")
        return tuple(getattr(self, field.name) for field in fields[:end])

    @property
    def num_edges(self) -> int:
        """Edges in both directions, without self-loops."""
        return self.num_slots - self.num_nodes

    def timed(self, samples: Samples, least: float | None = None) -> Row:
        """With its times; ``least`` is the least time in seconds at the machine's rates."""
        return dataclasses.replace(
            self,
            median_ms=1e3 * samples.median,
            p20_ms=1e3 * samples.quantile(0.2),
            p80_ms=1e3 * samples.quantile(0.8),
            rounds=len(samples.seconds),
            limit_ms=None if least is None else 1e3 * least,
            fraction=None if least is None else least / samples.median,
        )

    def with_peak(self, peak: int) -> Row:
        """With its peak memory."""
        return dataclasses.replace(self, peak_bytes=peak)

    def failed(self, reason: str) -> Row:
        """Without figures, with the reason."""
        return dataclasses.replace(self, reason=reason)


@dataclass(frozen=True)
class Context:
    """Where rows come from: fills the fields that all rows of a run share."""

    facts: Mapping[str, Any]

    @classmethod
    def of(cls, environment: Mapping[str, Any], device: str) -> Context:
        """From the facts of ``dcgnn info``."""
        versions = environment["versions"]
        live = [
            f"{name} ({backend['reason']})"
            for name, backend in environment["backends"].items()
            if backend["available"] and (name == "native-cpu") == (device == "cpu") and name != "reference"
        ]
        return cls(
            {
                "machine": f"{environment['cpu']}, {environment['cores']} cores"
                + (f"; {environment['cuda']}" if device != "cpu" else ""),
                "python": versions["python"],
                "torch": versions["torch"],
                "torch_geometric": versions["torch-geometric"],
                "dcgnn_kernels": versions["dcgnn-kernels"],
                "backend": ", ".join(live) or "plain PyTorch",
                "commit": commit(),
                "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
            }
        )

    def row(self, suite: str, problem: Problem, case: str, phase: str, threads: int) -> Row:
        """A row without figures."""
        return Row(
            suite=suite,
            graph=problem.name,
            num_nodes=problem.num_nodes,
            num_slots=problem.num_slots,
            case=case,
            phase=phase,
            device=problem.device.type,
            threads=threads,
            seed=problem.seed,
            **dataclasses.asdict(problem.settings),
            **self.facts,
        )


def commit() -> str:
    """The commit of the sources that run, + where files were changed; "unknown" outside a repository."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # An installed copy may lie inside a repository that is not ours.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return "unknown"
    name = git("rev-parse", "--short=12", "HEAD")
    changed = git("status", "--porcelain", "--untracked-files=no", ":/")
    return f"{name}{'+' if changed else ''}" if name else "unknown"


def write_json(path: str | Path, rows: Iterable[Row]) -> None:
    """Write the file as a whole or not at all."""
    content = {"format": _FORMAT, "version": _VERSION, "rows": [dataclasses.asdict(row) for row in rows]}
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    atomic_write(path, lambda file: file.write(text.encode()))


def read_json(path: str | Path) -> list[Row]:
    """Rows of a file that :func:`write_json` wrote.

    Raises:
        ValueError: If it is something else, or a value of a row is not what its field holds.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != _FORMAT or content["version"] != _VERSION:
            raise ValueError
        rows = [Row(**row) for row in content["rows"]]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is not a JSON file of dcgnn bench, version {_VERSION}") from None
    for place, row in enumerate(rows):
        for field in dataclasses.fields(Row):
            _check_value(f"{path}: rows[{place}].{field.name}", str(field.type), getattr(row, field.name))
    return rows


def _check_value(name: str, kind: str, value: Any) -> None:
    """Tables, slopes and plots calculate with what a file holds."""
    wanted, kinds = _KINDS[kind.removesuffix(" | None")]
    if kind.endswith("| None"):
        if value is None:
            return
        wanted = f"{wanted} or null"
    good = isinstance(value, kinds) and not isinstance(value, bool)
    if not good or (not isinstance(value, str) and not 0 <= value < math.inf):
        raise ValueError(f"{name} must be {wanted}, got {json.dumps(value)[:80]}")


def write_csv(path: str | Path, rows: Iterable[Row]) -> None:
    """One line for each row, with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    atomic_write(path, lambda file: file.write(text.getvalue().encode()))
