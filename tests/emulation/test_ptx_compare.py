"""Comparisons and selections against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from emulation.snippets import Case, case, from_format, pack, random_floats, random_integers, run, to_format

CASES: list[Case] = []
ORDERED = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
AS_NUMBER = "selp.u32 $d, 1, 0, %p1;"


def pair(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays with equal elements, and NaN among floats."""
    if "f" in kind:
        a, b = random_floats(kind), random_floats(kind, seed=1)
        b[8:16] = a[8:16]
        a[20], b[21] = (to_format(np.array([np.nan]), kind)[0],) * 2
        return a, b
    dtype = f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}"
    a, b = random_integers(dtype), random_integers(dtype, seed=1)
    b[30:40] = a[30:40]
    return a, b


def number(mask: np.ndarray) -> np.ndarray:
    return mask.astype(np.uint32)


def predicate_cases() -> None:
    for kind in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f16", "bf16", "f32", "f64"):
        a, b = pair(kind)
        x, y = (from_format(v, kind) if "f" in kind else v for v in (a, b))
        unordered = np.isnan(x) | np.isnan(y) if "f" in kind else np.zeros(len(a), bool)
        for name, function in ORDERED.items():
            if kind[0] == "b" and "f" not in kind and name not in ("eq", "ne"):
                continue
            ordered = function(x, y) & ~unordered
            CASES.append(case(f"setp.{name}.{kind} %p1, $a, $b; {AS_NUMBER}", (a, b), number(ordered)))
            if kind == "f32":
                expected = number(ordered | unordered)
                CASES.append(case(f"setp.{name}u.f32 %p1, $a, $b; {AS_NUMBER}", (a, b), expected))
    a, b = pair("f32")
    unordered = np.isnan(a) | np.isnan(b)
    CASES.append(case(f"setp.nan.f32 %p1, $a, $b; {AS_NUMBER}", (a, b), number(unordered)))
    CASES.append(case(f"setp.num.f32 %p1, $a, $b; {AS_NUMBER}", (a, b), number(~unordered)))
    a, b = pair("u32")
    for name, same in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        CASES.append(case(f"setp.{name}.u32 %p1, $a, $b; {AS_NUMBER}", (a, b), number(ORDERED[same](a, b))))
    third = np.arange(len(a), dtype=np.uint32) % 2
    for name, function in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):
        text = (
            f"setp.ne.u32 %p2, $c, 0; setp.lt.{name}.u32 %p1|%p3, $a, $b, !%p2; "
            f"{AS_NUMBER} selp.u32 $e, 1, 0, %p3;"
        )
        less = a < b
        expected = number(function(less, third == 0)), number(function(~less, third == 0))
        CASES.append(case(text, (a, b, third), expected))
    tiny = np.array([1e-40, 0.0, -1e-40], np.float32)
    CASES.append(case(f"setp.gt.ftz.f32 %p1, $a, $b; {AS_NUMBER}", (tiny, tiny * 0), number(tiny > 1)))
    for kind in ("f16", "bf16"):
        low, high = pair(kind), pair(kind)[::-1]
        text = f"setp.lt.{kind}x2 %p1|%p2, $a, $b; {AS_NUMBER} selp.u32 $e, 1, 0, %p2;"
        expected = [from_format(x, kind) < from_format(y, kind) for x, y in (low, high)]
        packed = tuple(pack(x, y) for x, y in zip(low, high, strict=True))
        CASES.append(case(text, packed, tuple(number(e) for e in expected)))


def set_cases() -> None:
    for kind in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f16", "bf16", "f32", "f64"):
        a, b = pair(kind)
        x, y = (from_format(v, kind) if "f" in kind else v for v in (a, b))
        expected = np.where(x == y, 2**32 - 1, 0).astype(np.uint32)
        CASES.append(case(f"set.eq.u32.{kind} $d, $a, $b;", (a, b), expected))
    a, b = pair("f32")
    unordered = np.isnan(a) | np.isnan(b)
    for name, function in ORDERED.items():
        ordered = function(a, b) & ~unordered
        CASES.append(case(f"set.{name}.f32.f32 $d, $a, $b;", (a, b), ordered.astype(np.float32)))
        CASES.append(
            case(f"set.{name}u.f32.f32 $d, $a, $b;", (a, b), (ordered | unordered).astype(np.float32))
        )
    CASES.append(case("set.nan.f32.f32 $d, $a, $b;", (a, b), unordered.astype(np.float32)))
    CASES.append(case("set.num.f32.f32 $d, $a, $b;", (a, b), (~unordered).astype(np.float32)))
    a, b = pair("u32")
    for name, same in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
        expected = np.where(ORDERED[same](a, b), 2**32 - 1, 0).astype(np.uint32)
        CASES.append(case(f"set.{name}.u32.u32 $d, $a, $b;", (a, b), expected))
    tiny = np.array([1e-40, 0.0, -1e-40], np.float32)
    CASES.append(case("set.gt.ftz.f32.f32 $d, $a, $b;", (tiny, tiny * 0), tiny * 0 + np.float32(0)))
    for kind in ("f16", "bf16"):
        low, high = pair(kind), pair(kind)[::-1]
        ones = [
            to_format((from_format(x, kind) < from_format(y, kind)).astype(np.float64), kind)
            for x, y in (low, high)
        ]
        packed = tuple(pack(x, y) for x, y in zip(low, high, strict=True))
        CASES.append(case(f"set.lt.{kind}x2.{kind}x2 $d, $a, $b;", packed, pack(*ones)))


def select_cases() -> None:
    flag = (np.arange(64) % 3 == 0).astype(np.uint32)
    for kind in ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64"):
        a, b = pair(kind)
        expected = np.where(flag == 1, a, b)
        CASES.append(case(f"setp.eq.u32 %p1, $c, 1; selp.{kind} $d, $a, $b, %p1;", (a, b, flag), expected))
        CASES.append(case(f"setp.ne.u32 %p1, $c, 1; selp.{kind} $d, $a, $b, !%p1;", (a, b, flag), expected))
    signs = random_integers(np.int32, seed=4)
    for kind in ("b32", "u32", "s32", "f32"):
        a, b = pair(kind)
        CASES.append(case(f"slct.{kind}.s32 $d, $a, $b, $c;", (a, b, signs), np.where(signs >= 0, a, b)))
    tiny = np.full(64, -1e-40, np.float32)
    a, b = pair("u32")
    CASES.append(case("slct.u32.f32 $d, $a, $b, $c;", (a, b, tiny), b))
    CASES.append(case("slct.ftz.u32.f32 $d, $a, $b, $c;", (a, b, tiny), a))
    for kind, small in (("f32", 1e-40), ("f64", 1e-310)):
        values = np.array([0.0, 1.0, -2.0, small, np.inf, -np.inf, np.nan], {"f32": "f4", "f64": "f8"}[kind])
        for name, expected in (
            ("finite", [1, 1, 1, 1, 0, 0, 0]),
            ("infinite", [0, 0, 0, 0, 1, 1, 0]),
            ("number", [1, 1, 1, 1, 1, 1, 0]),
            ("notanumber", [0, 0, 0, 0, 0, 0, 1]),
            ("normal", [0, 1, 1, 0, 0, 0, 0]),
            ("subnormal", [0, 0, 0, 1, 0, 0, 0]),
        ):
            text = f"testp.{name}.{kind} %p1, $a; {AS_NUMBER}"
            CASES.append(case(text, values, np.array(expected, np.uint32)))


predicate_cases()
set_cases()
select_cases()


@pytest.mark.parametrize("item", CASES, ids=str)
def test_compare(item):
    run(item)
