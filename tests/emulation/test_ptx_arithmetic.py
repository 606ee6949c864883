"""Arithmetic instructions against Python's integers and exact fractions."""

from __future__ import annotations

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
    run,
    to_format,
)

INTEGERS = {
    "u16": np.uint16,
    "s16": np.int16,
    "u32": np.uint32,
    "s32": np.int32,
    "u64": np.uint64,
    "s64": np.int64,
}
CASES: list[Case] = []


def wrap(values, dtype):
    """Python's integers modulo the type's range."""
    dtype = np.dtype(dtype)
    unsigned = np.array([int(v) % (1 << 8 * dtype.itemsize) for v in values], f"u{dtype.itemsize}")
    return unsigned.view(dtype)


def integer_cases() -> None:
    for name, dtype in INTEGERS.items():
        a, b, c = (random_integers(dtype, seed=seed) for seed in range(3))
        bits = 8 * np.dtype(dtype).itemsize
        ints = [list(map(int, values)) for values in (a, b, c)]

        def both(function, ints=ints, dtype=dtype):
            return wrap([function(*row) for row in zip(*ints, strict=True)], dtype)

        CASES.append(case(f"add.{name} $d, $a, $b;", (a, b), both(lambda x, y, _: x + y)))
        CASES.append(case(f"sub.{name} $d, $a, $b;", (a, b), both(lambda x, y, _: x - y)))
        CASES.append(case(f"mul.lo.{name} $d, $a, $b;", (a, b), both(lambda x, y, _: x * y)))
        CASES.append(case(f"mul.hi.{name} $d, $a, $b;", (a, b), both(lambda x, y, _, n=bits: x * y >> n)))
        CASES.append(case(f"mad.lo.{name} $d, $a, $b, $c;", (a, b, c), both(lambda x, y, z: x * y + z)))
        high = both(lambda x, y, z, n=bits: (x * y >> n) + z)
        CASES.append(case(f"mad.hi.{name} $d, $a, $b, $c;", (a, b, c), high))
        CASES.append(case(f"min.{name} $d, $a, $b;", (a, b), both(lambda x, y, _: min(x, y))))
        CASES.append(case(f"max.{name} $d, $a, $b;", (a, b), both(lambda x, y, _: max(x, y))))
        divisor = np.where(b == 0, 7, b).astype(dtype)
        quotients = [
            abs(x) // abs(y) * (-1 if (x < 0) != (y < 0) else 1)
            for x, y in zip(ints[0], map(int, divisor), strict=True)
        ]
        rests = [x - q * y for x, y, q in zip(ints[0], map(int, divisor), quotients, strict=True)]
        CASES.append(case(f"div.{name} $d, $a, $b;", (a, divisor), wrap(quotients, dtype)))
        CASES.append(case(f"rem.{name} $d, $a, $b;", (a, divisor), wrap(rests, dtype)))
        if name[0] == "s":
            CASES.append(case(f"neg.{name} $d, $a;", a, both(lambda x, *_: -x)))
            CASES.append(case(f"abs.{name} $d, $a;", a, both(lambda x, *_: abs(x))))
        if bits < 64:
            wide = np.dtype(f"{'i' if name[0] == 's' else 'u'}{bits // 4}")
            z = random_integers(wide, seed=5)
            product = [x * y for x, y in zip(*ints[:2], strict=True)]
            total = [p + int(v) for p, v in zip(product, z, strict=True)]
            CASES.append(case(f"mul.wide.{name} $d, $a, $b;", (a, b), wrap(product, wide)))
            CASES.append(case(f"mad.wide.{name} $d, $a, $b, $c;", (a, b, z), wrap(total, wide)))
    for name, dtype in (("u16x2", np.uint16), ("s16x2", np.int16)):
        a, b, c, d = (random_integers(dtype, seed=seed) for seed in range(4))
        for operation, function in (
            ("add", lambda x, y: x + y),
            ("sub", lambda x, y: x - y),
            ("min", np.minimum),
            ("max", np.maximum),
        ):
            expected = pack(function(a, b), function(c, d))
            CASES.append(case(f"{operation}.{name} $d, $a, $b;", (pack(a, c), pack(b, d)), expected))
    a, b = (random_integers(np.int32, seed=seed) for seed in range(2))
    CASES.append(case("max.relu.s32 $d, $a, $b;", (a, b), np.maximum(np.maximum(a, b), 0)))
    CASES.append(case("min.relu.s32 $d, $a, $b;", (a, b), np.maximum(np.minimum(a, b), 0)))


