"""Runs Triton kernels on CPU tensors, program by program, and checks every access.

Triton's own interpreter reads and writes past a tensor silently, and runs programs in order, so that races do
not show. ``guard()`` adds both checks and shuffles the programs.

``TRITON_INTERPRET`` stays unset. That variable decides when a function is *decorated*, so that one session
could either interpret or compile. Here kernels are ordinary ``@triton.jit`` functions, which compile ahead of
time; only inside ``guard()`` are launches, and calls of device functions, handed to the interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction


class GuardError(AssertionError):
    """Base class of what the guard finds."""


class OutOfBounds(GuardError):
    """An active element lies outside of every tensor argument."""


class Race(GuardError):
    """Two programs touch one element, one of them writes, and not both are atomic."""


@dataclass
class Report:
    """What ran inside the guard."""

    launches: int = 0
    programs: int = 0


NOBODY, SEVERAL = -1, -2
_CONFLICTS = {"load": ("store", "atomic"), "store": ("store", "load", "atomic"), "atomic": ("store", "load")}


class _Bytes:
    """Where one tensor argument lies."""

    def __init__(self, name: str, tensor: Any) -> None:
        steps = [(n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
        self.name = name
        self.begin = tensor.data_ptr()
        self.end = self.begin + (sum(steps) + 1) * tensor.element_size()


class _Checker:
    """The tensors of one launch and the accesses so far."""

    def __init__(self, tensors: list[tuple[str, Any]], races: bool) -> None:
        self.arguments = [_Bytes(name, tensor) for name, tensor in tensors if tensor.numel()]
        self.races = races
        self.program = 0
        begins, ends = [a.begin for a in self.arguments], [a.end for a in self.arguments]
        # One history for each stretch of memory: arguments that overlap share theirs.
        self.stretches: list[tuple[int, int, dict[str, np.ndarray]]] = []
        for begin, end in sorted(zip(begins, ends, strict=True)):
            if self.stretches and begin < self.stretches[-1][1]:
                begin, end = self.stretches[-1][0], max(end, self.stretches.pop()[1])
            history = {kind: np.full(end - begin if races else 0, NOBODY, np.int64) for kind in _CONFLICTS}
            self.stretches.append((begin, end, history))

    def check(self, kind: str, pointers: np.ndarray, mask: np.ndarray, width: int) -> None:
        active = np.broadcast_to(np.asarray(mask, bool), pointers.shape)
        addresses = pointers[active].astype(np.int64).reshape(-1)
        if not addresses.size:
            return
        inside = np.zeros(addresses.shape, bool)
        for argument in self.arguments:
            inside |= (addresses >= argument.begin) & (addresses + width <= argument.end)
        if not inside.all():
            raise OutOfBounds(self._outside(kind, addresses[~inside]))
        if self.races:
            self._order(kind, addresses, width)

    def _outside(self, kind: str, addresses: np.ndarray) -> str:
        first = int(addresses[0])
        distances = [(max(a.begin - first, first - a.end + 1), a) for a in self.arguments]
        near = ""
        if distances:
            distance, argument = min(distances, key=lambda item: item[0])
            size = argument.end - argument.begin
            near = f"; the first is {distance} bytes away from {argument.name} ({size} bytes)"
        count = len(addresses)
        return f"{kind} by program {self.program}: {count} active elements outside of every tensor{near}"

    def _order(self, kind: str, addresses: np.ndarray, width: int) -> None:
        for begin, end, history in self.stretches:
            chosen = addresses[(addresses >= begin) & (addresses < end)]
            if not chosen.size:
                continue
            at = (chosen - begin)[:, None] + np.arange(width)
            for earlier in _CONFLICTS[kind]:
                who = history[earlier][at]
                if ((who != NOBODY) & (who != self.program)).any():
                    name = next(a.name for a in self.arguments if a.begin <= chosen[0] < a.end)
                    raise Race(
                        f"{kind} of {name} by program {self.program} after a {earlier} by another program"
                    )
            before = history[kind][at]
            history[kind][at] = np.where((before == NOBODY) | (before == self.program), self.program, SEVERAL)


class _Watched:
    """Stands for Triton's module of raw memory accesses; checks before each."""

    def __init__(self, accesses: Any, state: _State) -> None:
        self._accesses, self._state = accesses, state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accesses, name)

    def load(self, pointers, mask, other, dtype):
        self._state.checker.check("load", pointers, mask, np.dtype(dtype).itemsize)
        return self._accesses.load(pointers, mask, other, dtype)

    def store(self, pointers, values, mask):
        self._state.checker.check("store", pointers, mask, np.asarray(values).dtype.itemsize)
        return self._accesses.store(pointers, values, mask)

    def atomic_rmw(self, operation, pointers, values, mask, order):
        self._state.checker.check("atomic", pointers, mask, np.asarray(values).dtype.itemsize)
        return self._accesses.atomic_rmw(operation, pointers, values, mask, order)

    def atomic_cas(self, pointers, expected, values, order):
        everywhere = np.ones(pointers.shape, bool)
        self._state.checker.check("atomic", pointers, everywhere, np.asarray(values).dtype.itemsize)
        return self._accesses.atomic_cas(pointers, expected, values, order)


