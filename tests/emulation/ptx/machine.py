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
from emulation.ptx.checks import Who
from emulation.ptx.memory import LOCAL_WINDOW, REGION_BITS, SHARED_WINDOW, GlobalMemory, Region, is_array
from emulation.ptx.opcodes import registry
from emulation.ptx.parser import Address, Immediate, Instruction, Kernel, Name, Operand, Register
from emulation.ptx.state import AT_BARRIER, AT_WARP_SYNC, EXITED, RUNNING, WARP, AsyncCopy, Group
from emulation.ptx.types import RAW, TYPES, Type, decode, encode, resize

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


class Machine:
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

    def where(self, thread: int) -> str:
        """Block, thread and instruction, for messages."""
        counter = min(int(self.counter[thread]), len(self.code) - 1)
        instruction = self.kernel.instructions[counter]
        place = f"block {self.block_number[thread]} thread {self.linear[thread]}"
        return f"{self.kernel.name}, {place}: {instruction.where()}"

    def uninitialised(self, what: str, thread: int) -> errors.Uninitialised:
        return errors.Uninitialised(f"{what} is read before it is written; {self.where(thread)}")

    # Operands

    def predicate(self, operand: Operand, group: Group) -> np.ndarray:
        values = self.read(operand, TYPES["pred"], group)
        return ~values if isinstance(operand, Register) and operand.negated else values

    def read(self, operand: Operand, kind: Type, group: Group) -> np.ndarray:
        """Values of an operand for the threads of a group, decoded as the type."""
        if isinstance(operand, Register):
            defined = group.of(self.defined[operand.name])
            if not defined.all():
                raise self.uninitialised(f"register {operand.name}", group.threads[~defined][0])
            bits = group.of(self.registers[operand.name])
            if kind.kind == "pred" or kind.bytes == 16:
                return bits
            return decode(resize(bits, kind.bytes, False), kind)
        return decode(np.repeat(self._constant_bits(operand, kind, group), 1), kind)

    def _constant_bits(self, operand: Operand, kind: Type, group: Group) -> np.ndarray:
        count = len(group)
        size = min(kind.bytes, 8)
        if isinstance(operand, Immediate):
            value = operand.value
            if operand.float_bytes and kind.is_float:
                number = np.array([value], RAW[operand.float_bytes]).view(f"f{operand.float_bytes}")
                if operand.float_bytes != kind.bytes and not kind.element:
                    return np.repeat(encode(number.astype(kind.dtype), kind), count)
            elif kind.is_float and not kind.element and not operand.float_bytes:
                return np.repeat(encode(np.array([value], np.float64).astype(kind.dtype), kind), count)
        elif isinstance(operand, Name):
            if operand.name in self.special:
                return group.of(self.special[operand.name]).astype(np.uint64).astype(RAW[size])
            if operand.name not in self.symbols:
                raise errors.Unsupported(f"operand {operand.name!r}; {self.where(group.threads[0])}")
            value = self.symbols[operand.name]
        else:
            raise errors.Unsupported(f"operand {operand}; {self.where(group.threads[0])}")
        if kind.kind == "pred":
            return np.full(count, bool(value))
        return np.full(count, value % (1 << 8 * size), RAW[size])

    def write(self, operand: Operand, values: np.ndarray, kind: Type, group: Group) -> None:
        """Store values of a type; a wider register is extended by sign or zeros."""
        if isinstance(operand, Name) and operand.name == "_":
            return
        if not isinstance(operand, Register):
            raise errors.Unsupported(f"destination {operand}; {self.where(group.threads[0])}")
        register = self.registers[operand.name]
        bits = encode(values, kind)
        if register.dtype != np.bool_ and kind.bytes != 16:
            bits = resize(bits, self.types[operand.name].bytes, kind.is_signed)
        where = slice(None) if group.all else group.threads
        register[where] = bits
        self.defined[operand.name][where] = True

    def address(self, operand: Operand, group: Group) -> np.ndarray:
        """The byte addresses that ``[base+offset]`` names."""
        if not isinstance(operand, Address):
            raise errors.Unsupported(f"address {operand}; {self.where(group.threads[0])}")
        base = operand.base
        kind = TYPES["u32" if isinstance(base, Register) and self.types[base.name].bytes == 4 else "u64"]
        return self.read(base, kind, group).astype(np.int64) + operand.offset

    # Memory

    def _regions(self, space: str, address: np.ndarray, group: Group):
        """For each region that is hit: the rows that hit it, and their bytes in its data."""
        if space == "generic":
            window = np.where(
                address >= LOCAL_WINDOW, LOCAL_WINDOW, np.where(address >= SHARED_WINDOW, SHARED_WINDOW, 0)
            )
            for start, name in ((0, "global"), (SHARED_WINDOW, "shared"), (LOCAL_WINDOW, "local")):
                rows = np.nonzero(window == start)[0]
                if len(rows):
                    part = Group(group.threads[rows], self.total)
                    for region, inner, begin in self._regions(name, address[rows] - start, part):
                        yield region, rows[inner], begin
            return
        rows = np.arange(len(address))
        if space in ("shared", "local"):
            size = self.shared_bytes if space == "shared" else self.local_bytes
            owner = group.of(self.local_block) if space == "shared" else group.threads
            region = self.shared if space == "shared" else self.local
            outside = np.where((address < 0) | (address > size), -(1 << 62), address + owner * size)
            limit = (owner + 1) * size
            yield region, rows, (outside, limit)
            return
        numbers = address >> REGION_BITS
        for number in np.unique(numbers):
            chosen = rows[numbers == number]
            region = self.global_memory.regions.get(int(number))
            if region is None:
                raise errors.OutOfBounds(
                    f"address {int(address[chosen[0]]):#x} is in no argument; "
                    f"{self.where(group.threads[chosen[0]])}"
                )
            yield region, chosen, (address[chosen] - (int(number) << REGION_BITS), None)

    def places(self, space: str, address: np.ndarray, size: int, kind: str, group: Group):
        """Checked accesses of ``size`` bytes: regions, rows that hit each, first bytes in its data."""
        apart = address % size != 0
        if apart.any():
            thread = group.threads[apart][0]
            raise errors.Misaligned(
                f"{kind} of {size} bytes at {int(address[apart][0]):#x}, not a multiple; {self.where(thread)}"
            )
        out = []
        for region, rows, (begin, limit) in self._regions(space, address, group):
            good = region.allowed(begin, size)
            if limit is not None:
                good &= begin + size <= limit
            if not good.all():
                row = rows[~good][0]
                described = f"{self.shared_bytes} bytes" if region is self.shared else region.describe()
                offset = int(address[row]) & ((1 << REGION_BITS) - 1)
                raise errors.OutOfBounds(
                    f"{space} {kind} of {size} bytes at byte {offset} is outside of {described}; "
                    + self.where(group.threads[row])
                )
            out.append((region, rows, begin - region.first))
        return out

    def track(
        self,
        region: Region,
        granules: np.ndarray,
        kind: str,
        threads: np.ndarray,
        repeated: np.ndarray | None = None,
    ) -> None:
        """Tell the region's log; raise on a race."""
        if region.log is None:
            return
        interval = self.block_number[threads] * (1 << 24) + self.barriers_passed[self.local_block[threads]]
        warp_interval = self.warp_number[threads] * (1 << 24) + self.warp_syncs[self.local_warp[threads]]
        warp_interval = warp_interval * (1 << 12) + self.barriers_passed[self.local_block[threads]] % (
            1 << 12
        )
        block = self.block_number[threads]
        who = Who(self.thread_number[threads], self.warp_number[threads], block, interval, warp_interval)
        found = region.log.access(kind, granules, who, repeated)
        if found:
            row, earlier = found
            place = "shared memory" if region is self.shared else region.describe()
            raise errors.Race(
                f"{kind} of {place} after a {earlier} by another thread that nothing orders; "
                f"{self.where(threads[row])}"
            )

    def load(
        self, space: str, address: np.ndarray, size: int, group: Group, kind: str = "read"
    ) -> np.ndarray:
        """Bytes at addresses: one row of ``size`` for each thread."""
        out = np.zeros((len(address), size), np.uint8)
        for region, rows, begin in self.places(space, address, size, "load", group):
            granules = region.granules(begin, size)
            ready = region.initialised[granules].all(1)
            if not ready.all():
                raise self.uninitialised(f"{space} memory", group.threads[rows[~ready][0]])
            self.track(region, granules, kind, group.threads[rows])
            out[rows] = region.data[begin[:, None] + np.arange(size)]
        return out

    def store(
        self, space: str, address: np.ndarray, data: np.ndarray, group: Group, kind: str = "write"
    ) -> None:
        """Write rows of bytes."""
        size = data.shape[1]
        for region, rows, begin in self.places(space, address, size, "store", group):
            granules = region.granules(begin, size)
            at = begin[:, None] + np.arange(size)
            repeated = None
            if not self.lanes_must_agree and kind == "write":
                repeated = (region.data[at] == data[rows]).all(1) & region.initialised[granules].all(1)
            self.track(region, granules, kind, group.threads[rows], repeated)
            order = np.arange(len(rows)) if self.random is None else self.random.permutation(len(rows))
            region.data[at[order]] = data[rows[order]]
            region.initialised[granules] = True
            lost = (region.data[at] != data[rows]).any(1)
            if not self.lanes_must_agree and region.log is not None:
                lost &= region.log.written_by_several(granules)
            if self.races and lost.any():
                thread = group.threads[rows[lost][0]]
                raise errors.Race(
                    f"threads store different values to one {space} address; {self.where(thread)}"
                )
