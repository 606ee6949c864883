"""Integer and floating-point arithmetic."""

from __future__ import annotations

import numpy as np

from emulation.ptx import numerics
from emulation.ptx.opcodes.registry import Form, opcode
from emulation.ptx.types import TYPES, Type

_INTEGERS = "u16 s16 u32 s32 u64 s64"
_FLOATS = "f16 bf16 f32 f64 f16x2 bf16x2"
_ROUNDINGS = "rn rz rm rp"
_MODES = ("rn", "rz", "rm", "rp")


def _wide(kind: Type) -> Type:
    return TYPES[f"{kind.kind}{2 * kind.bits}"]


def _rounding(form: Form) -> str:
    mode = form.one_of(*_MODES, default="rn")
    if form.types[0].name == "f64" and mode != "rn":
        raise form.unsupported(f"rounding {mode} of f64")
    return mode


def _mul_high(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits = 8 * a.dtype.itemsize
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)
    exact = [(int(x) * int(y)) >> 64 for x, y in zip(a, b, strict=True)]
    return np.array([value % (1 << 64) for value in exact], np.uint64).view(a.dtype)


def _prepare(form: Form, count: int, compute, narrow: int = 0):
    """An instruction ``d, a, b, …`` of one type, with .ftz and .sat around the computation.

    The first ``narrow`` sources have the second type of the instruction and are widened.
    """
    kind, operands = form.types[0] if narrow else form.type, form.operands
    if len(operands) != count + 1:
        raise form.unsupported(f"{len(operands)} operands")
    kinds = [*form.types[1:2] * narrow, *[kind] * (count - narrow)]
    ftz, sat, relu = form.has("ftz"), form.has("sat"), form.has("relu")
    if sat and not kind.is_float:
        raise form.unsupported("saturating integers")

    def run(machine, group):
        sources = zip(operands[1:], kinds, strict=True)
        values = [machine.read(operand, source, group).astype(kind.dtype) for operand, source in sources]
        if ftz:
            values = [numerics.flush(value) for value in values]
        result = compute(*values)
        if sat:
            result = numerics.saturate(result)
        if relu:
            result = np.where(result > 0, result, np.where(np.isnan(result), result, 0)).astype(result.dtype)
        if ftz:
            result = numerics.flush(result)
        machine.write(operands[0], result, kind, group)

    return run


def _narrow_sources(form: Form, count: int) -> int:
    """How many sources of ``add.f32.f16`` and its like are narrower than the result."""
    if len(form.types) == 1:
        return 0
    names = [kind.name for kind in form.types]
    if names not in (["f32", "f16"], ["f32", "bf16"]) or form.has("ftz"):
        raise form.unsupported(f"types {names}")
    return count


@opcode("add sub", f"{_INTEGERS} {_FLOATS} f32x2 u16x2 s16x2", f"{_ROUNDINGS} ftz sat")
def add(form: Form):
    narrow = _narrow_sources(form, 1)
    kind = form.types[0]
    subtract = form.instruction.parts[0] == "sub"
    if not kind.is_float:
        return _prepare(form, 2, np.subtract if subtract else np.add)
    mode = _rounding(form)
    return _prepare(form, 2, lambda a, b: numerics.add(a, -b if subtract else b, kind, mode), narrow)


@opcode("mul", f"{_INTEGERS} {_FLOATS} f32x2", f"{_ROUNDINGS} ftz sat lo hi wide")
def mul(form: Form):
    kind = form.type
    if kind.is_float:
        mode = _rounding(form)
        return _prepare(form, 2, lambda a, b: numerics.multiply(a, b, kind, mode))
    part = form.one_of("lo", "hi", "wide")
    if part == "lo":
        return _prepare(form, 2, np.multiply)
    if part == "hi":
        return _prepare(form, 2, _mul_high)
    return _multiply_wide(form)


def _multiply_wide(form: Form):
    kind, target = form.type, _wide(form.type)

    def run(machine, group):
        a, b = (machine.read(operand, kind, group).astype(target.dtype) for operand in form.operands[1:3])
        result = a * b
        if len(form.operands) == 4:
            result = result + machine.read(form.operands[3], target, group)
        machine.write(form.operands[0], result, target, group)

    return run


