# make setup   environment in .venv, package built and installed there (editable)
# make demo    trains DC-GNN on an embedded graph, beside GCN and GAT
# make test    all tests
# make test-gpu-code  every GPU kernel interpreted, as PTX for sm_80 and sm_90, and compiled for all GPUs
# make sanitize  native unit tests under the address, undefined-behaviour and thread sanitizers
# make check-cuda-build  a wheel with CUDA kernels, built and checked beside the CUDA build of torch; needs nvcc,
#              no GPU, and 8 GB of disk for its own environment in build/cuda-check
# make cuda-resources  registers, spills and occupancy of every CUDA kernel; fails on spills; needs nvcc
# make triton-resources  the same for Triton kernels in their default configurations; needs no nvcc
# make lint    ruff, mypy, clang-format
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
STAMP := $(VENV)/.installed

# Threads that spin while they wait slow each other down manyfold on a machine that is busy with other work.
export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo test test-gpu-code lint format native-test sanitize check-cuda-build cuda-resources triton-resources clean

setup: $(STAMP)

# torch comes first and alone: the extension is compiled against the version that is installed.
$(VENV)/.requirements: requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

$(STAMP): $(VENV)/.requirements setup.py pyproject.toml CMakeLists.txt $(SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" DCGNN_WERROR=$(if $(CI),1,0) DCGNN_BUILD_DIR="$(CURDIR)/build/native" \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	@$(BIN)/python -c "import dcgnn_kernels; print(dcgnn_kernels.backends())"
	touch $@

demo: setup
	$(BIN)/python -m dcgnn demo

# The tests are spread over the cores; benchmarks are not timed there.
test: setup native-test
	$(BIN)/python -m pytest tests --numprocesses auto --maxprocesses 8 --dist worksteal --benchmark-disable

# What make test runs in part. Compiling for nine GPUs takes the most of it.
test-gpu-code: setup
	DCGNN_GPU_CODE=full $(BIN)/python -m pytest tests/emulation $(wildcard tests/test_triton_*.py)

# The native unit tests need no torch; they link the kernels that set-up has compiled.
native-test: setup
	set -e; export PATH="$(CURDIR)/$(BIN):$$PATH"; folder="$$(ls -td build/native/cmake-torch-* | head -n 1)"; \
	  cmake "$$folder" -DDCGNN_BUILD_TESTS=ON > /dev/null; cmake --build "$$folder" --target native_tests; \
	  ctest --test-dir "$$folder" --output-on-failure

# -O1: the kernels are templates many layers deep, unusably slow without inlining. Races do not depend on the
# instruction set, so that the thread sanitizer takes one.
SANITIZE_address,undefined := -DDCGNN_ISA_VARIANTS=ON
SANITIZE_thread := -DDCGNN_ISA_VARIANTS=OFF
sanitize: sanitize-address,undefined sanitize-thread

sanitize-%: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/$@ -G Ninja -DDCGNN_BUILD_TESTS=ON $(SANITIZE_$*) \
	  -DCMAKE_BUILD_TYPE= -DCMAKE_CXX_FLAGS="-O1 -g1" -DDCGNN_SANITIZE=$* > /dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/$@
	PATH="$(CURDIR)/$(BIN):$$PATH" ctest --test-dir build/$@ --output-on-failure

# torch===: exactly this release, without a local label, which is the CUDA build. One variant of the CPU kernels
# is enough here.
CUDA_CHECK := $(CURDIR)/build/cuda-check
CUDA_BIN := $(CUDA_CHECK)/venv/bin
check-cuda-build:
	@command -v nvcc > /dev/null || { echo "check-cuda-build: nvcc is not on PATH" >&2; exit 1; }
	test -x $(CUDA_BIN)/python || $(PYTHON) -m venv $(CUDA_CHECK)/venv
	$(CUDA_BIN)/python -m pip install --quiet --disable-pip-version-check "torch===$$(sed -n 's/^torch==//p' requirements-dev.txt)"
	grep -v '^#\|^torch==' requirements-dev.txt > $(CUDA_CHECK)/requirements.txt
	$(CUDA_BIN)/python -m pip install --quiet --disable-pip-version-check -r $(CUDA_CHECK)/requirements.txt
	rm -rf $(CUDA_CHECK)/wheels
	PATH="$(CUDA_BIN):$$PATH" FORCE_CUDA=1 DCGNN_NATIVE=1 DCGNN_WERROR=1 DCGNN_BUILD_DIR=$(CUDA_CHECK)/native CMAKE_ARGS="-DDCGNN_ISA_VARIANTS=OFF $$CMAKE_ARGS" \
	  $(CUDA_BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps -w $(CUDA_CHECK)/wheels .
	$(CUDA_BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall $(CUDA_CHECK)/wheels/*.whl
	nvcc -shared -cudart none -Xcompiler -fPIC -Xlinker -soname,libcuda.so.1 -o $(CUDA_CHECK)/libcuda.so.1 csrc/tests/pretend_cuda.cpp
	cd $(CUDA_CHECK) && DCGNN_WHEEL="$$(ls wheels/*.whl)" DCGNN_PRETEND=$(CUDA_CHECK)/libcuda.so.1 \
	  LD_LIBRARY_PATH=$(CUDA_CHECK) LD_PRELOAD=$(CUDA_CHECK)/libcuda.so.1 $(CUDA_BIN)/pytest -s $(CURDIR)/tests/check_cuda_build.py \
	  $(CURDIR)/tests/test_triton_launch.py $(CURDIR)/tests/test_triton_registry.py
	@echo "The environment stays in build/cuda-check for the next run; 'make clean' removes it."

cuda-resources:
	$(PYTHON) tests/cuda_resources.py

triton-resources: setup
	DCGNN_GPU_CODE=resources $(BIN)/python -m pytest -s tests/test_triton_resources.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(SOURCES)

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

clean:
	rm -rf build dist *.egg-info dcgnn_kernels/_native*.so dcgnn_kernels/_build_info.json
