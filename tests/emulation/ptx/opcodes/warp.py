"""Instructions of a whole warp: shuffles, votes, matches, reductions, matrix fragments."""

from __future__ import annotations

import numpy as np

from emulation.ptx import numerics
from emulation.ptx.errors import DivergentBarrier
from emulation.ptx.opcodes.control import go_on
from emulation.ptx.opcodes.registry import Form, opcode
from emulation.ptx.parser import Pair
from emulation.ptx.state import AT_WARP_SYNC, EXITED, RUNNING, WARP, Group
from emulation.ptx.types import TYPES

_U32, _S32, _PRED = TYPES["u32"], TYPES["s32"], TYPES["pred"]
_ALL = np.uint64(0xFFFFFFFF)


def _lanes(machine, threads: np.ndarray) -> np.ndarray:
    """For each warp of the batch, the set of lanes among these threads."""
    sets = np.zeros(len(machine.warp_syncs), np.uint64)
    np.bitwise_or.at(
        sets, machine.local_warp[threads], np.uint64(1) << machine.lane[threads].astype(np.uint64)
    )
    return sets


def cooperative(form: Form, mask_operand, work):
    """Threads wait until all lanes of their mask have come; then ``work(machine, group, masks)``."""

    def run(machine, active, group):
        go_on(machine, group, active)
        if not len(active):
            return
        threads = active.threads
        warps = machine.local_warp[threads]
        masks = np.full(len(threads), _ALL)
        if mask_operand is not None:
            masks = machine.read(mask_operand, _U32, active).astype(np.uint64)
        if ((masks >> machine.lane[threads].astype(np.uint64)) & np.uint64(1) == 0).any():
            raise DivergentBarrier(f"a thread is not in its own member mask; {machine.where(threads[0])}")
        existing = _lanes(machine, np.arange(machine.total))[warps]
        gone = _lanes(machine, np.nonzero(machine.status == EXITED)[0])[warps]
        if (masks & gone != 0).any():
            thread = threads[masks & gone != 0][0]
            raise DivergentBarrier(f"the member mask names lanes that have exited; {machine.where(thread)}")
        here = _lanes(machine, threads)[warps]
        complete = (masks & existing & ~here) == 0
        machine.status[threads] = np.where(complete, RUNNING, AT_WARP_SYNC)
        ready = Group(threads[complete], machine.total)
        if len(ready):
            work(machine, ready, (masks & existing)[complete])
            machine.counter[ready.threads] += 1

    return run


def _positions(machine, group: Group) -> np.ndarray:
    where = np.full(machine.total + WARP, -1, np.int64)
    where[group.threads] = np.arange(len(group))
    return where


@opcode("shfl.sync", "b32", "up down bfly idx", moves=True)
def shuffle(form: Form):
    mode = form.one_of("up", "down", "bfly", "idx")
    target, source, distance, clamp, mask = form.operands

    def work(machine, group, masks):
        value = machine.read(source, _U32, group)
        step = machine.read(distance, _U32, group).astype(np.int64) & 31
        control = machine.read(clamp, _U32, group).astype(np.int64)
        lane = group.of(machine.lane)
        segment = (control >> 8) & 31
        last = (lane & segment) | (control & 31 & ~segment)
        lanes = {
            "up": lane - step,
            "down": lane + step,
            "bfly": lane ^ step,
            "idx": (lane & segment) | (step & ~segment),
        }[mode]
        inside = lanes >= last if mode == "up" else lanes <= last
        lanes = np.where(inside, lanes, lane)
        place = _positions(machine, group)[group.threads - lane + lanes]
        member = (masks >> lanes.astype(np.uint64)) & np.uint64(1) == 1
        if ((place < 0) | ~member).any():
            thread = group.threads[(place < 0) | ~member][0]
            raise DivergentBarrier(f"a shuffle from a lane that does not take part; {machine.where(thread)}")
        result, flag = (target.first, target.second) if isinstance(target, Pair) else (target, None)
        machine.write(result, value[place], _U32, group)
        if flag is not None:
            machine.write(flag, inside, _PRED, group)

    return cooperative(form, mask, work)


@opcode("vote.sync", "pred b32", "all any uni ballot", moves=True)
def vote(form: Form):
    mode = form.one_of("all", "any", "uni", "ballot")
    target, source, mask = form.operands

    def work(machine, group, masks):
        values = machine.predicate(source, group)
        ayes = _lanes(machine, group.threads[values])[machine.local_warp[group.threads]] & masks
        if mode == "ballot":
            machine.write(target, ayes.astype(np.uint32), _U32, group)
            return
        result = {"all": ayes == masks, "any": ayes != 0, "uni": (ayes == masks) | (ayes == 0)}[mode]
        machine.write(target, result, _PRED, group)

    return cooperative(form, mask, work)


