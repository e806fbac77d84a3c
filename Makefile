PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test bench docs format picture clean

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
	$(BIN)/python benchmarks/ledger.py
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/replicas.py
	$(BIN)/pytest -n auto -m slow

docs: .venv-docs/.ready
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet
	@echo "build/site/index.html"

.venv-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

picture: setup
	$(BIN)/python examples/picture.py

clean:
	rm -rf .venv .venv-docs out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
