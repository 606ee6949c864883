"""Small kernels around one instruction, and exact arithmetic to compare it with.

A snippet sees, for arrays ``a``, ``b``, … (inputs) and ``d``, ``e``, … (outputs): ``$a`` the thread's element
in a register, ``%at_a`` the address of that element and ``%base_a`` that of the array. Outputs named ``$d``
are stored after the snippet.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from emulation import ptx

INPUTS, OUTPUTS = "abc", "defg"
_REGISTERS = """
    .reg .pred %p<9>;
    .reg .b16 %h<9>;
    .reg .b32 %r<17>, %t;
    .reg .b64 %l<17>;
    .reg .b128 %q<5>;
"""


@dataclass
class Case:
    """A snippet, its inputs, and what the outputs must be, bit for bit (NaN equals NaN)."""

    text: str
    inputs: tuple[np.ndarray, ...] = ()
    expected: tuple[np.ndarray, ...] = ()
    declarations: str = ""
    grid: int = 1
    tolerance: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return re.sub(r"\s+", " ", self.text).strip()[:70]


def case(text: str, inputs: Any, expected: Any, **options: Any) -> Case:
    """A case of one or several inputs and outputs."""
    as_tuple = [value if isinstance(value, tuple) else (value,) for value in (inputs, expected)]
    return Case(text, *as_tuple, **options)


def source(item: Case) -> str:
    """The PTX text of a case."""
    names = [*zip(INPUTS, item.inputs, strict=False), *zip(OUTPUTS, item.expected, strict=False)]
    parameters = ", ".join(f".param .u64 param_{name}" for name, _ in names)
    lines = [
        ".version 8.8",
        ".target sm_100",
        ".address_size 64",
        f".visible .entry snippet({parameters})",
        "{",
    ]
    lines.append(_REGISTERS)
    lines.append(item.declarations)
    lines.append("mov.u32 %t, %tid.x;")
    text, after = item.text, []
    for name, array in names:
        bits = 8 * array.dtype.itemsize * (2 if array.ndim == 2 else 1)
        lines.append(f".reg .b64 %base_{name}, %at_{name}; .reg .b{bits} %value_{name};")
        lines.append(f"ld.param.u64 %base_{name}, [param_{name}];")
        lines.append(f"mad.wide.u32 %at_{name}, %t, {bits // 8}, %base_{name};")
        if f"${name}" in text and name in INPUTS:
            lines.append(f"ld.global.b{bits} %value_{name}, [%at_{name}];")
        elif f"${name}" in text:
            after.append(f"st.global.b{bits} [%at_{name}], %value_{name};")
        text = text.replace(f"${name}", f"%value_{name}")
    return "\n".join([*lines, text, *after, "ret;", "}"])


def run(item: Case) -> ptx.Result:
    """Execute a case and compare."""
    inputs = [np.array(value) for value in item.inputs]
    outputs = [np.zeros_like(value) for value in item.expected]
    options = dict(item.options)
    threads = options.pop("threads", len((*inputs, *outputs)[0]) // item.grid)
    kernel = ptx.parse(source(item)).kernel()
    result = ptx.launch(kernel, item.grid, threads, [*inputs, *outputs], **options)
    for output, expected in zip(outputs, item.expected, strict=True):
        if item.tolerance:
            np.testing.assert_allclose(output, expected, rtol=item.tolerance)
        else:
            np.testing.assert_array_equal(output, expected, strict=True)
            if output.dtype.kind == "f":
                number = ~np.isnan(expected)
                np.testing.assert_array_equal(np.signbit(output)[number], np.signbit(expected)[number])
    return result


_FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
_DTYPES = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def rounded(value: Fraction, name: str, mode: str = "rn") -> float:
    """The number of a format nearest to an exact value, in one of the four roundings."""
    digits, lowest, highest = _FORMATS[name]
    if value == 0:
        return 0.0
    size = abs(value)
    exponent = math.floor(math.log2(size.numerator) - math.log2(size.denominator))
    exponent += (size >= Fraction(2) ** (exponent + 1)) - (size < Fraction(2) ** exponent)
    quantum = Fraction(2) ** (max(exponent, lowest) - digits + 1)
    steps = value / quantum
    whole = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}[mode](steps)
    result = whole * quantum
    largest = (2 - Fraction(2) ** (1 - digits)) * Fraction(2) ** highest
    if abs(result) > largest:
        towards_zero = mode == "rz" or (mode == "rm" and result > 0) or (mode == "rp" and result < 0)
        return math.copysign(float(largest) if towards_zero else math.inf, 1 if result > 0 else -1)
    return math.copysign(float(result), 1 if value > 0 else -1)


def exactly(function, name: str, mode: str, *arrays: np.ndarray) -> np.ndarray:
    """``function`` of exact fractions, rounded once, for every element."""
    numbers = [
        rounded(function(*(Fraction(float(v)) for v in row)), name, mode) for row in zip(*arrays, strict=True)
    ]
    return to_format(np.array(numbers, np.float64), name)


def to_format(values: np.ndarray, name: str) -> np.ndarray:
    """Doubles that a format can hold, in its array type (bfloat16: bits)."""
    if name == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(_DTYPES[name])


def from_format(values: np.ndarray, name: str) -> np.ndarray:
    """The doubles of an array of a format."""
    if name == "bf16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def random_floats(name: str, count: int = 64, seed: int = 0, spread: float = 6.0) -> np.ndarray:
    """Numbers of many sizes and both signs, with zeros and small integers among them."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(count) * np.exp2(random.uniform(-spread, spread, count))
    values[:4] = [0.0, 1.0, -1.0, 3.0]
    return to_format(np.array([rounded(Fraction(float(v)), name) for v in values]), name)


def random_integers(dtype: Any, count: int = 64, seed: int = 0) -> np.ndarray:
    """Integers over the whole range, with the ends and small ones among them."""
    random = np.random.default_rng(seed)
    limits = np.iinfo(dtype)
    values = random.integers(limits.min, limits.max, count, dtype=dtype, endpoint=True)
    values[:6] = [0, 1, limits.max, limits.min, limits.max - 1, 3]
    values[6:20] = random.integers(max(-40, limits.min), 40, 14)
    return values


def pack(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Two 16- or 32-bit arrays as one of twice the width."""
    pair = np.stack([low, high], 1)
    return np.ascontiguousarray(pair).view(f"u{2 * low.dtype.itemsize}")[:, 0]
