"""Moves, loads, stores, address conversions and asynchronous copies."""

from __future__ import annotations

import numpy as np

from emulation.ptx.memory import LOCAL_WINDOW, SHARED_WINDOW
from emulation.ptx.opcodes.registry import Form, opcode
from emulation.ptx.parser import Address, Immediate, Name, Vector
from emulation.ptx.state import AsyncCopy, Group
from emulation.ptx.types import RAW, TYPES, Type, decode, encode

_BITS = "b8 b16 b32 b64 b128 u8 u16 u32 u64 s8 s16 s32 s64 f16 bf16 f32 f64"
_CACHE = (
    "ca cg cs lu cv wb wt L1::evict_normal L1::evict_unchanged L1::evict_first L1::evict_last "
    "L1::no_allocate "
    "L2::evict_normal L2::evict_first L2::evict_last L2::cache_hint L2::64B L2::128B L2::256B"
)
_ORDER = "weak volatile relaxed cta cluster gpu sys"
_STRONG = ("volatile", "relaxed", "acquire", "release")
_U32, _U64 = TYPES["u32"], TYPES["u64"]


def _from_bytes(data: np.ndarray, kind: Type) -> np.ndarray:
    """Rows of bytes to values, one column."""
    if kind.bytes == 16:
        return data.view(np.uint64)
    return decode(np.ascontiguousarray(data).view(RAW[kind.bytes])[:, 0], kind)


def _to_bytes(values: np.ndarray, kind: Type) -> np.ndarray:
    bits = np.ascontiguousarray(encode(values, kind))
    return bits.view(np.uint8).reshape(len(bits), kind.bytes)


@opcode("mov", f"pred {_BITS.replace('b8 ', '').replace('u8 ', '').replace('s8 ', '')}")
def move(form: Form):
    kind, (target, source) = form.type, form.operands

    def run(machine, group):
        if isinstance(source, Vector):
            part = TYPES[f"b{kind.bits // len(source.items)}"]
            data = [_to_bytes(machine.read(item, part, group), part) for item in source.items]
            machine.write(target, _from_bytes(np.concatenate(data, 1), kind), kind, group)
        elif isinstance(target, Vector):
            part = TYPES[f"b{kind.bits // len(target.items)}"]
            data = _to_bytes(machine.read(source, kind, group), kind)
            for i, item in enumerate(target.items):
                column = np.ascontiguousarray(data[:, i * part.bytes : (i + 1) * part.bytes])
                machine.write(item, _from_bytes(column, part), part, group)
        else:
            machine.write(target, machine.read(source, kind, group), kind, group)

    return run


def _read_hint(machine, form: Form, group, position: int) -> None:
    """The policy operand of ``.L2::cache_hint`` changes nothing, but must exist."""
    if form.has("L2::cache_hint"):
        machine.read(form.operands[position], _U64, group)


@opcode(
    "ld",
    _BITS,
    f"param param::entry shared shared::cta global local const nc acquire v2 v4 v8 {_ORDER} {_CACHE}",
)
def load(form: Form):
    kind, space = form.type, form.space
    targets = form.items(form.operands[0])
    source = form.operands[1]
    access = "atomic" if form.has(*_STRONG) else "read"
    size = kind.bytes * len(targets)
    if not isinstance(source, Address):
        raise form.unsupported("an operand that is not an address")

    def run(machine, group):
        if space == "param":
            data = _parameter(machine, form, source, size, len(group))
        else:
            where = "global" if space == "const" else space
            data = machine.load(where, machine.address(source, group), size, group, access)
            _read_hint(machine, form, group, 2)
        for i, target in enumerate(targets):
            column = np.ascontiguousarray(data[:, i * kind.bytes : (i + 1) * kind.bytes])
            machine.write(target, _from_bytes(column, kind), kind, group)

    return run


def _parameter(machine, form: Form, source: Address, size: int, count: int) -> np.ndarray:
    if not isinstance(source.base, Name) or source.base.name not in machine.parameters:
        raise form.unsupported("a parameter address in a register")
    data = machine.parameters[source.base.name][source.offset : source.offset + size]
    if len(data) != size:
        raise form.unsupported("a load past the end of a parameter")
    return np.tile(data, (count, 1))


