# `make train` and `make test` need python3 (3.11 or newer) and make; they set up .venv by themselves.
# Another interpreter: make PYTHON=python3.12 train

PYTHON ?= python3
VENV   ?= .venv
RUN    := $(VENV)/bin/python
PIP    := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help train test test-slow test-all lint types bench clean

help:
	@echo "make train     train a small Llama on 8 ranks of this machine (about a minute after the installation)"
	@echo "make test      the quick tests        make test-slow the others   make test-all  all tests"
	@echo "make lint      ruff                   make types     mypy"
	@echo "make bench     the side-by-side measurements"

train: $(VENV)/.core
	$(RUN) -m meshtrain.recipes.llama --dp 4 --tp 2

test: $(VENV)/.dev
	$(RUN) -m pytest -m "not slow"

test-slow: $(VENV)/.dev
	$(RUN) -m pytest -m slow

test-all: $(VENV)/.dev
	$(RUN) -m pytest

lint: $(VENV)/.dev
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

types: $(VENV)/.dev
	$(RUN) -m mypy

bench: $(VENV)/.dev
	$(RUN) benchmarks/step_time.py

clean:
	rm -rf $(VENV)

$(RUN):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11: name a newer one, as in make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.core: pyproject.toml constraints.txt | $(RUN)
	@echo "installing meshtrain into $(VENV) (once)"
	$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(RUN)
	@echo "installing meshtrain and its tools into $(VENV) (once)"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.core
