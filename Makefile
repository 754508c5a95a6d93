# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test lint types soak bench clean

setup: .venv/ready

# pip, not uv: a torch that already lies on this machine is found and kept.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: setup
	$(BIN)/echelon train --procs 2

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

test: setup lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not soak"

soak: setup
	$(BIN)/python -m pytest -m soak
	$(BIN)/echelon verify --all

bench: setup
	$(BIN)/python bench/overhead.py

clean:
	rm -rf .venv build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