def float_cases() -> None:
    exact = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}
    for name in ("f16", "bf16", "f32", "f64"):
        a, b, c = (random_floats(name, seed=seed) for seed in range(3))
        wide = [from_format(v, name) for v in (a, b, c)]
        modes = ("rn", "rz", "rm", "rp") if name == "f32" else ("rn",)
        for mode in modes:
            for operation, function in exact.items():
                expected = exactly(function, name, mode, *wide[:2])
                # A product with zero keeps a sign that a fraction cannot carry.
                expected = np.where(
                    wide[0] * wide[1] == 0, to_format(_plain(operation, *wide[:2]), name), expected
                )
                expected = expected.astype(a.dtype)
                CASES.append(case(f"{operation}.{mode}.{name} $d, $a, $b;", (a, b), expected))
            expected = exactly(lambda x, y, z: x * y + z, name, mode, *wide)
            CASES.append(case(f"fma.{mode}.{name} $d, $a, $b, $c;", (a, b, c), expected))
            if name in ("f32", "f64"):
                CASES.append(case(f"mad.{mode}.{name} $d, $a, $b, $c;", (a, b, c), expected))
        CASES.append(case(f"neg.{name} $d, $a;", a, to_format(-wide[0], name)))
        CASES.append(case(f"abs.{name} $d, $a;", a, to_format(np.abs(wide[0]), name)))
        gap = wide[0].copy()
        gap[5] = np.nan
        CASES.append(
            case(f"min.{name} $d, $a, $b;", (to_format(gap, name), b), to_format(np.fmin(gap, wide[1]), name))
        )
        CASES.append(
            case(f"max.{name} $d, $a, $b;", (to_format(gap, name), b), to_format(np.fmax(gap, wide[1]), name))
        )
    a, b = random_floats("f32"), random_floats("f32", seed=1)
    a[5], b[6] = np.nan, np.nan
    CASES.append(case("max.NaN.f32 $d, $a, $b;", (a, b), np.maximum(a, b)))
    CASES.append(case("min.NaN.f32 $d, $a, $b;", (a, b), np.minimum(a, b)))
    c = random_floats("f32", seed=2)
    CASES.append(case("max.f32 $d, $a, $b, $c;", (a, b, c), np.fmax(np.fmax(a, b), c)))
    zeros = np.array([0.0, -0.0, 0.0, -0.0], np.float32), np.array([-0.0, 0.0, 0.0, -0.0], np.float32)
    CASES.append(case("min.f32 $d, $a, $b;", zeros, np.array([-0.0, -0.0, 0.0, -0.0], np.float32)))
    CASES.append(case("max.f32 $d, $a, $b;", zeros, np.array([0.0, 0.0, 0.0, -0.0], np.float32)))
    for name in ("f32", "f64"):
        a, b = random_floats(name), random_floats(name, seed=1)
        CASES.append(case(f"copysign.{name} $d, $a, $b;", (a, b), np.copysign(b, a)))


def _plain(operation: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation](a, b)


def packed_cases() -> None:
    functions = {
        "add": (2, lambda x, y: x + y),
        "sub": (2, lambda x, y: x - y),
        "mul": (2, lambda x, y: x * y),
        "fma": (3, lambda x, y, z: x * y + z),
    }
    for name, element in (("f16x2", "f16"), ("bf16x2", "bf16"), ("f32x2", "f32")):
        # No zeros: their signs are tested above.
        halves = [
            [
                np.where(v == 0, random_floats(element)[1], v)
                for v in (random_floats(element, seed=s), random_floats(element, seed=s + 9))
            ]
            for s in range(3)
        ]
        packed = tuple(pack(*pair) for pair in halves)
        for operation, (count, function) in functions.items():
            low, high = (
                exactly(function, element, "rn", *(from_format(pair[i], element) for pair in halves[:count]))
                for i in (0, 1)
            )
            text = f"{operation}.rn.{name} $d, " + ", ".join(f"${letter}" for letter in "abc"[:count]) + ";"
            CASES.append(case(text, packed[:count], pack(low, high)))
        if name == "f32x2":
            continue
        for operation, function in (("min", np.fmin), ("max", np.fmax)):
            values = [[from_format(v, element) for v in pair] for pair in halves]
            both = [to_format(function(values[0][i], values[1][i]), element) for i in (0, 1)]
            CASES.append(case(f"{operation}.{name} $d, $a, $b;", packed[:2], pack(*both)))
        for operation, function in (("neg", np.negative), ("abs", np.abs)):
            both = [to_format(function(from_format(v, element)), element) for v in halves[0]]
            CASES.append(case(f"{operation}.{name} $d, $a;", packed[0], pack(*both)))


