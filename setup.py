"""Drives CMake to build the native extension; everything else is declared in pyproject.toml.

The extension is compiled against the torch of the environment that the package is installed into.
torch is located on disk and never imported here, so metadata and isolated builds need no torch.

Environment variables:
    DCGNN_NATIVE  "auto" (default): build when the tools are there, else install pure Python and say why;
                  "1": a missing tool is an error; "0": never build.
    FORCE_CUDA    unset: build the CUDA kernels when torch is a CUDA build and nvcc is there (a GPU is not
                  needed), else leave them out and say why; "1": leaving them out is an error; "0": never.
    TORCH_CUDA_ARCH_LIST  GPU architectures, as for torch, e.g. "8.0;9.0+PTX".
    DCGNN_WERROR  "1": a compiler warning in our code is an error (as in CI).
    CUDACXX, CUDA_HOME: where nvcc is, if not on PATH.
    DCGNN_BUILD_DIR: a folder for CMake's files that stays, for quick rebuilds.
    CXX, CMAKE_BUILD_PARALLEL_LEVEL, CMAKE_ARGS: as CMake reads them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
MODULE = "dcgnn_kernels._native"


def find_torch() -> Path | None:
    """The torch package's folder: of this interpreter, or, in an isolated build, of its environment."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        spec = None
    candidates = [Path(spec.origin).parent] if spec is not None and spec.origin else []
    candidates += [Path(sysconfig.get_path(key)) / "torch" for key in ("purelib", "platlib")]
    return next((path for path in candidates if (path / "include" / "ATen").is_dir()), None)


def torch_version(torch_dir: Path) -> str:
    text = (torch_dir / "version.py").read_text()
    match = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
    return match.group(1) if match else "unknown"


def torch_cuda_version(torch_dir: Path) -> str | None:
    """The CUDA release that torch was built with."""
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", (torch_dir / "version.py").read_text(), re.MULTILINE)
    return match.group(1) if match else None


def missing_tool() -> str | None:
    """Why the native extension cannot be built here, or None if it can."""
    mode = os.environ.get("DCGNN_NATIVE", "auto")
    if mode not in ("auto", "0", "1"):
        raise SystemExit(f"DCGNN_NATIVE must be auto, 0 or 1, got {mode!r}")
    if mode == "0":
        return "the build was asked to leave it out (DCGNN_NATIVE=0)"
    reason = None
    compiler = shlex.split(os.environ.get("CXX", ""))[:1] or ["c++", "g++", "clang++"]
    if not any(shutil.which(name) for name in compiler):
        reason = f"no C++ compiler was found when it was installed (looked for {', '.join(compiler)})"
    elif not shutil.which("cmake"):
        reason = "cmake was not found when it was installed"
    elif importlib.util.find_spec("pybind11") is None:
        reason = "pybind11 was not importable when it was installed"
    elif find_torch() is None:
        reason = (
            "torch was not in the environment when it was installed; install torch first, "
            "then reinstall with 'pip install --no-build-isolation --force-reinstall --no-deps'"
        )
    if reason is not None and mode == "1":
        raise SystemExit(f"DCGNN_NATIVE=1, but {reason}")
    return reason


def find_nvcc() -> str | None:
    named = os.environ.get("CUDACXX")
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [named] if named else [*(str(Path(home, "bin", "nvcc")) for home in homes), "nvcc"]
    return next((path for path in map(shutil.which, candidates) if path is not None), None)


def missing_cuda() -> str | None:
    """Why the CUDA kernels cannot be built here, or None if they can."""
    mode = os.environ.get("FORCE_CUDA", "auto") or "auto"
    if mode not in ("auto", "0", "1"):
        raise SystemExit(f"FORCE_CUDA must be 0 or 1, got {mode!r}")
    if mode == "0":
        return "the build was asked to leave it out (FORCE_CUDA=0)"
    torch_dir, nvcc = find_torch(), find_nvcc()
    version = torch_cuda_version(torch_dir) if torch_dir is not None else None
    reason = NOT_BUILT
    if reason is None and torch_dir is not None and version is None:
        reason = f"torch {torch_version(torch_dir)} was a build without CUDA when it was installed"
    elif reason is None and nvcc is None:
        reason = "nvcc was not found when it was installed (looked at CUDACXX, CUDA_HOME and PATH)"
    elif reason is None and nvcc is not None and version is not None:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        found = re.search(r"release (\d+)\.", text)
        if found is None or found[1] != version.split(".")[0]:
            has = f"of CUDA {found[1]}" if found is not None else "of an unknown version"
            reason = f"nvcc was {has} when it was installed, but torch was built with CUDA {version}"
    if reason is not None and mode == "1":
        raise SystemExit(f"FORCE_CUDA=1, but {reason}")
    return reason


NOT_BUILT = missing_tool()
CUDA_NOT_BUILT = missing_cuda()


class CMakeBuild(build_ext):
    """Builds the one extension module by CMake; a failing compiler is an error, never a fallback."""

    def build_extension(self, ext: Extension) -> None:
        torch_dir = find_torch()
        assert torch_dir is not None
        pybind11_dir = subprocess.check_output(
            [sys.executable, "-m", "pybind11", "--cmakedir"], text=True
        ).strip()
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        # Named by the caller, a build goes on where the last one stopped.
        parent = Path(os.environ.get("DCGNN_BUILD_DIR") or self.build_temp).resolve()
        build_dir = parent / f"cmake-torch-{torch_version(torch_dir)}"
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [
            "cmake",
            f"-S{ROOT}",
            f"-B{build_dir}",
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={output.parent}",
            f"-DDCGNN_MODULE_FILE={output.name}",
            f"-DDCGNN_TORCH_DIR={torch_dir}",
            f"-DDCGNN_TORCH_VERSION={torch_version(torch_dir)}",
            f"-DDCGNN_WERROR={'ON' if os.environ.get('DCGNN_WERROR') == '1' else 'OFF'}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11_dir}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        if CUDA_NOT_BUILT is None:
            configure += ["-DDCGNN_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={find_nvcc()}"]
            if os.environ.get("CXX"):
                configure.append(f"-DCMAKE_CUDA_HOST_COMPILER={shlex.split(os.environ['CXX'])[0]}")
        if shutil.which("ninja"):
            configure.append("-GNinja")
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build_dir), "--target", "_native"], check=True)


class BuildPyWithFacts(build_py):
    """Leaves a note of what was built, so that `backends()` can say why a part is missing."""

    def run(self) -> None:
        super().run()
        package = ROOT if self.editable_mode else Path(self.build_lib)
        path = package / "dcgnn_kernels" / "_build_info.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch_dir = find_torch()
        facts = {
            "native_not_built": NOT_BUILT,
            "cuda_not_built": CUDA_NOT_BUILT,
            "torch_version": torch_version(torch_dir) if torch_dir is not None else None,
        }
        path.write_text(json.dumps(facts) + "\n")
        if NOT_BUILT is not None:
            print(f"dcgnn-kernels: installing without native kernels: {NOT_BUILT}", file=sys.stderr)
        elif CUDA_NOT_BUILT is not None:
            print(f"dcgnn-kernels: installing without CUDA kernels: {CUDA_NOT_BUILT}", file=sys.stderr)


setup(
    package_dir={"dcgnn_kernels": "dcgnn_kernels", "dcgnn": "python/dcgnn"},
    ext_modules=[] if NOT_BUILT else [Extension(MODULE, sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPyWithFacts},
)
