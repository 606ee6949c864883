"""Every kernel in every configuration, compiled ahead of time, and the table of what each needs.

The list is not written by hand: the ops are called on a small graph that has egos of all size classes, and
the launches are recorded instead of run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dcgnn_kernels.graph import EgoGraph
from dcgnn_kernels.reference import accumulate_dtype
from dcgnn_kernels.triton import (
    cluster_scatter,
    config,
    global_sinkhorn,
    inspect,
    local_centroids,
    local_sinkhorn,
)
from dcgnn_kernels.triton.launcher import Launch, recorded

_TYPES = {
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
# The argument that shows the storage dtype.
_STORED = ("z", "x", "clusters", "rows_of_groups", "costs", "partial", "dots")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Threads, registers and bytes of shared memory of one multiprocessor, and its most blocks.
_LIMITS = {
    "sm_75": (1024, 65536, 65536, 16),
    "sm_80": (2048, 65536, 167936, 32),
    "sm_86": (1536, 65536, 102400, 16),
    "sm_89": (1536, 65536, 102400, 24),
    "sm_90": (2048, 65536, 233472, 32),
    "sm_100": (2048, 65536, 233472, 32),
    "sm_120": (1536, 65536, 102400, 24),
}


@dataclass(frozen=True)
class Entry:
    """One kernel in one configuration, as :func:`inspect.compile_for` takes it."""

    kernel: Any
    label: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    num_warps: int
    options: dict[str, Any]

    def compile(self, target: str) -> inspect.Compiled:
        """For one of ``inspect.TARGETS``."""
        return inspect.compile_for(
            self.kernel,
            self.signature,
            self.constants,
            target,
            divisible_by_16=self.divisible,
            num_warps=self.num_warps,
            **self.options,
        )


def entry_of(launch: Launch) -> Entry:
    """What Triton would compile for a launch: types, and multiples of 16, which it tells apart."""
    arguments = dict(launch.arguments)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible = []
    for parameter in launch.kernel.params:
        name, value = parameter.name, arguments.pop(parameter.name)
        free = not parameter.do_not_specialize
        if parameter.is_constexpr or (free and isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{_TYPES[value.dtype]}"
            if value.storage_offset() * value.element_size() % 16 == 0:
                divisible.append(name)
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if free and isinstance(value, int) and value % 16 == 0:
                divisible.append(name)
    num_warps = arguments.pop("num_warps")
    shape = ", ".join(
        f"{name}={value}" for name, value in constants.items() if name in ("E", "M", "B", "COLUMNS")
    )
    storage = next(signature[name] for name in _STORED if name in signature)
    flags = [name.lower() for name, value in constants.items() if value is True]
    label = f"{launch.kernel.__name__} {storage.removeprefix('*')} [{shape}] {' '.join(flags)}".rstrip()
    return Entry(launch.kernel, label, signature, constants, tuple(divisible), num_warps, arguments)


def _stars(sizes: Iterable[int]) -> Tensor:
    """Edges to centres of egos of these sizes, with about as many slots of each."""
    sources, targets = [], []
    centre = 2000
    for size in sizes:
        for _ in range(max(1, 2000 // size)):
            sources.append(torch.arange(size - 1))
            targets.append(torch.full((size - 1,), centre))
            centre += 1
    return torch.stack([torch.cat(sources), torch.cat(targets)])


def sample_graph() -> EgoGraph:
    """Egos and nodes of all size classes."""
    stars = _stars((3, 7, 14, 28, 60, 120, 250, 600, 2000))
    both = torch.cat([stars, stars.flip(0) + 4000], dim=1)
    return EgoGraph.from_edge_index(both, int(both.max()) + 1)


_Case = tuple[int, bool, str, int | None]  # K, whether centroids are given, cost scale, iterations
# Every size class: what the layers use by default,
# its counterpart with centroids, and K = 4.
_DEFAULTS: tuple[_Case, ...] = ((2, False, "max", 3), (2, True, "none", 3), (4, False, "max", 3))
# The largest tiles and hubs: every two options together.
_OPTIONS: tuple[_Case, ...] = (
    (2, False, "none", None),
    (2, False, "mean", None),
    (2, True, "max", None),
    (2, True, "mean", 3),
    (4, True, "mean", 3),
    (4, True, "none", 3),
)


def launches(
    dtype: torch.dtype, num_channels: int = 64, num_global: int = 8, *, options: bool = False
) -> Iterator[Launch]:
    """All launches of a forward and backward pass: K = 2 as the layers use it, and K = 4.

    ``options`` adds the other cost scales, centroids and convergence, in the largest tiles.
    """
    graph = sample_graph()
    arrays = graph.arrays()
    z = torch.zeros(graph.num_nodes, num_channels, dtype=dtype)
    share = torch.zeros(graph.num_nodes, num_global, dtype=dtype)
    whole = torch.zeros(num_global, num_channels, dtype=dtype)
    factors = (torch.zeros(graph.num_nodes, dtype=accumulate_dtype(dtype)),) * 4
    with recorded() as seen:
        for case in _DEFAULTS:
            assign, clusters = _local(graph, z, *case)
            local_centroids.local_centroids_backward(clusters, *arrays, clusters.size(1))
            cluster_scatter.cluster_scatter(assign, clusters, *arrays)
            cluster_scatter.node_update(z, share, whole, assign, clusters, *factors, *arrays, "tanh")
            cluster_scatter.node_update_backward(z, share, whole, assign, clusters, *factors, *arrays)
        local_centroids.local_centroids(z, *arrays, 2)
        assign, clusters, potentials = global_sinkhorn.global_sinkhorn(z, whole, 2.0, 3, "none", 1e-6, 100)
        global_sinkhorn.global_sinkhorn_backward(assign, clusters, z, whole, potentials, 2.0, 3, "none")
        large = EgoGraph.from_edge_index(_stars((120, 250, 2000)))
        for case in _OPTIONS if options else ():
            _local(large, z[: large.num_nodes], *case)
    yield from seen


def _local(
    graph: EgoGraph, z: Tensor, num_local: int, given: bool, cost_scale: str, num_iters: int | None
) -> tuple[Tensor, Tensor]:
    """Forward and backward of local_sinkhorn."""
    arrays, options = graph.arrays(), (num_local, 2.0, num_iters, cost_scale)
    centroids = z[:, None].repeat(1, num_local, 1) if given else None
    assign, clusters, potentials = local_sinkhorn.local_sinkhorn(z, centroids, *arrays, *options, 1e-6, 100)
    local_sinkhorn.local_sinkhorn_backward(assign, clusters, z, centroids, potentials, *arrays, *options)
    return assign, clusters


def entries(
    dtypes: Iterable[torch.dtype] = DTYPES,
    num_channels: int = 64,
    *,
    options: bool = False,
    choices: bool = False,
) -> list[Entry]:
    """Without repetitions, in the order in which they are launched; ``options`` as of :func:`launches`.

    ``choices`` adds the configurations that only the tuner takes.
    """
    found: dict[tuple[Any, ...], Entry] = {}
    for dtype in dtypes:
        with config.every_choice() if choices else nullcontext():
            seen = list(launches(dtype, num_channels, options=options))
        for launch in seen:
            entry = entry_of(launch)
            key = (entry.kernel, str(entry.signature), str(entry.constants), entry.divisible, entry.num_warps)
            found.setdefault(key, entry)
    return list(found.values())


def occupancy(compiled: inspect.Compiled) -> float | None:
    """Share of a multiprocessor's threads that can be resident; None where its limits are not known here."""
    if compiled.target not in _LIMITS:
        return None
    threads, registers, shared, blocks = _LIMITS[compiled.target]
    # Registers are given to warps in units of 256; a block uses 1 KiB of shared memory itself from sm_80 on.
    per_warp = -(-compiled.registers * 32 // 256) * 256
    by_registers = registers // per_warp // compiled.num_warps
    own = compiled.shared_bytes + (0 if compiled.target == "sm_75" else 1024)
    by_shared = shared // own if own else blocks
    resident = min(blocks, by_registers, by_shared, threads // (32 * compiled.num_warps))
    return resident * compiled.num_warps * 32 / threads


def table(rows: Iterable[tuple[Entry, inspect.Compiled]]) -> str:
    """Registers, spills, shared memory and theoretical occupancy, one line for each kernel and target."""
    head = ("kernel", "target", "warps", "registers", "spills (B)", "shared (B)", "occupancy")
    lines = [head]
    for entry, compiled in rows:
        share = occupancy(compiled)
        lines.append(
            (
                entry.label,
                compiled.target,
                str(compiled.num_warps),
                str(compiled.registers),
                str(compiled.spill_stores + compiled.spill_loads),
                str(compiled.shared_bytes),
                "" if share is None else f"{share:.0%}",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
