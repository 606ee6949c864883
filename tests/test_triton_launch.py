"""How the Triton kernels are planned and launched, on real and fake tensors, without a GPU."""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

from emulation import triton_guard, triton_ptx
from graphs import ring, star
from test_ops import random_inputs, values_and_grads
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton_cases import mixed, node_update_inputs, on_cpu, small_tiles

import dcgnn_kernels
from dcgnn import DCConv
from dcgnn_kernels import EgoGraph
from dcgnn_kernels.triton import (
    cluster_scatter,
    config,
    global_sinkhorn,
    inspect,
    local_centroids,
    local_sinkhorn,
    plan,
)
from dcgnn_kernels.triton.launcher import recorded

CPU = torch.device("cpu")


def degrees() -> torch.Tensor:
    """Segments of all kinds of sizes, some of them rare."""
    return torch.cat(
        [
            torch.full((count,), size)
            for size, count in ((1, 40), (4, 3), (5, 300), (17, 40), (300, 2), (5000, 1))
        ]
    )


def pointer_of(sizes: torch.Tensor) -> torch.Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(torch.int32)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "while a CUDA graph is captured"])
@pytest.mark.parametrize("limit", [0, 4, 64, 256])
def test_every_segment_is_in_one_launch_or_in_tiles(limit, exact, monkeypatch):
    monkeypatch.setattr(plan, "capturing", lambda tensor: not exact)
    sizes = degrees()[torch.randperm(degrees().numel())]
    pointer = pointer_of(sizes)
    made = plan.Plan(pointer, int(sizes.sum()))
    bounds = made.bounds.tolist()
    seen = []
    for group in made.groups(limit):
        segments = made.order[bounds[group.first] : bounds[group.last]].tolist()
        assert len(segments) <= group.count
        assert exact is False or len(segments) == group.count
        assert all(sizes[segment] <= group.limit <= max(limit, 4) for segment in segments)
        seen += segments
    tiles = made.tiles(limit, 32)
    covered = torch.zeros(int(sizes.sum()), dtype=torch.int64)
    for tile in range(tiles.num_tiles):
        begin, end = int(tiles.begin[tile]), int(tiles.end[tile])
        segment = int(tiles.segment_of_tile[tile])
        assert end - begin <= 32
        if end > begin:
            assert int(pointer[segment]) <= begin < end <= int(pointer[segment + 1])
            assert int(tiles.hubs[tiles.hub_of_tile[tile]]) == segment
        covered[begin:end] += 1
    hubs = [int(h) for h, n in zip(tiles.hubs, tiles.pointer.diff(), strict=True) if n > 0]
    assert sorted(seen + hubs) == list(range(sizes.numel()))
    for segment, size in enumerate(sizes.tolist()):
        expected = 1 if segment in hubs else 0
        assert bool((covered[int(pointer[segment]) :][:size] == expected).all())


def test_segments_are_counted_in_32_bits(monkeypatch):
    monkeypatch.setattr(plan, "MOST_SEGMENTS", 4)
    assert plan.Plan(pointer_of(torch.ones(3, dtype=torch.int64)), 3).order.dtype == torch.int32
    with pytest.raises(ValueError, match="fewer than"):
        plan.Plan(pointer_of(torch.ones(4, dtype=torch.int64)), 4)


def test_rare_classes_share_a_launch():
    sizes = degrees()
    made = plan.Plan(pointer_of(sizes), int(sizes.sum()))
    assert len(made.groups(256)) < len({plan.class_of(size) for size in sizes.tolist() if size <= 256})


def test_a_plan_belongs_to_its_array_and_dies_with_it():
    graph = EgoGraph.from_edge_index(*ring(20))
    first = plan.plan_of(graph.rowptr, graph.num_slots)
    assert plan.plan_of(graph.rowptr, graph.num_slots) is first
    assert plan.plan_of(graph.colptr, graph.num_slots) is first  # undirected
    assert plan.plan_of(graph.rowptr.clone(), graph.num_slots) is not first
    graph.rowptr.add_(0)  # another version
    second = plan.plan_of(graph.rowptr, graph.num_slots)
    assert second is not first
    with torch.inference_mode():
        inference = graph.rowptr.clone()
        assert plan.plan_of(inference, graph.num_slots) is plan.plan_of(inference, graph.num_slots)
    plans, pointers = weakref.ref(second), weakref.ref(graph.rowptr)
    del first, second
    gc.collect()
    assert plans() is not None
    del graph
    gc.collect()
    assert plans() is None
    assert pointers() is None


