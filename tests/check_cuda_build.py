"""What `make check-cuda-build` checks: a wheel with CUDA kernels, built against the CUDA build of torch and
installed beside it, on a machine that need not have a GPU. Not collected by `make test`.

No kernel runs here. Pretended devices (csrc/tests/pretend_cuda.cpp) let autograd and the compiler follow
fake CUDA tensors, and record what the extension launches.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from graphs import awkward, star
from torch._subclasses.fake_tensor import FakeTensorMode

import dcgnn_kernels
from dcgnn import DCConv
from dcgnn_kernels import EgoGraph, _native_loader, backends

NATIVE_OPS = ("cluster_scatter", "node_update")
TRITON_OPS = ("local_sinkhorn", "local_centroids", "global_sinkhorn")
WHEEL = Path(os.environ["DCGNN_WHEEL"])
PRETEND = ctypes.CDLL(os.environ["DCGNN_PRETEND"])
PRETEND.pretend_last_stream.restype = ctypes.c_void_p


def test_the_installed_extension_is_loaded():
    assert "site-packages" in dcgnn_kernels.__file__
    assert torch.version.cuda is not None
    assert _native_loader.module is not None, _native_loader.missing_reason
    assert _native_loader.module.cuda_version.split(".")[0] == torch.version.cuda.split(".")[0]


@pytest.mark.parametrize("op", NATIVE_OPS + TRITON_OPS)
def test_ops_are_registered_for_cuda(op):
    for name in (op, f"{op}_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dcgnn::{name}", "CUDA")


def test_each_backend_serves_its_ops_on_a_gpu():
    """The pretended devices are of compute capability 8.0."""
    state = backends()
    assert state["native-cuda"].available, state["native-cuda"].reason
    assert state["native-cuda"].ops == NATIVE_OPS
    assert state["triton"].available, state["triton"].reason
    assert state["triton"].ops == TRITON_OPS


TAKE_OVER = """
import torch
from dcgnn_kernels import _native_loader, backends
from dcgnn_kernels.triton import registry

assert not torch.cuda.is_initialized()
_native_loader.module.cuda_architectures = "sm_90"
called = []
registry.kernel = lambda name: lambda *arguments: called.append(name) or torch.empty(3, 8, device="cuda")
clusters = torch.empty(3, 2, 8, device="cuda")
index = torch.zeros(4, dtype=torch.int32, device="cuda")
torch.ops.dcgnn.cluster_scatter(torch.empty(3, 2, device="cuda"), clusters, *[index] * 5)
assert called == ["cluster_scatter"], called
print(backends())
"""


def test_triton_takes_over_on_a_gpu_that_the_build_holds_no_code_for():
    """Decided when CUDA starts, not when the package is imported."""
    done = subprocess.run([sys.executable, "-c", TAKE_OVER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compute capability 8.0, for which the build holds no code (sm_90)" in done.stdout


def test_backends_says_that_the_kernels_are_built_and_why_they_are_off(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend = backends()["native-cuda"]
    assert not backend.available
    assert {"cluster_scatter", "node_update"} <= set(backend.ops)
    assert "torch finds no CUDA device here" in backend.reason
    assert "sm_80" in backend.reason


def test_the_wheel_carries_code_for_every_listed_architecture(tmp_path):
    import triton  # comes with the CUDA build of torch

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with zipfile.ZipFile(WHEEL) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".so")]
        library = archive.extract(name, tmp_path)
    listed = subprocess.run(
        [tool, "--list-elf", "--list-ptx", library], capture_output=True, text=True, check=True
    ).stdout
    cubins = re.findall(r"ELF file.*\.(sm_\w+)\.cubin", listed)
    texts = re.findall(r"PTX file.*\.sm_(\w+)\.ptx", listed)
    wanted = _native_loader.module.cuda_architectures.split(", ")
    architectures = [name for name in wanted if name.startswith("sm_")]
    # One image for each of the four storage types, and the file that chooses between them.
    assert {name: cubins.count(name) for name in architectures} == dict.fromkeys(architectures, 5)
    assert set(texts) == {name.removeprefix("PTX of ") for name in wanted if name.startswith("PTX")}
    print(f"\n{WHEEL.name}: cubins for {', '.join(architectures)}, PTX for {', '.join(sorted(set(texts)))}")


@pytest.fixture
def fake_layer(monkeypatch):
    """A layer, its input and its graph as fake tensors on cuda, and the mode that they live in."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # else the mode creates a context
    torch.use_deterministic_algorithms(False)
    graph = EgoGraph.from_edge_index(*awkward())
    with FakeTensorMode() as mode:
        arrays = [torch.empty(array.shape, dtype=array.dtype, device="cuda") for array in graph.arrays()]
        with torch.device("cuda"):
            layer = DCConv(8, 16, num_global=4)
        x = torch.randn(graph.num_nodes, 8, device="cuda", requires_grad=True)
    return mode, layer, x, EgoGraph._trusted(*arrays)