@opcode("st", _BITS, f"shared shared::cta global local release v2 v4 v8 {_ORDER} {_CACHE}")
def store(form: Form):
    kind, space = form.type, form.space
    sources = form.items(form.operands[1])
    access = "atomic" if form.has(*_STRONG) else "write"

    def run(machine, group):
        data = [_to_bytes(machine.read(source, kind, group), kind) for source in sources]
        _read_hint(machine, form, group, 2)
        machine.store(space, machine.address(form.operands[0], group), np.concatenate(data, 1), group, access)

    return run


@opcode("cvta", "u32 u64", "to global shared shared::cta local const")
def convert_address(form: Form):
    """Generic addresses of shared and local memory lie in windows; those of global memory are the same."""
    window = {"shared": SHARED_WINDOW, "local": LOCAL_WINDOW}.get(form.space, 0)
    window = -window if form.has("to") else window
    if window and form.type.bytes == 4:
        raise form.unsupported("32-bit generic addresses")

    def run(machine, group):
        address = machine.read(form.operands[1], form.type, group).astype(np.int64)
        machine.write(form.operands[0], (address + window).astype(form.type.dtype), form.type, group)

    return run


@opcode("isspacep", "", "global shared shared::cta local const")
def is_in_space(form: Form):
    low, high = {"shared": (SHARED_WINDOW, LOCAL_WINDOW), "local": (LOCAL_WINDOW, 1 << 62)}.get(
        form.space, (1, SHARED_WINDOW)
    )

    def run(machine, group):
        address = machine.read(form.operands[1], _U64, group).astype(np.int64)
        machine.write(form.operands[0], (address >= low) & (address < high), TYPES["pred"], group)

    return run


@opcode(
    "createpolicy.fractional", "b64", "L2::evict_first L2::evict_last L2::evict_normal L2::evict_unchanged"
)
def create_policy(form: Form):
    def run(machine, group):
        machine.write(form.operands[0], np.zeros(len(group), np.uint64), _U64, group)

    return run


@opcode("prefetch", "", "global local L1 L2 L2::evict_last L2::evict_normal")
def prefetch(form: Form):
    """A hint: an address outside of every argument is allowed, as on the hardware."""

    def run(machine, group):
        machine.address(form.operands[0], group)

    return run


@opcode("cp.async", "", "shared shared::cta global ca cg L2::64B L2::128B L2::256B L2::cache_hint")
def copy_async(form: Form):
    """Reads global memory now; shared memory holds the bytes, and may be read, only after the wait."""
    target, source, size = form.operands[:3]
    if not isinstance(size, Immediate):
        raise form.unsupported("a size that is not a number")
    width = size.value
    has_hint = form.has("L2::cache_hint")
    partial = form.operands[3] if len(form.operands) > 3 + has_hint else None

    def run(machine, group):
        address = machine.address(target, group)
        data = np.zeros((len(group), width), np.uint8)
        filled = np.full(len(group), width, np.int64)
        if partial is not None:
            filled = machine.read(partial, _U32, group).astype(np.int64)
        origin = machine.address(source, group)
        for amount in np.unique(filled[filled > 0]):
            rows = np.nonzero(filled == amount)[0]
            part = Group(group.threads[rows], machine.total)
            data[rows, :amount] = machine.load("global", origin[rows], int(amount), part)
        for region, _, begin in machine.places("shared", address, width, "asynchronous copy", group):
            region.initialised[region.granules(begin, width)] = False
        threads = group.threads.copy()
        commit = machine.copies_committed[threads]
        machine.copies.append(AsyncCopy(threads, address, data, commit, np.ones(len(threads), bool)))

    return run


@opcode("cp.async.commit_group")
def commit_copies(form: Form):
    def run(machine, group):
        machine.copies_committed[group.threads] += 1

    return run


@opcode("cp.async.wait_group cp.async.wait_all")
def wait_for_copies(form: Form):
    everything = form.instruction.parts[-1] == "wait_all"
    allowed = 0 if everything else form.operands[0].value

    def run(machine, group):
        waits = np.zeros(machine.total, bool)
        waits[group.threads] = True
        for copy in machine.copies:
            committed = machine.copies_committed[copy.threads]
            ended = copy.waiting & waits[copy.threads] & (everything | (copy.group < committed - allowed))
            rows = np.nonzero(ended)[0]
            if len(rows):
                part = Group(copy.threads[rows], machine.total)
                machine.store("shared", copy.address[rows], copy.data[rows], part)
                copy.waiting[rows] = False
        machine.copies = [copy for copy in machine.copies if copy.waiting.any()]

    return run
