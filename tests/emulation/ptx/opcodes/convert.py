"""``cvt``: between integers, between floats, and across, in every rounding that compilers use."""

from __future__ import annotations

import numpy as np

from emulation.ptx import numerics
from emulation.ptx.opcodes.registry import Form, opcode
from emulation.ptx.types import TYPES, Type

_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_INTEGERS = "u8 s8 u16 s16 u32 s32 u64 s64"


def _float_to_integer(values: np.ndarray, source: Type, target: Type, mode: str) -> np.ndarray:
    """Out of range becomes the nearest end; NaN is 0, or the top bit when a side has 64 bits."""
    values = _TO_INTEGER[mode](values.astype(np.float64))
    limits = np.iinfo(target.dtype)
    low, high = values <= float(limits.min), values >= float(limits.max)
    middle = np.where(low | high | np.isnan(values), 0, values).astype(target.dtype)
    result = np.where(low, limits.min, np.where(high, limits.max, middle)).astype(target.dtype)
    top = source.name == "f64" or target.bytes == 8
    nan = np.array(1 << (target.bits - 1) if top else 0, f"u{target.bytes}").view(target.dtype)
    return np.where(np.isnan(values), nan, result).astype(target.dtype)


def _integer_to_integer(values: np.ndarray, target: Type, saturate: bool) -> np.ndarray:
    if saturate:
        limits = np.iinfo(target.dtype)
        clipped = [min(max(int(v), limits.min), limits.max) for v in values]
        return np.array(clipped, target.dtype)
    return values.astype(target.dtype)


def _integer_to_float(values: np.ndarray, target: Type, mode: str) -> np.ndarray:
    if target.name == "f64":
        return values.astype(np.float64)
    high = (values >> np.array(32, values.dtype)) if values.dtype.itemsize == 8 else np.zeros_like(values)
    low = values - (high << np.array(32, values.dtype)) if values.dtype.itemsize == 8 else values
    exact = numerics.two_sum(high.astype(np.float64) * 2.0**32, low.astype(np.float64))
    return numerics.round_to(*exact, target, mode)


def _float_to_float(form: Form, values: np.ndarray, target: Type, flush: bool) -> np.ndarray:
    if flush and values.dtype == np.float32:
        values = numerics.flush(values)
    if target.name == "tf32":
        form.one_of("rna")
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounded = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
        return np.where(np.isfinite(values), rounded, values)
    to_integer = form.one_of(*_TO_INTEGER, default="none")
    values = values.astype(np.float64)
    if to_integer != "none":
        values = _TO_INTEGER[to_integer](values)
    result = numerics.round_to(values, 0.0, target, form.one_of("rn", "rz", "rm", "rp", default="rn"))
    if flush and target.name == "f32":
        result = numerics.flush(result)
    if form.has("relu"):
        result = np.where(np.isnan(result) | (result > 0), result, result.dtype.type(0))
    return numerics.saturate(result) if form.has("sat") else result


@opcode(
    "cvt",
    f"{_INTEGERS} f16 bf16 f32 f64 tf32 f16x2 bf16x2",
    "rn rz rm rp rna rni rzi rmi rpi ftz sat relu",
)
def convert(form: Form):
    if len(form.types) != 2:
        raise form.unsupported("cvt wants two types")
    target, source = form.types
    flush = form.has("ftz")
    if target.name == "f64" and source.bytes == 8 and form.has("rz", "rm", "rp"):
        raise form.unsupported("directed rounding to f64")
    if source.is_float and not target.is_float:
        mode = form.one_of(*_TO_INTEGER)
    elif not source.is_float and target.is_float:
        mode = form.one_of("rn", "rz", "rm", "rp")
    else:
        mode = ""

    def one(values: np.ndarray, kind: Type) -> np.ndarray:
        if source.is_float and kind.is_float:
            return _float_to_float(form, values, kind, flush)
        if source.is_float:
            return _float_to_integer(numerics.flush(values) if flush else values, source, kind, mode)
        if kind.is_float:
            result = _integer_to_float(values, kind, mode)
            return numerics.saturate(result) if form.has("sat") else result
        return _integer_to_integer(values, kind, form.has("sat"))

    def run(machine, group):
        if target.element:
            # The first source becomes the upper half.
            half = TYPES[target.element]
            upper, lower = (one(machine.read(operand, source, group), half) for operand in form.operands[1:3])
            machine.write(form.operands[0], np.stack([lower, upper], 1), target, group)
        else:
            machine.write(
                form.operands[0], one(machine.read(form.operands[1], source, group), target), target, group
            )

    return run
