# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
# Workers of pytest, one per core: more of them take longer, as ranks switch more often than they wait.
WORKERS ?= 2
# The tests start hundreds of processes: what they import is compiled once.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test lint types suite soak mutants bench clean

help: ## list these commands
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 8

setup: .venv/ready ## make the virtual environment .venv

# pip, not uv: a torch that already lies on this machine is found and kept.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: setup ## train a small model on two ranks
	$(BIN)/echelon train --procs 2

test: setup ## lint, types and suite, side by side
	@$(MAKE) --no-print-directory --jobs=3 lint types suite

lint: setup ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup ## check types
	$(BIN)/mypy

suite: setup ## run the tests, but for the long ones
	@$(BIN)/python -m pytest --collect-only -m "not soak" > /dev/null || true # compiles the tests, for all workers
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not soak"

soak: setup ## run the long tests, and verify every layout
	$(BIN)/python -m pytest -m soak
	$(BIN)/echelon verify --all

mutants: setup ## plant known bugs in a copy of src/: each must fail its test
	$(BIN)/python tests/mutants/planted_bugs.py

bench: setup ## measure what the library adds to a plain loop
	$(BIN)/python bench/overhead.py

clean: ## remove everything that these commands made
	rm -rf .venv build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
