"""What the interpreter reports: every error says where, and each check has a class of its own."""

from __future__ import annotations


class PtxError(Exception):
    """Base class of everything that the parser and the machine raise."""


class PtxSyntaxError(PtxError):
    """The text is not PTX that the parser understands."""


class Unsupported(PtxError):
    """An opcode, modifier, type or operand that has no implementation; nothing is guessed."""


class OutOfBounds(PtxError):
    """An access outside of every argument, of shared or of local memory."""


class Misaligned(PtxError):
    """An address that is not a multiple of the number of bytes accessed."""


class Uninitialised(PtxError):
    """A read of memory or of a register that nothing has written."""


class Race(PtxError):
    """Two threads access one place, at least one writes, and nothing orders them."""


class DivergentBarrier(PtxError):
    """A barrier or a warp instruction that some of the threads it waits for cannot reach."""


class Deadlock(PtxError):
    """Threads that wait for ever, or a kernel that does not end within the step limit."""


class Trap(PtxError):
    """The kernel executed ``trap``: a failed device-side assertion."""
