"""Which opcodes exist, with which types and modifiers. Anything else raises when it is executed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from emulation.ptx.errors import Unsupported
from emulation.ptx.parser import Instruction, Operand, Vector
from emulation.ptx.types import TYPES, Type

if TYPE_CHECKING:
    import numpy as np

SPACES = ("param", "shared", "global", "local", "const")


@dataclass(frozen=True)
class Opcode:
    """One implementation: what it is called, what may follow the name, and how an instruction is prepared."""

    name: str
    types: frozenset[str]
    modifiers: frozenset[str]
    prepare: Callable[[Form], Callable[..., None]]
    moves: bool  # sets the program counters itself


@dataclass
class Code:
    """An instruction that is ready to run."""

    instruction: Instruction
    run: Callable[..., None]
    moves: bool = False
    space: str = ""
    granule: int = 0
    on_release: Callable[[Any, np.ndarray, np.ndarray], None] | None = None


class Form:
    """An instruction seen by its implementation: types in order, modifiers, operands."""

    def __init__(self, opcode: Opcode, instruction: Instruction) -> None:
        rest = instruction.parts[opcode.name.count(".") + 1 :]
        self.instruction = instruction
        self.types = tuple(TYPES[part] for part in rest if part in opcode.types)
        self.modifiers = tuple(part for part in rest if part not in opcode.types)
        self.operands = instruction.operands
        self.on_release: Callable[[Any, np.ndarray, np.ndarray], None] | None = None
        for part in self.modifiers:
            if part not in opcode.modifiers:
                raise self.unsupported(f"{part!r} of {opcode.name}")

    @property
    def type(self) -> Type:
        """The only type."""
        if len(self.types) != 1:
            raise self.unsupported(f"{len(self.types)} types where one is wanted")
        return self.types[0]

    @property
    def space(self) -> str:
        for part in self.modifiers:
            if part.split("::")[0] in SPACES:
                return part.split("::")[0]
        return "generic"

    def has(self, *modifiers: str) -> bool:
        return any(modifier in self.modifiers for modifier in modifiers)

    def one_of(self, *modifiers: str, default: str = "") -> str:
        """The modifier that is present."""
        found = [modifier for modifier in modifiers if modifier in self.modifiers]
        if len(found) > 1 or not (found or default):
            raise self.unsupported(f"one of {modifiers} is wanted, found {found}")
        return found[0] if found else default

    def items(self, operand: Operand) -> tuple[Operand, ...]:
        """The elements of a vector operand, or the operand alone."""
        return operand.items if isinstance(operand, Vector) else (operand,)

    def unsupported(self, what: str) -> Unsupported:
        return Unsupported(f"not implemented: {what}; {self.instruction.where()}")


OPCODES: dict[str, Opcode] = {}
_MEMORY = ("ld", "st", "atom", "red", "cp.async", "ldmatrix.sync", "stmatrix.sync")


def opcode(names: str, types: str = "", modifiers: str = "", moves: bool = False):
    """Register an implementation: a function from a form to ``run(machine, group)``."""

    def register(prepare: Callable[[Form], Callable[..., None]]) -> Callable[[Form], Callable[..., None]]:
        for name in names.split():
            if name in OPCODES:
                raise ValueError(f"{name} is registered twice")
            OPCODES[name] = Opcode(
                name, frozenset(types.split()), frozenset(modifiers.split()), prepare, moves
            )
        return prepare

    return register


def find(instruction: Instruction) -> Opcode | None:
    """The implementation with the longest name that the instruction begins with."""
    for length in (3, 2, 1):
        found = OPCODES.get(".".join(instruction.parts[:length]))
        if found is not None:
            return found
    return None


def bind(instruction: Instruction) -> Code:
    """Prepare an instruction; what is not implemented raises only when it is executed."""
    found = find(instruction)
    try:
        if found is None:
            raise Unsupported(f"not implemented: opcode {instruction.opcode}; {instruction.where()}")
        form = Form(found, instruction)
        code = Code(instruction, found.prepare(form), found.moves, on_release=form.on_release)
        if found.name in _MEMORY:
            code.space = "shared" if found.name not in ("ld", "st", "atom", "red") else form.space
            code.granule = min(form.type.bytes, 8) if form.types else 4
        return code
    except Unsupported as error:
        return Code(instruction, _raiser(error))


def _raiser(error: Unsupported) -> Callable[..., None]:
    def run(*_: Any) -> None:
        raise error

    return run
