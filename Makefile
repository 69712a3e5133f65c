# Every target makes its own .venv on first use. Nothing is needed beforehand but python3 (3.11 or newer), make and g++.
#
#   make demo     compile a real Qwen3-MoE, show what was fused, the check against eager and the speed-up
#   make test     the test suite
#   make test-npu the tests with the torch_npu wheel, in an environment of their own (.venv-npu); no NPU, no CANN
#   make test-npu-kernels  the Triton kernels compiled for Ascend, in an environment of their own (.venv-npu-kernels)
#   make bench    the benchmark table
#   make coverage the table of model families, docs/coverage.md; goes on where it was stopped
#   make coverage-third  compare a third of the families with the stored table
#   make lint     ruff          make types    mypy          make clean    remove everything that was made here
#
# TORCH_ARGS goes to the pip call that installs torch, e.g. to name an index of CPU-only builds.

SHELL      := /bin/bash
.SHELLFLAGS := -euo pipefail -c
PYTHON     ?= python3
TORCH_ARGS ?=
WORKERS    ?= 2
ARGS       ?=

VENV := .venv
PY   := $(VENV)/bin/python
PIP  := $(PY) -m pip --quiet --disable-pip-version-check
SAY  := printf '\n==> %s\n'

CHECKED := $(foreach d,examples benchmarks docs,$(if $(wildcard $(d)/*.py),$(d)))
SOURCES := $(wildcard setup.py pyproject.toml native/cpu/build.py native/cpu/*.cpp native/cpu/*.h)

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help install demo test test-npu test-npu-kernels bench coverage coverage-third lint types clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

install: $(VENV)/.installed

# torch first and alone: a resolver that sees it next to other requirements may take another build of it.
$(VENV)/.torch: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make needs Python 3.11 or newer (transformers does), but $(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.12")'
	@$(SAY) "Making $(VENV) and installing torch (the largest download)"
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@$(PIP) install $(TORCH_ARGS) "$$(grep '^torch==' constraints.txt)"
	@touch $@

$(VENV)/.packages: constraints.txt $(VENV)/.torch
	@$(SAY) "Installing transformers, pytest and the other packages of constraints.txt"
	@$(PIP) install -r constraints.txt
	@touch $@

$(VENV)/.installed: $(SOURCES) $(VENV)/.packages
	@$(SAY) "Building the C++ kernels and installing ascend-deep from this folder"
	@$(PIP) install --no-build-isolation --no-deps -e .
	@touch $@

demo: install
	@$(SAY) "Compiling a Qwen3-MoE with backend=\"ascend_deep\" and comparing it with eager and with Inductor"
	@$(PY) examples/compile_qwen3_moe.py $(ARGS)

# One torch thread a worker: the cores are shared by the workers, not by the threads of one of them.
test: install
	@$(SAY) "Running the tests in $(WORKERS) processes"
	@OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# torch_npu changes `import torch`, so it gets a second environment. Everything but the wheel comes from the first one.
NPU_VENV := .venv-npu
NPU_PY   := $(NPU_VENV)/bin/python

$(NPU_VENV)/.installed: tests/npu/requirements.txt $(VENV)/.installed
	@$(SAY) "Making $(NPU_VENV) and installing torch_npu"
	@$(PY) -m venv --without-pip --clear $(NPU_VENV)
	@$(PIP) --python $(NPU_PY) install --no-deps -r tests/npu/requirements.txt
	@echo "import site; site.addsitedir('$$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')')" \
	  > "$$($(NPU_PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/first_environment.pth"
	@touch $@

test-npu: $(NPU_VENV)/.installed
	@$(SAY) "Running the tests with torch_npu over stand-ins for CANN. Nothing runs on Ascend hardware."
	@ASCEND_DEEP_NPU_RIG=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 $(NPU_PY) -m pytest \
	  -n $(WORKERS) --dist loadfile tests/npu/wheel tests/npu/device $(ARGS)

# triton-ascend takes the place of Triton, so it gets a third environment.
KERNELS_VENV := .venv-npu-kernels
KERNELS_PY   := $(KERNELS_VENV)/bin/python

$(KERNELS_VENV)/.installed: tests/npu/kernels/requirements.txt $(VENV)/.installed
	@$(SAY) "Making $(KERNELS_VENV) and installing triton-ascend and ascendnpu-ir"
	@$(PY) -m venv --without-pip --clear $(KERNELS_VENV)
	@$(PIP) --python $(KERNELS_PY) install --no-deps -r tests/npu/kernels/requirements.txt
	@echo "import site; site.addsitedir('$$($(PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')')" \
	  > "$$($(KERNELS_PY) -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/first_environment.pth"
	@touch $@

test-npu-kernels: $(KERNELS_VENV)/.installed
	@$(SAY) "Compiling the Triton kernels for Ascend. Nothing is run."
	@ASCEND_DEEP_NPU_KERNELS=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 OMP_NUM_THREADS=1 $(KERNELS_PY) -m pytest tests/npu/kernels $(ARGS)

bench: install
	@$(SAY) "Running the benchmarks"
	@$(PY) -m benchmarks $(ARGS)

coverage: install
	@$(SAY) "Compiling every model family that has experts, in $(WORKERS) processes"
	@$(PY) -m ascend_deep coverage --jobs $(WORKERS) $(ARGS)

coverage-third: install
	@$(SAY) "Comparing a third of the model families with docs/coverage.json, in $(WORKERS) processes"
	@$(PY) -m ascend_deep coverage --third --jobs $(WORKERS) --check docs/coverage.json $(ARGS)

lint: $(VENV)/.packages
	@$(SAY) "Checking style with ruff"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

# The sub-packages live in top-level folders; mypy needs to see them where they are imported from.
types: $(VENV)/.packages
	@$(SAY) "Checking types with mypy"
	@rm -rf .mypy_src && mkdir -p .mypy_src/ascend_deep
	@cd .mypy_src/ascend_deep && ln -s ../../ascend_deep/*.py . && ln -s ../../{passes,ops,native,lowering} ../../ascend_deep/coverage .
	@cd .mypy_src && ln -s ../{examples,benchmarks,docs,setup.py} .
	@cd .mypy_src && $(abspath $(PY)) -m mypy --config-file ../pyproject.toml --no-incremental ascend_deep setup.py $(CHECKED)

clean:
	rm -rf $(VENV) $(NPU_VENV) $(KERNELS_VENV) .mypy_src .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info out
	find . -name '*.so' -delete
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
