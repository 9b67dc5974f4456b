# make demo: sets up a virtual environment and trains on real text.   make test: sets up and runs all tests that need no GPU.
# make prove: sets up, shows that 1, 2 and 3 ranks train the same bits, and finds the fault of a script that only looks right.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install -c requirements/constraints.txt

# make chaos: sets up, breaks jobs in all ways that hora chaos knows, twenty times each, and shows what became of them; half an hour or more.
.PHONY: demo prove test check chaos docs clean

demo: $(VENV)/.demo
	$(BIN)/hora demo

prove: $(VENV)/.demo
	$(BIN)/hora prove --exact --ranks 1,2,3 --steps 10 -m hora train lm --config demo --exact
	@echo
	$(BIN)/hora prove --ranks 1,2 --steps 5 examples/ddp_images.py --batch-size '{32/ranks}'; test $$? -eq 1

# Files begin in the order that tests/conftest.py gives them. Ranks load compiled modules, also for users who have Python write none.
test: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

chaos: $(VENV)/.dev
	@mkdir -p build
	$(BIN)/hora chaos --all --repeats 20 --torchrun --soak 5 --json build/chaos.json --markdown build/chaos.md

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
