"""Every kernel compiles ahead of time for every GPU, and spills nothing where it is meant to be fast."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from triton_cases import FULL

from dcgnn.cli import main
from dcgnn_kernels.triton import catalogue, inspect

NO_SPILLS = tuple(t for t in inspect.NVIDIA_TARGETS if t != "sm_75")
DTYPES = catalogue.DTYPES if FULL else (torch.float32,)


def chosen(dtype: torch.dtype) -> list[catalogue.Entry]:
    """All configurations, or the first (the largest tile) of every kernel."""
    entries = catalogue.entries([dtype])
    return entries if FULL else list({entry.kernel: entry for entry in reversed(entries)}.values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("target", inspect.TARGETS if FULL else ("sm_90",))
def test_compiles_without_spills(target, dtype):
    spilled = []
    for entry in chosen(dtype):
        compiled = entry.compile(target)
        assert compiled.binary
        if target in NO_SPILLS and compiled.spill_stores + compiled.spill_loads:
            spilled.append((entry.label, compiled.registers, compiled.spill_stores))
    assert not spilled


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


def compiled_with(registers, warps, shared, target="sm_80", spills=0):
    """What the assembler might have said."""
    compiled = inspect.Compiled("kernel", target, "kernel", "", b"", warps, shared)
    compiled.__dict__["usage"] = inspect.Usage(registers, spills, spills, 0)
    return compiled


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
