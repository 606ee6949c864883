"""Compiles the CUDA kernels of the broadcast to PTX and runs that PTX in the interpreter, on CPU tensors.

The kernels take one structure of pointers and numbers; the interpreter places one array for each
parameter. So the entry is rewritten to take the structure's fields one by one: nothing else changes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from emulation import ptx
from torch import Tensor

from dcgnn_kernels import EgoGraph
from dcgnn_kernels.reference import accumulate_dtype

CSRC = Path(__file__).resolve().parent.parent / "csrc"
BLOCK = 256
HUB_ENTRIES = 128

# The structures of csrc/cuda, in their order; the last fields are 4 bytes each, all others 8.
FORWARD = (
    "colptr",
    "ego",
    "slot",
    "num_nodes",
    "num_slots",
    "num_clusters",
    "channels",
    "assign",
    "clusters",
    "out",
    "partials",
    "x",
    "global_assign",
    "global_message",
    "ego_factor",
    "x_factor",
    "global_factor",
    "local_factor",
    "num_global",
    "activation",
    "lanes",
)
BACKWARD = (
    "rowptr",
    "member",
    "num_egos",
    "num_slots",
    "num_clusters",
    "channels",
    "grad",
    "assign",
    "clusters",
    "grad_assign",
    "grad_clusters",
    "partials",
    "ego_factor",
    "local_factor",
    "lanes",
)
NARROW_FIELDS = ("activation", "lanes")
OUTPUTS = ("out", "partials", "grad_assign", "grad_clusters")
FACTORS = ("x_factor", "global_factor", "local_factor", "ego_factor")
ACTIVATIONS = ("none", "relu", "tanh")

C_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int32: "int32_t",
    torch.int64: "int64_t",
}


@dataclass(frozen=True)
class Instance:
    """The kernels of one choice: channels a lane loads at once, K (0: any), rows wider than a warp, types."""

    dtype: torch.dtype
    index: torch.dtype
    vector: int
    clusters: int
    wide: bool = False

    def entries(self) -> dict[str, str]:
        """Kernel by role: the text that instantiates it."""
        types = f"{C_TYPES[self.dtype]}, {C_TYPES[self.index]}"
        numbers, wide = f"{self.vector}, {self.clusters}", str(self.wide).lower()
        return {
            "forward": f"cluster_scatter_kernel<{numbers}, {types}>(const ForwardParams<{types}>)",
            "forward hubs": f"cluster_scatter_hubs_kernel<{types}>(const ForwardParams<{types}>)",
            "backward": (
                f"cluster_scatter_backward_kernel<{numbers}, {wide}, {types}>(const BackwardParams<{types}>)"
            ),
            "backward hubs": f"cluster_scatter_backward_hubs_kernel<{types}>(const BackwardParams<{types}>)",
        }

    def mangled(self, role: str) -> str:
        """A part of the kernel's name in PTX that no other kernel has."""
        letters = {"float": "f", "double": "d", "int32_t": "i", "int64_t": "l"}
        types = [C_TYPES[dtype] for dtype in (self.dtype, self.index)]
        types_text = "".join(letters.get(name, f"NS0_{len(name)}{name}E") for name in types)
        name = re.match(r"\w+", self.entries()[role])[0]  # type: ignore[index]
        numbers = "" if "hubs" in role else f"Li{self.vector}ELi{self.clusters}E"
        if role == "backward":
            numbers += f"Lb{int(self.wide)}E"
        return f"{len(name)}{name}I{numbers}{types_text}E"


