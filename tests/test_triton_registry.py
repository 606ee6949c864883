"""Which implementation CUDA tensors get, and why: Triton, the native extension or plain PyTorch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dcgnn_kernels
from dcgnn_kernels import _native_loader
from dcgnn_kernels.triton import registry

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)


def test_import_does_not_load_triton():
    code = "import sys, dcgnn_kernels; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_backends_says_why_not(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in dcgnn_kernels.backends()["triton"].reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in dcgnn_kernels.backends()["triton"].reason
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    state = dcgnn_kernels.backends()["triton"]
    assert not state.available
    assert "without CUDA" in state.reason


class Recorder:
    """Stands for the library of ops: what was registered for CUDA, in order."""

    def __init__(self):
        self.names = []

    def impl(self, name, function, key):
        assert key == "CUDA"
        self.names.append(name)


def with_backward(*ops: str) -> list[str]:
    return [name for op in ops for name in (op, f"{op}_backward")]


@pytest.fixture
def native_cuda(monkeypatch):
    """The extension has CUDA kernels for sm_80 and sm_86; gives the calls that wait for CUDA to start."""
    native = {"dcgnn::cluster_scatter", "dcgnn::node_update"}
    has = lambda name, key: key == "CUDA" and name in native  # noqa: E731
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", has)
    monkeypatch.setattr(registry, "why_not_registered", lambda: None)
    monkeypatch.setattr(registry, "LIBRARY", Recorder())
    built = SimpleNamespace(
        instruction_set="", compiler="", torch_version="", cuda_version="13.0",
        cuda_architectures="sm_80, sm_86",
    )  # fmt: skip
    monkeypatch.setattr(_native_loader, "module", built)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    waiting = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", waiting.append)
    return waiting


def have_gpus(monkeypatch, *capabilities):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device])


def test_registration_leaves_native_cuda_kernels_alone(native_cuda, monkeypatch):
    assert registry.register() == ("cluster_scatter", "node_update")
    others = with_backward("local_sinkhorn", "local_centroids", "global_sinkhorn")
    assert registry.LIBRARY.names == others
    have_gpus(monkeypatch, (8, 0), (8, 9))
    (start_of_cuda,) = native_cuda
    start_of_cuda()
    assert registry.LIBRARY.names == others


def test_triton_takes_over_where_the_native_kernels_do_not_fit(native_cuda, monkeypatch):
    monkeypatch.setattr(registry, "_NATIVE", registry.register())
    have_gpus(monkeypatch, (8, 0), (9, 0))
    (start_of_cuda,) = native_cuda
    start_of_cuda()
    assert registry.LIBRARY.names[6:] == with_backward("cluster_scatter", "node_update")
    assert set(registry.served()) == set(registry.MODULES)
    have_gpus(monkeypatch, (8, 6))
    assert registry.served() == ("local_sinkhorn", "local_centroids", "global_sinkhorn")


def test_backends_of_a_gpu_that_the_native_kernels_do_not_fit(native_cuda, monkeypatch):
    monkeypatch.setattr(registry, "_NATIVE", ("cluster_scatter", "node_update"))
    registry._why_not_on.cache_clear()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    have_gpus(monkeypatch, (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    state = dcgnn_kernels.backends()
    assert not state["native-cuda"].available
    wanted = "a GPU has compute capability 9.0, for which the build holds no code (sm_80, sm_86)"
    assert wanted in state["native-cuda"].reason
    assert state["triton"].available, state["triton"].reason
    assert "cluster_scatter" in state["triton"].ops
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    state = dcgnn_kernels.backends()
    assert state["native-cuda"].available
    assert state["triton"].ops == ("local_sinkhorn", "local_centroids", "global_sinkhorn")
    registry._why_not_on.cache_clear()


@pytest.mark.parametrize(
    ("reason", "patch"),
    [
        ("found no C compiler", lambda m: m.setattr(registry.shutil, "which", lambda name: None)),
        ("capability 7.0; Triton wants 7.5", lambda m: have_gpus(m, (7, 0))),
        (
            "triton is not installed",
            lambda m: m.setattr(importlib.util, "find_spec", lambda n: None),
        ),
    ],
    ids=["no compiler", "old GPU", "no triton"],
)
def test_what_triton_cannot_run_runs_in_plain_pytorch(reason, patch, monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    have_gpus(monkeypatch, (8, 0))
    patch(monkeypatch)
    capability = torch.cuda.get_device_capability(0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    registry._why_not_on.cache_clear()
    assert reason in registry._why_not_on(device)
    ran = []
    monkeypatch.setattr(registry.fallback, "cluster_scatter", lambda *arguments: ran.append(arguments))
    monkeypatch.setattr(registry, "kernel", None)
    with FakeTensorMode():
        tensor = torch.empty(2, device=device)
    registry._entry("cluster_scatter")(tensor)
    assert len(ran) == 1
    registry._why_not_on.cache_clear()


@pytest.mark.parametrize(
    ("architecture", "runs", "does_not"),
    [
        ("sm_80", [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (12, 0)]),
        ("sm_86", [(8, 6), (8, 9)], [(8, 0)]),
        ("PTX of 80", [(8, 0), (9, 0), (12, 1)], [(7, 5)]),
        ("sm_120", [(12, 0), (12, 1)], [(10, 0)]),
        ("PTX of 120", [(12, 0), (13, 0)], [(10, 3)]),
        ("sm_90a", [(9, 0)], [(9, 1), (10, 0)]),
        ("PTX of 90a", [(9, 0)], [(10, 0)]),
        ("sm_100f", [(10, 0), (10, 3)], [(11, 0)]),
        ("PTX of 100f", [(10, 3)], [(12, 0)]),
    ],
)
def test_which_gpus_code_runs_on(architecture, runs, does_not):
    assert [c for c in runs + does_not if _native_loader._runs_on(architecture, c)] == runs
