"""Wheels and sdists: built from the sources, installed outside them, with and without a compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from dcgnn_kernels import backends

ROOT = Path(__file__).resolve().parent.parent
TOOLS = str(Path(sys.executable).parent)

TRY_IT = """
import json, torch, dcgnn, dcgnn_kernels
graph = dcgnn_kernels.EgoGraph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 0]]))
out = dcgnn.DCConv(4, 8, num_global=2)(torch.randn(3, 4), graph)
out.sum().backward()
native = dcgnn_kernels.backends()["native-cpu"]
print(json.dumps({"file": dcgnn_kernels.__file__, "model": dcgnn.__file__, "shape": list(out.shape),
                  "version": dcgnn_kernels.__version__, "native": native.available,
                  "reason": native.reason}))
"""


# The same files and the same steps as in an install, without the optimiser's time.
QUICK = "-DDCGNN_ISA_VARIANTS=OFF -DCMAKE_UNITY_BUILD=ON '-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG'"


def build_wheel(source: Path, target: Path, **environment: str) -> subprocess.CompletedProcess:
    env = {
        **os.environ,
        "PATH": f"{TOOLS}{os.pathsep}{os.environ['PATH']}",
        "CMAKE_ARGS": QUICK,
        **environment,
    }
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    command += ["--disable-pip-version-check", "-v", "-w", str(target), str(source)]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def install_and_try(wheel: Path, folder: Path) -> dict:
    """Installs into a fresh environment that sees the libraries of this one, but not our package."""
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    Path(site, "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet"),
            *("--disable-pip-version-check", "--ignore-installed", str(wheel)),
        ],
        check=True,
    )
    elsewhere = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run([python, "-c", TRY_IT], cwd=folder, env=elsewhere, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    info = json.loads(result.stdout.splitlines()[-1])
    assert Path(info["file"]).is_relative_to(folder)
    assert Path(info["model"]).is_relative_to(folder)
    assert info["shape"] == [3, 8]
    assert info["version"] == "0.1.0"
    return info


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.tar.gz")
    return archive


def test_sdist_holds_the_sources_and_nothing_built(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md"} <= names
    assert {"csrc/cpu/ego_graph.h", "csrc/bindings/module.cpp", "dcgnn_kernels/graph.py"} <= names
    assert "python/dcgnn/nn/conv.py" in names
    assert not [name for name in names if name.endswith((".so", "_build_info.json"))]


def test_wheel_from_the_sdist_works_in_a_fresh_environment(sdist, tmp_path):
    if not backends()["native-cpu"].available:
        pytest.skip(f"no native build here: {backends()['native-cpu'].reason}")
    built = build_wheel(sdist, tmp_path / "wheels")
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        libraries = [name for name in names if name.endswith(".so")]
        assert len(libraries) == 1
        # No path of the machine that built it.
        assert str(Path.home()).encode() not in archive.read(libraries[0])
    assert {name.split("/")[0] for name in names} == {
        "dcgnn",
        "dcgnn_kernels",
        "dcgnn_kernels-0.1.0.dist-info",
    }
    info = install_and_try(wheel, tmp_path)
    assert info["native"], info["reason"]


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": "no-such-compiler"}, "no C++ compiler was found"),
        ({"DCGNN_NATIVE": "0"}, "DCGNN_NATIVE=0"),
    ],
    ids=["no-compiler", "asked"],
)
def test_without_a_compiler_the_install_is_pure_python_and_says_so(sdist, tmp_path, environment, reason):
    built = build_wheel(sdist, tmp_path / "wheels", **environment)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "installing without native kernels" in built.stdout + built.stderr
    (wheel,) = (tmp_path / "wheels").glob("*.whl")
    assert wheel.name.endswith("-none-any.whl")
    info = install_and_try(wheel, tmp_path)
    assert not info["native"]
    assert reason in info["reason"]


def test_a_missing_compiler_is_an_error_when_native_is_required(sdist, tmp_path):
    built = build_wheel(sdist, tmp_path, CXX="no-such-compiler", DCGNN_NATIVE="1")
    assert built.returncode != 0
    assert "DCGNN_NATIVE=1, but no C++ compiler was found" in built.stdout + built.stderr


def test_a_compiler_that_fails_on_our_code_is_an_error(sdist, tmp_path):
    """A compiler that works for CMake's own trials and rejects our files."""
    compiler = tmp_path / "picky-c++"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *csrc/*) echo "picky: no" >&2; exit 1;; esac\nexec c++ "$@"\n'
    )
    compiler.chmod(0o755)
    built = build_wheel(sdist, tmp_path / "wheels", CXX=str(compiler), CMAKE_ARGS="-DDCGNN_ISA_VARIANTS=OFF")
    assert built.returncode != 0
    assert "picky: no" in built.stdout + built.stderr
    assert not list((tmp_path / "wheels").glob("*.whl"))
