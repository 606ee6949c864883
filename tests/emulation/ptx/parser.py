"""PTX text to instructions: entries, parameters, registers by scope, labels, variables, source lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from emulation.ptx.errors import PtxSyntaxError, Unsupported
from emulation.ptx.types import TYPES


@dataclass(frozen=True)
class Register:
    name: str
    negated: bool = False


@dataclass(frozen=True)
class Immediate:
    """A number: an int, or the bits of a float of ``float_bytes`` bytes."""

    value: int
    float_bytes: int = 0


@dataclass(frozen=True)
class Name:
    """A special register, a variable, a parameter or a label: known when the instruction runs."""

    name: str


@dataclass(frozen=True)
class Address:
    base: Register | Name | Immediate
    offset: int


@dataclass(frozen=True)
class Vector:
    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """``d|p``: two destinations."""

    first: Register | Name
    second: Register | Name


Operand = Register | Immediate | Name | Address | Vector | Pair


@dataclass
class Instruction:
    """One statement: ``@guard opcode.parts operands``."""

    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    text: str
    line: int
    source: tuple[int, int] | None  # file number and line of the .loc directive before it

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)

    def where(self) -> str:
        source = f", source file {self.source[0]} line {self.source[1]}" if self.source else ""
        return f"`{self.text}` (PTX line {self.line}{source})"


@dataclass
class Variable:
    """An array in shared, local, global or constant memory; ``size`` None is dynamic shared memory."""

    name: str
    space: str
    align: int
    size: int | None
    data: bytes | None = None


@dataclass
class Parameter:
    name: str
    type: str
    size: int
    align: int


@dataclass
class Kernel:
    """One ``.entry``, ready to launch."""

    name: str
    parameters: list[Parameter]
    instructions: list[Instruction] = field(default_factory=list)
    registers: dict[str, str] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    threads: tuple[int, ...] | None = None  # .reqntid

    @property
    def opcodes(self) -> list[str]:
        return sorted({instruction.opcode for instruction in self.instructions})


@dataclass
class Module:
    """A PTX text: its target and its entries."""

    target: str
    kernels: dict[str, Kernel]

    def kernel(self, part: str = "") -> Kernel:
        """The only entry whose name contains ``part``."""
        found = [kernel for name, kernel in self.kernels.items() if part in name]
        found = [kernel for kernel in found if kernel.name == part] or found
        if len(found) != 1:
            raise PtxSyntaxError(f"{len(found)} entries contain {part!r}; there are {sorted(self.kernels)}")
        return found[0]


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\((.*?)\))?([^{;]*)\{", re.S)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n]*")
_FILE = re.compile(r"\.file\b[^\n]*")
_HEADER = re.compile(r"^\s*\.(?:version|target|address_size|file|section)\b[^\n]*", re.M)
_LABEL = re.compile(r"([$%\w]+)\s*:(?!:)")
_GUARD = re.compile(r"@(!?)([%$\w]+)\s+")
_VARIABLE = re.compile(
    r"\.(shared|local|global|const)\s+((?:\.\w+\s+(?:\d+\s+)?)*)([\w$]+)\s*(?:\[\s*(\d*)\s*\])?\s*(?:=\s*(.*))?$",
    re.S,
)
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|\d+)U?$")
_FLOAT_BITS = re.compile(r"0[fF]([0-9a-fA-F]{8})$|0[dD]([0-9a-fA-F]{16})$")


def parse(text: str) -> Module:
    """All entries of a PTX text."""
    text = _without_comments(text)
    target = re.search(r"\.target\s+([\w, ]+)", text)
    module = Module(target.group(1).strip() if target else "", {})
    outside = []
    end = 0
    entries = []
    for match in _ENTRY.finditer(text):
        if match.start() < end:
            continue
        outside.append(text[end : match.start()])
        end = _closing_brace(text, match.end())
        entries.append((match, text[match.end() : end - 1]))
    outside.append(text[end:])
    declarations = _HEADER.sub("", "".join(outside)).split(";")
    shared_by_all = [variable for text in declarations for variable in _variables(text)]
    for match, body in entries:
        kernel = Kernel(match.group(1), _parameters(match.group(2) or ""))
        required = re.search(r"\.reqntid\s+([\d,\s]+)", match.group(3))
        if required:
            kernel.threads = tuple(int(n) for n in required.group(1).split(","))
        kernel.variables = {variable.name: variable for variable in shared_by_all}
        _Body(kernel, body, text.count("\n", 0, match.end()) + 1).read()
        module.kernels[kernel.name] = kernel
    if not module.kernels:
        raise PtxSyntaxError("the text has no .entry")
    return module


def _without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def _closing_brace(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if depth == 0:
            return match.end()
    raise PtxSyntaxError("a body is not closed")


def _split(text: str) -> list[str]:
    """Split at commas that are not inside brackets."""
    out, depth, current = [], 0, ""
    for character in text:
        depth += (character in "{[(") - (character in "}])")
        if character == "," and depth == 0:
            out.append(current.strip())
            current = ""
        else:
            current += character
    return [*out, current.strip()] if current.strip() else out


def _parameters(text: str) -> list[Parameter]:
    parameters = []
    for item in _split(text):
        kind = next(word[1:] for word in item.split() if word[1:] in TYPES)
        align = re.search(r"\.param\s+\.align\s+(\d+)", item)
        size = re.search(r"\[(\d+)\]\s*$", item)
        name = re.search(r"([\w$]+)\s*(?:\[\d+\])?\s*$", item)
        if name is None:
            raise PtxSyntaxError(f"parameter {item!r}")
        count = int(size.group(1)) if size else 1
        width = TYPES[kind].bytes
        parameters.append(
            Parameter(name.group(1), kind, count * width, int(align.group(1)) if align else width)
        )
    return parameters


def _variables(statement: str) -> list[Variable]:
    match = _VARIABLE.search(statement.strip())
    if not match or not re.match(
        r"\.(visible|extern|weak|common|shared|local|global|const)\b", statement.strip()
    ):
        return []
    space, attributes, name, count, values = match.groups()
    kind = next((word[1:] for word in attributes.split() if word[1:] in TYPES), None)
    if kind is None:
        return []
    align = re.search(r"\.align\s+(\d+)", attributes)
    width = TYPES[kind].bytes
    data = None
    if values is not None:
        numbers = [int(v.rstrip("U"), 0) for v in _split(values.strip().strip("{}"))]
        data = b"".join((n % (1 << 8 * width)).to_bytes(width, "little") for n in numbers)
    size = None if count == "" else int(count or 1) * width
    if data is not None and size is not None:
        data = data.ljust(size, b"\0")
    return [Variable(name, space, int(align.group(1)) if align else width, size, data)]


class _Body:
    """Reads one entry; registers of inner scopes get names of their own."""

    def __init__(self, kernel: Kernel, text: str, first_line: int) -> None:
        self.kernel, self.text, self.line = kernel, text, first_line
        self.scopes: list[dict[str, str]] = [{}]
        self.opened = 0
        self.source: tuple[int, int] | None = None
        self.last_label = ""

    def read(self) -> None:
        position = 0
        while position < len(self.text):
            character = self.text[position]
            if character.isspace() or character == ";":
                self.line += character == "\n"
                position += 1
            elif match := _LOC.match(self.text, position):
                self.source = int(match.group(1)), int(match.group(2))
                position = match.end()
            elif match := _FILE.match(self.text, position):
                position = match.end()
            elif match := _LABEL.match(self.text, position):
                self.last_label = match.group(1)
                self.kernel.labels[self.last_label] = len(self.kernel.instructions)
                position = match.end()
            elif character == "{":
                self.scopes.append({})
                self.opened += 1
                position += 1
            elif character == "}":
                self.scopes.pop()
                position += 1
            else:
                end = self.text.find(";", position)
                if end < 0:
                    raise PtxSyntaxError(f"line {self.line}: {self.text[position:].strip()!r} does not end")
                statement = self.text[position:end]
                self.statement(" ".join(statement.split()))
                self.line += statement.count("\n")
                position = end

    def statement(self, text: str) -> None:
        if text.startswith(".reg"):
            self.declare(text)
        elif text.startswith(".branchtargets"):
            self.kernel.tables[self.last_label] = _split(text.removeprefix(".branchtargets"))
        elif text.startswith("."):
            for variable in _variables(text):
                self.kernel.variables[variable.name] = variable
        else:
            self.instruction(text)

    def declare(self, text: str) -> None:
        _, kind, names = text.split(None, 2)
        if kind[1:] not in TYPES:
            raise Unsupported(f"register type {kind} in PTX line {self.line}")
        for item in names.split(","):
            match = re.fullmatch(r"([%\w$]+?)(?:<(\d+)>)?", item.strip())
            if match is None:
                raise PtxSyntaxError(f"PTX line {self.line}: {text}")
            stem, count = match.groups()
            for name in [stem] if count is None else [f"{stem}{i}" for i in range(int(count))]:
                unique = name if len(self.scopes) == 1 else f"{name}@{self.opened}"
                self.scopes[-1][name] = unique
                self.kernel.registers[unique] = kind[1:]

    def instruction(self, text: str) -> None:
        rest, guard = text, None
        if match := _GUARD.match(text):
            guard = Register(self.register(match.group(2)), match.group(1) == "!")
            rest = text[match.end() :]
        opcode, _, operands = rest.partition(" ")
        parsed = tuple(self.operand(item) for item in _split(operands))
        parts = tuple(opcode.split("."))
        self.kernel.instructions.append(Instruction(parts, parsed, guard, text, self.line, self.source))

    def register(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        raise PtxSyntaxError(f"PTX line {self.line}: register {name} is not declared")

    def operand(self, text: str) -> Operand:
        if text.startswith("{"):
            return Vector(tuple(self.operand(item) for item in _split(text.strip("{} "))))
        if text.startswith("["):
            return self.address(text)
        if "|" in text:
            first, second = (self.operand(item.strip()) for item in text.split("|"))
            if not isinstance(first, Register | Name) or not isinstance(second, Register | Name):
                raise PtxSyntaxError(f"PTX line {self.line}: {text}")
            return Pair(first, second)
        if match := _FLOAT_BITS.match(text):
            single, double = match.groups()
            return Immediate(int(single or double, 16), 4 if single else 8)
        if _INTEGER.match(text):
            return Immediate(int(text.rstrip("U"), 0))
        if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
            return Immediate(int(np.float64(text).view(np.uint64)), 8)
        negated, name = text.startswith("!"), text.lstrip("!").strip()
        try:
            return Register(self.register(name), negated)
        except PtxSyntaxError:
            return Name(name)

    def address(self, text: str) -> Address:
        match = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+)\s*)?\]", text)
        if match is None:
            raise Unsupported(f"address {text} in PTX line {self.line}")
        base = self.operand(match.group(1))
        if not isinstance(base, Register | Name | Immediate):
            raise Unsupported(f"address {text} in PTX line {self.line}")
        return Address(base, int(match.group(2) or "0", 0))
