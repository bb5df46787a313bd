# make        build the extension modules in place (the course's way: sys.path.append('./python') works)
# make train  make .venv, build, train Pythia-70M with block-sparse attention on the default text
# make test   the same .venv, the whole test suite
PYTHON ?= python3
VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
SOURCES := CMakeLists.txt pyproject.toml $(wildcard cmake/*.cmake cmake/inplace/CMakeLists.txt) \
           $(wildcard src/*.c* src/common/*.* src/common/cuda_sim/*.* src/common/cuda_sim/ptx/*.* src/kernels/*.*)
BUILT := $(VENV)/.built
SANITIZE ?=  # --smallest: of asan, race and ptx, the kernels' smallest cases alone
JOBS ?= $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN || echo 2)
REQUIRED_DEVICES ?= cpu_numpy,cpu,cuda_sim

# pip leaves it to the first import to compile a package's Python, which would double the time of installing it.
export PIP_COMPILE ?= 0

.DEFAULT_GOAL := lib
.PHONY: lib train test gpu-check asan race tsan ptx lint clean same-python

lib: $(BUILT)

# An editable install with in-place mode: pip, make and CMake all put the modules beside the Python sources.
$(BUILT): $(SOURCES) | $(VENV_PYTHON) same-python
	CMAKE_BUILD_PARALLEL_LEVEL=$(JOBS) $(VENV_PYTHON) -m pip install -q -e '.[test]'
	@touch $@

$(VENV_PYTHON):
	$(PYTHON) -m venv $(VENV)
	$(VENV_PYTHON) -m pip install -q --upgrade pip

# A .venv stays that of the Python that made it: where another one is named, tests would seem to run with it.
same-python: $(VENV_PYTHON)
	@test "$(origin PYTHON)" = file || test "$$($(PYTHON) -VV)" = "$$($(VENV_PYTHON) -VV)" || \
	  { echo "$(VENV) is of $$($(VENV_PYTHON) -V), not of PYTHON=$(PYTHON) (accepted: VENV=another, or after rm -r $(VENV))" >&2; exit 1; }

train: $(BUILT)
	$(VENV_PYTHON) apps/train_pythia.py --sparse

test: $(BUILT)
	NEEDLE_REQUIRE_DEVICES=$(REQUIRED_DEVICES) $(VENV_PYTHON) -m pytest -n auto

# For whoever has a GPU: build for it, parity suite, compute-sanitizer, benchmarks; uses this machine's own Python packages.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py

# The whole matrix under a sanitizer: cpu and cuda_sim under address, undefined, bounds and alignment checks; cuda_sim under
# the race detector for kernels; cpu and its thread pool under the thread sanitizer; cuda_sim with the kernels as nvcc compiles them.
asan race tsan ptx: $(BUILT)
	$(VENV_PYTHON) -m pip install -q cmake ninja pybind11
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" CMAKE_GENERATOR=Ninja $(VENV_PYTHON) tests/sanitize.py $@ $(SANITIZE)

lint: $(BUILT)
	$(VENV_PYTHON) -m pip install -q ruff mypy clang-format
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$(find src tests -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' -o -name '*.def')

clean:
	rm -rf build dist python/needle/backend_ndarray/*.so $(BUILT)
