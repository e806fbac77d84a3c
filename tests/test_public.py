"""The public names are exactly those meant, and importing them is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import diminuendo as dim

NAMES = {
    "Budget",
    "BudgetRefused",
    "DiminuendoError",
    "GaussianStep",
    "InputError",
    "Ledger",
    "LedgerError",
    "MissingExtra",
    "Plan",
    "PlanWarning",
    "SchemaError",
    "UsageError",
    "accounting",
    "bounds",
    "calibrate",
    "delta",
    "epsilon",
    "influence",
    "ledger",
    "plan",
    "schedules",
    "tune",
}


def test_names() -> None:
    assert set(dim.__all__) == NAMES
    assert {name for name in dir(dim) if not name.startswith("_")} == NAMES
    for name in NAMES:
        assert getattr(dim, name) is not None


def test_plan_stays_a_function_after_everything_is_imported() -> None:
    import diminuendo.cli

    assert callable(diminuendo.cli.main)
    assert callable(dim.plan)
    assert callable(dim.calibrate)
    assert callable(dim.epsilon)


def test_unknown_names_are_errors() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        _ = dim.nothing


def test_import_brings_no_heavy_module() -> None:
    code = (
        "import sys, diminuendo as dim; dim.plan; dim.epsilon; dim.bounds; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'torch', 'matplotlib', 'sklearn', 'optuna', 'typer', 'rich', 'sqlalchemy'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