def test_plan_of_a_captured_graph_is_not_kept(monkeypatch):
    graph = EgoGraph.from_edge_index(*star(20))
    with monkeypatch.context() as patch:
        patch.setattr(plan, "capturing", lambda tensor: True)
        patch.setattr(torch, "tensor", None)  # copies from the host are forbidden in a capture
        assert not plan.plan_of(graph.rowptr, graph.num_slots).exact
    assert plan.plan_of(graph.rowptr, graph.num_slots).exact


def test_tiles_made_during_a_capture_are_not_kept(monkeypatch):
    sizes = degrees()
    made = plan.Plan(pointer_of(sizes), int(sizes.sum()))
    with monkeypatch.context() as patch:
        patch.setattr(plan, "capturing", lambda tensor: True)
        bounded = made.tiles(64, 32)
    exact = made.tiles(64, 32)
    assert bounded.num_tiles > exact.num_tiles
    assert made.tiles(64, 32) is exact
    with monkeypatch.context() as patch:
        patch.setattr(plan, "capturing", lambda tensor: True)
        assert made.tiles(64, 32) is exact  # what is known is used


def test_memory_of_a_plan_is_told_to_other_streams():
    """Stand-ins for the device's objects: an array is recorded on the current stream unless that made it."""

    class Array:
        def __init__(self):
            self.recorded = []

        def record_stream(self, stream):
            self.recorded.append(stream)

    class Pointer:
        is_cuda = True
        device = "cuda:1"

    made = plan.Plan.__new__(plan.Plan)
    made.pointer = Pointer()
    here, there = Array(), Array()
    made._made_on = [("first", (here,)), ("second", (there,))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device: {"cuda:1": "second"}[device])
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        made.used_on_current_stream()
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        made.used_on_current_stream()
    assert here.recorded == ["second"]
    assert there.recorded == []


@pytest.mark.parametrize("tiled", [False, True])
def test_bounds_instead_of_counts_give_the_same_bits(tiled, monkeypatch):
    if tiled:
        small_tiles(monkeypatch)
    z, _ = random_inputs(mixed().num_nodes, 2, 8, CPU, torch.float32)
    results = []
    for captured in (False, True):
        monkeypatch.setattr(plan, "capturing", lambda tensor, captured=captured: captured)
        with on_cpu(lambda seed=5 + captured: triton_guard.guard(seed=seed)):
            graph = mixed()
            run = functools.partial(dcgnn_kernels.local_sinkhorn, centroids=None, graph=graph)
            results.append(values_and_grads(run, (z,)))
    for left, right in zip(*(values + grads for values, grads in results), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0)


def test_no_atomics():
    """No kernel adds into memory."""
    from pathlib import Path

    folder = Path(plan.__file__).parent
    assert not any("atomic_" in path.read_text(encoding="utf-8") for path in folder.glob("*.py"))


def calls(graph: EgoGraph, dtype: torch.dtype, device: torch.device, num_channels: int = 16):
    """Every op with its backward, as (name, function without arguments)."""
    arrays = graph.arrays()
    inputs, factors = node_update_inputs(graph, 3, 2, num_channels)
    z, share, whole, assign, clusters = (
        torch.zeros(tensor.shape, dtype=dtype, device=device) for tensor in inputs
    )
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    given = [torch.zeros(graph.num_nodes, dtype=wide, device=device) for _ in factors]
    potentials = torch.zeros(graph.num_nodes, 3, 2, dtype=wide, device=device)
    local = (2, 0.7, 3, "max")
    many = clusters.repeat(1, 2, 1)
    return {
        "local fresh": lambda: local_sinkhorn.local_sinkhorn(z, None, *arrays, *local, 1e-6, 10),
        "local": lambda: local_sinkhorn.local_sinkhorn(z, clusters, *arrays, *local, 1e-6, 10),
        "local, K = 4": lambda: local_sinkhorn.local_sinkhorn(z, many, *arrays, 4, *local[1:], 1e-6, 10),
        "local backward": lambda: local_sinkhorn.local_sinkhorn_backward(
            assign, clusters, z, None, potentials, *arrays, *local
        ),
        "local, K = 4, backward": lambda: local_sinkhorn.local_sinkhorn_backward(
            None, many, z, many, potentials.repeat(1, 1, 2), *arrays, 4, *local[1:]
        ),
        "centroids": lambda: local_centroids.local_centroids(z, *arrays, 3),
        "centroids backward": lambda: local_centroids.local_centroids_backward(clusters, *arrays, 2),
        "scatter": lambda: cluster_scatter.cluster_scatter(assign, clusters, *arrays),
        "scatter backward": lambda: cluster_scatter.cluster_scatter_backward(z, assign, clusters, *arrays),
        "update": lambda: cluster_scatter.node_update(
            z, share, whole, assign, clusters, *given, *arrays, "relu"
        ),
        "update backward": lambda: cluster_scatter.node_update_backward(
            z, share, whole, assign, clusters, *given, *arrays
        ),
        "global": lambda: global_sinkhorn.global_sinkhorn(z, whole, 0.7, 3, "max", 1e-6, 10),
        "global backward": lambda: global_sinkhorn.global_sinkhorn_backward(
            None, whole, z, whole, potentials[0].repeat(1, 2)[:, :3], 0.7, 3, "max"
        ),
    }


