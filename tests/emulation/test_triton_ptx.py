"""Triton kernels compiled for real GPUs, executed as PTX: results, planted bugs, resources."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: Triton kernels cannot be emulated here")

from dcgnn_kernels.triton import inspect
from emulation import kernels, ptx, triton_guard
from emulation.test_triton_guard import rows, softmax, sums
from emulation.triton_ptx import emulate

ARCHITECTURES = [75, 80, 90, 100]


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_give_what_they_should(arch, dtype):
    with emulate(arch) as launches:
        y, expected = softmax(dtype=dtype)
        torch.testing.assert_close(y, expected, rtol=2e-2 if dtype.itemsize == 2 else 1e-6, atol=1e-4)
        torch.testing.assert_close(*sums())
    assert [result.kernel for result in launches] == ["segment_softmax", "scatter_sum"]
    assert f".target sm_{arch}" in launches.compiled[0].ptx


@pytest.mark.parametrize("seed", [1, 2])
def test_any_order_of_warps_and_any_garbage_give_the_same(seed):
    x, y, out = torch.randn(20, 64), torch.randn(20, 64), torch.full((20,), float("nan"))
    with emulate(80, seed=seed, undefined=seed):
        kernels.row_dot[(3,)](x, y, out, 20, 64, F=64, BLOCK=8, num_warps=4)
    torch.testing.assert_close(out, (x * y).sum(1))


def test_both_emulators_work_side_by_side_in_any_order():
    for _ in range(2):
        with triton_guard.guard(seed=1):
            first, expected = softmax()
        with emulate(80):
            second, _ = softmax()
    torch.testing.assert_close(first, expected)
    assert second.shape == first.shape


@pytest.mark.parametrize("bug", ["no mask", "past the end", "unmasked store"])
def test_accesses_past_the_end_are_found(bug):
    with emulate(80), pytest.raises(ptx.OutOfBounds, match=r"outside of [xy] of \d+ bytes"):
        softmax(bug)


def test_sums_without_atomics_are_found():
    with emulate(80), pytest.raises(ptx.Race, match="out of 96 bytes"):
        sums("plain sum")


def test_a_missing_barrier_is_found():
    """The barriers of a reduction, taken out of Triton's own PTX."""
    compiled = inspect.compile_for(
        kernels.row_dot,
        {
            "x": "*fp32",
            "y": "*fp32",
            "out": "*fp32",
            "n": "i32",
            "stride": "i32",
            "F": "constexpr",
            "BLOCK": "constexpr",
        },
        {"F": 128, "BLOCK": 1},
        "sm_80",
    )
    x, y, out = torch.randn(4, 128), torch.randn(4, 128), torch.zeros(4)
    for text, finds in (
        (compiled.ptx, ()),
        (compiled.ptx.replace("bar.sync", "// bar.sync"), (ptx.Race, ptx.Uninitialised)),
    ):
        kernel = ptx.parse(text).kernel()
        options = {"shared_bytes": compiled.shared_bytes, "undefined": 0, "lane_conflicts": "any"}
        if not finds:
            ptx.launch(kernel, 4, 128, [x, y, out, 4, 128], **options)
            torch.testing.assert_close(out, (x * y).sum(1))
            continue
        with pytest.raises(finds):
            ptx.launch(kernel, 4, 128, [x, y, out, 4, 128], **options)


def test_a_misaligned_vector_load_is_found():
    """Compiled for addresses that are multiples of 16 bytes, given a view that begins at 4."""
    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    compiled = inspect.compile_for(
        kernels.copy_all.fn, signature, {"BLOCK": 512}, "sm_80", divisible_by_16=("x", "y", "n")
    )
    kernel = ptx.parse(compiled.ptx).kernel()
    memory, out = torch.randn(520), torch.zeros(512)
    ptx.launch(kernel, 1, 128, [memory[4:516], out, 512])
    torch.testing.assert_close(out, memory[4:516])
    with pytest.raises(ptx.Misaligned, match="load of 16 bytes"):
        ptx.launch(kernel, 1, 128, [memory[1:513], out, 512])


def test_arguments_are_specialised_as_triton_does():
    memory, out = torch.randn(520), torch.zeros(512)
    with emulate(80) as launches:
        kernels.copy_all[(1,)](memory[:512], out, 512)
        kernels.copy_all[(1,)](memory[1:513], out, 512)
        kernels.copy_all[(1,)](memory[:1], out, 1)
    vectors = ["ld.global.v4.b32" in compiled.ptx for compiled in launches.compiled]
    assert vectors == [True, False, False]
    assert len(ptx.parse(launches.compiled[0].ptx).kernel().parameters) > len(
        ptx.parse(launches.compiled[2].ptx).kernel().parameters
    )


SIGNATURE = {"rowptr": "*i32", "x": "*fp32", "y": "*fp32", "BLOCK": "constexpr", "BUG": "constexpr"}


class TestInspect:
    def compile(self, target, **options):
        return inspect.compile_for(
            kernels.segment_softmax, SIGNATURE, {"BLOCK": 256, "BUG": ""}, target, **options
        )

    @pytest.mark.parametrize("target", inspect.TARGETS)
    def test_every_target_compiles_and_reports(self, target):
        compiled = self.compile(target)
        assert compiled.registers > 0
        assert compiled.shared_bytes > 0
        assert (compiled.spill_stores, compiled.spill_loads, compiled.stack_bytes) == (0, 0, 0)
        assert compiled.binary[:4] == b"\x7fELF"
        assert compiled.entry in compiled.assembly
        if target.startswith("gfx"):
            with pytest.raises(ValueError, match="no PTX"):
                _ = compiled.ptx

    def test_spills_are_reported(self):
        compiled = self.compile("sm_80", maxnreg=16)
        wide = inspect.compile_for(
            kernels.row_dot,
            dict.fromkeys(("x", "y", "out"), "*fp32")
            | {"n": "i32", "stride": "i32", "F": "constexpr", "BLOCK": "constexpr"},
            {"F": 512, "BLOCK": 16},
            "sm_80",
            maxnreg=24,
        )
        assert compiled.registers <= 24
        assert wide.spill_stores > 0
        assert wide.spill_loads > 0
        assert wide.stack_bytes > 0

    def test_bad_requests_say_what_is_wanted(self):
        with pytest.raises(ValueError, match="sm_<number>"):
            self.compile("hopper")
        with pytest.raises(ValueError, match=r"constants lacks \['BUG'\]"):
            inspect.compile_for(kernels.segment_softmax, SIGNATURE, {"BLOCK": 16}, "sm_80")
        with pytest.raises(ValueError, match="the kernel's parameters are"):
            inspect.compile_for(kernels.segment_softmax, {"x": "*fp32"}, {}, "sm_80")


def test_long_rows_use_every_check_with_shared_memory():
    rowptr, x = rows()
    y = torch.full_like(x, float("nan"))
    with emulate(90, seed=3):
        kernels.segment_softmax[(6,)](rowptr, x, y, BLOCK=512, BUG="", num_warps=8)
    pieces = [x[a:b].softmax(0) for a, b in pairwise(rowptr)]
    torch.testing.assert_close(y, torch.cat(pieces))
