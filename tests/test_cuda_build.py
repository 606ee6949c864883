"""When CUDA kernels are built: the reasons of setup.py and backends(), and the list of architectures."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from dcgnn_kernels import _native_loader

ROOT = Path(__file__).resolve().parent.parent
TOOLS = str(Path(sys.executable).parent)
ASK = (
    "import runpy, sys, setuptools; setuptools.setup = lambda **_: None; facts = runpy.run_path('setup.py'); "
)


def reason_of_setup(**environment: str) -> subprocess.CompletedProcess:
    """Runs setup.py up to the decision; prints why CUDA kernels are left out."""
    env = {**os.environ, "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}", **environment}
    env = {name: value for name, value in env.items() if name not in ("CUDACXX", "CUDA_HOME", "CUDA_PATH")}
    env |= environment
    code = ASK + "print(facts['CUDA_NOT_BUILT'])"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.fixture
def fake_torch(tmp_path):
    """A folder that looks like a CUDA build of torch on disk, first on PYTHONPATH."""
    package = tmp_path / "site" / "torch"
    (package / "include" / "ATen").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "version.py").write_text("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n")
    return {"PYTHONPATH": str(tmp_path / "site")}


def fake_nvcc(folder: Path, release: str) -> str:
    path = folder / "nvcc"
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    path.chmod(0o755)
    return str(path)


def test_cuda_kernels_are_built_with_nvcc_and_a_cuda_build_of_torch(fake_torch, tmp_path):
    done = reason_of_setup(**fake_torch, CUDACXX=fake_nvcc(tmp_path, "13.1"))
    assert done.stdout.strip() == "None", done.stderr


@pytest.mark.parametrize(
    ("release", "forced", "reason"),
    [
        (None, "", "nvcc was not found"),
        ("12.4", "", "nvcc was of CUDA 12 when it was installed, but torch was built with CUDA 13.0"),
        ("13.0", "0", "the build was asked to leave it out (FORCE_CUDA=0)"),
    ],
    ids=["no nvcc", "another release", "asked"],
)
def test_why_cuda_kernels_are_left_out(fake_torch, tmp_path, release, forced, reason):
    nvcc = str(tmp_path / "nothing") if release is None else fake_nvcc(tmp_path, release)
    done = reason_of_setup(**fake_torch, CUDACXX=nvcc, FORCE_CUDA=forced)
    assert reason in done.stdout, done.stderr


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")
def test_a_cpu_build_of_torch_gets_no_cuda_kernels(tmp_path):
    nvcc = fake_nvcc(tmp_path, "13.0")
    assert "was a build without CUDA" in reason_of_setup(CUDACXX=nvcc).stdout
    forced = reason_of_setup(CUDACXX=nvcc, FORCE_CUDA="1")
    assert forced.returncode != 0
    assert "FORCE_CUDA=1, but torch" in forced.stderr


def test_force_cuda_is_checked():
    assert "FORCE_CUDA must be 0 or 1, got 'yes'" in reason_of_setup(FORCE_CUDA="yes").stderr


def architectures(text: str, version: str = "13.0") -> subprocess.CompletedProcess:
    script = ROOT / "cmake" / "CudaArchitectures.cmake"
    command = [f"{TOOLS}/cmake", f"-DLIST={text}", f"-DVERSION={version}", "-P", str(script)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.skipif(not Path(TOOLS, "cmake").exists(), reason="cmake is not installed beside Python")
@pytest.mark.parametrize(
    ("text", "version", "expected"),
    [
        ("", "13.0", "75-real;80-real;86-real;90-real;100-real;120-real;120-virtual"),
        ("", "12.4", "75-real;80-real;86-real;90-real;90-virtual"),
        ("8.0", "13.0", "80-real"),
        ("7.5;8.0 9.0a+PTX", "13.0", "75-real;80-real;90a-real;90a-virtual"),
        ("Ampere,Hopper+PTX", "13.0", "80-real;86-real;90-real;90-virtual"),
    ],
)
def test_architectures(text, version, expected):
    assert architectures(text, version).stderr.strip() == expected


@pytest.mark.skipif(not Path(TOOLS, "cmake").exists(), reason="cmake is not installed beside Python")
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5.2 7.0+PTX", "need 7.5 or newer, got 5.2 7.0+PTX"),
        ("Volta", "need 7.5 or newer, got Volta"),
        ("sm_80", "is not an architecture"),
    ],
)
def test_bad_architectures(text, message):
    done = architectures(text)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.split())


@pytest.mark.skipif(not Path(TOOLS, "cmake").exists(), reason="cmake is not installed beside Python")
def test_architectures_that_are_too_old_are_left_out_with_a_warning():
    done = architectures("5.2 6.0 6.1 7.0 7.2 Kepler+Tegra Volta 7.5 8.0 8.6 8.7 9.0+PTX")
    assert done.returncode == 0
    message = " ".join(done.stderr.split())
    assert "CMake Warning" in message
    assert "left out: 5.2 6.0 6.1 7.0 7.2 Kepler+Tegra Volta " in message
    assert message.endswith(" 75-real;80-real;86-real;87-real;90-real;90-virtual")


def test_the_sdist_holds_what_a_cuda_build_needs(tmp_path):
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    sources = {f"csrc/cuda/{path.name}" for path in (ROOT / "csrc" / "cuda").iterdir()}
    assert {"cmake/CudaArchitectures.cmake", "csrc/bindings/cuda_clusters.cpp", *sources} <= names


class BuiltWithoutCuda:
    cuda_version = None


class BuiltWithCuda:
    cuda_version = "13.0.88"
    cuda_architectures = "sm_80, PTX of 80"


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (None, "no extension"),
        (BuiltWithoutCuda, "no compiler for it"),
        (BuiltWithCuda, "built (CUDA 13.0.88, sm_80, PTX of 80), but torch finds no CUDA device here"),
    ],
)
def test_backends_says_why_native_cuda_is_off(monkeypatch, tmp_path, module, reason):
    (tmp_path / "_build_info.json").write_text(json.dumps({"cuda_not_built": "no compiler for it"}))
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_native_loader, "__file__", str(tmp_path / "loader.py"))
    monkeypatch.setattr(_native_loader, "missing_reason", "no extension")
    monkeypatch.setattr(_native_loader, "module", module)
    backend = importlib.import_module("dcgnn_kernels.backends")._native_cuda()
    assert not backend.available
    assert reason in backend.reason
