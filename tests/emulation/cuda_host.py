"""Builds and runs programs that execute CUDA kernels on the host through ``csrc/tests/cuda_host.h``."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
MISSING = "g++ is not installed: CUDA kernels cannot be compiled for the host here"
_FLAGS = {
    "address,undefined": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
    "races": ["-fsanitize=thread", "-fno-pie", "-Wno-tsan"],
    "none": [],
}


def available() -> bool:
    """Whether g++ is on the PATH."""
    return shutil.which("g++") is not None


def build(
    source: str | Path, folder: Path, sanitize: str = "address,undefined", options: Sequence[str] = ()
) -> Path:
    """Compile a source (a path, or the text itself); the program's path.

    ``sanitize`` is ``"address,undefined"``, ``"races"`` (see ``cuda_host_races.h``) or ``"none"``.
    """
    if isinstance(source, str):
        path = folder / "program.cpp"
        path.write_text(source, encoding="utf-8")
    else:
        path = source
    stem = f"{path.stem}-{sanitize.replace(',', '-')}"
    program, compiled = folder / stem, folder / f"{stem}.o"
    # Without optimisation the sanitizers' code compiles several times faster; options may say otherwise.
    level = "-O1" if sanitize == "races" else "-O0"
    flags = ["-std=c++17", level, "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas", *_FLAGS[sanitize]]
    _run("g++", *flags, f"-I{CSRC}", *options, "-c", str(path), "-o", str(compiled))
    # The hooks that the thread sanitizer calls are the header's, not the library's.
    linking = ["-no-pie"] if sanitize == "races" else _FLAGS[sanitize]
    _run("g++", *linking, str(compiled), "-o", str(program))
    return program


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program; code addresses in its messages become file and line."""
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True)
    match = re.search(r"pc 0x([0-9a-f]+)", done.stderr)
    if match and shutil.which("addr2line"):
        done.stderr += _source_line(program, int(match.group(1), 16))
    return done


def _source_line(program: Path, address: int) -> str:
    found = subprocess.run(
        ["addr2line", "-e", str(program), hex(address - 1)], capture_output=True, text=True
    )
    return f"at {found.stdout.strip()}\n"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