@pytest.mark.parametrize("device", ["meta", "cuda:1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", calls(mixed(), torch.float32, CPU))
def test_launches_on_another_device(name, dtype, device, monkeypatch):
    """Tensors without memory, fake ones on a second GPU or meta ones, walk the whole path down to the launch.

    Every tensor argument is on their device and contiguous, and every grid has programs. Counts of segments
    cannot be read from them, so that plans take bounds.
    """
    if device != "meta" and not torch.backends.cuda.is_built():
        pytest.skip("a CPU build of torch has no arithmetic on fake CUDA tensors")
    small_tiles(monkeypatch)
    target = torch.device(device)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: contextlib.nullcontext())
    monkeypatch.setattr(plan, "capturing", lambda tensor: True)
    monkeypatch.setattr(config, "capturing", lambda tensor: True)
    graph = mixed()
    mode = contextlib.nullcontext() if device == "meta" else FakeTensorMode(allow_non_fake_inputs=True)
    with mode, recorded() as launches:
        arrays = [torch.empty_like(array, device=target) for array in graph.arrays()]
        outputs = calls(EgoGraph._trusted(*arrays), dtype, target)[name]()
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        assert all(out.device == target and out.is_contiguous() for out in outputs)
    assert launches
    for launch in launches:
        assert all(size > 0 for size in launch.grid)
        missing = {p.name for p in launch.kernel.params} - set(launch.arguments)
        assert not missing, (launch.kernel.__name__, missing)
        for key, value in launch.arguments.items():
            if isinstance(value, torch.Tensor):
                assert value.device == target, (launch.kernel.__name__, key)
                assert value.is_contiguous(), (launch.kernel.__name__, key)