def mixed_cases() -> None:
    """sm_100: float32 results of 16-bit sources."""
    wide = random_floats("f32", seed=3)
    for name in ("f16", "bf16"):
        a, b = random_floats(name, seed=4), random_floats(name, seed=5)
        x, y = from_format(a, name), from_format(b, name)
        for mode in ("rn", "rz"):
            total, difference, product = (
                exactly(function, "f32", mode, x, y, wide)
                for function in (lambda x, _, z: x + z, lambda x, _, z: x - z, lambda x, y, z: x * y + z)
            )
            CASES.append(case(f"add.{mode}.f32.{name} $d, $a, $b;", (a, wide), total))
            CASES.append(case(f"sub.{mode}.f32.{name} $d, $a, $b;", (a, wide), difference))
            CASES.append(case(f"fma.{mode}.f32.{name} $d, $a, $b, $c;", (a, b, wide), product))


TINY = np.array([1e-39, -1e-40, 1e-20, 2e-38, -3.0, 0.25], np.float32)


def flush(values):
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), values), values)


def modifier_cases() -> None:
    one, half = np.full_like(TINY, 1), np.full_like(TINY, 0.5)
    CASES.append(case("add.ftz.f32 $d, $a, $b;", (TINY, -TINY[::-1]), flush(flush(TINY) - flush(TINY[::-1]))))
    CASES.append(case("sub.ftz.f32 $d, $a, $b;", (TINY, half * 0), flush(TINY)))
    CASES.append(case("mul.ftz.f32 $d, $a, $b;", (TINY, half), flush(flush(TINY) * half)))
    CASES.append(case("mul.f32 $d, $a, $b;", (TINY, half), TINY * half))
    CASES.append(case("mad.rn.ftz.f32 $d, $a, $b, $c;", (TINY, one, one), flush(TINY) + one))
    CASES.append(case("fma.rn.ftz.f32 $d, $a, $b, $c;", (TINY, half, half * -0.0), flush(flush(TINY) * half)))
    CASES.append(case("neg.ftz.f32 $d, $a;", TINY, flush(-TINY)))
    CASES.append(case("abs.ftz.f32 $d, $a;", TINY, flush(np.abs(TINY))))
    CASES.append(case("min.ftz.f32 $d, $a, $b;", (TINY, one), np.minimum(flush(TINY), one)))
    CASES.append(case("max.ftz.f32 $d, $a, $b;", (TINY, -one), np.maximum(flush(TINY), -one)))
    wide = np.array([-1, 0.25, 0.75, 3, np.nan, 1], np.float32)
    zero = wide * 0
    clipped = np.array([0, 0.25, 0.75, 1, 0, 1], np.float32)
    zero[4] = 0
    CASES.append(case("add.sat.f32 $d, $a, $b;", (wide, zero), clipped))
    CASES.append(case("sub.sat.f32 $d, $a, $b;", (wide, zero), clipped))
    CASES.append(case("mul.sat.f32 $d, $a, $b;", (wide, zero + 1), clipped))
    CASES.append(case("mad.rn.sat.f32 $d, $a, $b, $c;", (wide, zero + 1, zero), clipped))
    CASES.append(case("fma.rn.sat.f32 $d, $a, $b, $c;", (wide, zero + 1, zero), clipped))
    halves = wide.astype(np.float16)
    CASES.append(
        case(
            "fma.rn.relu.f16 $d, $a, $b, $c;",
            (halves, (zero + 1).astype(np.float16), zero.astype(np.float16)),
            np.array([0, 0.25, 0.75, 3, np.nan, 1], np.float16),
        )
    )


