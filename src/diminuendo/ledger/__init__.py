"""A ledger: budgets that belong to data, spent by many runs, and never overspent."""

from diminuendo.ledger.address import default as default_address
from diminuendo.ledger.book import Grant, Ledger
from diminuendo.ledger.exchange import (
    Imported,
    export,
    granted_events,
    import_file,
    to_dp_accounting,
)
from diminuendo.ledger.identity import identify
from diminuendo.ledger.rows import Head, Run, Status
from diminuendo.ledger.spending import LedgerSpending
from diminuendo.ledger.terms import Terms
from diminuendo.ledger.verify import Verified, verify

__all__ = [
    "Grant",
    "Head",
    "Imported",
    "Ledger",
    "LedgerSpending",
    "Run",
    "Status",
    "Terms",
    "Verified",
    "default_address",
    "export",
    "granted_events",
    "identify",
    "import_file",
    "to_dp_accounting",
    "verify",
]
