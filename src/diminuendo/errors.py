"""Every error that this library raises on purpose.

    DiminuendoError           the root                                  exit code
    ├── InputError            a value is wrong (also a ValueError)              2
    │   └── SchemaError       a file was written under another schema version   2
    ├── UsageError            a call came at the wrong moment (a RuntimeError)  2
    │   └── Proposed          a second person has to agree first                2
    ├── MissingExtra          an optional package is not installed              2
    │                         (also a ModuleNotFoundError)
    ├── EngineError           per-example gradients cannot be computed here     2
    │   │                     (also a ValueError)
    │   ├── UnsupportedModule the model has a layer that rules them out         2
    │   └── MixedExamples     a loss depends on several examples                2
    ├── BudgetRefused         the request costs more than is left               3
    └── LedgerError           the ledger is out of reach, full or damaged       1
        └── PermissionRefused the database does not let this user do that       1

`EngineError` and its kin are defined in `diminuendo.training.clipping.errors`, `Proposed` and
`PermissionRefused` in `diminuendo.ledger`, all others here.
Each is raised before anything has changed: no work is half-done when one reaches the caller.

Which one to raise: an `InputError` says "Expected NAME to be …, got VALUE. What to do." and is for
values alone. A method called too early, twice or after the end raises a `UsageError`, whose message
is a plain sentence.
"""

from __future__ import annotations

from typing import Any

_LONGEST_VALUE = 60


class DiminuendoError(Exception):
    """Root of the tree: catch this to catch everything that the library refuses.

    `exit_code` is what the command line ends with.
    """

    exit_code = 2


class InputError(DiminuendoError, ValueError):
    """A bad value. The message holds what was expected, the name, the value and the remedy."""

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
    "This run has ended. Start a new one."
    """


class MissingExtra(DiminuendoError, ModuleNotFoundError):
    """An optional package is not installed. The message says which extra brings it."""


class BudgetRefused(DiminuendoError):
    """The request would spend more privacy than there is left."""

    exit_code = 3


class LedgerError(DiminuendoError):
    """The ledger cannot answer, or its records contradict each other."""

    exit_code = 1
