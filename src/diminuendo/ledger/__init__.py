"""A ledger: privacy budgets of datasets, spent by many runs and never overspent."""

from typing import Any

from diminuendo.ledger import mechanisms, page, renamed, roles, serve, view
from diminuendo.ledger.address import default as default_address
from diminuendo.ledger.anchors import LedgerWarning
from diminuendo.ledger.approval import Proposed
from diminuendo.ledger.book import Grant, Ledger
from diminuendo.ledger.exchange import export, granted_events, to_dp_accounting, write_private
from diminuendo.ledger.identity import identify
from diminuendo.ledger.imports import ImportedBudget, import_file
from diminuendo.ledger.records import Head
from diminuendo.ledger.spending import LedgerSpending
from diminuendo.ledger.state import Run, Status
from diminuendo.ledger.terms import Terms
from diminuendo.ledger.verify import Verification, verify

__all__ = [
    "Grant",
    "Head",
    "ImportedBudget",
    "Ledger",
    "LedgerSpending",
    "LedgerWarning",
    "Proposed",
    "Run",
    "Status",
    "Terms",
    "Verification",
    "default_address",
    "export",
    "granted_events",
    "identify",
    "import_file",
    "mechanisms",
    "page",
    "roles",
    "serve",
    "to_dp_accounting",
    "verify",
    "view",
    "write_private",
]

_RENAMED = {"Verified": Verification, "Imported": ImportedBudget}


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    renamed.warn(f"{__name__}.{name}", _RENAMED[name].__name__)
    return _RENAMED[name]
