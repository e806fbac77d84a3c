"""Names from the version before: they go on working, with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def warn(old: str, new: str) -> None:
    """Say that `old` is now called `new`, at the line of the caller's caller."""
    warnings.warn(f"{old} is now called {new}.", DeprecationWarning, stacklevel=3)


def arguments(**new_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept keyword arguments under their old names: `@renamed.arguments(old="new")`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            for old, new in new_names.items():
                if old in kwargs:
                    warn(f"The argument {old}", new)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate
