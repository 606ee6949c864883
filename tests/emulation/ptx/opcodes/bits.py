"""Logic, shifts, bit fields and byte permutations."""

from __future__ import annotations

import numpy as np

from emulation.ptx.opcodes.registry import Form, opcode
from emulation.ptx.types import TYPES

_U32 = TYPES["u32"]
_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@opcode("and or xor", "pred b16 b32 b64")
def logic(form: Form):
    kind, function = form.type, _LOGIC[form.instruction.parts[0]]

    def run(machine, group):
        read = machine.predicate if kind.kind == "pred" else lambda o, g: machine.read(o, kind, g)
        a, b = (read(operand, group) for operand in form.operands[1:])
        machine.write(form.operands[0], function(a, b), kind, group)

    return run


@opcode("not", "pred b16 b32 b64")
def invert(form: Form):
    def run(machine, group):
        machine.write(form.operands[0], ~machine.read(form.operands[1], form.type, group), form.type, group)

    return run


@opcode("lop3", "b32")
def lop3(form: Form):
    def run(machine, group):
        a, b, c, table = (machine.read(operand, _U32, group) for operand in form.operands[1:])
        result = np.zeros_like(a)
        for entry in range(8):
            term = np.where((table >> np.uint32(entry)) & 1 == 1, np.uint32(0xFFFFFFFF), np.uint32(0))
            for value, bit in ((a, 4), (b, 2), (c, 1)):
                term = term & (value if entry & bit else ~value)
            result |= term
        machine.write(form.operands[0], result, _U32, group)

    return run


@opcode("shl", "b16 b32 b64")
def shift_left(form: Form):
    return _shift(form, lambda a, n: a << n)


@opcode("shr", "b16 b32 b64 u16 u32 u64 s16 s32 s64")
def shift_right(form: Form):
    return _shift(form, lambda a, n: a >> n)


def _shift(form: Form, shift):
    kind = form.type

    def run(machine, group):
        value = machine.read(form.operands[1], kind, group)
        amount = machine.read(form.operands[2], _U32, group)
        inside = np.minimum(amount, kind.bits - 1).astype(kind.dtype)
        result = shift(value, inside)
        emptied = np.where(value < 0, -1, 0).astype(kind.dtype) if kind.is_signed else kind.dtype.type(0)
        machine.write(form.operands[0], np.where(amount >= kind.bits, emptied, result), kind, group)

    return run


@opcode("shf", "b32", "l r wrap clamp")
def funnel_shift(form: Form):
    left, wrap = form.one_of("l", "r") == "l", form.one_of("wrap", "clamp") == "wrap"

    def run(machine, group):
        low, high, amount = (
            machine.read(operand, _U32, group).astype(np.uint64) for operand in form.operands[1:]
        )
        amount = amount & np.uint64(31) if wrap else np.minimum(amount, np.uint64(32))
        both = (high << np.uint64(32)) | low
        result = (both << amount) >> np.uint64(32) if left else both >> amount
        machine.write(form.operands[0], result.astype(np.uint32), _U32, group)

    return run


def _field(machine, form: Form, group, first: int):
    """Position and length of a bit field, each one byte."""
    return (
        machine.read(operand, _U32, group).astype(np.int64) & 255
        for operand in form.operands[first : first + 2]
    )


@opcode("bfe", "u32 u64 s32 s64")
def extract_field(form: Form):
    kind = form.type

    def run(machine, group):
        value = machine.read(form.operands[1], kind, group)
        position, length = _field(machine, form, group, 2)
        sign_at = np.minimum(position + length - 1, kind.bits - 1)
        shifted = value >> np.minimum(position, kind.bits - 1).astype(kind.dtype)
        if not kind.is_signed:
            shifted = np.where(position >= kind.bits, kind.dtype.type(0), shifted)
        raw = shifted.view(f"u{kind.bytes}").astype(np.uint64)
        mask = np.where(
            length >= 64, np.uint64(2**64 - 1), (np.uint64(1) << length.clip(0, 63).astype(np.uint64)) - 1
        )
        result = raw & mask
        if kind.is_signed:
            sign = (value >> sign_at.clip(0).astype(kind.dtype)) & kind.dtype.type(1)
            result = np.where((sign != 0) & (length > 0), result | ~mask, result)
        result = np.where(length == 0, 0, result)
        machine.write(form.operands[0], result.astype(f"u{kind.bytes}").view(kind.dtype), kind, group)

    return run


