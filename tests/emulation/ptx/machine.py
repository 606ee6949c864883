"""The machine: registers and a program counter for every thread, all threads of some blocks in one vector.

The next instruction is the one at the smallest program counter of the threads that can run; all threads that
stand there execute it together, so diverged warps meet again as early as possible. With a seed, a random half
of the warps is eligible each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from emulation.ptx import errors
from emulation.ptx.accesses import Accesses
from emulation.ptx.memory import GlobalMemory, Region, is_array
from emulation.ptx.opcodes import registry
from emulation.ptx.parser import Instruction, Kernel
from emulation.ptx.state import AT_BARRIER, AT_WARP_SYNC, EXITED, RUNNING, WARP, AsyncCopy, Group
from emulation.ptx.types import RAW, TYPES, Type

MAX_STEPS = 20_000_000


@dataclass
class Result:
    """What a launch did: instructions issued (for a group of threads), and thread instructions by opcode."""

    kernel: str
    instructions: int = 0
    opcodes: Counter[str] = field(default_factory=Counter)


def _triple(size: int | Sequence[int]) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int | np.integer) else tuple(size)
    x, y, z = (*map(int, sizes), 1, 1, 1)[:3]
    return x, y, z


def launch(
    kernel: Kernel,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any],
    *,
    shared_bytes: int = 0,
    seed: int | None = None,
    races: bool = True,
    uninitialised: Sequence[int] = (),
    undefined: str | int = "error",
    lane_conflicts: str = "error",
    names: Sequence[str] | None = None,
    batch: int = 64,
) -> Result:
    """Run a kernel on numpy arrays or CPU tensors, which it changes in place.

    ``args`` in the order of the parameters: arrays, ints, floats, or bytes for a structure; missing ones at
    the end (Triton's scratch pointers) are 0. ``uninitialised`` names positions of arrays that may not be
    read before they are written. ``undefined="error"`` reports reads of registers that nothing wrote; an int
    fills registers with garbage of that seed instead. ``lane_conflicts="error"`` reports lanes of a warp that
    store different values to one address in one instruction, and warps that store to one address with no
    barrier between. With ``"any"`` one lane wins, the last or, with a seed, a random one, and warps of a
    block may store the same value. ``batch`` blocks run at a time.
    """
    grid, block = _triple(grid), _triple(block)
    if kernel.threads and _triple(kernel.threads) != block:
        raise errors.PtxError(f"{kernel.name} requires blocks of {kernel.threads} threads, not {block}")
    if lane_conflicts not in ("error", "any"):
        raise ValueError(f"lane_conflicts is {lane_conflicts!r}, wanted 'error' or 'any'")
    machine = Machine(kernel, grid, block, shared_bytes, seed, races, undefined, lane_conflicts == "error")
    machine.bind_arguments(args, uninitialised, names)
    blocks = np.arange(grid[0] * grid[1] * grid[2])
    if machine.random is not None:
        blocks = machine.random.permutation(blocks)
    for begin in range(0, len(blocks), batch):
        machine.run(blocks[begin : begin + batch])
    return machine.result


class Machine(Accesses):
    """One launch; ``run`` executes a batch of its blocks from beginning to end."""

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        seed: int | None,
        races: bool,
        undefined: str | int,
        lanes_must_agree: bool,
    ) -> None:
        self.kernel, self.grid, self.block = kernel, grid, block
        self.races, self.undefined = races, undefined
        self.lanes_must_agree = lanes_must_agree
        self.random = None if seed is None else np.random.default_rng(seed)
        self.result = Result(kernel.name)
        self.code = [registry.bind(instruction) for instruction in kernel.instructions]
        self.types = {name: TYPES[kind] for name, kind in kernel.registers.items()}
        self.block_threads = block[0] * block[1] * block[2]
        self.block_warps = -(-self.block_threads // WARP)
        self.global_memory = GlobalMemory(self._granule("global", "generic"), races)
        self.symbols: dict[str, int] = {}
        self.parameters: dict[str, np.ndarray] = {}
        self._place_variables(shared_bytes)

    def _granule(self, *spaces: str) -> int:
        """The narrowest element that any instruction accesses in these spaces."""
        widths = [code.granule for code in self.code if code.space in spaces and code.granule]
        return min(widths, default=4)

    def _place_variables(self, dynamic: int) -> None:
        sizes = {"shared": 0, "local": 0}
        dynamic_names = []
        for variable in self.kernel.variables.values():
            if variable.space in ("global", "const"):
                data = variable.data if variable.data is not None else bytes(variable.size or 0)
                self.symbols[variable.name] = self.global_memory.add_variable(variable.name, data)
            elif variable.size is None:
                dynamic_names.append(variable.name)
            else:
                at = -(-sizes[variable.space] // variable.align) * variable.align
                self.symbols[variable.name] = at
                sizes[variable.space] = at + variable.size
        end = sizes["shared"]
        if dynamic_names:
            end = -(-end // 16) * 16
            self.symbols.update(dict.fromkeys(dynamic_names, end))
        self.shared_bytes, self.local_bytes = end + dynamic, sizes["local"]

    def bind_arguments(
        self, args: Sequence[Any], uninitialised: Sequence[int], names: Sequence[str] | None
    ) -> None:
        """Put arrays into global memory and everything into parameter memory."""
        parameters = self.kernel.parameters
        if len(args) > len(parameters):
            raise errors.PtxError(
                f"{self.kernel.name} has {len(parameters)} parameters, {len(args)} were given"
            )
        args = [*args, *[0] * (len(parameters) - len(args))]
        labels = [names[i] if names and i < len(names) else f"argument {i}" for i in range(len(args))]
        arrays = [i for i, value in enumerate(args) if is_array(value)]
        addresses = self.global_memory.place((labels[i], args[i], i not in uninitialised) for i in arrays)
        where = dict(zip(arrays, addresses, strict=True))
        for i, parameter in enumerate(parameters):
            value = where.get(i, args[i])
            if isinstance(value, bytes):
                data = value.ljust(parameter.size, b"\0")
            elif isinstance(value, float | np.floating):
                data = np.array(value, f"f{parameter.size}").tobytes()
            else:
                data = (int(value) % (1 << 8 * parameter.size)).to_bytes(parameter.size, "little")
            self.parameters[parameter.name] = np.frombuffer(data, np.uint8)

    # State of a batch

    def _start(self, blocks: np.ndarray) -> None:
        count, threads = len(blocks), self.block_threads
        self.total = total = count * threads
        self.linear = np.tile(np.arange(threads), count)
        self.local_block = np.repeat(np.arange(count), threads)
        self.block_number = np.repeat(blocks, threads)
        self.lane = self.linear % WARP
        self.local_warp = self.local_block * self.block_warps + self.linear // WARP
        self.warp_number = self.block_number * self.block_warps + self.linear // WARP
        self.thread_number = self.block_number * threads + self.linear
        self.counter = np.zeros(total, np.int64)
        self.status = np.full(total, RUNNING, np.int8)
        self.barrier = np.zeros(total, np.int64)
        self.barriers_passed = np.zeros(count, np.int64)
        self.warp_syncs = np.zeros(count * self.block_warps, np.int64)
        self.votes = np.zeros(total, bool)
        self.copies: list[AsyncCopy] = []
        self.copies_committed = np.zeros(total, np.int64)
        garbage = None if self.undefined == "error" else np.random.default_rng(int(self.undefined))
        self.registers = {name: self._fresh(kind, garbage) for name, kind in self.types.items()}
        self.defined = {name: np.full(total, garbage is not None) for name in self.types}
        self.shared = self._private("shared", count * self.shared_bytes, "shared memory")
        self.local = self._private("local", total * self.local_bytes, "local memory")
        self.special = self._special_registers()

    def _fresh(self, kind: Type, garbage: np.random.Generator | None) -> np.ndarray:
        shape = (self.total, 2) if kind.bytes == 16 else (self.total,)
        dtype = np.dtype(bool) if kind.kind == "pred" else RAW[min(kind.bytes, 8)]
        if garbage is None:
            return np.zeros(shape, dtype)
        if kind.kind == "pred":
            return garbage.integers(0, 2, shape).astype(bool)
        return garbage.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)

    def _private(self, space: str, size: int, name: str) -> Region:
        granule = self._granule(space, "generic")
        region = Region(np.zeros(size, np.uint8), 0, granule, False, self.races and space == "shared")
        region.arguments.append((0, size, name))
        return region

    def _special_registers(self) -> dict[str, np.ndarray]:
        special = {"%laneid": self.lane, "%warpid": self.linear // WARP, "WARP_SZ": np.full(self.total, WARP)}
        for index, sizes, stem in (
            (self.linear, self.block, "tid"),
            (self.block_number, self.grid, "ctaid"),
        ):
            for axis, letter in enumerate("xyz"):
                step = int(np.prod(sizes[:axis]))
                special[f"%{stem}.{letter}"] = index // step % sizes[axis]
                special[f"%n{stem}.{letter}"] = np.full(self.total, sizes[axis])
        lanes = self.lane.astype(np.uint64)
        one = np.uint64(1)
        special["%lanemask_eq"] = one << lanes
        special["%lanemask_lt"] = (one << lanes) - one
        special["%lanemask_le"] = (one << (lanes + one)) - one
        special["%lanemask_gt"] = np.uint64(0xFFFFFFFF) ^ special["%lanemask_le"]
        special["%lanemask_ge"] = np.uint64(0xFFFFFFFF) ^ special["%lanemask_lt"]
        return special

    # The schedule

    def run(self, blocks: np.ndarray) -> None:
        """Execute these blocks to the end."""
        self._start(blocks)
        with np.errstate(all="ignore"):
            while True:
                chosen = self._choose()
                if chosen is None:
                    return
                self._execute_from(*chosen)
                if self.result.instructions > MAX_STEPS:
                    raise errors.Deadlock(f"no end after {MAX_STEPS} instructions; {self.where(0)}")

    def _choose(self) -> tuple[int, np.ndarray, int] | None:
        """The next program counter, the threads there, and the counter at which others wait to join."""
        running = self.status == RUNNING
        while not running.any():
            if (self.status == EXITED).all():
                return None
            self._release_barriers()
            running = self.status == RUNNING
        limit = len(self.code) + 1
        if self.random is not None:
            warps = np.unique(self.local_warp[running])
            eligible = np.zeros(len(self.warp_syncs), bool)
            eligible[self.random.permutation(warps)[: max(1, len(warps) // 2)]] = True
            running &= eligible[self.local_warp]
            limit = int(self.random.integers(1, 16))
        first = int(self.counter[running].min())
        here = (self.counter == first) & (running | (self.status == AT_WARP_SYNC))
        ahead = self.counter[(running | (self.status == AT_WARP_SYNC)) & (self.counter > first)]
        limit = min(limit + (first if self.random is not None else 0), ahead.min(initial=len(self.code) + 1))
        return first, np.nonzero(here)[0], int(limit)

    def _execute_from(self, counter: int, threads: np.ndarray, limit: int) -> None:
        """Straight on until a branch, a wait, or a place where other threads stand."""
        group = Group(threads, self.total)
        while True:
            if counter >= len(self.code):
                self.exit(threads)
                return
            code = self.code[counter]
            self.result.instructions += 1
            self.result.opcodes[code.instruction.opcode] += len(group)
            active = self._guarded(code.instruction, group)
            if code.moves:
                code.run(self, active, group)
                return
            if len(active):
                code.run(self, active)
            counter += 1
            self.counter[threads] = counter
            if counter >= limit:
                return

    def _guarded(self, instruction: Instruction, group: Group) -> Group:
        if instruction.guard is None:
            return group
        chosen = self.predicate(instruction.guard, group)
        return group if chosen.all() else Group(group.threads[chosen], self.total)

    def exit(self, threads: np.ndarray) -> None:
        """End threads; warps that waited for them look again."""
        self.status[threads] = EXITED
        waiting = (self.status == AT_WARP_SYNC) & np.isin(self.local_warp, self.local_warp[threads])
        self.status[waiting] = RUNNING

    def _release_barriers(self) -> None:
        released = False
        for block in np.unique(self.local_block[self.status != EXITED]):
            members = np.nonzero(self.local_block == block)[0]
            status = self.status[members]
            waiting = members[status == AT_BARRIER]
            if len(waiting) == 0:
                continue
            if len(waiting) == len(members) and len(set(self.barrier[members])) == 1:
                self._check_aligned(members)
                self._finish_barrier(members)
                self.status[members] = RUNNING
                self.counter[members] += 1
                self.barriers_passed[block] += 1
                released = True
            elif (status == EXITED).any() and not (status == AT_WARP_SYNC).any():
                raise errors.DivergentBarrier(
                    (
                        f"a barrier is reached by {len(waiting)} of {len(members)} threads of the block, "
                        f"others exited; "
                    )
                    + self.where(waiting[0])
                )
        if not released:
            stuck = np.nonzero((self.status == AT_BARRIER) | (self.status == AT_WARP_SYNC))[0]
            kinds = {int(s) for s in self.status[stuck]}
            text = "threads wait at different barriers" if kinds == {AT_BARRIER} else "threads wait for lanes"
            raise errors.DivergentBarrier(f"{text} that cannot come; {self.where(stuck[0])}")

    def _finish_barrier(self, members: np.ndarray) -> None:
        """``bar.red`` gives every thread its result when all have come."""
        for counter in np.unique(self.counter[members]):
            code = self.code[counter]
            if code.on_release is not None:
                code.on_release(self, members, members[self.counter[members] == counter])

    def _check_aligned(self, members: np.ndarray) -> None:
        first_lane = members[self.lane[members] == 0]
        expected = np.repeat(self.counter[first_lane], WARP)[: len(members)]
        apart = self.counter[members] != expected
        if apart.any():
            raise errors.DivergentBarrier(
                f"lanes of one warp wait at two barrier instructions; {self.where(members[apart][0])}"
            )
