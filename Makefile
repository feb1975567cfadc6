# `make` lists what there is to do. Everything runs in $(VENV), which `make setup` fills from constraints.txt.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made-from-constraints
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup quickstart test lint types tests fuzz faults soak lines bench clean

help: ## List the targets
	@awk -F ': .*## ' '/^[a-z]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Make the virtual environment, with every version pinned

# torch goes first, by itself: it is by far the largest, and the only one whose build differs between machines.
# setuptools-scm is seqeval's, which comes as source only and would fetch whichever release is newest, without the packages
# that one needs.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "bertkit needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) hatchling editables setuptools-scm
	$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

quickstart: $(STAMP) ## Pretrain a small encoder on the documentation strings of this Python (about 5 minutes)
	$(BIN)/bertkit pretrain quickstart

test: lint types tests ## Check style and types, and run every test

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Two processes with one thread each: sums come out the same however many cores there are.
tests: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal

# What docs/reliability.md reports. All of it stays below one temporary directory, under limits of memory and time.
fuzz: $(STAMP) ## Attack every command and reader with generated input for an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.attack 1000000 3600

faults: $(STAMP) ## Kill, fill the disk and damage files at every moment of every command (some hours)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.corruption 2400
	@set -e; for fault in kill ENOSPC EIO EROFS; do \
		OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.disturbed $$fault 1000; done

soak: $(STAMP) ## Train for two hours with a kill every few minutes; tokenise 50,000 files and ten million documents
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak --minutes 120 --files 50000 --documents 10000000

lines: $(STAMP) ## Write the lines on which functions stand into the links of docs/objectives.md
	$(BIN)/python -m tests.objectives.page_lines

bench: $(STAMP) ## Measure speed, memory and agreement on this machine, on text that it has (some 20 minutes)
	$(BIN)/bertkit bench
	@set -e; for name in tokenize_memory agreement; do \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

clean: ## Delete the virtual environment and the tools' caches (runs stay)
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
