"""Ahead-of-time compilation of Triton kernels, and what they need: registers, spills, shared memory.

No GPU is needed: Triton's wheel brings the assembler (``ptxas``) for NVIDIA and LLVM for AMD.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NVIDIA_TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
AMD_TARGETS = ("gfx90a", "gfx942")
TARGETS = NVIDIA_TARGETS + AMD_TARGETS


@dataclass(frozen=True)
class Usage:
    """Registers of a thread, and bytes of stack and spills of a thread."""

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int


@dataclass(frozen=True)
class Compiled:
    """One kernel for one GPU; shared memory is counted for each block, the rest for each thread."""

    kernel: str
    target: str
    entry: str  # name of the kernel in the binary
    assembly: str  # PTX, or AMD assembly
    binary: bytes  # cubin, or hsaco
    num_warps: int
    shared_bytes: int
    usage: Usage

    @property
    def registers(self) -> int:
        return self.usage.registers

    @property
    def spill_stores(self) -> int:
        return self.usage.spill_stores

    @property
    def spill_loads(self) -> int:
        return self.usage.spill_loads

    @property
    def stack_bytes(self) -> int:
        return self.usage.stack_bytes

    @property
    def ptx(self) -> str:
        """The PTX of an NVIDIA target."""
        if not self.target.startswith("sm_"):
            raise ValueError(f"{self.target} has no PTX, its assembly is in .assembly")
        return self.assembly


def gpu_target(name: str) -> GPUTarget:
    """``sm_80`` or ``gfx942`` as Triton's target."""
    if match := re.fullmatch(r"sm_(\d+)", name):
        return GPUTarget("cuda", int(match.group(1)), 32)
    if re.fullmatch(r"gfx\w+", name):
        # CDNA has wavefronts of 64, RDNA of 32.
        return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)
    raise ValueError(f"target is {name!r}, wanted sm_<number> or gfx<name>, such as {', '.join(TARGETS)}")


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    *,
    divisible_by_16: Iterable[str] = (),
    num_warps: int = 4,
    **options: Any,
) -> Compiled:
    """Compile a ``@triton.jit`` function for one target.

    Args:
        kernel: the function.
        signature: the type of every parameter in order, such as ``"*fp32"``, ``"i32"`` or ``"constexpr"``.
        constants: values of the ``constexpr`` parameters (and of others that are to be fixed).
        target: one of :data:`TARGETS`, or another that Triton knows.
        divisible_by_16: pointers and integers that Triton may take for multiples of 16.
        num_warps: warps in a block.
        options: further options of Triton's compiler, such as ``num_stages``.
    """
    compiled = _compile(kernel, signature, constants, target, divisible_by_16, num_warps, options)
    nvidia = target.startswith("sm_")
    return Compiled(
        kernel=kernel.fn.__name__,
        target=target,
        entry=compiled.metadata.name,
        assembly=compiled.asm["ptx" if nvidia else "amdgcn"],
        binary=compiled.asm["cubin" if nvidia else "hsaco"],
        num_warps=num_warps,
        shared_bytes=compiled.metadata.shared,
        usage=(
            _nvidia_usage(compiled.metadata.assembler_report)
            if nvidia
            else _amd_usage(compiled.asm["amdgcn"])
        ),
    )


def _compile(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    target: str,
    divisible_by_16: Iterable[str],
    num_warps: int,
    options: Mapping[str, Any],
) -> Any:
    names = list(kernel.arg_names)
    if list(signature) != names:
        raise ValueError(f"signature names {list(signature)}, the kernel's parameters are {names}")
    missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in constants]
    if missing:
        raise ValueError(f"constants lacks {missing}")
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else kind for name, kind in signature.items()},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible_by_16},
    )
    # Said explicitly, since the default of the fusion differs between versions of Triton.
    settings = {"num_warps": num_warps, "enable_fp_fusion": True, **options}
    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = _with_report
        return triton.compile(source, target=gpu_target(target), options=settings)


def _with_report(*given: Any) -> tuple[str, str] | None:
    """Triton's hook into compilation: what NVIDIA's assembler reports is kept with the kernel, also on disk.

    A run of our own would cost as much again and might use other options. Called with nothing, the hook tells
    what is added to the keys of Triton's cache.
    """
    if not given:
        return "assembler_report", "assembler_report"
    stages = given[1]
    if "cubin" not in stages:
        return None
    assemble = stages["cubin"]

    def assemble_and_report(ptx: str, metadata: dict[str, Any]) -> bytes:
        with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as report:
            knobs.nvidia.dump_ptxas_log = True
            binary: bytes = assemble(ptx, metadata)
        metadata["assembler_report"] = report.getvalue()
        return binary

    stages["cubin"] = assemble_and_report
    return None


def _number(pattern: str, text: str, what: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"{what} is missing in the compiler's report:\n{text[-2000:]}")
    return int(found.group(1))


def _nvidia_usage(report: str) -> Usage:
    """What ``ptxas -v`` says."""
    return Usage(
        registers=_number(r"Used (\d+) registers", report, "the number of registers"),
        spill_stores=_number(r"(\d+) bytes spill stores", report, "spill stores"),
        spill_loads=_number(r"(\d+) bytes spill loads", report, "spill loads"),
        stack_bytes=_number(r"(\d+) bytes stack frame", report, "the stack frame"),
    )


def _amd_usage(assembly: str) -> Usage:
    """The metadata at the end of AMD assembly; spills are counted in registers of four bytes."""
    spilled = 4 * _number(r"\.vgpr_spill_count:\s*(\d+)", assembly, "vgpr_spill_count")
    return Usage(
        registers=_number(r"\.vgpr_count:\s*(\d+)", assembly, "vgpr_count"),
        spill_stores=spilled,
        spill_loads=spilled,
        stack_bytes=_number(r"\.private_segment_fixed_size:\s*(\d+)", assembly, "private_segment_fixed_size"),
    )