class PretendedGpu:
    """Triton's own launch code on a machine with a second GPU that is not there.

    Stands for Triton's driver, for ``torch.cuda.device_of`` and for compiled kernels, which are recorded
    instead of compiled and run: (kernel, device, signature, constants, attributes), and (grid, stream).
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.held: list[torch.Tensor] = []
        self.compiled: list[tuple] = []
        self.started: list[tuple] = []
        patch.setattr(torch.cuda, "device_of", self.device_of)
        patch.setattr(type(driver), "active", self)

        def compile_kernel(kernel, key, signature, device, constants, options, attributes, warmup):
            self.compiled.append((kernel, device, signature, constants, attributes))
            return SimpleNamespace(
                launch_metadata=lambda *_: None, run=self.run, function=None, packed_metadata=None
            )

        patch.setattr(JITFunction, "_do_compile", compile_kernel)

    @contextlib.contextmanager
    def device_of(self, tensor):
        self.held.append(tensor)
        yield
        self.held.pop()

    def get_current_device(self):
        assert self.held, "a launch outside of the device guard"
        return f"GPU of tensor {id(self.held[-1])}"

    def get_current_stream(self, device):
        return f"current stream of {device}"

    def get_current_target(self):
        return inspect.gpu_target("sm_80")

    def run(self, x, y, z, stream, *_):
        self.started.append(((x, y, z), stream))


@pytest.mark.parametrize("name", calls(mixed(), torch.float32, CPU))
def test_triton_launches_on_the_device_and_stream_of_the_data(name, monkeypatch):
    """The guard is entered with a tensor of the op and held during every launch, from which Triton takes the
    stream; and Triton specialises arguments as the emulator of the PTX does.
    """
    small_tiles(monkeypatch)
    graph = mixed()
    call = calls(graph, torch.float32, CPU)[name]
    own = {id(cell.cell_contents) for cell in call.__closure__ if torch.is_tensor(cell.cell_contents)}
    with recorded() as expected:
        call()
    gpu = PretendedGpu(monkeypatch)
    call()
    assert len(gpu.compiled) == len(gpu.started) == len(expected) > 0
    for launch, compiled, started in zip(expected, gpu.compiled, gpu.started, strict=True):
        kernel, device, signature, constants, attributes = compiled
        assert device in {f"GPU of tensor {tensor}" for tensor in own}
        assert started == ((*launch.grid, 1, 1)[:3], f"current stream of {device}")
        assert kernel is launch.kernel
        names = list(signature)
        wanted = triton_ptx.specialise(kernel, launch.arguments)
        divisible = tuple(names[place] for (place,), facts in attributes.items() if facts)
        assert (signature, {names[place]: value for (place,), value in constants.items()}) == wanted[:2]
        assert divisible == wanted[2]


def test_the_guard_of_torch_takes_the_index_of_the_tensor():
    with FakeTensorMode():
        assert torch.cuda.device_of(torch.empty(2, device="cuda:3")).idx == 3


def test_ops_trace_on_fake_cuda_tensors():
    """Schemas and fake kernels of forward and backward agree for CUDA tensors, without a GPU.

    A CPU build of torch cannot record autograd for CUDA tensors. The autograd formulas know no device, and
    the tests of the interpreted ops run them.
    """
    graph = mixed()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake = EgoGraph._trusted(*(torch.empty_like(array, device="cuda") for array in graph.arrays()))
        z = torch.empty(graph.num_nodes, 8, device="cuda")
        options = (*fake.arrays(), 2, 0.7, 3, "max")
        assign, clusters, potentials = torch.ops.dcgnn.local_sinkhorn(z, None, *options, 1e-6, 10)
        grad_z, grad_centroids = torch.ops.dcgnn.local_sinkhorn_backward(
            assign, clusters, z, None, potentials, *options
        )
        out = dcgnn_kernels.cluster_scatter(assign, clusters, fake)
        assert {t.device.type for t in (assign, clusters, potentials, grad_z, out)} == {"cuda"}
        assert grad_z.shape == z.shape
        assert grad_centroids.numel() == 0


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="torch has no CUDA")
def test_layer_and_autograd_trace_on_fake_cuda_tensors():
    graph = mixed()
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = EgoGraph._trusted(*(torch.empty_like(array, device="cuda") for array in graph.arrays()))
        with torch.device("cuda"):
            layer = DCConv(8, 6, num_global=4)
        result = layer(torch.empty(graph.num_nodes, 8, device="cuda"), fake)
        assert result.shape == (graph.num_nodes, 6)
        result.sum().backward()
        assert all(p.grad is not None and p.grad.device.type == "cuda" for p in layer.parameters())


def test_empty_graphs_launch_nothing():
    graph = EgoGraph.from_edge_index(torch.zeros(2, 0, dtype=torch.int64), 0)
    with recorded() as launches:
        for name, call in calls(graph, torch.float32, CPU).items():
            if "global" not in name:
                call()
    assert not launches


def test_tuning_times_each_choice_once_and_keeps_the_best(monkeypatch):
    times = {4: 3.0, 8: 1.0, 2: 2.0}
    ran = []
    monkeypatch.setattr(config, "tuning_wanted", lambda tensor: True)
    monkeypatch.setattr(config, "_chosen", {})

    def measure(run):
        run()
        return times[ran[-1].warps]

    monkeypatch.setattr(config, "measure", measure)
    choices = [config.Config(1, 16, warps) for warps in times]
    z = torch.zeros(4, 8)
    config.launch(("kernel", 16), choices, z, ran.append)
    assert [choice.warps for choice in ran] == [4, 8, 2, 8]
    config.launch(("kernel", 16), choices, z, ran.append)
    assert ran[4:] == [choices[1]]
    config.launch(("kernel", 32), choices, z, ran.append)
    assert len(ran) == 9


def test_tuning_is_off_where_bits_or_captures_matter(monkeypatch):
    z = torch.zeros(2, 2)
    assert not config.tuning_wanted(z)  # not on a GPU
    with FakeTensorMode():
        fake = torch.empty(2, 2, device="cuda")
    assert not config.tuning_wanted(fake)  # deterministic algorithms: see conftest.py
    torch.use_deterministic_algorithms(False)
    assert config.tuning_wanted(fake)
    monkeypatch.setenv("DCGNN_TUNE", "0")
    assert not config.tuning_wanted(fake)
    monkeypatch.delenv("DCGNN_TUNE")


def test_a_capture_takes_what_was_chosen_before_and_times_nothing(monkeypatch):
    monkeypatch.setattr(config, "tuning_wanted", lambda tensor: True)
    monkeypatch.setattr(config, "capturing", lambda tensor: True)
    monkeypatch.setattr(config, "measure", None)
    choices = [config.Config(1, 16, warps) for warps in (4, 8)]
    z, ran = torch.zeros(4, 8), []
    monkeypatch.setattr(config, "_chosen", {("known", z.dtype, z.device): choices[1]})
    config.launch(("known",), choices, z, ran.append)
    config.launch(("unknown",), choices, z, ran.append)
    assert ran == [choices[1], choices[0]]


def test_a_choice_that_does_not_compile_is_not_chosen(monkeypatch):
    from triton.runtime.errors import OutOfResources

    def run():
        raise OutOfResources(2, 1, "registers")

    assert config.measure(run) == float("inf")


class PretendedQueue:
    """A GPU that works off what a slower host queues: a clock for each, in milliseconds."""

    ZERO, KERNEL, HOST = 0.03, 0.004, 0.05

    def __init__(self, patch: pytest.MonkeyPatch, host: float = HOST) -> None:
        queue = self
        self.host = self.gpu = 0.0
        self.host_launch = host
        self.log: list[str] = []

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                queue.log.append("event")
                self.time = max(queue.gpu, queue.host)

            def query(self):
                return self.time <= queue.host

            def synchronize(self):
                queue.host = max(queue.host, queue.gpu)

            def elapsed_time(self, end):
                return end.time - self.time

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(
            config, "_scratch", lambda: SimpleNamespace(zero_=lambda: self.run("zero", 0.005, self.ZERO))
        )

    def run(self, name, host, gpu):
        self.host += host
        self.gpu = max(self.gpu, self.host) + gpu
        self.log.append(name)

    def kernel(self):
        self.run("kernel", self.host_launch, self.KERNEL)


def test_the_tuner_times_groups_of_launches_that_were_queued_ahead(monkeypatch):
    """The kernel's own time comes out although launching it takes the host longer."""
    queue = PretendedQueue(monkeypatch)
    assert config.measure(queue.kernel) == pytest.approx(queue.KERNEL)
    timed = "event " + "kernel " * config.LAUNCHES + "event"
    text = " ".join(queue.log)
    assert text.startswith("kernel zero ")  # the first launch compiles
    assert text.endswith(timed)
    assert text.count("kernel") == 1 + text.count(timed) * config.LAUNCHES
    assert text.count(timed) > config.GROUPS  # the first head start was too short


def test_the_tuner_ends_on_a_host_that_is_too_slow(monkeypatch):
    queue = PretendedQueue(monkeypatch, host=5.0)
    assert config.measure(queue.kernel) > queue.KERNEL


@pytest.mark.parametrize("num_channels", [1, 64, 100, 1024, 5000])
@pytest.mark.parametrize("num_clusters", [1, 2, 3, 64, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_configurations_fit(num_channels, num_clusters, dtype):
    for backward in (False, True):
        limit = config.resident_limit(num_channels, num_clusters, dtype, backward)
        assert 0 <= limit <= config.LONGEST
        if limit:
            for choice in config.resident_configs(limit, num_channels, num_clusters, dtype, backward):
                assert choice.slots == limit
                assert 1 <= choice.warps <= 16
                assert choice.segments >= 1
    width = min(config.features(num_channels), config.WIDEST)
    for choice in config.gather_configs(1024, width * config.power_of_two(num_clusters), dtype):
        assert 1 <= choice.warps <= 16
        assert choice.segments * choice.slots >= 1