def function_cases() -> None:
    positive = np.abs(random_floats("f32")) + np.float32(0.01)
    any_sign = random_floats("f32", seed=1, spread=3)
    functions = {
        "ex2": (np.exp2, any_sign),
        "lg2": (np.log2, positive),
        "sin": (np.sin, any_sign),
        "cos": (np.cos, any_sign),
        "rcp": (lambda x: 1 / x, positive),
        "sqrt": (np.sqrt, positive),
        "rsqrt": (lambda x: 1 / np.sqrt(x), positive),
        "tanh": (np.tanh, any_sign),
    }
    for operation, (function, values) in functions.items():
        expected = function(values.astype(np.float64)).astype(np.float32)
        CASES.append(case(f"{operation}.approx.f32 $d, $a;", values, expected))
        if operation != "tanh":
            inputs = np.abs(TINY) if operation in ("lg2", "sqrt", "rsqrt") else TINY
            with np.errstate(all="ignore"):
                flushed = flush(function(flush(inputs).astype(np.float64)).astype(np.float32))
            CASES.append(case(f"{operation}.approx.ftz.f32 $d, $a;", inputs, flushed))
    CASES.append(case("div.approx.f32 $d, $a, $b;", (any_sign, positive), any_sign / positive))
    CASES.append(case("div.full.f32 $d, $a, $b;", (any_sign, positive), any_sign / positive))
    CASES.append(case("div.full.ftz.f32 $d, $a, $b;", (TINY, TINY * 0 + 1), flush(TINY)))
    for name in ("f32", "f64"):
        a, b = random_floats(name, seed=3), np.abs(random_floats(name, seed=4))
        b = np.where(b == 0, b.dtype.type(3), b)
        nonzero = np.where(a == 0, a.dtype.type(5), a)
        quotient = exactly(lambda x, y: x / y, name, "rn", nonzero, b)
        CASES.append(case(f"div.rn.{name} $d, $a, $b;", (nonzero, b), quotient))
        CASES.append(case(f"rcp.rn.{name} $d, $a;", b, exactly(lambda x: 1 / x, name, "rn", b)))
        CASES.append(case(f"sqrt.rn.{name} $d, $a;", b, np.sqrt(b)))
    doubles = np.abs(random_floats("f64", seed=6)) + 0.01
    CASES.append(case("rcp.approx.ftz.f64 $d, $a;", doubles, 1 / doubles, tolerance=2**-20))
    CASES.append(case("rsqrt.approx.f64 $d, $a;", doubles, 1 / np.sqrt(doubles)))
    for name in ("f16", "bf16"):
        a, b = random_floats(name, seed=1, spread=2), random_floats(name, seed=2, spread=2)
        for operation, function in (("ex2", np.exp2), ("tanh", np.tanh)):
            low, high = (
                exactly(lambda x, f=function: Fraction(float(f(float(x)))), name, "rn", from_format(v, name))
                for v in (a, b)
            )
            if operation == "tanh":
                low, high = (np.where(from_format(v, name) == 0, v, r) for v, r in ((a, low), (b, high)))
            ftz = ".ftz" if name == "bf16" and operation == "ex2" else ""
            CASES.append(case(f"{operation}.approx{ftz}.{name} $d, $a;", a, low))
            CASES.append(case(f"{operation}.approx{ftz}.{name}x2 $d, $a;", pack(a, b), pack(low, high)))


integer_cases()
float_cases()
packed_cases()
mixed_cases()
modifier_cases()
function_cases()


@pytest.mark.parametrize("item", CASES, ids=str)
def test_arithmetic(item):
    run(item)


def test_fma_of_doubles_rounds_once_at_the_ends_of_the_range():
    a = np.array([1 + 2.0**-52, 1e200, 1e-200, 1e-310, 1e308, -0.0, 2.0**-1000, np.inf, 3.0])
    b = np.array([1 - 2.0**-52, 1e200, 1e-200, 0.5, 10.0, 5.0, 2.0**-60, 0.0, 1 / 3])
    c = np.array([-1.0, -1e300, 1e-320, 1e-312, -1e308, -0.0, 2.0**-1040, 1.0, -1.0])
    expected = [*(exactly(lambda x, y, z: x * y + z, "f64", "rn", a[:5], b[:5], c[:5])), -0.0, 0, np.nan, 0]
    expected[6:7] = exactly(lambda x, y, z: x * y + z, "f64", "rn", a[6:7], b[6:7], c[6:7])
    expected[8:9] = exactly(lambda x, y, z: x * y + z, "f64", "rn", a[8:9], b[8:9], c[8:9])
    run(case("fma.rn.f64 $d, $a, $b, $c;", (a, b, c), np.array(expected)))


def test_division_by_zero_gives_all_ones():
    a, b = np.array([5, 0, 7], np.uint32), np.array([0, 0, 2], np.uint32)
    run(case("div.u32 $d, $a, $b;", (a, b), np.array([2**32 - 1, 2**32 - 1, 3], np.uint32)))
