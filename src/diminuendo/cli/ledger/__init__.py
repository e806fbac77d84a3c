"""diminuendo ledger: one module for each kind of command."""

from __future__ import annotations

import typer

from diminuendo.cli.ledger import budgets, charging, checking, exchange, glance
from diminuendo.cli.ledger.common import Url, app

__all__ = ["Url", "budgets", "charging", "checking", "exchange", "glance", "register"]


def register(parent: typer.Typer) -> None:
    """Add the commands to the program."""
    parent.add_typer(app, name="ledger")
