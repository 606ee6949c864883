"""Freed memory that the process keeps, seen in processes of their own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

GLIBC = platform.libc_ver()[0] == "glibc"

_FAULTS = """
import resource, statistics, sys
import torch
from dcgnn.allocator import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "keep" else None
faults = []
for turn in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(8 << 20)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
# The system may take pages back at any time: what counts is a turn that it leaves alone.
print(kept, statistics.median_high(faults))
"""


def run(how: str, **variables: str) -> list[str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _FAULTS, how], env=own | variables, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


@pytest.mark.skipif(not GLIBC, reason="the C library is not glibc")
def test_freed_memory_serves_the_next_tensor():
    _, without = run("leave")
    kept, with_it = run("keep")
    assert kept == "True"
    assert int(without) >= 16  # 32 MiB in huge pages, 8192 in small ones
    assert int(with_it) < int(without) / 10


@pytest.mark.parametrize("variables", [{"MALLOC_ARENA_MAX": "2"}, {"GLIBC_TUNABLES": "glibc.malloc.check=0"}])
def test_settings_of_the_user_stay(variables):
    assert run("keep", **variables)[0] == "False"


def test_other_libraries_are_left_alone(monkeypatch):
    from dcgnn.allocator import keep_freed_memory

    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False
