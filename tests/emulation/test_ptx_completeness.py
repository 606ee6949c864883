"""No opcode without a test, no guessing about others, and a parser that says what it cannot read."""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
import pytest
import torch

from emulation import (
    ptx,
    test_ptx_arithmetic,
    test_ptx_bits,
    test_ptx_compare,
    test_ptx_control,
    test_ptx_convert,
    test_ptx_data,
)
from emulation.ptx.opcodes.registry import OPCODES, find, opcode
from emulation.ptx.parser import Instruction
from emulation.snippets import Case, case, run

FAMILIES = (
    test_ptx_arithmetic,
    test_ptx_bits,
    test_ptx_compare,
    test_ptx_control,
    test_ptx_convert,
    test_ptx_data,
)


def covered_parts() -> dict[str, set[str]]:
    """For every opcode, the modifiers and types that snippets use (not the code around them)."""
    parts = defaultdict(set)
    cases: list[Case] = [item for family in FAMILIES for item in family.CASES]
    for item in [*cases, test_ptx_control.TRAP]:
        for statement in re.split(r"[;{}]|\b\w+:(?!:)", item.text):
            words = re.sub(r"^@!?\S+", "", statement.strip()).split()
            if not words or words[0].startswith((".", "%", "$")):
                continue
            opcode = tuple(words[0].split("."))
            found = find(Instruction(opcode, (), None, statement, 0, None))
            if found:
                parts[found.name] |= set(opcode[found.name.count(".") + 1 :])
    return parts


def test_every_opcode_with_every_type_and_modifier_has_a_test():
    covered = covered_parts()
    missing = [
        f"{name}.{part}" if part else name
        for name, opcode in OPCODES.items()
        for part in sorted({""} | opcode.types | opcode.modifiers)
        if name not in covered or (part and part not in covered[name])
    ]
    assert not missing, f"no test executes {missing}"


@pytest.mark.parametrize(
    "text",
    [
        "dp4a.u32.u32 $d, $a, $a, $a;",
        "add.cc.u32 $d, $a, $a;",
        "add.rz.f64 %l1, %l1, %l1;",
        "ld.global.unknown.b32 $d, [%at_a];",
        "mov.u32 $d, %clock;",
        "mov.b32 $d, nowhere;",
        "cvt.f32.s32 $d, $a;",
        "mul.u32 $d, $a, $a;",
        "mul.f32.f16 $d, $a, $a;",
        "add.f32.f64 $d, $a, $a;",
        "min.u32.u32 $d, $a, $a;",
        "bar.sync 1, 32; mov.b32 $d, $a;",
        "call.uni helper, ();",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {$d}, {$a}, {$a}, {$a};",
        "mbarrier.init.shared.b64 [%l1], 1;",
        "add.u32 $d, $a;",
        "add.sat.s32 $d, $a, $a;",
        "set.lt.u32 $d, $a, $a;",
        "slct.s32 $d, $a, $a, $a;",
        "bra %r1;",
        "cvt.u32 $d, $a;",
        "cvt.rz.f64.s64 %l1, %l1;",
        "cvta.shared.u32 $d, $a;",
        "ld.global.b32 $d, $a;",
        "ld.global.b32 $d, [%at_a+%l1];",
        "ld.global.b32 $d, [0.5];",
        "ld.param.b32 $d, [%l1];",
        "ld.param.b64 %l1, [param_a+4];",
        "st.global.b32 $a, $a;",
        "mov.b32 $d, [%at_a];",
        "mov.b32 5, $a;",
        "cp.async.ca.shared.global [%r1], [%at_a], $a;",
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1}, [%r2];",
        ".reg .b7 %z;",
    ],
)
def test_what_is_not_implemented_raises_with_its_line(text):
    item = case("mov.b64 %l1, 0;" + text, np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32))
    with pytest.raises(ptx.Unsupported, match=r"PTX line \d+"):
        run(item)


def test_what_is_not_executed_may_be_unknown():
    text = "bra END; unknown.opcode.b32 $d, $a; END: mov.b32 $d, $a;"
    values = np.arange(64, dtype=np.uint32)
    run(case(text, values, values))


HEAD = ".version 8.0\n.target sm_80\n.address_size 64\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD, "no .entry"),
        (HEAD + ".entry k() { mov.u32 ", "not closed"),
        (HEAD + ".entry k() { .reg .b32 %r1; mov.u32 %r1, 0 }", "does not end"),
        (HEAD + ".entry k() { @%p1 ret; }", "%p1 is not declared"),
        (HEAD + ".entry k() { .reg .b32 %r<; }", "PTX line 4"),
        (HEAD + ".entry k() { .reg .b32 %r1; mov.b32 %r1|5, 0; }", "PTX line 4"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(ptx.PtxSyntaxError, match=message):
        ptx.parse(text)


def test_entries_are_found_by_a_part_of_their_name():
    module = ptx.parse(HEAD + ".visible .entry _Z3addPf() { ret; }\n.visible .entry _Z4add2Pf() { ret; }")
    assert module.target == "sm_80"
    assert module.kernel("add2").name == "_Z4add2Pf"
    assert module.kernel("_Z3addPf").name == "_Z3addPf"
    with pytest.raises(ptx.PtxSyntaxError, match="2 entries"):
        module.kernel("add")


def test_registers_of_inner_scopes_are_their_own():
    text = (
        "mov.u32 %r1, 1; { .reg .b64 %r1; mov.u64 %r1, 5000000000; cvt.u32.u64 %r2, %r1; "
        "} add.u32 $d, %r1, %r2;"
    )
    values = np.arange(64, dtype=np.uint32)
    run(case(text, values, np.full(64, 5000000001 % 2**32, np.uint32)))


def test_positions_in_messages_count_comments_and_source_lines():
    text = "/* two\nlines */ // and one\n.loc 1 77 3\n ld.global.b32 $d, [%l9];"
    with pytest.raises(ptx.Uninitialised, match=r"register %l9 .* \(PTX line 2\d, source file 1 line 77\)"):
        run(case(text, np.zeros(4, np.uint32), np.zeros(4, np.uint32)))


def test_a_launch_is_checked():
    kernel = ptx.parse(HEAD + ".visible .entry k(.param .u64 a) .reqntid 64 { ret; }").kernel()
    with pytest.raises(ptx.PtxError, match="64"):
        ptx.launch(kernel, 1, 32, [np.zeros(1)])
    with pytest.raises(ptx.PtxError, match="1 parameters, 2 were given"):
        ptx.launch(kernel, 1, 64, [np.zeros(1), 3])
    with pytest.raises(ValueError, match="lane_conflicts is 'all'"):
        ptx.launch(kernel, 1, 64, [np.zeros(1)], lane_conflicts="all")
    with pytest.raises(TypeError, match="this tensor on meta"):
        ptx.launch(kernel, 1, 64, [torch.zeros(1, device="meta")])
    with pytest.raises(TypeError, match="negative strides"):
        ptx.launch(kernel, 1, 64, [np.zeros(2)[::-1]])
    assert ptx.launch(kernel, 1, 64, [np.zeros(1)]).opcodes == {"ret": 64}


def test_an_opcode_is_registered_once():
    with pytest.raises(ValueError, match=r"ret is registered twice"):
        opcode("ret")(lambda form: None)
