"""Every check of the PTX interpreter: what must be reported, and what is allowed beside it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from emulation import ptx
from emulation.snippets import Case, run, source

T64 = np.arange(64, dtype=np.uint32)
TILE = ".shared .align 16 .b8 tile[256];"
SHARED = "mov.u32 %r1, tile; mad.lo.u32 %r2, %t, 4, %r1;"
ORDERS = [None, 0, 1, 2]


def snippet(text: str, threads: int = 64, grid: int = 1, **options) -> Case:
    values = np.arange(threads * grid, dtype=np.uint32)
    return Case(text, (values,), (values * 0,), TILE, grid, options=options)


def execute(item: Case) -> np.ndarray:
    """Run a case with no expectation; its first output."""
    inputs, outputs = [v.copy() for v in item.inputs], [v.copy() for v in item.expected]
    kernel = ptx.parse(source(item)).kernel()
    ptx.launch(kernel, item.grid, len(inputs[0]) // item.grid, [*inputs, *outputs], **item.options)
    return outputs[0]


class TestBounds:
    @pytest.mark.parametrize(
        "text",
        [
            "ld.global.b32 %r1, [%at_a+4];",
            "st.global.b32 [%at_d+4], %t;",
            "red.global.add.u32 [%at_d+4], 1;",
            "ld.global.b32 %r1, [%base_a+-4];",
            "ld.b32 %r1, [%at_a+4];",
        ],
    )
    def test_global(self, text):
        with pytest.raises(ptx.OutOfBounds, match="argument"):
            execute(snippet(text))

    def test_wild_address(self):
        with pytest.raises(ptx.OutOfBounds, match="in no argument"):
            execute(snippet("mov.u64 %l1, 64; ld.global.b32 %r1, [%l1];"))

    @pytest.mark.parametrize(
        "text",
        [
            "st.shared.b32 [%r2+4], %t;",
            "st.shared.b32 [tile+256], %t;",
            "mov.u32 %r3, -4; ld.shared.b32 %r4, [%r3];",
        ],
    )
    @pytest.mark.parametrize("grid", [1, 3])
    def test_shared(self, text, grid):
        with pytest.raises(ptx.OutOfBounds, match="256 bytes"):
            execute(snippet(SHARED + text, grid=grid))

    def test_local(self):
        item = snippet("mov.u64 %l1, depot; st.local.b32 [%l1+8], %t;")
        item.declarations += ".local .align 8 .b8 depot[8];"
        with pytest.raises(ptx.OutOfBounds):
            execute(item)

    def test_a_view_ends_where_it_ends(self):
        whole = np.arange(128, dtype=np.uint32)
        kernel = ptx.parse(source(snippet("ld.global.b32 $d, [%at_a];"))).kernel()
        with pytest.raises(ptx.OutOfBounds, match="features of 252 bytes"):
            ptx.launch(kernel, 1, 64, [whole[:63], np.zeros(64, np.uint32)], names=["features", "out"])

    def test_predicated_off_is_fine(self):
        execute(snippet("setp.lt.u32 %p1, %t, 63; @%p1 ld.global.b32 %r1, [%at_a+4];"))


class TestAlignment:
    @pytest.mark.parametrize("space", ["global", "shared"])
    def test_vectors(self, space):
        address = "%base_a" if space == "global" else "%r1"
        text = f"{SHARED} ld.{space}.v4.b32 {{%r3, %r4, %r5, %r6}}, [{address}+8];"
        with pytest.raises(ptx.Misaligned, match="16 bytes"):
            execute(snippet(text))

    def test_rows_that_are_no_multiple_of_the_vector(self):
        text = (
            "mad.wide.u32 %l1, %t, 12, %base_a; setp.lt.u32 %p1, %t, 2; "
            "@%p1 ld.global.v2.b32 {%r1, %r2}, [%l1];"
        )
        with pytest.raises(ptx.Misaligned, match="8 bytes"):
            execute(snippet(text))

    def test_views_keep_their_alignment(self):
        whole = np.arange(80, dtype=np.uint32)
        kernel = ptx.parse(source(snippet("ld.global.v2.b32 {%r1, $d}, [%base_a];"))).kernel()
        ptx.launch(kernel, 1, 64, [whole[2:66], np.zeros(64, np.uint32)])
        with pytest.raises(ptx.Misaligned):
            ptx.launch(kernel, 1, 64, [whole[1:65], np.zeros(64, np.uint32)])


class TestUninitialised:
    def test_registers(self):
        with pytest.raises(ptx.Uninitialised, match="register %r5"):
            execute(snippet("add.u32 %r1, %r5, 1;"))

    def test_registers_of_some_threads(self):
        text = "setp.lt.u32 %p1, %t, 63; @%p1 mov.u32 %r5, 1; add.u32 $d, %r5, 1;"
        with pytest.raises(ptx.Uninitialised, match="thread 63"):
            execute(snippet(text))

    def test_registers_may_hold_garbage_instead(self):
        text = "setp.lt.u32 %p1, %t, 63; @%p1 mov.u32 %r5, 1; add.u32 $d, %r5, 1;"
        out = [execute(snippet(text, undefined=seed)) for seed in (1, 2)]
        assert (out[0][:63] == 2).all()
        assert out[0][63] != out[1][63]

    def test_shared_memory(self):
        with pytest.raises(ptx.Uninitialised, match="shared memory"):
            execute(snippet(SHARED + "ld.shared.b32 $d, [%r2];"))

    def test_shared_memory_of_another_block_does_not_count(self):
        text = SHARED + (
            "mov.u32 %r3, %ctaid.x; setp.eq.u32 %p1, %r3, 0; @%p1 st.shared.b32 [%r2], %t; "
            "bar.sync 0; ld.shared.b32 $d, [%r2];"
        )
        with pytest.raises(ptx.Uninitialised, match="block 1"):
            execute(snippet(text, grid=2))

    @pytest.mark.parametrize("text", ["ld.global.b32 %r1, [%at_a];", "red.global.add.u32 [%at_a], 1;"])
    def test_global_arguments(self, text):
        execute(snippet(text))
        with pytest.raises(ptx.Uninitialised, match="global memory"):
            execute(snippet(text, uninitialised=(0,)))
        execute(
            snippet("st.global.b32 [%at_a], %t;" + text.replace("red", "bar.sync 0; red"), uninitialised=(0,))
        )

    def test_a_copy_that_was_not_waited_for(self):
        copy = SHARED + (
            "cp.async.ca.shared.global [%r2], [%at_a], 4; cp.async.commit_group; {} ld.shared.b32 $d, [%r2];"
        )
        execute(snippet(copy.format("cp.async.wait_group 0;")))
        with pytest.raises(ptx.Uninitialised, match="shared memory"):
            execute(snippet(copy.format("cp.async.wait_group 1;")))


WRITE = SHARED + "st.shared.b32 [%r2], %t;"
READ_OTHER_WARP = "xor.b32 %r3, %t, 32; mad.lo.u32 %r4, %r3, 4, %r1; ld.shared.b32 $d, [%r4];"
READ_OTHER_LANE = READ_OTHER_WARP.replace("32; mad", "1; mad")


@pytest.mark.parametrize("seed", ORDERS)
class TestSharedRaces:
    def test_read_after_write(self, seed):
        execute(snippet(f"{WRITE} bar.sync 0; {READ_OTHER_WARP}", seed=seed))
        with pytest.raises((ptx.Race, ptx.Uninitialised)):
            execute(snippet(f"{WRITE} {READ_OTHER_WARP}", seed=seed))

    def test_write_after_read(self, seed):
        again = "add.u32 %r5, %t, 1; st.shared.b32 [%r2], %r5;"
        execute(snippet(f"{WRITE} bar.sync 0; {READ_OTHER_WARP} bar.sync 0; {again}", seed=seed))
        with pytest.raises(ptx.Race, match="shared memory"):
            execute(snippet(f"{WRITE} bar.sync 0; {READ_OTHER_WARP} {again}", seed=seed))

    def test_a_write_after_reads_by_several_warps(self, seed):
        """The own warp's read comes between the other's read and the write."""
        read_both = "ld.shared.b32 %r6, [tile]; st.global.b32 [%at_d], %r6;"
        write = "setp.eq.u32 %p1, %t, 0; @%p1 st.shared.b32 [tile], %t;"
        execute(snippet(f"{WRITE} bar.sync 0; {read_both} bar.sync 0; {write}", seed=seed))
        with pytest.raises(ptx.Race, match="write of shared memory after a read"):
            execute(snippet(f"{WRITE} bar.sync 0; {read_both} {write}", seed=seed))

    def test_a_write_after_the_own_read_after_that_of_another_warp(self, seed):
        begin = f"{WRITE} bar.sync 0; setp.eq.u32 %p1, %t, 40; setp.eq.u32 %p2, %t, 0;"
        reads = "@%p1 ld.shared.b32 %r6, [tile]; bar.warp.sync -1; @%p2 ld.shared.b32 %r6, [tile];"
        write = "@%p2 st.shared.b32 [tile], %t;"
        execute(snippet(f"{begin} {reads} bar.sync 0; {write}", seed=seed))
        with pytest.raises(ptx.Race):
            execute(snippet(f"{begin} {reads} {write}", seed=seed))

    def test_two_writes(self, seed):
        with pytest.raises(ptx.Race, match="write"):
            execute(
                snippet(
                    "and.b32 %r1, %t, 31; mad.lo.u32 %r2, %r1, 4, tile; st.shared.b32 [%r2], 5;", seed=seed
                )
            )

    def test_lanes_of_one_warp_need_a_warp_barrier(self, seed):
        execute(snippet(f"{WRITE} bar.warp.sync -1; {READ_OTHER_LANE}", seed=seed))
        execute(snippet(f"{WRITE} bar.sync 0; {READ_OTHER_LANE}", seed=seed))
        with pytest.raises(ptx.Race):
            execute(snippet(f"{WRITE} {READ_OTHER_LANE}", seed=seed))
        shuffle = "shfl.sync.bfly.b32 %r7, %t, 1, 31, -1;"
        with pytest.raises(ptx.Race):
            execute(snippet(f"{WRITE} {shuffle} {READ_OTHER_LANE}", seed=seed))

    def test_lanes_that_store_different_values(self, seed):
        execute(snippet("st.shared.b32 [tile], 5;", threads=32, seed=seed))
        with pytest.raises(ptx.Race, match="different values"):
            execute(snippet("st.shared.b32 [tile], %t;", threads=32, seed=seed))
        text = "st.shared.b32 [tile], %t; bar.sync 0; ld.shared.b32 $d, [tile];"
        out = execute(snippet(text, threads=32, seed=seed, lane_conflicts="any"))
        assert len(set(out)) == 1
        assert seed is not None or out[0] == 31

    def test_warps_may_repeat_a_value_when_asked(self, seed):
        text = "st.shared.b32 [tile], {}; bar.sync 0; ld.shared.b32 $d, [tile];"
        with pytest.raises(ptx.Race):
            execute(snippet(text.format(5), seed=seed))
        assert set(execute(snippet(text.format(5), seed=seed, lane_conflicts="any"))) == {5}
        with pytest.raises(ptx.Race):
            execute(snippet("mov.u32 %r9, %warpid;" + text.format("%r9"), seed=seed, lane_conflicts="any"))
        unordered = text.format(5).replace("bar.sync 0;", "")
        with pytest.raises((ptx.Race, ptx.Uninitialised)):
            execute(snippet(unordered, seed=seed, lane_conflicts="any"))
        with pytest.raises(ptx.Race):
            execute(snippet("st.global.b32 [%base_d], 5;", grid=2, seed=seed, lane_conflicts="any"))

    def test_atomics_and_plain_accesses(self, seed):
        begin = (
            "setp.eq.u32 %p1, %t, 0; @%p1 st.shared.b32 [tile], 0; bar.sync 0; red.shared.add.u32 [tile], 1;"
        )
        execute(snippet(f"{begin} bar.sync 0; ld.shared.b32 $d, [tile];", seed=seed))
        with pytest.raises(ptx.Race, match="atomic"):
            execute(snippet(f"{begin} ld.shared.b32 $d, [tile];", seed=seed))

    def test_no_check_when_asked(self, seed):
        execute(snippet(f"{WRITE} {READ_OTHER_LANE}", seed=None, races=False))


@pytest.mark.parametrize("seed", ORDERS)
class TestGlobalRaces:
    def test_sum_without_atomics(self, seed):
        text = (
            "setp.eq.u32 %p1, %t, 0; @%p1 ld.global.b32 %r1, [%base_d]; @%p1 add.u32 %r1, %r1, 1; "
            "@%p1 st.global.b32 [%base_d], %r1;"
        )
        execute(snippet(text, seed=seed))
        with pytest.raises(ptx.Race, match="argument 1"):
            execute(snippet(text, grid=2, seed=seed))

    def test_atomics_are_fine(self, seed):
        out = execute(snippet("red.global.add.u32 [%base_d], 1;", grid=3, seed=seed))
        assert out[0] == 192

    def test_atomic_and_read(self, seed):
        text = "red.global.add.u32 [%base_d], 1; ld.global.b32 %r1, [%base_d];"
        with pytest.raises(ptx.Race):
            execute(snippet(text, grid=2, seed=seed))

    def test_two_blocks_write(self, seed):
        with pytest.raises(ptx.Race, match="write"):
            execute(snippet("setp.eq.u32 %p1, %t, 0; @%p1 st.global.b32 [%base_d], 7;", grid=2, seed=seed))

    def test_a_barrier_orders_one_block_only(self, seed):
        text = (
            "st.global.b32 [%at_d], %t; bar.sync 0; xor.b32 %r1, %t, 32; "
            "mad.wide.u32 %l1, %r1, 4, %base_d; ld.global.b32 %r2, [%l1];"
        )
        execute(snippet(text, seed=seed))
        with pytest.raises(ptx.Race):
            execute(snippet(text.replace("bar.sync 0;", ""), seed=seed))
        with pytest.raises(ptx.Race):
            execute(snippet(text, grid=2, seed=seed))

    def test_blocks_of_different_batches(self, seed):
        with pytest.raises(ptx.Race):
            execute(
                snippet(
                    "setp.eq.u32 %p1, %t, 0; @%p1 st.global.b32 [%base_d], 7;", grid=2, seed=seed, batch=1
                )
            )

    def test_small_elements_beside_each_other(self, seed):
        halves = np.arange(128, dtype=np.uint16)
        text = (
            "mov.u32 %r1, %ctaid.x; mad.lo.u32 %r2, %t, 2, %r1; "
            "mad.wide.u32 %l1, %r2, 2, %base_d; cvt.u16.u32 %h1, %r2; "
            "st.global.b16 [%l1], %h1;"
        )
        run(Case(text, (halves,), (halves,), grid=2, options={"seed": seed}))

    def test_strong_accesses_do_not_race(self, seed):
        text = (
            "setp.eq.u32 %p1, %t, 0; @%p1 st.relaxed.gpu.global.b32 [%base_d], 7; "
            "ld.relaxed.gpu.global.b32 %r1, [%base_d];"
        )
        execute(snippet(text, grid=2, seed=seed))


class TestBarriers:
    def test_not_reached_by_threads_that_exit(self):
        with pytest.raises(ptx.DivergentBarrier, match="32 of 64 threads"):
            execute(snippet("setp.lt.u32 %p1, %t, 32; @%p1 ret; bar.sync 0;"))

    def test_predicated(self):
        with pytest.raises(ptx.DivergentBarrier):
            execute(snippet("setp.lt.u32 %p1, %t, 40; @%p1 bar.sync 0;"))

    def test_two_names(self):
        text = "setp.lt.u32 %p1, %t, 32; @%p1 bra LOW; bar.sync 1; bra END; LOW: bar.sync 2; END:"
        with pytest.raises(ptx.DivergentBarrier, match="different barriers"):
            execute(snippet(text))
        execute(snippet(text.replace("bar.sync 2", "bar.sync 1")))

    def test_lanes_of_a_warp_at_two_instructions(self):
        text = "setp.lt.u32 %p1, %t, 16; @%p1 bra LOW; bar.sync 0; bra END; LOW: bar.sync 0; END:"
        with pytest.raises(ptx.DivergentBarrier, match="lanes of one warp"):
            execute(snippet(text))

    @pytest.mark.parametrize(
        "operation",
        [
            "shfl.sync.bfly.b32 $d, %t, 1, 31, -1;",
            "vote.sync.ballot.b32 $d, %p1, -1;",
            "redux.sync.add.u32 $d, %t, -1;",
            "bar.warp.sync -1; mov.u32 $d, 1;",
            "match.any.sync.b32 $d, %t, -1;",
        ],
    )
    def test_lanes_that_exited_are_in_the_mask(self, operation):
        text = f"setp.lt.u32 %p1, %t, 4; @%p1 ret; {operation}"
        with pytest.raises(ptx.DivergentBarrier, match="exited"):
            execute(snippet(text))
        execute(snippet(text.replace("-1;", "0xfffffff0;"), threads=32))

    def test_lanes_that_wait_elsewhere_are_in_the_mask(self):
        text = (
            "setp.lt.u32 %p1, %t, 3; @%p1 bra LOW; shfl.sync.bfly.b32 $d, %t, 1, 31, -1; bra END; "
            "LOW: bar.sync 0; mov.u32 $d, 1; END:"
        )
        with pytest.raises(ptx.DivergentBarrier):
            execute(snippet(text))

    def test_a_thread_outside_of_its_mask(self):
        with pytest.raises(ptx.DivergentBarrier, match="own member mask"):
            execute(snippet("shfl.sync.bfly.b32 $d, %t, 1, 31, 0xffff;"))

    def test_a_shuffle_from_outside_of_the_mask(self):
        text = "setp.lt.u32 %p1, %t, 16; mov.u32 $d, 0; @%p1 shfl.sync.bfly.b32 $d, %t, 16, 31, 0xffff;"
        with pytest.raises(ptx.DivergentBarrier, match="does not take part"):
            execute(snippet(text, threads=32))

    def test_a_partial_last_warp_is_complete(self):
        execute(snippet("shfl.sync.bfly.b32 $d, %t, 1, 31, -1;", threads=40))

    def test_an_endless_loop_ends(self, monkeypatch):
        monkeypatch.setattr("emulation.ptx.machine.MAX_STEPS", 1000)
        with pytest.raises(ptx.Deadlock, match="1000 instructions"):
            execute(snippet("AGAIN: add.u32 %r1, %t, 1; bra AGAIN;"))


def test_messages_name_block_thread_and_instruction():
    item = snippet("ld.global.b32 %r1, [%at_a+4];", grid=1)
    with pytest.raises(
        ptx.OutOfBounds, match=re.escape("block 0 thread 63: `ld.global.b32 %r1, [%at_a+4]` (PTX line")
    ):
        execute(item)


def test_a_seed_changes_the_order_of_atomics():
    outs = [execute(snippet("atom.global.add.u32 $d, [%base_a], 1;", seed=seed)) for seed in (None, 1, 2)]
    assert sorted(map(int, outs[0])) == sorted(map(int, outs[1])) == sorted(map(int, outs[2]))
    assert not np.array_equal(outs[1], outs[2])
