# `make demo` and `make test` work alone on a fresh machine: each makes .venv, installs what it needs, and runs.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# Two: the tests are sized for a machine of two cores.
JOBS ?= 2
PROMPT ?= The for statement

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PLUGINS := $(patsubst plugins/%/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml))

# Twice quiet: errors only. Builds use the hatchling of .venv, since an isolated build environment would resolve its own packages.
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check
PIP_INSTALL := $(PIP) --constraint constraints.txt
PIP_LOCAL := $(PIP_INSTALL) --no-build-isolation

# The second supported transformers lies in front of the installed one through PYTHONPATH.
OTHER_TRANSFORMERS := 5.17.0
OTHER_TRANSFORMERS_DIR := $(VENV)/transformers-$(OTHER_TRANSFORMERS)

# The vendors' Python of DeepGEMM and DeepEP, over which the plugin's tests put a compiled layer in torch; their own are for GPUs.
DEEPGEMM := tokenspeed-deepgemm==2.5.0.post20260604 sgl-deep-gemm==0.1.5.post1 tokenspeed-deepep==1.2.1.post20251110
DEEPGEMM_PYTHON := 3.12
DEEPGEMM_DIR := $(VENV)/deepgemm-vendor

# The vendor's operators for Ascend, loaded on a CPU for their schemas; one build of it fits one release of torch.
TORCH_NPU := 2.13.0
TORCH_NPU_DIR := $(VENV)/ascend-vendor

# The vendor's sources, which tests read for the signatures of its functions and never import.
FLASHINFER := 0.6.11.post3
FLASHINFER_DIR := $(VENV)/flashinfer-vendor

# One thread per process: JOBS workers, and ranks that some tests start, share the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL := --numprocesses $(JOBS) --dist worksteal

.PHONY: help
help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# --- install: each stamp stands for one step and is redone only when a file behind it changes ---

$(STAMPS)/torch: constraints.txt
	@echo "making $(VENV) and installing torch, the largest download (some minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP_INSTALL) torch
	@mkdir -p $(@D) && touch $@

$(STAMPS)/core: pyproject.toml $(STAMPS)/torch
	@echo "installing moe-core, transformers and the tools of its tests (a minute or two) ..."
	@$(PIP_INSTALL) hatchling editables
	@$(PIP_LOCAL) --editable '.[bench,dev,transformers]'
	@touch $@

$(STAMPS)/plugin-%: plugins/%/pyproject.toml $(STAMPS)/core
	@echo "installing the plugin $* ..."
	@$(PIP_LOCAL) --editable plugins/$*
	@touch $@

$(STAMPS)/transformers-%: $(STAMPS)/core
	@echo "installing transformers $* beside the other one ..."
	@rm -rf $(VENV)/transformers-$*
	@$(PIP) --no-deps --target $(VENV)/transformers-$* transformers==$*
	@touch $@

# Where none can be had the tests put a stand-in there, and say so. A wheel for another Python does: only its Python files are loaded.
$(STAMPS)/deepgemm-vendor: $(STAMPS)/plugin-cuda_deepgemm
	@echo "getting the vendors' DeepGEMM and DeepEP ..."
	@rm -rf $(DEEPGEMM_DIR)
	@for build in $(DEEPGEMM); do \
	    folder=$(DEEPGEMM_DIR)/$${build%%=*}; \
	    $(PIP) --no-deps --no-compile --only-binary :all: --python-version $(DEEPGEMM_PYTHON) --target $$folder $$build \
	    || { rm -rf $$folder; echo "$$build cannot be installed here: its signatures are not asked"; }; \
	done
	@[ ! -d $(DEEPGEMM_DIR) ] || touch $@

.PHONY: deepgemm-vendor
deepgemm-vendor: $(STAMPS)/deepgemm-vendor ## The vendors' DeepGEMM and DeepEP in .venv, for the tests of plugins/cuda_deepgemm.

# Where it cannot be had the tests use the schemas that the plugin ships, and say so.
$(STAMPS)/ascend-vendor: $(STAMPS)/plugin-ascend_npu
	@echo "getting the vendor's torch_npu ..."
	@rm -rf $(TORCH_NPU_DIR)
	@if $(PIP) --no-deps --target $(TORCH_NPU_DIR) torch_npu==$(TORCH_NPU) \
	    && $(BIN)/python -m moe_plugin_ascend.emulation $(TORCH_NPU_DIR); \
	then touch $@; \
	else rm -rf $(TORCH_NPU_DIR); echo "torch_npu $(TORCH_NPU) cannot be installed here: its schemas are not asked"; \
	fi

