"""Every kernel compiles ahead of time for every GPU, and spills nothing where it is meant to be fast."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from triton_cases import FULL, RESOURCES

from dcgnn.cli import main
from dcgnn_kernels.triton import catalogue, inspect

NO_SPILLS = tuple(t for t in inspect.NVIDIA_TARGETS if t != "sm_75")
LARGEST, DEFAULTS, EVERYTHING = "largest tiles", "default configurations", "every option"


def cases() -> list[tuple[str, torch.dtype, str]]:
    """Which configurations are compiled for which GPU and dtype: make test, make triton-resources and
    make test-gpu-code, which takes every kernel for every GPU in every dtype, and in every configuration in
    float32: all of them would be 7,300 kernels.
    """
    if FULL:
        return [
            (target, dtype, EVERYTHING if dtype == torch.float32 else LARGEST)
            for dtype in catalogue.DTYPES
            for target in inspect.TARGETS
        ]
    if RESOURCES:
        every = [
            (t, dtype, DEFAULTS) for t in ("sm_80", "sm_90") for dtype in (torch.float32, torch.bfloat16)
        ]
        return every + [(t, torch.float32, LARGEST) for t in inspect.TARGETS if t not in ("sm_80", "sm_90")]
    return [("sm_90", torch.float32, LARGEST)]


@functools.cache
def chosen(dtype: torch.dtype, which: str) -> list[catalogue.Entry]:
    """In each process the same list; the largest tile of a kernel is launched first."""
    entries = catalogue.entries([dtype], options=which == EVERYTHING)
    return (
        list({entry.kernel: entry for entry in reversed(entries)}.values()) if which == LARGEST else entries
    )


@functools.cache
def tuned(dtype: torch.dtype) -> list[catalogue.Entry]:
    """Those that only the tuner takes, which times them: a spill there is no defect."""
    defaults = catalogue.entries([dtype])
    return [entry for entry in catalogue.entries([dtype], choices=True) if entry not in defaults]


def compile_one(target: str, dtype: torch.dtype, which: str, index: int) -> tuple[str, int]:
    """The name of the configuration and spilled bytes of a thread."""
    entries = chosen(dtype, which)
    entry = entries[index] if index < len(entries) else tuned(dtype)[index - len(entries)]
    compiled = entry.compile(target)
    assert compiled.binary
    counted = target in NO_SPILLS and index < len(entries)
    return entry.label, compiled.spill_stores + compiled.spill_loads if counted else 0


@pytest.fixture(scope="module")
def in_processes():
    """Calls a function for each of some arguments, on all cores where there is much to do."""
    if not (FULL or RESOURCES):
        yield map
        return
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        yield functools.partial(pool.map, chunksize=4)


@pytest.mark.parametrize(("target", "dtype", "which"), cases(), ids=str)
def test_compiles_without_spills(target, dtype, which, in_processes):
    number = len(chosen(dtype, which)) + (len(tuned(dtype)) if which == EVERYTHING else 0)
    done = list(in_processes(functools.partial(compile_one, target, dtype, which), range(number)))
    print(f"{target}, {dtype}: {number} kernels in their {which}")
    assert not {label: size for label, size in done if size > 0}


def test_what_only_the_tuner_takes_is_listed():
    defaults = catalogue.entries([torch.float32])
    entries = catalogue.entries([torch.float32], choices=True)
    assert all(entry in entries for entry in defaults)
    shapes = [
        {(entry.constants["E"], entry.constants["M"]) for entry in listed if "E" in entry.constants}
        for listed in (defaults, entries)
    ]
    assert shapes[0] < shapes[1]


def test_the_catalogue_has_every_kernel():
    from dcgnn_kernels.triton import hubs, many, pair, passes, rows, transpose

    launched = set()
    for module in (hubs, many, pair, passes, rows, transpose):
        names = [name for name, value in vars(module).items() if hasattr(value, "arg_names")]
        text = Path(module.__file__).read_text(encoding="utf-8")
        # A device function is called with parentheses inside of a kernel.
        called = set(re.findall(r"(?<!def )\b(\w+)\(", text))
        launched |= {
            name for name in names if getattr(module, name).fn.__module__ == module.__name__
        } - called
    shared = {"member_rows", "channels", "tile_sum"}  # called by kernels of other modules
    listed = {entry.kernel.__name__ for entry in catalogue.entries([torch.float32])}
    assert listed == launched - shared


@pytest.mark.parametrize(
    ("option", "values"), [("SCALE", {0, 1, 2}), ("CONVERGE", {False, True}), ("FRESH", {False, True})]
)
def test_the_catalogue_has_every_option(option, values):
    """Of every kernel that has it; K other than 2 has no kernels for convergence."""
    seen: dict[str, set] = {}
    for entry in catalogue.entries([torch.float32], options=True):
        if option in entry.constants:
            seen.setdefault(entry.kernel.__name__, set()).add(entry.constants[option])
    assert seen
    assert all(found == values for found in seen.values()), seen


def compiled_with(registers, warps, shared, target="sm_80", spills=0):
    """What the assembler might have said."""
    usage = inspect.Usage(registers, spills, spills, 0)
    return inspect.Compiled("kernel", target, "kernel", "", b"", warps, shared, usage)


def test_occupancy_by_hand():
    assert catalogue.occupancy(compiled_with(32, 4, 0)) == 1.0  # 16 blocks of 128 threads
    assert catalogue.occupancy(compiled_with(64, 4, 0)) == 0.5  # 65536 / (64 · 128) = 8 blocks
    assert catalogue.occupancy(compiled_with(33, 4, 0)) == 0.75  # 33 registers count as 40: 12 blocks
    assert catalogue.occupancy(compiled_with(32, 4, 80 * 1024)) == 0.125  # two blocks by shared memory
    assert catalogue.occupancy(compiled_with(255, 16, 0)) == 0.0  # does not fit at all
    assert catalogue.occupancy(compiled_with(32, 4, 0, "gfx942")) is None


def test_the_table_has_a_line_for_each_row():
    entry = catalogue.entries([torch.float32])[0]
    head, line = catalogue.table([(entry, compiled_with(64, 8, 2048, spills=6))]).splitlines()
    assert head.split()[:2] == ["kernel", "target"]
    assert entry.label in line
    assert line.split()[-5:] == ["8", "64", "12", "2048", "50%"]


def test_info_prints_the_table(monkeypatch, capsys):
    one = [catalogue.entries([torch.float32])[0]]
    monkeypatch.setattr(catalogue, "entries", lambda dtypes: one)
    assert main(["info", "--kernels", "sm_90"]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert "occupancy" in head
    assert line.startswith("pair_forward fp32")
    assert main(["info", "--kernels", "sm_1"]) == 2
    assert "--kernels sm_1: wanted all, or some of sm_75" in capsys.readouterr().err
