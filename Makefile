PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test bench format picture clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto -m "not slow"

bench: setup
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/accounting.py
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/training.py
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/noise.py
	$(BIN)/python benchmarks/ledger.py
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/repeats.py
	$(BIN)/pytest -n auto -m slow

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

picture: setup
	$(BIN)/python examples/picture.py

clean:
	rm -rf .venv out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
