.DEFAULT_GOAL := help
.PHONY: help setup demo demo-compare check fix test test-slow coverage bench docs lock clean

# The first interpreter that is new enough; name another one with PYTHON=...
NEW_ENOUGH = $(shell $(1) -c 'import sys; sys.version_info >= (3, 11) and print("$(1)")' 2>/dev/null)
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(call NEW_ENOUGH,$(name))) python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

help:  ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## Build the environment in .venv.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Archipelago needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo not there)."; \
	  echo "Name another one: make setup PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e ".[dev]"
	@# Bytecode on all cores, but not of what hardly ever runs; a file that does not compile is its owner's business.
	@$(BIN)/python -m compileall -q -j 0 -x '/tests?/|/testing/|/transformers/models/' $(VENV)/lib >/dev/null || true
	@touch $(STAMP)

demo: $(STAMP)  ## Run the three-silo federation on real digits; results in build/demo.
	@$(BIN)/python examples/digits_three_silos/run.py --out build/demo

demo-compare: $(STAMP)  ## Compare the demo's routers and strategies with a non-private reference.
	@$(BIN)/python examples/digits_three_silos/compare.py --out build/demo

check: $(STAMP)  ## Lint, format and type checks.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fix: $(STAMP)  ## Mend what ruff can mend, then format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(STAMP)  ## The default tests: CPU, offline, two files at a time.
	$(BIN)/python -m pytest -n 2

test-slow: $(STAMP)  ## The slow tests as well.
	$(BIN)/python -m pytest -m "not gpu"

coverage: $(STAMP)  ## The default tests with the branches they take counted; fails below the gate in pyproject.toml.
	$(BIN)/python -m pytest -n 2 -m "not slow and not gpu and not measured" --cov --cov-report=term

bench: $(STAMP)  ## Benchmarks of the diffusion core, side by side; figures in build/bench/targets.csv.
	@$(BIN)/python examples/benchmarks/run.py

docs: $(STAMP)  ## Write the references that come from the code: docs/reference/api.md and recipe.md.
	$(BIN)/python -m tools.reference

lock: $(STAMP)  ## Write requirements.lock: what .venv holds, with hashes; needs a package index.
	.ci/lock

clean:  ## Remove what the targets above built.
	rm -rf build $(VENV)