@opcode("mad", f"{_INTEGERS} f32 f64", f"{_ROUNDINGS} ftz sat lo hi wide")
def mad(form: Form):
    if form.type.is_float:
        return fma(form)
    part = form.one_of("lo", "hi", "wide")
    if part == "wide":
        return _multiply_wide(form)
    return _prepare(form, 3, lambda a, b, c: (_mul_high(a, b) if part == "hi" else a * b) + c)


@opcode("fma", f"{_FLOATS} f32x2", f"{_ROUNDINGS} ftz sat relu")
def fma(form: Form):
    narrow = _narrow_sources(form, 2)
    kind, mode = form.types[0], _rounding(form)
    flat = kind if not kind.element else TYPES[kind.element]

    def compute(a, b, c):
        return numerics.fma(a.reshape(-1), b.reshape(-1), c.reshape(-1), flat, mode).reshape(a.shape)

    return _prepare(form, 3, compute, narrow)


@opcode("div", f"{_INTEGERS} f32 f64", "rn ftz approx full")
def div(form: Form):
    if not form.type.is_float:
        return _prepare(form, 2, lambda a, b: _divide_integers(a, b)[0])
    form.one_of("rn", "approx", "full")
    return _prepare(form, 2, np.divide)


@opcode("rem", _INTEGERS)
def rem(form: Form):
    return _prepare(form, 2, lambda a, b: _divide_integers(a, b)[1])


def _divide_integers(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Towards zero, as C does; a division by zero gives all ones, as the hardware does."""
    safe = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // safe
    rest = a - quotient * safe
    if a.dtype.kind == "i":
        fix = (rest != 0) & ((a < 0) != (safe < 0))
        quotient = quotient + fix
        rest = a - quotient * safe
    ones = np.zeros_like(a) - a.dtype.type(1) if a.dtype.kind == "i" else ~np.zeros_like(a)
    return np.where(b == 0, ones, quotient).astype(a.dtype), np.where(b == 0, a, rest).astype(a.dtype)


@opcode("neg abs", f"s16 s32 s64 {_FLOATS}", "ftz")
def sign(form: Form):
    return _prepare(form, 1, {"neg": np.negative, "abs": np.abs}[form.instruction.parts[0]])


@opcode("min max", f"{_INTEGERS} {_FLOATS} u16x2 s16x2", "ftz NaN relu")
def extremum(form: Form):
    largest, nan = form.instruction.parts[0] == "max", form.has("NaN")

    def compute(*values):
        result = values[0]
        for value in values[1:]:
            result = numerics.extremum(result, value, largest, nan)
        return result

    return _prepare(form, len(form.operands) - 1, compute)


@opcode("copysign", "f32 f64")
def copysign(form: Form):
    return _prepare(form, 2, lambda a, b: np.copysign(b, a))


_FUNCTIONS = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
    "tanh": np.tanh,
}


def _function(form: Form):
    kind, function = form.type, _FUNCTIONS[form.instruction.parts[0]]
    coarse = kind.name == "f64" and form.has("approx") and form.has("ftz")

    def compute(x):
        if kind.name == "f64":
            result = function(x)
            # Only the upper half of the result is defined; what follows are Newton steps.
            return (
                (result.view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
                if coarse
                else result
            )
        return numerics.round_to(function(x.astype(np.float64)), 0.0, kind)

    return _prepare(form, 1, compute)


@opcode("ex2", "f32 f16 f16x2 bf16 bf16x2", "approx ftz")
def ex2(form: Form):
    return _function(form)


@opcode("tanh", "f32 f16 f16x2 bf16 bf16x2", "approx")
def tanh(form: Form):
    return _function(form)


@opcode("lg2 sin cos", "f32", "approx ftz")
def approximate(form: Form):
    return _function(form)


@opcode("rcp sqrt", "f32 f64", "approx rn ftz")
def reciprocal(form: Form):
    form.one_of("approx", "rn")
    return _function(form)


@opcode("rsqrt", "f32 f64", "approx ftz")
def reciprocal_root(form: Form):
    return _function(form)
