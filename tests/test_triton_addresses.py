"""Addresses beyond 2^31 elements: what the kernels compute for graphs that no machine here holds.

One program of each launch runs in Triton's interpreter on memory that does not exist: arrays of indices hold
numbers just below 2^31, all others ones, and what is written is dropped. A product of such a number with a
stride that was made in 32 bits points before its array, or between its beginning and the row in question.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import triton
import triton.language as tl
from emulation import triton_guard
from test_ops import values_and_grads
from triton.runtime import interpreter
from triton_cases import mixed, node_update_inputs, on_cpu, small_tiles

import dcgnn_kernels
from dcgnn_kernels.triton import catalogue
from dcgnn_kernels.triton.launcher import Launch, recorded

FAR = 2**31 - 4096  # the first row, slot or tile of a program; all numbers of egos and nodes are even
NEAR = 2**24  # what is not below this is far
END = 2**31 - 2048
CHANNELS = 8


@dataclass
class Endless:
    """An array without memory, of which each begins at another multiple of 2^48."""

    name: str
    number: int
    tensor: torch.Tensor

    def pointer(self) -> tl.tensor:
        kind = tl.str_to_ty(triton.runtime.jit.mangle_type(self.tensor), None)
        handle = interpreter.TensorHandle(np.array([self.number << 48], np.uint64), kind)
        return tl.tensor(handle, kind)


class Memory:
    """Stands for Triton's module of raw memory accesses during one launch."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.first = arguments.get("first")
        self.arrays = {a.number: a for a in arguments.values() if isinstance(a, Endless)}
        self.reached: dict[str, int] = {}

    def elements(self, pointers: np.ndarray, mask: np.ndarray) -> tuple[str, np.ndarray]:
        """The array that is accessed, and which of its elements; -1 where the access is masked."""
        active = np.broadcast_to(np.asarray(mask, bool), pointers.shape)
        numbers = np.unique((pointers.astype(np.int64) + 2**47 >> 48)[active])
        if numbers.size == 0:
            return "", np.full(pointers.shape, -1)
        assert numbers.size == 1, "one access to several arrays"
        array = self.arrays[int(numbers[0])]
        elements = (pointers.astype(np.int64) - (array.number << 48)) // array.tensor.element_size()
        wrong = active & ((elements < 0) | ((elements >= NEAR) & (elements < FAR)))
        assert not wrong.any(), f"{array.name}[{elements[wrong][0]}] is no element that a kernel can mean"
        self.reached[array.name] = max(self.reached.get(array.name, 0), int(elements[active].max()))
        return array.name, np.where(active, elements, -1)

    def load(self, pointers, mask, other, dtype):
        name, elements = self.elements(pointers, mask)
        return np.where(elements < 0, other, self.values(name, elements)).astype(dtype)

    def store(self, pointers, values, mask):
        self.elements(pointers, mask)

    def values(self, name: str, elements: np.ndarray) -> Any:
        if name == "bounds":
            return np.where(elements == self.first, 0, END)
        if name in ("begins", "rowptr", "pointer"):
            return FAR + 2 * (elements % 2)  # two slots or tiles
        if name == "ends":
            return FAR + 2
        if name in ("member", "ego", "slot", "order", "hubs", "source_index"):
            return FAR + 2 * (elements % 8)
        return 1.0


