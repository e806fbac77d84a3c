"""Every error that this library raises on purpose.

    DiminuendoError
    ├── InputError       wrong use or bad input            (exit code 2; also a ValueError)
    │   └── SchemaError  a file of another schema version
    ├── UsageError       a call at the wrong moment        (exit code 2; also a RuntimeError)
    ├── BudgetRefused    more was asked than is left       (exit code 3)
    └── LedgerError      the ledger is away, full, damaged (exit code 1)

An InputError says what was expected, of which name, what came instead, and what to do about it.
Raised before anything has changed: no state is half-done when one of these reaches the caller.
"""

from __future__ import annotations

from typing import Any

_LONGEST_VALUE = 60


class DiminuendoError(Exception):
    """Root of the tree: catch this to catch everything that the library refuses."""


class InputError(DiminuendoError, ValueError):
    """Bad input, told as: expected, name, value, remedy."""

    def __init__(self, expected: str, *, name: str, value: Any, remedy: str = "") -> None:
        try:
            shown = repr(value)
        except ValueError:
            shown = f"a {type(value).__name__} too long to print"
        if len(shown) > _LONGEST_VALUE:
            shown = shown[: _LONGEST_VALUE - 1] + "…"
        message = f"Expected {name} to be {expected}, got {shown}."
        super().__init__(f"{message} {remedy}".strip().replace("\n", " "))
        self.name = name


class SchemaError(InputError):
    """A file written under another schema version."""


class UsageError(DiminuendoError, RuntimeError):
    """A call at the wrong moment: too early, twice, after the end, or from another process.

    The message is a plain sentence that says what happened and what to do instead, e.g.
    "This run is closed. Open a new one with ledger.open(…)."
    """


class BudgetRefused(DiminuendoError):
    """The request would spend more privacy than there is left."""


class LedgerError(DiminuendoError):
    """The ledger cannot answer, or its records do not hold together."""
