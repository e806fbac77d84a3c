"""The public names are exactly those meant, and importing them is cheap."""

from __future__ import annotations

import importlib
import re
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
    with pytest.raises(AttributeError, match="nothing"):
        _ = dim.influence.nothing


def test_influence_offers_what_is_measured() -> None:
    import diminuendo.influence
    from diminuendo import measuring

    assert diminuendo.influence.measure is measuring.measure
    assert dim.influence.spectrum_of is measuring.spectrum_of
    assert set(diminuendo.influence.__all__) >= {"measure", "spectrum_of"}


def test_tuning_is_imported_from_one_place() -> None:
    from diminuendo.tuning import Shape, Space, TwoLayers

    assert dim.tune.__module__.startswith("diminuendo.tuning")
    assert Shape(examples=2, features=1, classes=2).largest_norm == 10
    assert Space(steps=3).steps == 3
    assert TwoLayers(2, 3, 4).parameters == 25


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("", "Replica", "replicas"),
        ("", "train", "replicas"),
        (".auxiliary", "Shape", "tuning"),
        (".auxiliary", "several", "tuning.auxiliary"),
        (".charged", "Charged", "tuning"),
        (".charged", "tune_on_private", "tuning"),
        (".data", "load", "paper.data"),
        (".measuring", "MeasuredInfluence", "measuring"),
        (".networks", "TwoLayers", "tuning"),
        (".repeats", "flat_parameters", "replicas.initial"),
        (".statistics", "interval", "replicas.statistics"),
        (".tuning", "Chosen", "tuning"),
        (".tuning", "Space", "tuning"),
    ],
)
def test_old_names_of_experiments_still_work_and_warn(module: str, name: str, home: str) -> None:
    old = importlib.import_module(f"diminuendo.experiments{module}")
    with pytest.warns(DeprecationWarning, match=rf"is now diminuendo\.{re.escape(home)}\.\w+\."):
        value = getattr(old, name)
    renamed = {
        "several": "synthetic_sets",
        "Charged": "PrivateTuningResult",
        "Chosen": "FamilyResult",
    }
    new = importlib.import_module(f"diminuendo.{home}")
    assert value is getattr(new, renamed.get(name, name))


def test_names_that_experiments_never_had_are_errors() -> None:
    for module in ("", ".tuning"):
        old = importlib.import_module(f"diminuendo.experiments{module}")
        with pytest.raises(AttributeError, match="nothing"):
            _ = old.nothing


def test_import_brings_no_heavy_module() -> None:
    code = (
        "import sys, diminuendo as dim; dim.plan; dim.epsilon; dim.bounds; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'torch', 'matplotlib', 'sklearn', 'optuna', 'typer', 'rich', 'sqlalchemy'}))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
