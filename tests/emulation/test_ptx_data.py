"""Moves, loads and stores in every space, width and with every hint; atomics; asynchronous copies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from emulation import ptx
from emulation.snippets import (
    Case,
    case,
    from_format,
    pack,
    random_floats,
    random_integers,
    run,
    source,
    to_format,
)

CASES: list[Case] = []
LOAD_HINTS = [
    "nc",
    "weak",
    "ca",
    "cg",
    "cs",
    "lu",
    "cv",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "volatile",
    "wb",
    "wt",
]
STORE_HINTS = [
    "weak",
    "wb",
    "cg",
    "cs",
    "wt",
    "ca",
    "cv",
    "lu",
    "L1::evict_normal",
    "L1::evict_unchanged",
    "L1::evict_first",
    "L1::evict_last",
    "L1::no_allocate",
    "L2::evict_normal",
    "L2::evict_first",
    "L2::evict_last",
    "L2::64B",
    "L2::128B",
    "L2::256B",
    "volatile",
]


def move_cases() -> None:
    for kind in ("b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64"):
        a = random_integers(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
        CASES.append(case(f"mov.{kind} $d, $a;", a, a))
    for kind in ("f16", "bf16", "f32", "f64"):
        a = random_floats(kind)
        CASES.append(case(f"mov.{kind} $d, $a;", a, a))
    a, b = (random_integers(np.uint32, seed=seed) for seed in range(2))
    CASES.append(case("mov.b64 $d, {$a, $b};", (a, b), pack(a, b)))
    CASES.append(case("mov.b64 {$d, $e}, $a;", pack(a, b), (a, b)))
    CASES.append(case("mov.b64 {_, $d}, $a;", pack(a, b), b))
    h, k = (random_integers(np.uint16, seed=seed) for seed in range(2))
    CASES.append(case("mov.b32 $d, {$a, $b};", (h, k), pack(h, k)))
    CASES.append(case("mov.b32 {$d, $e}, $a;", pack(h, k), (h, k)))
    p, q = (random_integers(np.uint64, seed=seed) for seed in range(2))
    text = "mov.b128 %q1, {$a, $b}; mov.b128 %q2, %q1; mov.b128 {$d, $e}, %q2;"
    CASES.append(case(text, (p, q), (p, q)))
    text = "setp.gt.u32 %p1, $a, 5; mov.pred %p2, %p1; selp.u32 $d, 1, 0, %p2;"
    CASES.append(case(text, a, (a > 5).astype(np.uint32)))
    CASES.append(case("mov.f32 $d, 0f40490FDB;", a, np.full(64, np.pi, np.float32)))
    CASES.append(case("mov.f64 $d, 0d400921FB54442D18;", a, np.full(64, np.pi)))
    CASES.append(case("mov.f32 $d, 2.5;", a, np.full(64, 2.5, np.float32)))
    CASES.append(case("mov.b32 $d, -2;", a, np.full(64, 2**32 - 2, np.uint32)))
    CASES.append(case("mov.b16 $d, 0xBF80U;", a, np.full(64, 0xBF80, np.uint16)))


def load_cases() -> None:
    for kind in ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64"):
        stored = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
        a = random_integers(stored)
        wide = a.astype("i8" if kind[0] == "s" else "u8")
        CASES.append(case(f"ld.global.{kind} $d, [%at_a];", a, wide))
        CASES.append(case(f"st.global.{kind} [%at_d], $a;", wide, a))
    for kind in ("f16", "bf16", "f32", "f64"):
        a = random_floats(kind)
        CASES.append(case(f"ld.global.{kind} $d, [%at_a];", a, a))
        CASES.append(case(f"st.global.{kind} [%at_d], $a;", a, a))
    a = random_integers(np.uint32)
    CASES.extend(case(f"ld.global.{hint}.b32 $d, [%at_a];", a, a) for hint in LOAD_HINTS)
    CASES.extend(case(f"st.global.{hint}.b32 [%at_d], $a;", a, a) for hint in STORE_HINTS)
    for scope in ("cta", "cluster", "gpu", "sys"):
        for order in ("relaxed", "acquire"):
            CASES.append(case(f"ld.{order}.{scope}.global.b32 $d, [%at_a];", a, a))
        for order in ("relaxed", "release"):
            CASES.append(case(f"st.{order}.{scope}.global.b32 [%at_d], $a;", a, a))
    policy = "createpolicy.fractional.L2::{}.b64 %l1, 1.0;"
    for name in ("evict_first", "evict_last", "evict_normal", "evict_unchanged"):
        text = policy.format(name) + "ld.global.L1::evict_last.L2::cache_hint.b32 $d, [%at_a], %l1;"
        CASES.append(case(text, a, a))
    text = policy.format("evict_first") + "st.global.L2::cache_hint.b32 [%at_d], $a, %l1;"
    CASES.append(case(text, a, a))
    text = "setp.lt.u32 %p1, %t, 63; mov.b32 $d, 0; @%p1 ld.global.b32 $d, [%at_a+4];"
    CASES.append(case(text, a, np.append(a[1:], np.uint32(0))))


def vector_cases() -> None:
    for count, kind, dtype in (
        (2, "b32", "u4"),
        (4, "b32", "u4"),
        (2, "b64", "u8"),
        (4, "b16", "u2"),
        (8, "b32", "u4"),
    ):
        a = random_integers(np.dtype(dtype), count * 16)
        size = count * np.dtype(dtype).itemsize
        stem = {2: "h", 4: "r", 8: "l"}[np.dtype(dtype).itemsize]
        registers = "{" + ", ".join(f"%{stem}{i + 1}" for i in range(count)) + "}"
        text = (
            f"setp.lt.u32 %p1, %t, 16; mad.wide.u32 %l11, %t, {size}, %base_a;"
            f"mad.wide.u32 %l12, %t, {size}, %base_d;"
            f"@%p1 ld.global.v{count}.{kind} {registers}, [%l11];"
            f"@%p1 st.global.v{count}.{kind} [%l12], {registers};"
        )
        CASES.append(case(text, a, a))
    pairs = random_integers(np.uint64, 128).reshape(64, 2)
    CASES.append(case("ld.global.b128 %q1, [%at_a]; st.global.b128 [%at_d], %q1;", pairs, pairs))


def space_cases() -> None:
    a = random_integers(np.uint32)
    shared = ".shared .align 16 .b8 tile[256];"
    for space in ("shared", "shared::cta"):
        text = f"""mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 4, %r1; st.{space}.b32 [%r2], $a; bar.sync 0;
            xor.b32 %r3, %t, 37; mad.lo.u32 %r4, %r3, 4, %r1; ld.{space}.b32 $d, [%r4];"""
        CASES.append(case(text, a, a[np.arange(64) ^ 37], declarations=shared))
    text = """mov.u64 %l1, tile; cvta.shared.u64 %l2, %l1; mad.wide.u32 %l3, %t, 4, %l2; st.b32 [%l3], $a;
            bar.sync 0;
        cvta.to.shared.u64 %l4, %l3; cvt.u32.u64 %r1, %l4; ld.shared.b32 $d, [%r1];
        isspacep.shared %p1, %l3;
        selp.u32 $e, 1, 0, %p1; isspacep.global %p2, %l3; selp.u32 $f, 1, 0, %p2;"""
    yes, no = np.ones(64, np.uint32), np.zeros(64, np.uint32)
    CASES.append(case(text, a, (a, yes, no), declarations=shared))
    CASES.append(
        case(
            text.replace(".shared.u64", ".shared::cta.u64").replace(
                "isspacep.shared", "isspacep.shared::cta"
            ),
            a,
            (a, yes, no),
            declarations=shared,
        )
    )
    text = """cvta.global.u64 %l1, %at_a; cvta.to.global.u64 %l2, %l1; ld.b32 $d, [%l1];
            isspacep.global %p1, %l2;
        selp.u32 $e, 1, 0, %p1; isspacep.const %p2, %l2; cvta.to.const.u64 %l3, %l2;"""
    CASES.append(case(text, a, (a, yes)))
    text = "cvt.u32.u64 %r1, %l1; cvta.to.global.u32 %r2, %r1; mov.u32 $d, %r2;"
    CASES.append(case("mov.u64 %l1, 7;" + text, a, np.full(64, 7, np.uint32)))
    depot = ".local .align 8 .b8 depot[16];"
    text = """mov.u64 %l1, depot; cvta.local.u64 %l2, %l1; st.local.b32 [%l1+4], $a; st.b32 [%l2+8], %t;
        ld.b32 $d, [%l2+4]; cvta.to.local.u64 %l3, %l2; ld.local.b32 $e, [%l3+8]; isspacep.local %p1, %l2;
        selp.u32 $f, 1, 0, %p1;"""
    CASES.append(case(text, a, (a, np.arange(64, dtype=np.uint32), yes), declarations=depot))
    constant = ".const .align 4 .u32 table[4] = {10, 20, 30, 40};"
    text = "and.b32 %r1, %t, 3; mov.u64 %l1, table; mad.wide.u32 %l2, %r1, 4, %l1; ld.const.u32 $d, [%l2];"
    CASES.append(case(text, a, (np.arange(64) % 4 * 10 + 10).astype(np.uint32), declarations=constant))
    text = "ld.param.u64 %l1, [param_a]; ld.param::entry.b32 %r1, [param_a+4]; ld.global.b32 $d, [%l1];"
    CASES.append(case(text, a, np.full(64, a[0])))
    for where in ("global", "local"):
        for level in ("L1", "L2"):
            CASES.append(case(f"prefetch.{where}.{level} [%at_a]; mov.b32 $d, $a;", a, a))
    for level in ("L2::evict_last", "L2::evict_normal"):
        CASES.append(case(f"prefetch.global.{level} [%at_a]; mov.b32 $d, $a;", a, a))


def copy_cases() -> None:
    a = random_integers(np.uint32, 256)
    shared = ".shared .align 16 .b8 tile[1024];"
    begin = "mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 4, %r1;"
    for cache in ("ca", "ca.L2::64B", "ca.L2::128B", "ca.L2::256B"):
        text = (
            f"{begin} cp.async.{cache}.shared.global [%r2], [%at_a], 4; cp.async.commit_group; "
            f"cp.async.wait_group 0; ld.shared.b32 $d, [%r2];"
        )
        CASES.append(case(text, a, a, declarations=shared))
    text = (
        f"{begin} cp.async.ca.shared::cta.global [%r2], [%at_a], 4; cp.async.wait_all; "
        f"ld.shared.b32 $d, [%r2];"
    )
    CASES.append(case(text, a, a, declarations=shared))
    text = f"""{begin} createpolicy.fractional.L2::evict_first.b64 %l1, 1.0; setp.lt.u32 %p1, %t, 16;
            selp.u32 %r3, 4, 0, %p1;
        cp.async.ca.shared.global.L2::cache_hint [%r2], [%at_a], 4, %r3, %l1;
        cp.async.wait_all; ld.shared.b32 $d, [%r2];"""
    CASES.append(case(text, a, np.where(np.arange(256) < 16, a, 0).astype(np.uint32), declarations=shared))
    text = """setp.lt.u32 %p1, %t, 64; mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 16, %r1;
            mad.wide.u32 %l1, %t, 16, %base_a;
        @%p1 cp.async.cg.shared.global [%r2], [%l1], 16; cp.async.commit_group;
        cp.async.wait_group 0; bar.sync 0;
        mad.lo.u32 %r3, %t, 4, %r1; ld.shared.b32 $d, [%r3];"""
    CASES.append(case(text, a, a, declarations=shared))


def atomic_cases() -> None:
    for operation in ("add", "min", "max", "and", "or", "xor"):
        for kind in ("u32", "s32", "u64", "s64", "b32", "b64"):
            if (kind[0] == "b") != (operation in ("and", "or", "xor")):
                continue
            a = random_integers(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
            function = {
                "add": np.add,
                "min": np.minimum,
                "max": np.maximum,
                "and": np.bitwise_and,
                "or": np.bitwise_or,
                "xor": np.bitwise_xor,
            }[operation]
            with np.errstate(over="ignore"):
                total = function.reduce(np.append(a, a.dtype.type(0)), dtype=a.dtype)
            expected = np.zeros_like(a)
            expected[0] = total
            CASES.append(case(f"red.global.{operation}.{kind} [%base_d], $a;", a, expected))
            before = function.accumulate(np.append(a.dtype.type(0), a), dtype=a.dtype)[:-1]
            text = f"atom.global.relaxed.gpu.{operation}.{kind} $e, [%base_d], $a;"
            CASES.append(case(text, a, (expected, before)))
    for kind in ("f16", "bf16", "f32", "f64"):
        a = to_format(np.arange(1, 17, dtype=np.float64) / 4, kind)
        expected = np.zeros_like(a)
        expected[0] = to_format(np.array([34.0]), kind)[0]
        noftz = ".noftz" if kind in ("f16", "bf16") else ""
        CASES.append(case(f"red.global.add{noftz}.{kind} [%base_d], $a;", a, expected))
        before = to_format(np.cumsum(from_format(a, kind)) - from_format(a, kind), kind)
        CASES.append(case(f"atom.global.add{noftz}.{kind} $e, [%base_d], $a;", a, (expected, before)))
        if noftz:
            packed, target = pack(a, a), pack(expected, expected)
            CASES.append(case(f"red.global.add.noftz.{kind}x2 [%base_d], $a;", packed, target))
            CASES.append(
                case(
                    f"atom.global.add.noftz.{kind}x2 $e, [%base_d], $a;",
                    packed,
                    (target, pack(before, before)),
                )
            )
    ones = np.ones(64, np.uint32)
    limit = np.full(64, 9, np.uint32)
    first = np.zeros(64, np.uint32)
    first[0] = 64 % 10
    CASES.append(
        case("atom.global.inc.u32 $e, [%base_d], $a;", limit, (first, (np.arange(64) % 10).astype(np.uint32)))
    )
    CASES.append(case("red.global.inc.u32 [%base_d], $a;", limit, first))
    down = np.zeros(64, np.uint32)
    down[0] = (0 - 64) % 10
    CASES.append(
        case(
            "atom.global.dec.u32 $e, [%base_d], $a;",
            limit,
            (down, ((0 - np.arange(64)) % 10).astype(np.uint32)),
        )
    )
    CASES.append(case("red.global.dec.u32 [%base_d], $a;", limit, down))
    a = random_integers(np.uint32)
    last = np.zeros_like(a)
    last[0] = a[-1]
    CASES.append(case("atom.global.exch.b32 $e, [%base_d], $a;", a, (last, np.append(np.uint32(0), a[:-1]))))
    winner = np.zeros(64, np.uint32)
    winner[0] = 1
    text = "add.u32 %r1, %t, 1; atom.global.cas.b32 $e, [%base_d], 0, %r1;"
    CASES.append(case(text, ones, (winner, np.minimum(np.arange(64), 1).astype(np.uint32))))
    half = np.zeros(64, np.uint16)
    half[0] = 1
    text = "cvt.u16.u32 %h1, %t; add.u16 %h1, %h1, 1; atom.global.cas.b16 %h2, [%base_d], 0, %h1;"
    CASES.append(case(text, ones, half))
    CASES.append(
        case(
            "cvt.u16.u32 %h1, %t; add.u16 %h1, %h1, 1; red.global.or.b16 [%base_d], %h1;",
            ones,
            _first(half, 127),
        )
    )
    count = np.zeros(64, np.uint32)
    count[0] = 64
    for scope in ("cta", "cluster", "gpu", "sys"):
        for order in ("relaxed", "acquire", "release", "acq_rel"):
            CASES.append(case(f"atom.{order}.{scope}.global.add.u32 %r1, [%base_d], 1;", ones, count))
            CASES.append(case(f"red.{order}.{scope}.global.add.u32 [%base_d], 1;", ones, count))
    tally = ".shared .align 4 .b8 tally[4];"
    for space in ("shared", "shared::cta"):
        for text in (f"atom.{space}.add.u32 %r2, [%r1], 1;", f"red.{space}.add.u32 [%r1], 1;"):
            whole = (
                f"mov.u32 %r1, tally; setp.eq.u32 %p1, %t, 0; @%p1 st.shared.b32 [%r1], 0; bar.sync 0; "
                f"{text} bar.sync 0; ld.shared.b32 $d, [%r1];"
            )
            CASES.append(case(whole, ones, np.full(64, 64, np.uint32), declarations=tally))
    CASES.append(case("atom.add.u32 %r1, [%base_d], 1; red.add.u32 [%base_d], 1;", ones, count * 2))
    hint = "createpolicy.fractional.L2::evict_last.b64 %l1, 1.0;"
    CASES.append(case(hint + "red.global.add.L2::cache_hint.u32 [%base_d], 1, %l1;", ones, count))
    CASES.append(case(hint + "atom.global.add.L2::cache_hint.u32 %r1, [%base_d], 1, %l1;", ones, count))
    sums = np.zeros(64, np.float32)
    sums[:4] = 64, 128, 192, 256
    for operation in (
        "red.global.add.v4.f32 [%base_d], {{{}}};",
        "atom.global.add.v4.f32 {{%r5, %r6, %r7, %r8}}, [%base_d], {{{}}};",
    ):
        text = "mov.f32 %r1, 1.0; mov.f32 %r2, 2.0; mov.f32 %r3, 3.0; mov.f32 %r4, 4.0;"
        CASES.append(case(text + operation.format("%r1, %r2, %r3, %r4"), ones, sums))
        two = operation.replace("v4", "v2").replace(", %r7, %r8", "").format("%r1, %r2")
        CASES.append(case(text + two, ones, np.where(np.arange(64) < 2, sums, 0).astype(np.float32)))


def _first(array: np.ndarray, value: int) -> np.ndarray:
    out = array.copy()
    out[0] = value
    return out


move_cases()
load_cases()
vector_cases()
space_cases()
copy_cases()
atomic_cases()


@pytest.mark.parametrize("item", CASES, ids=str)
def test_data(item):
    run(item)


SCALE = """
.version 8.0
.target sm_80
.address_size 64
.visible .entry scale(.param .u64 values, .param .f32 factor, .param .f64 shift, .param .align 8 .b8 pair[16])
{
    .reg .b64 %l<4>; .reg .b32 %t; .reg .f32 %f<6>; .reg .f64 %g<4>; .reg .b32 %r<3>;
    ld.param.u64 %l1, [values];
    ld.param.f32 %f1, [factor];
    ld.param.f64 %g1, [shift];
    ld.param.b32 %r1, [pair+4];
    mov.u32 %t, %tid.x;
    mad.wide.u32 %l2, %t, 4, %l1;
    ld.global.f32 %f2, [%l2];
    cvt.rn.f32.f64 %f3, %g1;
    fma.rn.f32 %f4, %f1, %f2, %f3;
    cvt.rn.f32.s32 %f5, %r1;
    add.f32 %f4, %f4, %f5;
    st.global.f32 [%l2], %f4;
}
"""


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_arguments_are_arrays_or_tensors_numbers_and_structures(library):
    values = np.arange(8, dtype=np.float32)
    argument = values if library == "numpy" else torch.from_numpy(values)
    pair = np.array([1, -7, 0, 0], np.int32).tobytes()
    ptx.launch(ptx.parse(SCALE).kernel("scale"), 1, 8, [argument, 2.0, 0.5, pair])
    np.testing.assert_array_equal(values, np.arange(8) * 2 + 0.5 - 7)


def test_views_of_one_allocation_see_each_other():
    store = "st.global.b32 [%at_a], %t; ld.global.b32 $d, [%base_a+4];"
    item = case(store, np.zeros(4, np.uint32), np.zeros(4, np.uint32))
    both = np.zeros(8, np.uint32)
    kernel = ptx.parse(source(item)).kernel()
    with pytest.raises(ptx.Race):
        ptx.launch(kernel, 1, 4, [both[:4], both[2:6]])
