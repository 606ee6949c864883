"""Branches, barriers, fences and warp instructions."""

from __future__ import annotations

import numpy as np
import pytest

from emulation import ptx
from emulation.snippets import Case, case, random_floats, random_integers, run

CASES: list[Case] = []
T64 = np.arange(64, dtype=np.uint32)
LANE = T64 % 32


def control_cases() -> None:
    text = "setp.lt.u32 %p1, %t, 10; @%p1 bra LOW; mov.u32 $d, 7; bra.uni END; LOW: mov.u32 $d, 3; END:"
    CASES.append(case(text, T64, np.where(T64 < 10, 3, 7).astype(np.uint32)))
    text = "setp.lt.u32 %p1, %t, 10; @!%p1 bra HIGH; mov.u32 $d, 3; bra END; HIGH: mov.u32 $d, 7; END:"
    CASES.append(case(text, T64, np.where(T64 < 10, 3, 7).astype(np.uint32)))
    loop = (
        "mov.u32 %r1, 0; mov.u32 $d, 0; AGAIN: add.u32 $d, $d, %r1; add.u32 %r1, %r1, 1; "
        "setp.le.u32 %p1, %r1, %t; @%p1 bra AGAIN;"
    )
    CASES.append(case(loop, T64, (T64 * (T64 + 1) // 2).astype(np.uint32)))
    CASES.append(case(loop, T64, (T64 * (T64 + 1) // 2).astype(np.uint32), options={"seed": 3}))
    table = """and.b32 %r1, %t, 3; TABLE: .branchtargets A, B, C, D; brx.idx{} %r1, TABLE;
        A: mov.u32 $d, 10; bra END; B: mov.u32 $d, 20; bra END; C: mov.u32 $d, 30; bra END;
        D: mov.u32 $d, 40; END:"""
    for uni in ("", ".uni"):
        CASES.append(case(table.format(uni), T64, (T64 % 4 * 10 + 10).astype(np.uint32)))
    for leave in ("ret", "exit", "ret.uni", "exit.uni"):
        text = (
            f"mov.u32 %r1, 1; st.global.b32 [%at_d], %r1; setp.ge.u32 %p1, %t, 32; @%p1 {leave}; "
            f"mov.u32 %r1, 5; st.global.b32 [%at_d], %r1;"
        )
        CASES.append(case(text, T64, np.where(T64 < 32, 5, 1).astype(np.uint32)))
    tile = ".shared .align 4 .b8 tile[256];"
    for barrier in (
        "bar.sync 0;",
        "bar.sync 1, 64;",
        "bar.cta.sync 0;",
        "barrier.sync 0;",
        "barrier.sync.aligned 0;",
        "barrier.cta.sync.aligned 2;",
        "bar.cta.sync.aligned 0;",
        "bar.sync.aligned 0;",
        "barrier.cta.sync 0;",
    ):
        text = (
            f"mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 4, %r1; st.shared.b32 [%r2], %t; "
            f"{barrier} sub.u32 %r3, 63, %t; mad.lo.u32 %r4, %r3, 4, %r1; "
            f"ld.shared.b32 $d, [%r4];"
        )
        CASES.append(case(text, T64, T64[::-1].copy(), declarations=tile))
    for stem in ("bar.red", "bar.cta.red", "barrier.red", "barrier.cta.red"):
        for aligned in ("", ".aligned"):
            ask = "setp.lt.u32 %p1, %t, 40;"
            text = f"{ask} {stem}.popc{aligned}.u32 $d, 0, %p1;"
            CASES.append(case(text, T64, np.full(64, 40, np.uint32)))
            for operation, value in (("and", 0), ("or", 1)):
                text = f"{ask} {stem}.{operation}{aligned}.pred %p2, 0, %p1; selp.u32 $d, 1, 0, %p2;"
                CASES.append(case(text, T64, np.full(64, value, np.uint32)))
    fences = (
        "membar.cta",
        "membar.gl",
        "membar.gpu",
        "membar.sys",
        "fence.proxy.async",
        "fence.proxy.async.shared::cta",
    )
    fences += ("fence.proxy.alias", "griddepcontrol.wait", "griddepcontrol.launch_dependents")
    fences += tuple(
        f"fence.{o}.{s}"
        for o in ("sc", "acq_rel", "acquire", "release")
        for s in ("cta", "cluster", "gpu", "sys")
    )
    CASES.extend(case(f"{fence}; mov.u32 $d, %t;", T64, T64) for fence in fences)
    CASES.append(case("nanosleep.u32 100; mov.u32 $d, %t;", T64, T64))


def special_cases() -> None:
    one = np.uint64(1)
    lane = LANE.astype(np.uint64)
    for name, expected in (
        ("%laneid", LANE),
        ("%warpid", T64 // 32),
        ("%ntid.x", T64 * 0 + 64),
        ("%tid.y", T64 * 0),
        ("%nctaid.x", T64 * 0 + 1),
        ("%ctaid.x", T64 * 0),
        ("WARP_SZ", T64 * 0 + 32),
        ("%lanemask_eq", one << lane),
        ("%lanemask_lt", (one << lane) - one),
        ("%lanemask_le", (one << (lane + one)) - one),
        ("%lanemask_gt", 2**32 - (one << (lane + one))),
        ("%lanemask_ge", 2**32 - (one << lane)),
    ):
        CASES.append(case(f"mov.u32 $d, {name};", T64, expected.astype(np.uint32)))


def shuffle_cases() -> None:
    a = random_integers(np.uint32)
    pairs = a.reshape(2, 32)
    index = np.arange(32)

    def expected(source, inside):
        return pairs[:, np.where(inside, source, index)].reshape(-1), np.tile(inside, 2).astype(np.uint32)

    after = "selp.u32 $e, 1, 0, %p1;"
    text = f"shfl.sync.bfly.b32 $d|%p1, $a, 5, 31, -1; {after}"
    CASES.append(case(text, a, expected(index ^ 5, index >= 0)))
    text = f"shfl.sync.up.b32 $d|%p1, $a, 3, 0, 0xffffffff; {after}"
    CASES.append(case(text, a, expected(index - 3, index >= 3)))
    text = f"shfl.sync.down.b32 $d|%p1, $a, 3, 31, 0xffffffff; {after}"
    CASES.append(case(text, a, expected(index + 3, index + 3 < 32)))
    text = f"and.b32 %r1, %t, 7; shfl.sync.idx.b32 $d|%p1, $a, %r1, 31, -1; {after}"
    CASES.append(case(text, a, expected(index % 8, index >= 0)))
    # Segments of 8 lanes: width 8 is the control (32 - 8) << 8 | 31.
    text = f"shfl.sync.down.b32 $d|%p1, $a, 2, 0x181f, -1; {after}"
    CASES.append(case(text, a, expected(index + 2, index % 8 < 6)))
    text = f"shfl.sync.up.b32 $d|%p1, $a, 2, 0x1800, -1; {after}"
    CASES.append(case(text, a, expected(index - 2, index % 8 >= 2)))
    text = f"shfl.sync.idx.b32 $d|%p1, $a, 1, 0x181f, -1; {after}"
    CASES.append(case(text, a, expected(index // 8 * 8 + 1, index >= 0)))
    text = "shfl.sync.bfly.b32 $d, $a, 1, 31, -1;"
    CASES.append(case(text, a, pairs[:, index ^ 1].reshape(-1)))
    text = (
        "and.b32 %r1, %t, 16; setp.eq.u32 %p1, %r1, 0; @%p1 bra LOW; "
        "shfl.sync.bfly.b32 $d, $a, 1, 31, 0xffff0000; bra END; "
        "LOW: shfl.sync.bfly.b32 $d, $a, 2, 31, 0xffff; END:"
    )
    CASES.append(case(text, a, pairs[:, np.where(index < 16, index ^ 2, index ^ 1)].reshape(-1)))
    # Lanes that arrive late are waited for.
    text = (
        "setp.lt.u32 %p1, %t, 7; mov.b32 %r1, $a; @%p1 bra LATE; bra MEET; "
        "MEET: shfl.sync.bfly.b32 $d, %r1, 1, 31, -1; bra END; LATE: add.u32 %r1, %r1, 1; "
        "bra MEET; END:"
    )
    later = np.where(T64 < 7, a + np.uint32(1), a).reshape(2, 32)[:, index ^ 1].reshape(-1)
    CASES.append(case(text, a, later))
    CASES.append(case(text, a, later, options={"seed": 5}))


def vote_cases() -> None:
    ask = "setp.lt.u32 %p1, $a, 20;"
    bits = (1 << 20) - 1
    ballot = np.where(T64 < 32, bits, 0).astype(np.uint32)
    CASES.append(case(f"{ask} vote.sync.ballot.b32 $d, %p1, -1;", T64, ballot))
    for mode, first, second in (("all", 0, 0), ("any", 1, 0), ("uni", 0, 1)):
        text = f"{ask} vote.sync.{mode}.pred %p2, %p1, -1; selp.u32 $d, 1, 0, %p2;"
        CASES.append(case(text, T64, np.where(T64 < 32, first, second).astype(np.uint32)))
    text = "setp.ge.u32 %p1, $a, 20; vote.sync.ballot.b32 $d, !%p1, -1;"
    CASES.append(case(text, T64, ballot))
    text = "setp.lt.u32 %p1, %t, 12; @%p1 bra FEW; mov.u32 $d, 0; bra END; FEW: activemask.b32 $d; END:"
    CASES.append(case(text, T64, np.where(T64 < 12, 0xFFF, 0).astype(np.uint32)))
    text = "elect.sync %r1|%p1, 0xfffffff0; mov.u32 $d, %r1; selp.u32 $e, 1, 0, %p1;"
    guarded = (
        "and.b32 %r2, %t, 31; setp.lt.u32 %p2, %r2, 4; @%p2 bra SKIP; "
        + text
        + " bra END; SKIP: mov.u32 $d, 99; mov.u32 $e, 99; END:"
    )
    CASES.append(
        case(
            guarded,
            T64,
            (
                np.where(LANE < 4, 99, 4).astype(np.uint32),
                np.where(LANE < 4, 99, LANE == 4).astype(np.uint32),
            ),
        )
    )
    for bits_, dtype in ((32, np.uint32), (64, np.uint64)):
        values = (LANE % 3).astype(dtype)
        same = [sum(1 << j for j in range(32) if j % 3 == lane % 3) for lane in LANE]
        CASES.append(case(f"match.any.sync.b{bits_} $d, $a, -1;", values, np.array(same, np.uint32)))
        values = np.where(T64 < 32, 5, values).astype(dtype)
        every = np.where(T64 < 32, 2**32 - 1, 0).astype(np.uint32)
        text = f"match.all.sync.b{bits_} $d|%p1, $a, -1; selp.u32 $e, 1, 0, %p1;"
        CASES.append(case(text, values, (every, (T64 < 32).astype(np.uint32))))


def reduction_cases() -> None:
    for kind, dtype in (("u32", np.uint32), ("s32", np.int32)):
        a = random_integers(dtype)
        for operation, function in (("add", np.add), ("min", np.minimum), ("max", np.maximum)):
            total = function.reduce(a.reshape(2, 32), axis=1, dtype=dtype)
            CASES.append(case(f"redux.sync.{operation}.{kind} $d, $a, -1;", a, np.repeat(total, 32)))
    a = random_integers(np.uint32)
    for operation, function in (("and", np.bitwise_and), ("or", np.bitwise_or), ("xor", np.bitwise_xor)):
        total = function.reduce(a.reshape(2, 32), axis=1)
        CASES.append(case(f"redux.sync.{operation}.b32 $d, $a, -1;", a, np.repeat(total, 32)))
    a = random_floats("f32")
    a[40] = np.nan
    rows = a.reshape(2, 32)
    CASES.append(case("redux.sync.min.f32 $d, $a, -1;", a, np.repeat(np.fmin.reduce(rows, 1), 32)))
    CASES.append(case("redux.sync.max.NaN.f32 $d, $a, -1;", a, np.repeat(np.maximum.reduce(rows, 1), 32)))
    CASES.append(
        case("redux.sync.max.abs.f32 $d, $a, -1;", a, np.repeat(np.fmax.reduce(np.abs(rows), 1), 32))
    )
    text = (
        "mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 4, %r1; st.shared.b32 [%r2], %t; "
        "bar.warp.sync -1; xor.b32 %r3, %t, 1; mad.lo.u32 %r4, %r3, 4, %r1; "
        "ld.shared.b32 $d, [%r4];"
    )
    CASES.append(case(text, T64, T64 ^ 1, declarations=".shared .align 4 .b8 tile[256];"))


def matrix_cases() -> None:
    halves = random_integers(np.uint16, 256)
    words = halves.view(np.uint32)
    lane = np.arange(32)
    for count in (1, 2, 4):
        matrices = halves.reshape(4, 8, 8)[:count]
        registers = ", ".join(f"%r{i + 5}" for i in range(count))
        moves = " ".join(f"mov.b32 ${'defg'[i]}, %r{i + 5};" for i in range(count))
        fill = "mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 4, %r1; setp.lt.u32 %p1, %t, 32;"
        # 32 threads store 128 words, 4 each; row r of matrix i begins at 128 i + 16 r bytes.
        fill += (
            "mad.wide.u32 %l1, %t, 16, %base_a; mad.lo.u32 %r3, %t, 16, %r1; "
            "ld.global.v4.b32 {%r9, %r10, %r11, %r12}, [%l1]; "
            "st.shared.v4.b32 [%r3], {%r9, %r10, %r11, %r12}; bar.sync 0;"
        )
        for transposed in ("", ".trans"):
            for space in ("shared", "shared::cta"):
                tiles = matrices.transpose(0, 2, 1) if transposed else matrices
                expected = tuple(
                    tile[lane // 4, lane % 4 * 2].astype(np.uint32)
                    | tile[lane // 4, lane % 4 * 2 + 1].astype(np.uint32) << np.uint32(16)
                    for tile in tiles
                )
                text = (
                    f"{fill} ldmatrix.sync.aligned.m8n8.x{count}{transposed}.{space}.b16 {{{registers}}}, "
                    f"[%r3]; {moves}"
                )
                CASES.append(Case(text, (words,), expected, declarations=".shared .align 16 .b8 tile[512];"))
                # What ldmatrix reads back is what stmatrix stored in the same way.
                back = " ".join(
                    f"mov.b32 %r{i + 5}, {1000 + i}; add.u32 %r{i + 5}, %r{i + 5}, %t;" for i in range(count)
                )
                text = (
                    f"{fill} {back} stmatrix.sync.aligned.m8n8.x{count}{transposed}.{space}.b16 [%r3], "
                    f"{{{registers}}}; bar.sync 0; "
                    f"ldmatrix.sync.aligned.m8n8.x{count}{transposed}.{space}.b16 {{{registers}}}, [%r3]; "
                    f"{moves}"
                )
                stored = tuple((1000 + i + lane).astype(np.uint32) for i in range(count))
                CASES.append(Case(text, (words,), stored, declarations=".shared .align 16 .b8 tile[512];"))


control_cases()
special_cases()
shuffle_cases()
vote_cases()
reduction_cases()
matrix_cases()


@pytest.mark.parametrize("item", CASES, ids=str)
def test_control(item):
    if "matrix" in item.text:
        item = Case(item.text, item.inputs, item.expected, item.declarations, options={"threads": 32})
    run(item)


def test_trap_is_reported():
    with pytest.raises(ptx.Trap, match="block 0 thread 3"):
        run(TRAP)


TRAP = case("setp.eq.u32 %p1, %t, 3; @%p1 trap; mov.u32 $d, 0;", T64, T64)


def test_grids_and_blocks_have_three_dimensions():
    names = ("tid.x", "tid.y", "tid.z", "ctaid.x", "ctaid.y", "ctaid.z")
    sizes = {"tid": (3, 2, 2), "ctaid": (2, 3, 2)}
    code = "\n".join(
        f"mov.u32 %r1, %{name}; mov.u32 %r2, %n{name}; mad.lo.u32 %r3, %r3, %r2, %r1;"
        for name in reversed(names)
    )
    text = f"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry numbers(.param .u64 out)
{{
    .reg .b32 %r<5>; .reg .b64 %l<3>;
    mov.u32 %r3, 0;
    {code}
    ld.param.u64 %l1, [out];
    mad.wide.u32 %l2, %r3, 4, %l1;
    st.global.b32 [%l2], %r3;
}}"""
    out = np.full(144, 2**32 - 1, np.uint32)
    ptx.launch(ptx.parse(text).kernel(), sizes["ctaid"], sizes["tid"], [out], batch=5)
    np.testing.assert_array_equal(out, np.arange(144))