class _State:
    """The guard while it is active."""

    def __init__(self, seed: int | None, races: bool) -> None:
        self.random = None if seed is None else np.random.default_rng(seed)
        self.races = races
        self.report = Report()
        self.checker = _Checker([], races)
        self.order: np.ndarray | None = None

    def run(self, function: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        """Replaces ``JITFunction.run``."""
        if warmup:
            return
        self.report.launches += 1
        interpreted = interpreter.InterpretedFunction(function.fn)
        # Hooks see the interpreter's copies of the arguments, whose addresses the kernel will use.
        interpreted.add_pre_run_hook(lambda *a, **k: self._arguments(function, a, k))
        try:
            # A kernel may divide by zero in lanes that it masks.
            with np.errstate(all="ignore"):
                interpreted.run(*args, grid=grid, warmup=False, **kwargs)
        except interpreter.InterpreterError as error:
            raise _cause(error) from None

    def _arguments(self, function: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = [*zip(function.arg_names, args, strict=False), *kwargs.items()]
        self.checker = _Checker([(n, t) for n, t in named if hasattr(t, "data_ptr")], self.races)
        self.order = None

    def next_program(self, builder: Any, x: int, y: int, z: int) -> None:
        """Replaces ``set_grid_idx``: another permutation of the grid for every launch."""
        _, ny, nz = builder.grid_dim
        number = (x * ny + y) * nz + z
        if self.random is not None:
            if self.order is None:
                self.order = self.random.permutation(int(np.prod(builder.grid_dim)))
            number = int(self.order[number])
        builder.grid_idx = (number // (ny * nz), number // nz % ny, number % nz)
        self.checker.program = number
        self.report.programs += 1


def _cause(error: BaseException) -> BaseException:
    """What went wrong, without the interpreter's wrapping."""
    while isinstance(error, interpreter.InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _call_device_function(function: JITFunction, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``JITFunction.__call__``; unlike the interpreter's own, leaves triton.language as it was."""
    scope = interpreter._patch_lang(function.fn)
    try:
        return interpreter.InterpretedFunction(function.fn).rewrite()(*args, **kwargs)
    finally:
        scope.restore()


@contextlib.contextmanager
def guard(seed: int | None = None, races: bool = True) -> Iterator[Report]:
    """Inside, ``kernel[grid](...)`` interprets the kernel on CPU tensors and checks it.

    Args:
        seed: None runs programs in order; an int shuffles them.
        races: whether accesses of different programs to one element are checked.

    Raises:
        OutOfBounds: an active element is outside of every tensor argument (a view has its own extent).
        Race: the result could depend on the order of the programs.
    """
    state = _State(seed, races)
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(interpreter, "_interpreter", _Watched(interpreter._interpreter, state))
        replace(
            interpreter.InterpreterBuilder, "set_grid_idx", lambda b, x, y, z: state.next_program(b, x, y, z)
        )
        replace(JITFunction, "run", lambda f, *a, **k: state.run(f, *a, **k))
        replace(JITFunction, "__call__", _call_device_function)
        yield state.report