def run_far(launch: Launch) -> dict[str, int]:
    """Runs a program with large numbers; gives the last element that it touched of every array."""
    arguments = {
        name: Endless(name, 1 + number, value) if isinstance(value, torch.Tensor) else value
        for number, (name, value) in enumerate(launch.arguments.items())
    }
    program, programs = 12, 24  # of hubs and their rows there are few
    if "first" in arguments:
        program = FAR // arguments["E"]
        arguments["last"] = END if arguments.get("TILED") else arguments["last"]
    elif "costs" in arguments and "num_rows" in arguments:
        arguments["num_rows"] = END
        last = triton.cdiv(END, arguments["B"]) - 1
        if "z" in arguments:
            program = last
        else:
            programs = last - program  # the next block of rows is the last
    memory = Memory(arguments)
    convert = interpreter._implicit_cvt

    def pointer(argument: Any) -> Any:
        return argument.pointer() if isinstance(argument, Endless) else convert(argument)

    def place(builder: Any, x: int, y: int, z: int) -> None:
        builder.grid_idx, builder.grid_dim = (program, 0, 0), (programs, 1, 1)

    with triton_guard.guard(races=False), contextlib.ExitStack() as stack, np.errstate(all="ignore"):
        for owner, name, value in (
            (interpreter, "_interpreter", memory),
            (interpreter, "_implicit_cvt", pointer),
            (interpreter.InterpreterBuilder, "set_grid_idx", place),
            (interpreter.GridExecutor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs)),
            (interpreter.GridExecutor, "_restore_args_dev", lambda *_: None),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        interpreter.InterpretedFunction(launch.kernel.fn).run(grid=(1,), warmup=False, **arguments)
    return memory.reached


def launches_of_every_op(monkeypatch: pytest.MonkeyPatch) -> dict[str, Launch]:
    """By label; whole egos and tiles, two and three cluster-nodes."""
    graph = mixed()
    inputs, factors = node_update_inputs(graph, 2, 3, CHANNELS)
    inputs = tuple(tensor.float() for tensor in inputs)
    factors = {name: factor.float() for name, factor in factors.items()}
    found: dict[str, Launch] = {}
    for tiled in (False, True):
        with monkeypatch.context() as patch, on_cpu(recorded) as launches:
            if tiled:
                small_tiles(patch)
            z, clusters = inputs[0], inputs[4]
            for given, num_iters in ((None, 2), (clusters[:, :2], None), (clusters, 2)):
                tensors = (z,) if given is None else (z, given)
                values_and_grads(
                    lambda z, c=None, n=num_iters: dcgnn_kernels.local_sinkhorn(z, c, graph, 0.7, n, "max"),
                    tensors,
                )
            values_and_grads(lambda z: dcgnn_kernels.local_centroids(z, graph, 3), (z,))
            values_and_grads(lambda *t: dcgnn_kernels.cluster_scatter(*t, graph), inputs[3:])
            values_and_grads(lambda *t: dcgnn_kernels.node_update(*t, graph, **factors), inputs)
            values_and_grads(lambda z, c: dcgnn_kernels.global_sinkhorn(z, c, 0.7, 2, "max"), (z, inputs[2]))
        found |= {catalogue.entry_of(launch).label: launch for launch in launches}
    return found


def test_addresses_of_every_kernel_are_64_bits_wide(monkeypatch):
    launches = launches_of_every_op(monkeypatch)
    kernels = {launch.kernel.__name__ for launch in launches.values()}
    assert kernels == {entry.kernel.__name__ for entry in catalogue.entries([torch.float32], options=True)}
    small = {"column_potential", "column_sum"}  # of as many rows as there are programs
    for label, launch in launches.items():
        if launch.kernel.__name__ not in small:
            reached = run_far(launch)
            assert max(reached.values()) > 2 * FAR, (label, reached)


@triton.jit
def scatter(member, out, first, last, num_channels, WIDE: tl.constexpr, E: tl.constexpr):
    node = tl.load(member + tl.program_id(0) * E + tl.arange(0, E))
    if WIDE:
        node = node.to(tl.int64)
    tl.store(out + node * num_channels, 1.0)


@pytest.mark.parametrize("num_channels", [3, 8])
def test_a_product_in_32_bits_is_noticed(num_channels):
    arguments = {"member": torch.zeros(8, dtype=torch.int32), "out": torch.zeros(8), "first": 0, "last": 1}
    arguments |= {"num_channels": num_channels, "E": 8}
    reached = run_far(Launch(scatter, (1,), arguments | {"WIDE": True}))
    assert reached["out"] == num_channels * (FAR + 14)
    with pytest.raises(interpreter.InterpreterError, match="no element that a kernel can mean"):
        run_far(Launch(scatter, (1,), arguments | {"WIDE": False}))
