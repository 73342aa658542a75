# make train ARGS="--steps 50"   train the reference model; sets up .venv first if need be
# make test                      the chosen tests, see tests/selection.py
# make test  ARGS=tests/pure     all tests of a folder, or of a file
# make test  TORCH=2.15.0        the chosen tests on another PyTorch, in an environment of its own
# make test-all                  all tests
# make check                     formatting, lint, types, directions of imports
# make docs                      this documentation as a site, in build/docs
# make docs-open                 the same, served at http://127.0.0.1:8000
# make dist                      builds wheel and sdist, and uses the wheel in a clean environment
# make bench                     compares speed with PyTorch's own
# make format | clean            (clean keeps the environments and runs)

PYTHON ?= python3
ARGS ?=
# Tests go to two workers, each with a pool of ranks of its own. With ARGS they run in one process.
WORKERS ?= $(if $(ARGS),0,2)

PORT ?= 8000

# The pinned PyTorch lives in .venv, any other in .venv-VERSION beside it.
PINNED := $(patsubst torch==%,%,$(shell grep '^torch==' constraints.txt))
TORCH ?= $(PINNED)
VENV := .venv$(if $(filter-out $(PINNED),$(TORCH)),-$(TORCH))
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS := $(VENV)/constraints.txt
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Tests start hundreds of processes; bytecode saves each of them a third of a second.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help train test test-all check dist docs docs-open bench format clean
.DEFAULT_GOAL := help

help:
	@grep '^# make' Makefile | cut -c3-

train: $(READY)
	@$(BIN)/fullshard train $(ARGS)

test: $(READY)
	@$(BIN)/python -m pytest -q --numprocesses=$(WORKERS) --dist=worksteal $(or $(ARGS),--chosen)

test-all: $(READY)
	@$(BIN)/python -m pytest -q --numprocesses=$(WORKERS) --dist=worksteal

check: $(READY)
	@echo "== format";  $(BIN)/ruff format --check .
	@echo "== lint";    $(BIN)/ruff check .
	@echo "== types";   $(BIN)/mypy
	@echo "== imports"; $(BIN)/python -m pytest -q tests/pure/test_imports.py

# Made anew each time: pages also come from the code, which Sphinx does not look at for changes.
docs: $(READY)
	@$(BIN)/python -m sphinx --fresh-env --fail-on-warning --keep-going --quiet \
		--doctree-dir build/doctrees docs build/docs
	@echo "build/docs/index.html"

docs-open: docs
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/docs $(PORT)

dist: $(READY)
	@$(BIN)/python -m tests.dist

bench: $(READY)
	@$(BIN)/python -m bench $(ARGS)

format: $(READY)
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

clean:
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and by its exact version, so that nothing later resolves to another, bigger
# build of it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fullshard needs Python 3.11 or newer, try make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || { echo "== creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(CONSTRAINTS)
	@echo "== installing torch==$(TORCH) (the first time takes minutes)"
	@$(PIP) install torch==$(TORCH)
	@echo "== installing fullshard and its tools"
	@$(PIP) install --constraint $(CONSTRAINTS) --editable '.[plot,dev,docs,qlora,frameworks,datasets]'
	@touch $@
