PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-models test-adapters models-table bench docs format picture clean

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

test-models: .venv-models/.ready
	.venv-models/bin/python -m pytest -q -n auto -W ignore tests/models

test-adapters: .venv-adapters/.ready
	.venv-adapters/bin/python -m pytest -q -n auto -W ignore tests/adapters

.venv-adapters/.ready: pyproject.toml constraints-adapters.txt
	$(PYTHON) -m venv .venv-adapters
	.venv-adapters/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-adapters.txt -e '.[adapters]'
	touch $@

models-table: .venv-models/.ready
	.venv-models/bin/python -m pytest -q -W ignore tests/models
	.venv-models/bin/python tests/models/table.py

.venv-models/.ready: pyproject.toml constraints-models.txt
	$(PYTHON) -m venv .venv-models
	.venv-models/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-models.txt -e '.[models]'
	touch $@

bench: setup .venv-models/.ready
	$(BIN)/python benchmarks/planning.py
	$(BIN)/python benchmarks/accounting.py
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/training.py
	.venv-models/bin/python benchmarks/models.py
	OMP_WAIT_POLICY=passive $(BIN)/python benchmarks/noise.py
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
	rm -rf .venv .venv-adapters .venv-docs .venv-models out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
