"""An interpreter of PTX, the assembly that nvcc and Triton emit, on numpy arrays.

>>> kernel = parse(text).kernel("gather")
>>> launch(kernel, grid, block, [rowptr, member, features, out, num_nodes])

It checks what hardware does not report: accesses outside of an argument, misaligned vectors, reads of
unwritten memory and registers, races inside a block and between blocks, and barriers that not every thread
reaches.
"""

from emulation.ptx import nvcc
from emulation.ptx.errors import (
    Deadlock,
    DivergentBarrier,
    Misaligned,
    OutOfBounds,
    PtxError,
    PtxSyntaxError,
    Race,
    Trap,
    Uninitialised,
    Unsupported,
)
from emulation.ptx.machine import Result, launch
from emulation.ptx.parser import Kernel, Module, parse

__all__ = [
    "Deadlock",
    "DivergentBarrier",
    "Kernel",
    "Misaligned",
    "Module",
    "OutOfBounds",
    "PtxError",
    "PtxSyntaxError",
    "Race",
    "Result",
    "Trap",
    "Uninitialised",
    "Unsupported",
    "launch",
    "nvcc",
    "parse",
]