def check_gradients(layer, x, out):
    assert out.device.type == "cuda"
    assert out.shape == (10, 16)
    out.sum().backward()
    assert x.grad.device.type == "cuda"
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.device.type == "cuda"


def test_fake_tensors_flow_through_layer_and_autograd(fake_layer):
    mode, layer, x, graph = fake_layer
    with mode:
        check_gradients(layer, x, layer(x, graph))


def test_fake_tensors_flow_through_compile(fake_layer):
    mode, layer, x, graph = fake_layer
    with mode:
        check_gradients(layer, x, torch.compile(layer, backend="aot_eager", fullgraph=True)(x, graph))


def test_fake_tensors_flow_through_export(fake_layer):
    mode, layer, x, graph = fake_layer
    with mode:
        program = torch.export.export(layer, (x, graph))
    called = {str(node.target) for node in program.graph.nodes}
    assert {f"dcgnn.{op}.default" for op in ("local_sinkhorn", "global_sinkhorn", "node_update")} <= called


def test_fake_tensors_flow_through_every_op_and_its_gradient(fake_layer):
    """The ops that a layer does not call by default, too: other K, given centroids, the plain broadcast."""
    mode, _, x, graph = fake_layer

    def chain(x):
        centroids = dcgnn_kernels.local_centroids(x, graph, 3)
        assign, clusters = dcgnn_kernels.local_sinkhorn(x, centroids, graph, num_iters=2, cost_scale="mean")
        share, whole = dcgnn_kernels.global_sinkhorn(x, clusters[:4, 0], cost_scale="max")
        return dcgnn_kernels.cluster_scatter(assign, clusters, graph) + share @ whole

    with mode:
        for run in (chain, torch.compile(chain, backend="aot_eager", fullgraph=True)):
            x.grad = None
            out = run(x)
            assert out.device.type == "cuda"
            out.sum().backward()
            assert x.grad.shape == x.shape


def on_device(graph: EgoGraph, device: str = "cuda") -> EgoGraph:
    return EgoGraph._trusted(*(array.to(device) for array in graph.arrays()))


@pytest.fixture
def call():
    """cluster_scatter on the pretended device: a graph with a hub, so that it takes two launches."""
    torch.use_deterministic_algorithms(False)
    graph = on_device(EgoGraph.from_edge_index(*star(300)))
    assign = torch.empty(graph.num_slots, 2, device="cuda")
    clusters = torch.empty(graph.num_nodes, 2, 8, device="cuda")
    PRETEND.pretend_reset(0)
    return lambda: torch.ops.dcgnn.cluster_scatter(assign, clusters, *graph.arrays())


def test_kernels_go_to_the_current_stream(call):
    stream = torch.cuda.Stream()
    out = call()
    assert out.shape == (300, 8)
    assert PRETEND.pretend_num_launches() == 2
    assert PRETEND.pretend_last_block() == 256
    assert not PRETEND.pretend_last_stream()  # the default stream
    with torch.cuda.stream(stream):
        call()
    assert PRETEND.pretend_last_stream() == stream.cuda_stream


def test_kernels_go_to_the_device_of_their_tensors_and_its_stream():
    torch.use_deterministic_algorithms(False)
    graph = on_device(EgoGraph.from_edge_index(*star(300)), "cuda:1")
    assign = torch.empty(graph.num_slots, 2, device="cuda:1")
    clusters = torch.empty(graph.num_nodes, 2, 8, device="cuda:1")
    streams = [torch.cuda.Stream(device) for device in (0, 1)]
    PRETEND.pretend_reset(0)
    with torch.cuda.stream(streams[1]), torch.cuda.device(0):
        out = torch.ops.dcgnn.cluster_scatter(assign, clusters, *graph.arrays())
        assert torch.cuda.current_device() == 0
    assert out.device == torch.device("cuda:1")
    assert PRETEND.pretend_num_launches() == 2
    assert PRETEND.pretend_last_device() == 1
    assert PRETEND.pretend_last_stream() == streams[1].cuda_stream
    with torch.cuda.stream(streams[0]):
        torch.ops.dcgnn.cluster_scatter_backward(out, assign, clusters, *graph.arrays())
    assert PRETEND.pretend_last_device() == 1
    assert not PRETEND.pretend_last_stream()  # the other device's stream is not this one's
    with pytest.raises(ValueError, match="assign is on cuda:0, wanted cuda:1"):
        torch.ops.dcgnn.cluster_scatter(torch.empty(assign.shape, device="cuda:0"), clusters, *graph.arrays())


