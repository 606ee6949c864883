"""Reading and writing the operands of an instruction, for the threads of a group."""

from __future__ import annotations

import numpy as np

from emulation.ptx import errors
from emulation.ptx.parser import Address, Immediate, Kernel, Name, Operand, Register
from emulation.ptx.state import Group
from emulation.ptx.types import RAW, TYPES, Type, decode, encode, resize


class Operands:
    """The part of the machine that knows registers, numbers and names."""

    kernel: Kernel
    types: dict[str, Type]  # of the registers
    registers: dict[str, np.ndarray]
    defined: dict[str, np.ndarray]
    special: dict[str, np.ndarray]
    symbols: dict[str, int]  # addresses of variables
    counter: np.ndarray
    block_number: np.ndarray
    linear: np.ndarray

    def where(self, thread: int) -> str:
        """Block, thread and instruction, for messages."""
        counter = min(int(self.counter[thread]), len(self.kernel.instructions) - 1)
        instruction = self.kernel.instructions[counter]
        place = f"block {self.block_number[thread]} thread {self.linear[thread]}"
        return f"{self.kernel.name}, {place}: {instruction.where()}"

    def uninitialised(self, what: str, thread: int) -> errors.Uninitialised:
        return errors.Uninitialised(f"{what} is read before it is written; {self.where(thread)}")

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
