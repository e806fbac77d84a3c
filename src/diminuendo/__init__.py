"""diminuendo: private gradient descent whose noise fades where it hurts most.

Names are loaded when they are first used, so that `import diminuendo` costs nothing. This module is
the only one that knows all the others: `_HOMES` says where each public name lives, and `_LATER`
which names a package offers although they live in a package that builds on it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diminuendo import accounting, bounds, influence, ledger, schedules
    from diminuendo.accounting.account import delta, epsilon
    from diminuendo.accounting.calibrate import calibrate
    from diminuendo.budget import Budget
    from diminuendo.errors import (
        BudgetRefused,
        DiminuendoError,
        InputError,
        LedgerError,
        MissingExtra,
        SchemaError,
        UsageError,
    )
    from diminuendo.events import GaussianStep
    from diminuendo.ledger import Ledger
    from diminuendo.planning import Plan, PlanWarning, plan
    from diminuendo.tuning import tune

__version__ = "0.1.0"

_HOMES = {
    "Budget": "budget",
    "BudgetRefused": "errors",
    "DiminuendoError": "errors",
    "GaussianStep": "events",
    "InputError": "errors",
    "Ledger": "ledger",
    "LedgerError": "errors",
    "MissingExtra": "errors",
    "Plan": "planning",
    "PlanWarning": "planning",
    "SchemaError": "errors",
    "UsageError": "errors",
    "calibrate": "accounting.calibrate",
    "delta": "accounting.account",
    "epsilon": "accounting.account",
    "plan": "planning",
    "tune": "tuning",
}
_MODULES = ("accounting", "bounds", "influence", "ledger", "schedules")
_LATER = {
    "diminuendo.influence": {"measure": "measuring", "spectrum_of": "measuring"},
    "diminuendo.spending": {"Ledger": "ledger"},
    "diminuendo.training": {"learning_rate_for": "tuning"},
}

__all__ = [
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
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"diminuendo.{name}")
    if name in _HOMES:
        value = getattr(importlib.import_module(f"diminuendo.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'diminuendo' has no attribute {name!r}")


def _later(package: str, name: str) -> Any:
    """A name that `package` offers from a package that builds on it, or an AttributeError."""
    home = _LATER.get(package, {}).get(name)
    if home is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"diminuendo.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