@pytest.mark.parametrize("error", [98, 719], ids=["invalid device function", "launch failure"])
def test_a_failing_launch_is_a_python_exception(call, error):
    PRETEND.pretend_reset(error)
    with pytest.raises(RuntimeError, match="CUDA error"):
        call()
    assert PRETEND.pretend_num_launches() == 1
    call()  # the error is not left behind


def test_node_update_takes_its_activation():
    torch.use_deterministic_algorithms(False)
    graph = on_device(EgoGraph.from_edge_index(*awkward()))
    shapes = ((10, 8), (10, 3), (3, 8), (graph.num_slots, 2), (10, 2, 8), *((10,),) * 4)
    tensors = [torch.empty(shape, device="cuda") for shape in shapes]
    PRETEND.pretend_reset(0)
    for activation in ("none", "relu", "tanh"):
        out = torch.ops.dcgnn.node_update(*tensors, *graph.arrays(), activation)
        assert out.shape == (10, 8)
    assert PRETEND.pretend_num_launches() == 3
    with pytest.raises(ValueError, match="activation must be none, relu or tanh, got elu"):
        torch.ops.dcgnn.node_update(*tensors, *graph.arrays(), "elu")


def test_nothing_is_launched_for_empty_input():
    torch.use_deterministic_algorithms(False)
    graph = on_device(EgoGraph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 0))
    PRETEND.pretend_reset(0)
    out = torch.ops.dcgnn.cluster_scatter(
        torch.empty(0, 2, device="cuda"), torch.empty(0, 2, 8, device="cuda"), *graph.arrays()
    )
    assert out.shape == (0, 8)
    assert PRETEND.pretend_num_launches() == 0


def test_bad_tensors_are_refused_before_any_launch(call):
    graph = on_device(EgoGraph.from_edge_index(*star(300)))
    clusters = torch.empty(graph.num_nodes, 2, 8, device="cuda")
    assign = torch.empty(graph.num_slots, 2, device="cuda")
    op = torch.ops.dcgnn.cluster_scatter
    with pytest.raises(ValueError, match="clusters is on cpu, but another argument is on a CUDA device"):
        op(assign, torch.empty(clusters.shape), *graph.arrays())
    with pytest.raises(ValueError, match="assign is Half, wanted Float"):
        op(torch.empty(assign.shape, dtype=torch.float16, device="cuda"), clusters, *graph.arrays())
    with pytest.raises(ValueError, match=r"assign must have shape \[898, 2\]"):
        op(assign[1:], clusters, *graph.arrays())
    with pytest.raises(ValueError, match="ego is Long, wanted Int"):
        op(
            assign,
            clusters,
            *graph.arrays()[:3],
            torch.empty(898, dtype=torch.int64, device="cuda"),
            graph.slot,
        )
    with pytest.raises(ValueError, match="member is on cpu, wanted cuda:0"):
        op(assign, clusters, graph.rowptr, graph.member.cpu(), *graph.arrays()[2:])
    with pytest.raises(ValueError, match="rowptr must have at least one entry"):
        op(assign, clusters, graph.rowptr[:0], *graph.arrays()[1:])
    with pytest.raises(ValueError, match="grad is on cpu, wanted cuda:0"):
        torch.ops.dcgnn.cluster_scatter_backward(torch.empty(300, 8), assign, clusters, *graph.arrays())
    dense = [torch.empty(shape, device="cuda") for shape in ((300, 3), (3, 8))]
    factors = [torch.empty(300, device="cuda") for _ in range(3)]
    with pytest.raises(ValueError, match="a factor is on cpu, wanted cuda:0"):
        torch.ops.dcgnn.node_update_backward(
            torch.empty(300, 8, device="cuda"), *dense, assign, clusters, *factors, torch.empty(300),
            *graph.arrays(),
        )  # fmt: skip
    assert PRETEND.pretend_num_launches() == 0
