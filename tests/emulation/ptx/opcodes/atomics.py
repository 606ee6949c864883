"""``atom`` and ``red``: one thread after the other, in the order of the threads (shuffled with a seed)."""

from __future__ import annotations

import numpy as np

from emulation.ptx import numerics
from emulation.ptx.opcodes.registry import Form, opcode
from emulation.ptx.types import RAW, Type, decode, encode

_TYPES = "b16 b32 b64 u32 u64 s32 s64 f16 bf16 f32 f64 f16x2 bf16x2"
_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
_OPERATIONS = (*_REDUCTIONS, "exch", "cas")
_WHERE = (
    "global shared shared::cta relaxed acquire release acq_rel cta cluster gpu sys noftz v2 v4 L2::cache_hint"
)


def _apply(operation: str, old: np.ndarray, value: np.ndarray, swap: np.ndarray, kind: Type) -> np.ndarray:
    if operation == "add":
        return numerics.add(old, value, kind) if kind.is_float else old + value
    if operation in ("min", "max"):
        return numerics.extremum(old, value, operation == "max", False)
    if operation == "inc":
        return np.where(old >= value, 0, old + kind.dtype.type(1)).astype(kind.dtype)
    if operation == "dec":
        return np.where((old == 0) | (old > value), value, old - kind.dtype.type(1)).astype(kind.dtype)
    if operation == "exch":
        return value
    if operation == "cas":
        return np.where(old == value, swap, old)
    return {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[operation](old, value)


@opcode("atom", _TYPES, f"{' '.join(_OPERATIONS)} {_WHERE}")
@opcode("red", _TYPES, f"{' '.join(_REDUCTIONS)} {_WHERE}")
def atomic(form: Form):
    kind, space = form.type, form.space
    operation = form.one_of(*_OPERATIONS)
    returns = form.instruction.parts[0] == "atom"
    operands = form.operands if returns else (None, *form.operands)
    values = form.items(operands[2])

    def run(machine, group):
        order = np.arange(len(group)) if machine.random is None else machine.random.permutation(len(group))
        address = machine.address(operands[1], group)
        size = kind.bytes * len(values)
        old = [np.zeros(len(group), RAW[kind.bytes]) for _ in values]
        new = [encode(machine.read(value, kind, group), kind) for value in values]
        swap = encode(machine.read(operands[3], kind, group), kind) if operation == "cas" else new[0]
        for region, rows, begin in machine.places(space, address, size, "atomic", group):
            granules = region.granules(begin, size)
            if not region.initialised[granules].all():
                raise machine.uninitialised(f"{space} memory", group.threads[rows[0]])
            machine.track(region, granules, "atomic", group.threads[rows])
            first_byte = np.full(len(group), -1, np.int64)
            first_byte[rows] = begin
            turn = order[first_byte[order] >= 0]
            while len(turn):
                # Those that come first at their address; the others wait for the next round.
                _, leaders = np.unique(first_byte[turn], return_index=True)
                now = turn[leaders]
                for i in range(len(values)):
                    at = first_byte[now][:, None] + i * kind.bytes + np.arange(kind.bytes)
                    before = region.data[at].view(RAW[kind.bytes])[:, 0]
                    arguments = (decode(v, kind) for v in (before, new[i][now], swap[now]))
                    after = encode(_apply(operation, *arguments, kind), kind)
                    region.data[at] = after[:, None].view(np.uint8)
                    old[i][now] = before
                turn = np.delete(turn, leaders)
        if returns:
            for target, bits in zip(form.items(operands[0]), old, strict=True):
                machine.write(target, decode(bits, kind), kind, group)

    return run