def vectorised(dtype: torch.dtype, index: torch.dtype, clusters: int, wide: bool = False) -> Instance:
    return Instance(dtype, index, 16 // dtype.itemsize, clusters, wide)


def scalar(dtype: torch.dtype, index: torch.dtype, wide: bool = False) -> Instance:
    """For rows that 16-byte loads do not fit."""
    return Instance(dtype, index, 1, 0, wide)


def compile_instances(instances: Sequence[Instance], arch: str, csrc: Path = CSRC) -> ptx.Module:
    """PTX of these kernels, with flat parameters."""
    entries = dict.fromkeys(text for instance in instances for text in instance.entries().values())
    lines = ['#include "cuda/instances.cuh"', "namespace dcgnn::cuda {"]
    lines += [f"template __global__ void {text};" for text in entries]
    text = ptx.nvcc.compile("\n".join([*lines, "}"]), arch, options=["-I", str(csrc)])
    return ptx.parse(flatten_parameters(text))


def flatten_parameters(text: str) -> str:
    """One parameter for each field; loads through a register that holds the structure's address: direct."""
    lines = []
    address: dict[str, int] = {}  # of registers, from the beginning of the structure
    structure = ""
    for line in text.splitlines():
        if declared := re.search(r"\.param \.align 8 \.b8 (\w+)_param_0\[\d+\]", line):
            structure, address = declared[1], {}
            lines.append(_declare(structure))
        elif moved := re.match(r"\s*mov\.[bu]64\s+(%\w+), (\S+);", line):
            if moved[2] == f"{structure}_param_0":
                address[moved[1]] = 0
            elif moved[2] in address:
                address[moved[1]] = address[moved[2]]
            else:
                lines.append(line)
        elif (added := re.match(r"\s*add\.s64\s+(%\w+), (%\w+), (-?\d+);", line)) and added[2] in address:
            address[added[1]] = address[added[2]] + int(added[3])
        elif loaded := re.match(r"(\s*ld\.param\.\w+\s+%\w+, )\[(\S+?)(?:\+(-?\d+))?\];", line):
            offset = address.get(loaded[2], 0) + int(loaded[3] or 0)
            lines.append(f"{loaded[1]}[{structure}_at_{offset}];")
        else:
            lines.append(line)
    return "\n".join(lines)


def _declare(structure: str) -> str:
    fields, offset = [], 0
    for name in FORWARD if "ForwardParams" in structure else BACKWARD:
        size = 4 if name in NARROW_FIELDS else 8
        fields.append(f"\t.param .b{8 * size} {structure}_at_{offset}")
        offset += size
    return ",\n".join(fields)


def lanes_for_row(channels: int, vector: int) -> int:
    lanes = 4
    while lanes < 32 and lanes * vector < channels:
        lanes *= 2
    return lanes


@dataclass
class Runner:
    """Runs the kernels of one instance as the launcher does, on a grid of a few blocks."""

    module: ptx.Module
    instance: Instance
    graph: EgoGraph
    blocks: int = 2
    seed: int | None = None

    def forward(
        self,
        assign: Tensor,
        clusters: Tensor,
        update: dict[str, Tensor] | None = None,
        activation: str = "none",
    ) -> Tensor:
        """``update``: x, global_assign, global_message and the four factors, for the fused node update."""
        channels = clusters.size(2)
        given = dict(update or {})
        if update is not None:
            given["num_global"] = update["global_assign"].size(1)
        given |= {"assign": assign, "clusters": clusters, "activation": ACTIVATIONS.index(activation)}
        given["out"] = clusters.new_empty(self.graph.num_nodes, channels)
        self._run(FORWARD, "forward", given, clusters, channels)
        return given["out"]

    def backward(
        self, grad: Tensor, assign: Tensor, clusters: Tensor, factors: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        given = {"grad": grad, "assign": assign, "clusters": clusters, **(factors or {})}
        given |= {"grad_assign": torch.empty_like(assign), "grad_clusters": torch.empty_like(clusters)}
        self._run(BACKWARD, "backward", given, clusters, clusters[0].numel())
        return given["grad_assign"], given["grad_clusters"]

    def _run(self, fields: Sequence[str], role: str, given: dict, clusters: Tensor, row: int) -> None:
        chunks = -(-self.graph.num_slots // HUB_ENTRIES) if self.graph.num_slots > HUB_ENTRIES else 0
        given |= {
            **dict(zip(("rowptr", "member", "colptr", "ego", "slot"), self.graph.arrays(), strict=True)),
            "num_egos": self.graph.num_egos,
            "num_nodes": self.graph.num_nodes,
            "num_slots": self.graph.num_slots,
            "num_clusters": clusters.size(1),
            "channels": clusters.size(2),
            "lanes": lanes_for_row(clusters.size(2), self.instance.vector),
            "partials": torch.empty(max(2 * chunks * row, 1), dtype=accumulate_dtype(clusters.dtype)),
        }
        # torch.empty gives NaN in the tests: the interpreter watches the reads of the first launch only.
        unwritten = [i for i, name in enumerate(fields) if name in OUTPUTS]
        arguments = [given.get(name, 0) for name in fields]
        arguments = [0 if isinstance(value, Tensor) and value.numel() == 0 else value for value in arguments]
        kernel = self.module.kernel(self.instance.mangled(role))
        ptx.launch(
            kernel, self.blocks, BLOCK, arguments, seed=self.seed, uninitialised=unwritten, names=fields
        )
        if chunks:
            kernel = self.module.kernel(self.instance.mangled(f"{role} hubs"))
            ptx.launch(kernel, self.blocks, BLOCK, arguments, seed=self.seed, names=fields)