@opcode("bfi", "b32 b64")
def insert_field(form: Form):
    kind = form.type

    def run(machine, group):
        source, base = (
            machine.read(operand, kind, group).astype(np.uint64) for operand in form.operands[1:3]
        )
        position, length = _field(machine, form, group, 3)
        mask = np.where(
            length >= 64, np.uint64(2**64 - 1), (np.uint64(1) << length.clip(0, 63).astype(np.uint64)) - 1
        )
        shift = position.clip(0, 63).astype(np.uint64)
        mask = np.where(position > 63, np.uint64(0), mask << shift)
        result = (base & ~mask) | ((source << shift) & mask)
        machine.write(form.operands[0], result.astype(kind.dtype), kind, group)

    return run


def _per_value(form: Form, function):
    """A bit count: the source has the instruction's type, the result is u32."""
    kind = form.type

    def run(machine, group):
        values = machine.read(form.operands[1], kind, group)
        machine.write(form.operands[0], np.array([function(int(v)) for v in values], np.uint32), _U32, group)

    return run


@opcode("popc", "b32 b64")
def count_ones(form: Form):
    return _per_value(form, int.bit_count)


@opcode("clz", "b32 b64")
def count_leading_zeros(form: Form):
    return _per_value(form, lambda value: form.type.bits - value.bit_length())


@opcode("bfind", "u32 u64 s32 s64", "shiftamt")
def find_leading_one(form: Form):
    """The highest bit that differs from the sign; all ones when there is none."""
    bits, from_top = form.type.bits, form.has("shiftamt")

    def position(value: int) -> int:
        length = (~value if value < 0 else value).bit_length()
        if length == 0:
            return 0xFFFFFFFF
        return bits - length if from_top else length - 1

    return _per_value(form, position)


@opcode("brev", "b32 b64")
def reverse_bits(form: Form):
    kind = form.type

    def run(machine, group):
        values = machine.read(form.operands[1], kind, group)
        result = [int(f"{int(v):0{kind.bits}b}"[::-1], 2) for v in values]
        machine.write(form.operands[0], np.array(result, kind.dtype), kind, group)

    return run


_MODES = {
    "f4e": lambda i, s: s + i,
    "b4e": lambda i, s: (s - i) % 8,
    "rc8": lambda i, s: s,
    "ecl": lambda i, s: np.maximum(s, i),
    "ecr": lambda i, s: np.minimum(s, i),
    "rc16": lambda i, s: 2 * (s & 1) + i % 2,
}


@opcode("prmt", "b32", "f4e b4e rc8 ecl ecr rc16")
def permute(form: Form):
    mode = form.one_of(*_MODES, default="default")

    def run(machine, group):
        a, b, control = (machine.read(operand, _U32, group) for operand in form.operands[1:])
        pool = np.concatenate([np.ascontiguousarray(v)[:, None].view(np.uint8) for v in (a, b)], 1)
        out = np.zeros((len(a), 4), np.uint8)
        for i in range(4):
            if mode == "default":
                selector = (control >> np.uint32(4 * i)).astype(np.int64) & 15
            else:
                limit = 1 if mode == "rc16" else 3
                selector = _MODES[mode](i, control.astype(np.int64) & limit)
            value = np.take_along_axis(pool, (selector & 7)[:, None], 1)[:, 0]
            sign = (value.view(np.int8) >> 7).view(np.uint8)
            out[:, i] = np.where((selector & 8 != 0) & (mode == "default"), sign, value)
        machine.write(form.operands[0], out.view(np.uint32)[:, 0], _U32, group)

    return run
