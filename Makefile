# make setup   environment in .venv, package built and installed there (editable)
# make demo    trains DC-GNN on an embedded graph, beside GCN and GAT
# make test    all tests
# make sanitize  native unit tests under the address, undefined-behaviour and thread sanitizers
# make lint    ruff, mypy, clang-format
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
STAMP := $(VENV)/.installed

# Threads that spin while they wait slow each other down manyfold on a machine that is busy with other work.
export OMP_WAIT_POLICY ?= passive

.PHONY: setup demo test lint format native-test sanitize clean

setup: $(STAMP)

# torch comes first and alone: the extension is compiled against the version that is installed.
$(VENV)/.requirements: requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' requirements-dev.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

$(STAMP): $(VENV)/.requirements setup.py pyproject.toml CMakeLists.txt $(SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" DCGNN_WERROR=$(if $(CI),1,0) \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

demo: setup
	$(BIN)/python -m dcgnn demo

test: setup native-test
	$(BIN)/python -m pytest tests

# The native unit tests need no torch.
native-test: setup
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake -S . -B build/native-test -G Ninja -DDCGNN_BUILD_TESTS=ON \
	  -DCMAKE_BUILD_TYPE=Release -DDCGNN_WERROR=$(if $(CI),ON,OFF) > /dev/null
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build/native-test
	PATH="$(CURDIR)/$(BIN):$$PATH" ctest --test-dir build/native-test --output-on-failure

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
