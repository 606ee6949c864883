"""The CUDA kernels of the broadcast, executed without a GPU: nvcc's PTX, interpreted, against `reference`.

The interpreter checks bounds, alignment, unwritten memory, races and divergence while it runs. What a kernel
computes on the host, under the sanitizers, is tested by CTest (csrc/tests/test_cuda_scatter.cpp).
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from cuda_kernels import CSRC, FACTORS, Instance, Runner, compile_instances, scalar, vectorised
from emulation import cuda_host, ptx
from graphs import awkward, both_ways
from torch import Tensor

from dcgnn_kernels import EgoGraph, reference
from dcgnn_kernels.reference import accumulate_dtype

needs_nvcc = pytest.mark.skipif(
    not ptx.nvcc.available(), reason=f"the compiled CUDA kernels are left out: {ptx.nvcc.MISSING}"
)

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
PAIRS = {
    "float32": vectorised(torch.float32, torch.int32, 2),
    "float64": vectorised(torch.float64, torch.int64, 2),
    "float16": vectorised(torch.float16, torch.int32, 2),
    "bfloat16": vectorised(torch.bfloat16, torch.int64, 2),
}
OTHERS = {
    "one": vectorised(torch.float32, torch.int64, 1),
    "three": vectorised(torch.bfloat16, torch.int32, 3),
    "four": vectorised(torch.float32, torch.int32, 4),
    "many": vectorised(torch.float16, torch.int64, 0),
    "wide": vectorised(torch.float32, torch.int32, 2, wide=True),
    "scalar": scalar(torch.float32, torch.int32),
    "scalar-bfloat16": scalar(torch.bfloat16, torch.int64),
    "scalar-wide": scalar(torch.float32, torch.int32, wide=True),
}
# (K, F) of a run: what the launcher gives to that kernel.
SIZES = {
    "one": (1, 8),
    "three": (3, 24),
    "four": (4, 20),
    "many": (6, 16),
    "wide": (2, 132),
    "scalar": (2, 7),
    "scalar-bfloat16": (3, 9),
    "scalar-wide": (3, 35),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@cache
def compiled(arch: str) -> ptx.Module:
    """All kernels of the tests: sm_80 has them all, the other architectures those for K = 2."""
    instances = [*PAIRS.values(), *(OTHERS.values() if arch == "sm_80" else ())]
    return compile_instances(instances, arch)


def with_index(graph: EgoGraph, index: torch.dtype) -> EgoGraph:
    return EgoGraph(*(array.to(index) for array in graph.arrays()))


def hub_graph() -> EgoGraph:
    """Node 99 is in every ego and holds every node: a hub that begins inside a chunk. Node 3 has 41
    neighbours: one warp. The others are light.
    """
    nodes = torch.arange(140)
    hub = torch.stack([torch.full_like(nodes, 99), nodes])
    medium = torch.stack([torch.full((41,), 3), torch.arange(50, 91)])
    return EgoGraph.from_edge_index(both_ways(torch.cat([hub, medium], dim=1)), 140)


def sample(instance: Instance, graph: EgoGraph, num_clusters: int, num_channels: int) -> dict[str, Tensor]:
    num_nodes, num_global = graph.num_nodes, 3
    tensors = {
        "x": torch.randn(num_nodes, num_channels),
        "global_assign": torch.rand(num_nodes, num_global),
        "global_message": torch.randn(num_global, num_channels),
        "assign": torch.rand(graph.num_slots, num_clusters),
        "clusters": torch.randn(graph.num_egos, num_clusters, num_channels),
        "grad": torch.randn(num_nodes, num_channels),
    }
    stored = {name: tensor.to(instance.dtype) for name, tensor in tensors.items()}
    factors = {name: torch.rand(num_nodes, dtype=accumulate_dtype(instance.dtype)) for name in FACTORS}
    return {**stored, **factors}


def check(
    module: ptx.Module,
    instance: Instance,
    graph: EgoGraph,
    num_clusters: int,
    num_channels: int,
    fused: bool,
    seed: int | None = None,
) -> None:
    """Forward and backward against float64 autograd through the reference."""
    graph = with_index(graph, instance.index)
    tensors = sample(instance, graph, num_clusters, num_channels)
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    assign, clusters = wide["assign"].requires_grad_(), wide["clusters"].requires_grad_()
    factors = {name: tensors[name] for name in FACTORS}
    runner = Runner(module, instance, graph, seed=seed)
    if fused:
        update = {name: tensors[name] for name in ("x", "global_assign", "global_message")} | factors
        linear = reference.node_update(
            wide["x"],
            wide["global_assign"],
            wide["global_message"],
            assign,
            clusters,
            graph,
            **{name: wide[name] for name in FACTORS},
        )
        expected = torch.tanh(linear)
        result = runner.forward(tensors["assign"], tensors["clusters"], update, "tanh")
        backward_factors = {name: factors[name] for name in ("ego_factor", "local_factor")}
    else:
        linear = expected = reference.cluster_scatter(assign, clusters, graph)
        result = runner.forward(tensors["assign"], tensors["clusters"])
        backward_factors = {}
    grads = torch.autograd.grad(linear, (assign, clusters), wide["grad"])
    results = runner.backward(tensors["grad"], tensors["assign"], tensors["clusters"], backward_factors)
    for actual, wanted in zip((result, *results), (expected, *grads), strict=True):
        wanted = wanted.detach()
        scale = float(wanted.abs().max())
        torch.testing.assert_close(
            actual.double(), wanted, rtol=TOLERANCE[instance.dtype], atol=TOLERANCE[instance.dtype] * scale
        )


@needs_nvcc
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", PAIRS)
def test_every_dtype_on_every_architecture(arch, name):
    check(compiled(arch), PAIRS[name], hub_graph(), 2, 12 * 4 // PAIRS[name].dtype.itemsize, fused=False)
    check(compiled(arch), PAIRS[name], EgoGraph.from_edge_index(*awkward()), 2, 16, fused=True, seed=5)


@needs_nvcc
def test_graphs_of_a_batch_as_egos():
    graphs = EgoGraph.from_batch(torch.randint(0, 3, (150,)).clamp(max=1))
    check(compiled("sm_80"), next(iter(PAIRS.values())), graphs, 2, 16, fused=False)


@needs_nvcc
@pytest.mark.parametrize("name", OTHERS)
def test_every_kind_of_kernel(name):
    num_clusters, num_channels = SIZES[name]
    check(compiled("sm_80"), OTHERS[name], hub_graph(), num_clusters, num_channels, fused=True)


@needs_nvcc
def test_plain_and_rectified_node_update():
    instance = PAIRS["float32"]
    graph = EgoGraph.from_edge_index(*awkward())
    tensors = sample(instance, graph, 2, 8)
    update = {name: tensors[name] for name in ("x", "global_assign", "global_message", *FACTORS)}
    runner = Runner(compiled("sm_80"), instance, graph)
    plain = runner.forward(tensors["assign"], tensors["clusters"], update)
    rectified = runner.forward(tensors["assign"], tensors["clusters"], update, "relu")
    assert bool((plain < 0).any())
    assert torch.equal(rectified, plain.clamp(min=0))


@needs_nvcc
def test_bits_do_not_depend_on_the_grid_or_the_order_of_warps():
    instance = PAIRS["float32"]
    graph = hub_graph()
    tensors = sample(instance, graph, 2, 12)
    results = []
    for blocks, seed in ((1, None), (3, 1), (29, 2)):
        runner = Runner(compiled("sm_80"), instance, graph, blocks, seed)
        forward = runner.forward(tensors["assign"], tensors["clusters"])
        results.append((forward, *runner.backward(tensors["grad"], tensors["assign"], tensors["clusters"])))
    for others in results[1:]:
        for left, right in zip(results[0], others, strict=True):
            assert torch.equal(left, right)


def late(tensor: Tensor) -> Tensor:
    """The same values, one element after a multiple of 16 bytes."""
    storage = tensor.new_zeros(tensor.numel() + 1)
    storage[1:] = tensor.flatten()
    return storage[1:].view(tensor.shape)


@needs_nvcc
def test_misaligned_rows_need_the_scalar_kernel():
    graph = EgoGraph.from_edge_index(*awkward())
    tensors = sample(PAIRS["float32"], graph, 2, 8)
    assign, clusters = tensors["assign"], late(tensors["clusters"])
    with pytest.raises(ptx.Misaligned):
        Runner(compiled("sm_80"), PAIRS["float32"], graph).forward(assign, clusters)
    result = Runner(compiled("sm_80"), OTHERS["scalar"], graph).forward(assign, clusters)
    torch.testing.assert_close(result, reference.cluster_scatter(assign, clusters, graph))


# A bug planted in the sources, and what must notice it. `WRONG`: the comparison of numbers.
WRONG = AssertionError
BUGS: dict[str, tuple[str, str, str, type[Exception]]] = {
    "no barrier before the sums are read": (
        "segments.cuh",
        "sums[warp][lane] = sum;\n      __syncthreads();",
        "sums[warp][lane] = sum;",
        ptx.Race,
    ),
    "no barrier before the sums are overwritten": (
        "segments.cuh",
        "store(hub, channel, total);\n      }\n      __syncthreads();",
        "store(hub, channel, total);\n      }",
        ptx.Race,
    ),
    "channels past the end of a row": (
        "cluster_scatter.cuh",
        "if (channel >= params.channels) return;",
        "",
        ptx.OutOfBounds,
    ),
    "sums that begin at what the output held": (
        "cluster_scatter.cuh",
        "A sums[kVector] = {};",
        "A sums[kVector] = {widen(params.out[0])};",
        ptx.Uninitialised,
    ),
    "an entry of the next node": ("cluster_scatter.cuh", "entry < task.count", "entry <= task.count", WRONG),
    "hubs left out": ("segments.cuh", "int num_tasks = 2;", "int num_tasks = 0;", WRONG),
    "only half of a hub's pieces": (
        "segments.cuh",
        "which = i == chunk && hub_begin > begin ? 1 : 0;",
        "which = 0;",
        WRONG,
    ),
    "groups not added up": (
        "cluster_scatter.cuh",
        "if (task.shared) add_groups<kVector>(group, sums);",
        "",
        WRONG,
    ),
    "a shuffle that half of the lanes skip": (
        "cluster_scatter_backward.cuh",
        "      reduce_batch(turn, factors, products);\n    }\n    store_sums",
        "      if (group.index == 0) reduce_batch(turn, factors, products);\n    }\n    store_sums",
        ptx.PtxError,
    ),
    "the wrong entry's product": (
        "cluster_scatter_backward.cuh",
        "(upper ? 2 : 0) + (odd ? 1 : 0)",
        "(upper ? 1 : 0) + (odd ? 2 : 0)",
        WRONG,
    ),
}


@needs_nvcc
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug, tmp_path):
    file, old, new, error = BUGS[bug]
    csrc = planted(tmp_path, file, old, new)
    instance = PAIRS["float32"]
    module = compile_instances([instance], "sm_80", csrc)
    with pytest.raises(error):
        check(module, instance, hub_graph(), 2, 36, fused=False)


def planted(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the sources with one change."""
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc)
    text = (csrc / "cuda" / file).read_text()
    assert text.count(old) == 1, f"{file} holds the place {text.count(old)} times"
    (csrc / "cuda" / file).write_text(text.replace(old, new))
    return csrc


