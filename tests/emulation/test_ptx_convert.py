"""``cvt`` against exact rounding and Python's integers."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from emulation.snippets import (
    Case,
    case,
    exactly,
    from_format,
    pack,
    random_floats,
    random_integers,
    rounded,
    run,
    to_format,
)

CASES: list[Case] = []
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
FLOATS = ("f16", "bf16", "f32", "f64")
TO_INTEGER = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def dtype_of(kind: str) -> np.dtype:
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")


def register(values: np.ndarray) -> np.ndarray:
    """Registers have at least 16 bits."""
    return (
        values.astype(np.int16 if values.dtype.kind == "i" else np.uint16) if values.itemsize == 1 else values
    )


def limited(value: int, kind: str) -> int:
    limits = np.iinfo(dtype_of(kind))
    return min(max(value, int(limits.min)), int(limits.max))


def integer_cases() -> None:
    for source in INTEGERS:
        a = random_integers(dtype_of(source))
        for target in INTEGERS:
            expected = register(a.astype(dtype_of(target)))
            CASES.append(case(f"cvt.{target}.{source} $d, $a;", register(a), expected))
        for target in ("u8", "s16", "s32"):
            clipped = np.array([limited(int(v), target) for v in a], dtype_of(target))
            CASES.append(case(f"cvt.sat.{target}.{source} $d, $a;", register(a), register(clipped)))
        for target in FLOATS:
            for mode in ("rn", "rz", "rm", "rp") if target == "f32" else ("rn",):
                exact = [Fraction(int(v)) for v in a]
                numbers = np.array([rounded(v, target, mode) for v in exact])
                CASES.append(
                    case(f"cvt.{mode}.{target}.{source} $d, $a;", register(a), to_format(numbers, target))
                )


def float_to_integer_cases() -> None:
    for source in FLOATS:
        a = random_floats(source, spread=10)
        wide = from_format(a, source)
        for target in INTEGERS:
            for mode, function in TO_INTEGER.items():
                numbers = [limited(function(float(v)), target) for v in wide]
                expected = register(np.array(numbers, dtype_of(target)))
                CASES.append(case(f"cvt.{mode}.{target}.{source} $d, $a;", a, expected))
    ends = np.array([3e9, -3e9, 1e20, -1e20, np.inf, -np.inf, np.nan, 2.0**31, 2.0**63], np.float32)
    as_s32 = [limited(2**80 if v > 2e9 else -(2**80), "s32") for v in ends]
    as_s32[6] = 0
    CASES.append(case("cvt.rzi.s32.f32 $d, $a;", ends, np.array(as_s32, np.int32)))
    as_u32 = [3000000000, 0, 2**32 - 1, 0, 2**32 - 1, 0, 0, 2**31, 2**32 - 1]
    CASES.append(case("cvt.rzi.u32.f32 $d, $a;", ends, np.array(as_u32, np.uint32)))
    top = 2**63
    as_s64 = [3000000000, -3000000000, top - 1, -top, top - 1, -top, -top, 2**31, top - 1]
    CASES.append(case("cvt.rzi.s64.f32 $d, $a;", ends, np.array(as_s64, np.int64)))
    tiny = np.array([1e-40, 1.5], np.float32)
    CASES.append(case("cvt.rpi.s32.f32 $d, $a;", tiny, np.array([1, 2], np.int32)))
    CASES.append(case("cvt.rpi.ftz.s32.f32 $d, $a;", tiny, np.array([0, 2], np.int32)))


def float_cases() -> None:
    for source in FLOATS:
        a = random_floats(source, spread=8)
        wide = from_format(a, source)
        for target in FLOATS:
            narrows = FLOATS.index(target) < FLOATS.index(source) or {source, target} == {"f16", "bf16"}
            for mode in ("rn", "rz", "rm", "rp") if narrows else ("",):
                expected = exactly(lambda x: x, target, mode or "rn", wide)
                dot = f".{mode}" if mode else ""
                CASES.append(case(f"cvt{dot}.{target}.{source} $d, $a;", a, expected))
    a = random_floats("f32", spread=5)
    for mode, function in TO_INTEGER.items():
        expected = np.array([math.copysign(function(float(v)), v) for v in a], np.float32)
        CASES.append(case(f"cvt.{mode}.f32.f32 $d, $a;", a, expected))
    clipped = np.where(a > 0, np.minimum(a, 1), 0).astype(np.float32)
    CASES.append(case("cvt.sat.f32.f32 $d, $a;", a, clipped))
    CASES.append(case("cvt.rn.relu.f16.f32 $d, $a;", a, np.maximum(a, 0).astype(np.float16)))
    tiny = np.array([1e-40, -1e-40, 2.0], np.float32)
    CASES.append(case("cvt.ftz.f64.f32 $d, $a;", tiny, np.array([0.0, -0.0, 2.0])))
    doubles = np.array([1e-40, 2.0**-126, 2.0])
    CASES.append(case("cvt.rn.ftz.f32.f64 $d, $a;", doubles, np.array([0.0, 2.0**-126, 2.0], np.float32)))
    special = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, 65520.0, 1e-30], np.float32)
    with np.errstate(over="ignore"):
        CASES.append(case("cvt.rn.f16.f32 $d, $a;", special, special.astype(np.float16)))
    bits = np.array([0x7F80, 0xFF80, 0x7FFF, 0x714A, 0xF14A, 0x4780, 0x0DA2], np.uint16)
    CASES.append(case("cvt.rn.bf16.f32 $d, $a;", special, bits))
    tie = (np.float32(1) + np.float32(2) ** -np.arange(9, 13, dtype=np.float32)).astype(np.float32)
    # Halves of the last place go away from zero: 1 + 2**-11 becomes 1 + 2**-10.
    CASES.append(
        case("cvt.rna.tf32.f32 $d, $a;", tie, np.array([1 + 2**-9, 1 + 2**-10, 1 + 2**-10, 1], np.float32))
    )


def packed_cases() -> None:
    high, low = random_floats("f32"), random_floats("f32", seed=1)
    for target in ("f16", "bf16"):
        for mode in ("rn", "rz"):
            both = [exactly(lambda x: x, target, mode, v) for v in (low, high)]
            CASES.append(case(f"cvt.{mode}.{target}x2.f32 $d, $a, $b;", (high, low), pack(*both)))


integer_cases()
float_to_integer_cases()
float_cases()
packed_cases()


@pytest.mark.parametrize("item", CASES, ids=str)
def test_convert(item):
    run(item)
