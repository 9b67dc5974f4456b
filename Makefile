# make demo: sets up a virtual environment and trains on real text.   make test: sets up and runs all tests that need no GPU.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install -c requirements/constraints.txt

.PHONY: demo test check docs clean

demo: $(VENV)/.demo
	$(BIN)/hora demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.dev
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build dist site

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Hora needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version`. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "could not make $(VENV); on Debian: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml requirements/constraints.txt
	@echo "installing into $(VENV) (once)"
	$(PIP) -e '.[plot,tensorboard]'
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml requirements/constraints.txt
	@echo "installing into $(VENV) (once)"
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.demo