.PHONY: ascend-vendor
ascend-vendor: $(STAMPS)/ascend-vendor ## The vendor's torch_npu in .venv, for the tests of plugins/ascend_npu.

# Where they cannot be had the tests use the signatures that the plugin ships, and say so.
$(STAMPS)/flashinfer-vendor: $(STAMPS)/plugin-flashinfer_cutedsl
	@echo "getting the vendor's FlashInfer ..."
	@rm -rf $(FLASHINFER_DIR)
	@if $(PIP) --no-deps --no-compile --target $(FLASHINFER_DIR) flashinfer-python==$(FLASHINFER); \
	then touch $@; \
	else rm -rf $(FLASHINFER_DIR); echo "flashinfer $(FLASHINFER) cannot be installed here: its signatures are not asked"; \
	fi

.PHONY: flashinfer-vendor
flashinfer-vendor: $(STAMPS)/flashinfer-vendor ## The vendor's FlashInfer in .venv, for the tests of plugins/flashinfer_cutedsl.

.PHONY: install
install: $(STAMPS)/core $(PLUGINS:%=$(STAMPS)/plugin-%) ## Make .venv with the core, its tools and every plugin.

# --- use ---

.PHONY: demo
demo: install ## List the backends, explain one choice, generate text with the tiny model.
	$(BIN)/moe-core list-backends
	$(BIN)/moe-core resolve --environment h100 --model examples/tiny_moe --explain
	$(BIN)/moe-core run --model examples/tiny_moe --prompt "$(PROMPT)"

# --- check ---

.PHONY: test
test: lint types contracts unit ## Everything below: what CI runs.

.PHONY: lint
lint: install ## ruff: rules and format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: format
format: install ## Let ruff fix and format the files.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

PLUGIN_TYPES := $(PLUGINS:%=types-%)
.PHONY: types types-core $(PLUGIN_TYPES)
types: types-core $(PLUGIN_TYPES) ## mypy --strict on the core, the examples and each plugin.
types-core: install
	$(BIN)/mypy --strict
$(PLUGIN_TYPES): types-%: install
	cd plugins/$* && ../../$(BIN)/mypy --strict moe_plugin_*/

.PHONY: contracts
contracts: install ## import-linter: the layers of the core.
	$(BIN)/lint-imports

PLUGIN_UNIT := $(PLUGINS:%=unit-%)
.PHONY: unit unit-core $(PLUGIN_UNIT) unit-optimized unit-transformers
unit: unit-core $(PLUGIN_UNIT) unit-optimized unit-transformers ## All tests of the core and the plugins, in every variant.
unit-core: install
	$(PYTEST) $(PARALLEL) tests
$(PLUGIN_UNIT): unit-%: install
	$(PYTEST) $(PARALLEL) plugins/$*/tests

unit-cuda_deepgemm: deepgemm-vendor

unit-ascend_npu: ascend-vendor

unit-flashinfer_cutedsl: flashinfer-vendor

# PYTHONOPTIMIZE instead of -O: xdist workers and child processes do not inherit the switch. Bytecode for this level exists only
# after a first run, so it must be written even where the environment says otherwise: compiling torch anew takes a minute.
OPTIMIZED := PYTHONOPTIMIZE=1 PYTHONDONTWRITEBYTECODE= $(PYTEST) $(PARALLEL) -m error_path
# Exit status 5: a plugin that marks no test.
unit-optimized: install ## The error-path tests of core and plugins again, as under python -O.
	$(OPTIMIZED) tests
	@for plugin in $(PLUGINS); do \
	    $(OPTIMIZED) plugins/$$plugin/tests || [ $$? -eq 5 ]; \
	done

unit-transformers: install $(STAMPS)/transformers-$(OTHER_TRANSFORMERS) ## The transformers bridge again, on the other version.
	@PYTHONPATH=$(OTHER_TRANSFORMERS_DIR) $(BIN)/python -c \
	    'import transformers; v = transformers.__version__; raise SystemExit(v != "$(OTHER_TRANSFORMERS)" and f"found transformers {v}")'
	PYTHONPATH=$(OTHER_TRANSFORMERS_DIR) $(PYTEST) $(PARALLEL) tests/integrations

.PHONY: clean
clean: ## Remove .venv, caches and build results.
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
