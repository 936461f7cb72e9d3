.DEFAULT_GOAL := help
.PHONY: help setup demo digits demo-compare check fix test test-slow coverage bench docs site lock audit sbom wheelhouse clean

# The first interpreter that is new enough; name another one with PYTHON=...
NEW_ENOUGH = $(shell $(1) -c 'import sys; sys.version_info >= (3, 11) and print("$(1)")' 2>/dev/null)
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(call NEW_ENOUGH,$(name))) python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Every file that is installed has its hash in a lock; what a lock does not name is not installed. uv takes a quarter of
# pip's time; where it finds no index, being configured apart from pip, pip does it.
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps
UV_INSTALL = UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps
SELDOM = /tests?/|/testing/|/transformers/models/|pipelines/|/_inductor/|/devtools/|/sympy/(physics|stats)/
SELDOM := $(SELDOM)|/(pip|setuptools|networkx|fontTools|mypyc?|dns|torchgen)/
# TORCH=cuda or TORCH=cpu chooses the build of torch. Without it, make takes the build with CUDA if there is an NVIDIA
# GPU, otherwise the CPU build; if that build is not found, it takes the other one.
HAS_GPU := $(wildcard /proc/driver/nvidia/version)
ifeq ($(TORCH),cuda)
TORCH_LOCKS = torch.lock
TORCH_REASON = TORCH=cuda asks for the build with CUDA
else ifeq ($(TORCH),cpu)
TORCH_LOCKS = torch-cpu.lock
TORCH_REASON = TORCH=cpu asks for the CPU build
else ifneq ($(HAS_GPU),)
TORCH_LOCKS = torch.lock torch-cpu.lock
TORCH_REASON = this machine has an NVIDIA GPU
else
TORCH_LOCKS = torch-cpu.lock torch.lock
TORCH_REASON = this machine has no NVIDIA GPU
endif
INSTALL_LOCK = $(UV_INSTALL) --require-hashes -r $(1) 2>/dev/null || $(PIP_INSTALL) --require-hashes -r $(1)

# Tests start our programs some hundred times. With bytecode each start takes a third of the processor time.
unexport PYTHONDONTWRITEBYTECODE

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## Build the environment in .venv, from files with known hashes; TORCH=cuda or cpu chooses torch.

# A build of torch that is named is installed again.
$(STAMP): pyproject.toml requirements.lock torch.lock torch-cpu.lock $(if $(TORCH),FORCE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Archipelago needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)."; \
	  echo "Name another one: make setup PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@sed -n '/^uv==/,/[^\\]$$/p' requirements.lock >$(VENV)/uv.lock
	$(PIP_INSTALL) --require-hashes -r $(VENV)/uv.lock
	@echo "Installing what requirements.lock names."; $(call INSTALL_LOCK,requirements.lock)
	@# Another build of the same version counts as installed, so that the one that is there goes first.
	@$(if $(TORCH),$(BIN)/python -m pip uninstall --quiet --yes torch,true)
	@echo "Installing torch: $(TORCH_REASON)."
	@for lock in $(TORCH_LOCKS); do \
	  if ( $(call INSTALL_LOCK,$$lock) ) 2>$(VENV)/torch.log; then \
	    echo "Installed torch $$($(BIN)/python -c 'import torch; print(torch.__version__)') from $$lock."; exit 0; \
	  fi; echo "What $$lock names was not found."; \
	done; cat $(VENV)/torch.log; exit 1
	$(PIP_INSTALL) --no-build-isolation -e .
	@$(BIN)/python -m ddm.system.torchvision_startup
	@$(BIN)/python -m pip check --disable-pip-version-check
	@# Bytecode on all cores, but not of what hardly ever runs; a file that does not compile is its owner's business.
	@$(BIN)/python -m compileall -q -j 0 -x '$(SELDOM)' $(VENV)/lib >/dev/null || true
	@touch $(STAMP)

demo: $(STAMP)  ## Run the three-silo federation on real digits; results in build/demo.
	@$(BIN)/python examples/digits_three_silos/run.py --out build/demo

digits: $(STAMP)  ## Write the images of the tutorial to build/tutorial/data.
	@$(BIN)/python examples/digits_three_silos/make_data.py --out build/tutorial/data

demo-compare: $(STAMP)  ## Compare the demo's routers and strategies with a non-private reference.
	@$(BIN)/python examples/digits_three_silos/compare.py --out build/demo

check: $(STAMP)  ## Checks of lint, format, spelling and types, and that the documentation builds without a warning.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/python -m tools.site

fix: $(STAMP)  ## Fix what ruff can fix, then format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(STAMP)  ## The default tests: CPU, offline, three files at a time (half of a test is waiting for processes).
	$(BIN)/python -m pytest -n 3

test-slow: $(STAMP)  ## The slow tests as well.
	$(BIN)/python -m pytest -m "not gpu"

coverage: $(STAMP)  ## The default tests with the branches they take counted; fails below the gate in pyproject.toml.
	$(BIN)/python -m pytest -n 3 -m "not slow and not gpu and not measured" --cov --cov-report=term

bench: $(STAMP)  ## Benchmarks of the diffusion core, side by side; figures in build/bench/targets.csv.
	@$(BIN)/python examples/benchmarks/run.py

docs: $(STAMP)  ## Write what comes from the code: pages of docs/reference, sizing, list of decisions, pictures.
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.pictures

site: $(STAMP)  ## Build the documentation as a site in build/site, which needs no network; a warning is an error.
	$(BIN)/python -m tools.site

lock: $(STAMP)  ## Write the locks: what .venv holds, with hashes; needs a package index.
	.ci/lock

audit: $(STAMP)  ## Look up known vulnerabilities of everything in the locks; needs the advisory database's network.
	$(BIN)/pip-audit --require-hashes --disable-pip -r requirements.lock -r torch.lock

sbom: $(STAMP)  ## Write build/sbom.cdx.json: what .venv holds, as CycloneDX.
	@mkdir -p build
	$(BIN)/cyclonedx-py environment $(BIN)/python --pyproject pyproject.toml --output-reproducible --of JSON \
	  -o build/sbom.cdx.json

wheelhouse: $(STAMP)  ## Fill build/wheelhouse: what installs Archipelago without a network, with hashes; needs an index.
	$(BIN)/python -m tools.wheelhouse build/wheelhouse

clean:  ## Remove what the targets above built.
	rm -rf build $(VENV)
