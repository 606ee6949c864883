"""Branches, exits, block barriers and fences."""

from __future__ import annotations

import numpy as np

from emulation.ptx.errors import Trap
from emulation.ptx.opcodes.registry import Form, opcode
from emulation.ptx.parser import Name
from emulation.ptx.state import AT_BARRIER, Group
from emulation.ptx.types import TYPES

_U32 = TYPES["u32"]


def go_on(machine, group: Group, active: Group) -> None:
    """Threads of the group whose guard is false pass the instruction."""
    if len(active) < len(group):
        rest = np.setdiff1d(group.threads, active.threads, assume_unique=True)
        machine.counter[rest] += 1


@opcode("bra", "", "uni", moves=True)
def branch(form: Form):
    (target,) = form.operands
    if not isinstance(target, Name):
        raise form.unsupported("a branch to a register")

    def run(machine, active, group):
        go_on(machine, group, active)
        machine.counter[active.threads] = machine.kernel.labels[target.name]

    return run


@opcode("brx.idx", "", "uni", moves=True)
def branch_by_index(form: Form):
    index, table = form.operands

    def run(machine, active, group):
        go_on(machine, group, active)
        places = np.array([machine.kernel.labels[name] for name in machine.kernel.tables[table.name]])
        if len(active):
            machine.counter[active.threads] = places[machine.read(index, _U32, active)]

    return run


@opcode("ret exit", "", "uni", moves=True)
def leave(form: Form):
    def run(machine, active, group):
        go_on(machine, group, active)
        machine.exit(active.threads)

    return run


@opcode("trap")
def trap(form: Form):
    def run(machine, group):
        raise Trap(machine.where(group.threads[0]))

    return run


def _wait(machine, form: Form, active: Group, barrier, count) -> None:
    machine.barrier[active.threads] = machine.read(barrier, _U32, active)
    if count is not None and (machine.read(count, _U32, active) != machine.block_threads).any():
        raise form.unsupported("a barrier for a part of the block")
    machine.status[active.threads] = AT_BARRIER


@opcode("bar.sync bar.cta.sync barrier.sync barrier.cta.sync", "", "aligned", moves=True)
def barrier(form: Form):
    def run(machine, active, group):
        go_on(machine, group, active)
        if len(active):
            _wait(
                machine, form, active, form.operands[0], form.operands[1] if len(form.operands) > 1 else None
            )

    return run


@opcode("bar.red bar.cta.red barrier.red barrier.cta.red", "u32 pred", "popc and or aligned", moves=True)
def barrier_reduction(form: Form):
    """Every thread gets the number of true predicates of the block, or whether all or any are."""
    kind, operation = form.type, form.one_of("popc", "and", "or")
    target, name, vote = form.operands[0], form.operands[1], form.operands[-1]

    def run(machine, active, group):
        go_on(machine, group, active)
        if len(active):
            machine.votes[active.threads] = machine.predicate(vote, active)
            _wait(machine, form, active, name, form.operands[2] if len(form.operands) == 4 else None)

    def on_release(machine, members, here):
        votes = machine.votes[members]
        value = {"popc": votes.sum(), "and": votes.all(), "or": votes.any()}[operation]
        values = np.full(len(here), value, kind.dtype)
        machine.write(target, values, kind, Group(here, machine.total))

    form.on_release = on_release
    return run


@opcode("membar", "", "cta gl gpu sys")
@opcode("fence", "", "sc acq_rel acquire release cta cluster gpu sys proxy async shared::cta alias")
@opcode("griddepcontrol", "", "wait launch_dependents")
def nothing(form: Form):
    """Memory is sequentially consistent here, and there is one kernel at a time."""
    return lambda machine, group: None


@opcode("nanosleep", "u32")
def sleep(form: Form):
    return lambda machine, group: None
