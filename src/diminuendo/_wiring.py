"""What a lower layer asks for and a higher one provides, filled in by the package's front door.

No module imports one that lies above it. Where training is given a ledger's URL, somebody has to
turn it into a ledger all the same: `diminuendo/__init__.py`, which knows every part, leaves a
function for that here, and it loads the part when it is first called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_provided: dict[str, Callable[..., Any]] = {}


def provide(name: str, function: Callable[..., Any]) -> None:
    """Leave a function for those below to call by name; a second one replaces the first."""
    _provided[name] = function


def provided(name: str) -> Callable[..., Any]:
    """The function that was left under a name."""
    return _provided[name]
