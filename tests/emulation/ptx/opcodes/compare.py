"""Comparisons, predicates and selections."""

from __future__ import annotations

import numpy as np

from emulation.ptx import numerics
from emulation.ptx.opcodes.registry import Form, opcode
from emulation.ptx.parser import Pair
from emulation.ptx.types import TYPES

_PRED = TYPES["pred"]
_COMPARISONS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_UNORDERED = {f"{name}u": name for name in _COMPARISONS}
_NAMES = " ".join([*_COMPARISONS, *_UNSIGNED, *_UNORDERED, "num", "nan"])
_TYPES = "b16 b32 b64 u16 u32 u64 s16 s32 s64 f16 bf16 f32 f64 f16x2 bf16x2"
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _compare(form: Form, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    name = form.one_of(*_NAMES.split())
    if form.has("ftz"):
        a, b = numerics.flush(a), numerics.flush(b)
    if a.dtype.kind != "f":
        return _COMPARISONS[_UNSIGNED.get(name, name)](a, b)
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        return unordered if name == "nan" else ~unordered
    if name in _UNORDERED:
        return _COMPARISONS[_UNORDERED[name]](a, b) | unordered
    return _COMPARISONS[name](a, b) & ~unordered


@opcode("setp", _TYPES, f"{_NAMES} ftz and or xor")
def set_predicate(form: Form):
    """``setp.cmp.bool p|q, a, b, c``: p is ``(a cmp b) bool c``, q is ``!(a cmp b) bool c``; packed: one for
    each half.
    """
    kind, target = form.type, form.operands[0]

    def run(machine, group):
        value = _compare(form, *(machine.read(operand, kind, group) for operand in form.operands[1:3]))
        results = [value[:, 0], value[:, 1]] if kind.element else [value, ~value]
        if len(form.operands) == 4:
            other = machine.predicate(form.operands[3], group)
            results = [_COMBINE[form.one_of(*_COMBINE)](result, other) for result in results]
        targets = (target.first, target.second) if isinstance(target, Pair) else (target,)
        for place, result in zip(targets, results, strict=False):
            machine.write(place, result, _PRED, group)

    return run


@opcode("set", _TYPES, f"{_NAMES} ftz")
def set_value(form: Form):
    """All ones, or 1.0 for a float destination, where the comparison holds."""
    if len(form.types) != 2:
        raise form.unsupported("set with one type")
    target, kind = form.types

    def run(machine, group):
        value = _compare(form, *(machine.read(operand, kind, group) for operand in form.operands[1:3]))
        true = target.dtype.type(1) if target.is_float else ~target.dtype.type(0)
        machine.write(form.operands[0], np.where(value, true, target.dtype.type(0)), target, group)

    return run


@opcode("selp", "b16 b32 b64 u16 u32 u64 s16 s32 s64 f32 f64")
def select(form: Form):
    kind = form.type

    def run(machine, group):
        a, b = (machine.read(operand, kind, group) for operand in form.operands[1:3])
        machine.write(
            form.operands[0], np.where(machine.predicate(form.operands[3], group), a, b), kind, group
        )

    return run


@opcode("slct", "b32 u32 s32 f32", "ftz")
def select_by_sign(form: Form):
    if len(form.types) != 2:
        raise form.unsupported("slct with one type")
    kind, by = form.types

    def run(machine, group):
        a, b = (machine.read(operand, kind, group) for operand in form.operands[1:3])
        sign = machine.read(form.operands[3], by, group)
        sign = numerics.flush(sign) if form.has("ftz") else sign
        machine.write(form.operands[0], np.where(sign >= 0, a, b), kind, group)

    return run


_TESTS = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).tiny),
    "subnormal": lambda x: (x != 0) & (np.abs(x) < np.finfo(x.dtype).tiny),
}


@opcode("testp", "f32 f64", " ".join(_TESTS))
def test_property(form: Form):
    test = _TESTS[form.one_of(*_TESTS)]

    def run(machine, group):
        values = machine.read(form.operands[1], form.type, group)
        machine.write(form.operands[0], test(values), _PRED, group)

    return run
