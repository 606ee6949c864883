"""Compiles Triton kernels for an NVIDIA GPU when they are launched, and executes the PTX."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

from dcgnn_kernels.triton import inspect
from emulation import ptx

_POINTERS = {
    torch.bool: "*i1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
}
_CACHE: dict[tuple[Any, ...], tuple[inspect.Compiled, ptx.Kernel]] = {}


class Launches(list[ptx.Result]):
    """The results of the launches, in order; ``compiled`` holds what was compiled for each."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[inspect.Compiled] = []

    @property
    def launches(self) -> list[ptx.Result]:
        return list(self)


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _POINTERS[value.dtype]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"a kernel argument of type {type(value).__name__}")


def _divisible(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # The machine keeps a tensor's place in its allocation and aligns allocations.
        offset = value.data_ptr() - value.untyped_storage().data_ptr()
        return offset % 16 == 0
    return isinstance(value, int) and not isinstance(value, bool) and value % 16 == 0


def specialise(
    kernel: JITFunction, values: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any], tuple[str, ...]]:
    """Signature, constants and multiples of 16 as Triton derives them from the arguments of a launch."""
    signature, constants, divisible = {}, {}, []
    for parameter in kernel.params:
        value = values[parameter.name]
        free = not parameter.do_not_specialize
        one = free and isinstance(value, int) and not isinstance(value, bool) and value == 1
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        annotated = parameter.annotation_type
        signature[parameter.name] = annotated or _type(value)
        aligned = free and not (isinstance(value, torch.Tensor) and parameter.do_not_specialize_on_alignment)
        if aligned and _divisible(value):
            divisible.append(parameter.name)
    return signature, constants, tuple(divisible)


def _prepare(kernel: JITFunction, values: dict[str, Any], target: str, options: dict[str, Any]):
    signature, constants, divisible = specialise(kernel, values)
    key = (
        kernel.fn,
        target,
        *(tuple(sorted(map(str, part.items()))) for part in (signature, constants, options)),
        divisible,
    )
    if key not in _CACHE:
        compiled = inspect.compile_for(
            kernel, signature, constants, target, divisible_by_16=divisible, **options
        )
        _CACHE[key] = compiled, ptx.parse(compiled.ptx).kernel(compiled.entry)
    given = [(name, values[name]) for name in signature if name not in constants]
    return *_CACHE[key], given


@contextlib.contextmanager
def emulate(
    arch: int | str = 80, undefined: str | int = 0, lane_conflicts: str = "any", **checks: Any
) -> Iterator[Launches]:
    """Inside, ``kernel[grid](...)`` compiles for ``sm_<arch>`` and runs the PTX on the CPU tensors given.

    ``undefined``, ``lane_conflicts`` and the other ``checks`` (seed, races, batch) are those of
    :func:`emulation.ptx.launch`, but lenient by default where Triton's own code is loose: it shuffles
    registers of lanes that it never uses, lets warps store the same value to one place, and lets all lanes of
    a warp store a reduced value that, with fused multiply-adds, differs between them in the last bit.
    """
    target = arch if isinstance(arch, str) else f"sm_{arch}"
    launches = Launches()

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        if warmup:
            return
        values = dict(zip(kernel.arg_names, args, strict=False))
        values |= {name: kwargs.pop(name) for name in kernel.arg_names if name in kwargs}
        defaults = {p.name: p.default for p in kernel.params if p.has_default}
        values = {**defaults, **values}
        sizes = grid(values) if callable(grid) else grid
        compiled, entry, given = _prepare(kernel, values, target, kwargs)
        result = ptx.launch(
            entry,
            sizes,
            32 * compiled.num_warps,
            [value for _, value in given],
            shared_bytes=compiled.shared_bytes,
            names=[name for name, _ in given],
            undefined=undefined,
            lane_conflicts=lane_conflicts,
            **checks,
        )
        launches.append(result)
        launches.compiled.append(compiled)

    with mock.patch.object(JITFunction, "run", run):
        yield launches