@opcode("match.any.sync match.all.sync", "b32 b64", moves=True)
def match(form: Form):
    """Which lanes hold the same value; ``all``: the mask if every lane does, else 0."""
    every, kind = form.instruction.parts[1] == "all", form.type
    target, source, mask = form.operands

    def work(machine, group, masks):
        values = machine.read(source, kind, group)
        warps = machine.local_warp[group.threads]
        _, same = np.unique(
            np.stack([warps.astype(np.uint64), values.astype(np.uint64)]), axis=1, return_inverse=True
        )
        sets = np.zeros(same.max() + 1, np.uint64)
        np.bitwise_or.at(
            sets, same.reshape(-1), np.uint64(1) << machine.lane[group.threads].astype(np.uint64)
        )
        equal = sets[same.reshape(-1)] & masks
        agree = equal == masks
        result = np.where(agree, masks, 0) if every else equal
        first = target.first if isinstance(target, Pair) else target
        machine.write(first, result.astype(np.uint32), _U32, group)
        if isinstance(target, Pair):
            machine.write(target.second, agree, _PRED, group)

    return cooperative(form, mask, work)


@opcode("redux.sync", "u32 s32 b32 f32", "add min max and or xor abs NaN", moves=True)
def reduce_warp(form: Form):
    kind = form.type
    operation = form.one_of("add", "min", "max", "and", "or", "xor")
    target, source, mask = form.operands
    combine = {
        "add": np.add,
        "min": lambda a, b: numerics.extremum(a, b, False, form.has("NaN")),
        "max": lambda a, b: numerics.extremum(a, b, True, form.has("NaN")),
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[operation]

    def work(machine, group, masks):
        values = machine.read(source, kind, group)
        values = np.abs(values) if form.has("abs") else values
        _, sets = np.unique(
            np.stack([machine.local_warp[group.threads].astype(np.uint64), masks]),
            axis=1,
            return_inverse=True,
        )
        sets = sets.reshape(-1)
        result = np.empty_like(values)
        for number in range(sets.max() + 1):
            members = np.nonzero(sets == number)[0]
            total = values[members[:1]]
            for member in members[1:]:
                total = combine(total, values[member : member + 1])
            result[members] = total
        machine.write(target, result, kind, group)

    return cooperative(form, mask, work)


@opcode("elect.sync", moves=True)
def elect(form: Form):
    """The lowest lane of the mask is the leader."""
    target, mask = form.operands

    def work(machine, group, masks):
        lowest = np.array([(int(m) & -int(m)).bit_length() - 1 for m in masks], np.uint32)
        machine.write(target.first, lowest, _U32, group)
        machine.write(target.second, group.of(machine.lane) == lowest, _PRED, group)

    return cooperative(form, mask, work)


@opcode("bar.warp.sync", moves=True)
def warp_barrier(form: Form):
    """The only warp instruction that orders memory accesses."""

    def work(machine, group, masks):
        machine.warp_syncs[np.unique(machine.local_warp[group.threads])] += 1

    return cooperative(form, form.operands[0], work)


@opcode("activemask", "b32")
def active_mask(form: Form):
    def run(machine, group):
        sets = _lanes(machine, group.threads)[machine.local_warp[group.threads]]
        machine.write(form.operands[0], sets.astype(np.uint32), _U32, group)

    return run


def _fragments(lane: np.ndarray, transposed: bool):
    """Row, column and half of the register for the two elements of an 8 x 8 matrix that a lane holds."""
    for half in (0, 1):
        across, along = lane // 4, lane % 4 * 2 + half
        yield (along, across, half) if transposed else (across, along, half)


@opcode("ldmatrix.sync stmatrix.sync", "b16", "aligned m8n8 x1 x2 x4 trans shared shared::cta", moves=True)
def matrix(form: Form):
    """8 x 8 matrices of 16-bit elements; lane 8i + r gives the address of row r of matrix i."""
    count = int(form.one_of("x1", "x2", "x4")[1])
    loads = form.instruction.parts[0] == "ldmatrix"
    registers, address = form.operands if loads else form.operands[::-1]
    registers = form.items(registers)
    if len(registers) != count:
        raise form.unsupported(f"{len(registers)} registers for x{count}")

    def work(machine, group, masks):
        lane = group.of(machine.lane)
        rows = machine.address(address, group)
        place = _positions(machine, group)
        first = group.threads - lane
        for i, register in enumerate(registers):
            value = np.zeros(len(group), np.uint32) if loads else machine.read(register, _U32, group)
            for row, column, half in _fragments(lane, form.has("trans")):
                where = rows[place[first + 8 * i + row]] + 2 * column
                shift = np.uint32(16 * half)
                if loads:
                    data = machine.load("shared", where, 2, group).view(np.uint16)[:, 0]
                    value |= data.astype(np.uint32) << shift
                else:
                    data = ((value >> shift) & np.uint32(0xFFFF)).astype(np.uint16)
                    machine.store("shared", where, data[:, None].view(np.uint8), group)
            if loads:
                machine.write(register, value, _U32, group)

    return cooperative(form, None, work)