@needs_nvcc
def test_a_wide_row_in_a_narrow_kernel_is_noticed():
    """The launcher's choice matters: the kernel for rows that fit a warp leaves the rest unwritten."""
    graph = EgoGraph.from_edge_index(*awkward())
    with pytest.raises(WRONG):
        check(compiled("sm_80"), PAIRS["float32"], graph, 2, 132, fused=False)


# On the host: what to change, under which sanitizer, and a part of the message.
HOST_BUGS = {
    "channels past the end of a row": (
        "cluster_scatter.cuh",
        "if (channel >= params.channels) return;",
        "",
        "address,undefined",
        "heap-buffer-overflow",
    ),
    "vectors on rows that do not fit them": (
        "instances.cuh",
        "bool fit = row_bytes % 16 == 0;",
        "return true; bool fit = row_bytes % 16 == 0;",
        "address,undefined",
        "misaligned address",
    ),
    "no barrier before the sums are read": (
        "segments.cuh",
        "sums[warp][lane] = sum;\n      __syncthreads();",
        "sums[warp][lane] = sum;",
        "races",
        "race",
    ),
}


@pytest.mark.skipif(not cuda_host.available(), reason=cuda_host.MISSING)
@pytest.mark.parametrize("bug", HOST_BUGS)
def test_planted_bugs_are_caught_on_the_host(bug, tmp_path):
    file, old, new, sanitize, message = HOST_BUGS[bug]
    csrc = planted(tmp_path, file, old, new)
    options = ["-iquote", str(csrc), "-O0", "-DDCGNN_TEST_TYPE=float", "-DDCGNN_TEST_INDEX=int32_t"]
    program = cuda_host.build(csrc / "tests" / "test_cuda_scatter.cpp", tmp_path, sanitize, options)
    done = cuda_host.run(program, "quick")
    assert done.returncode != 0
    assert message in done.stderr
