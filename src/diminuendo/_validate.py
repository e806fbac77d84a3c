"""Checks of arguments: each returns the value in its working type, or raises an InputError."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diminuendo.errors import InputError

Vector = NDArray[np.float64]


def real(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
    remedy: str = "",
) -> float:
    """The value as a finite float inside (above, below) and [at_least, at_most]."""
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number) and above < number < below and at_least <= number <= at_most:
        return number
    bounds = [
        f"{words} {bound:g}".replace("e+0", "e").replace("e+", "e")
        for words, bound in (
            ("above", above),
            ("at least", at_least),
            ("below", below),
            ("at most", at_most),
        )
        if math.isfinite(bound)
    ]
    expected = " ".join(["a finite number", " and ".join(bounds)]).strip()
    raise InputError(expected, name=name, value=value, remedy=remedy)


def positive(name: str, value: Any, *, remedy: str = "") -> float:
    """The value as a finite float above 0."""
    return real(name, value, above=0, remedy=remedy)


LARGEST_COUNT = 10**15


def count(
    name: str, value: Any, *, at_least: int = 1, at_most: int = LARGEST_COUNT, remedy: str = ""
) -> int:
    """The value as an int within the limits; bools and floats, even whole ones, are refused."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        number = at_least - 1
    if not at_least <= number <= at_most:
        limit = f" and at most {at_most:,}" if number > at_most else ""
        raise InputError(
            f"a whole number of at least {at_least}{limit}", name=name, value=value, remedy=remedy
        )
    return number


def vector(name: str, values: ArrayLike, *, positive: bool = True, remedy: str = "") -> Vector:
    """The values as a non-empty one-dimensional float64 array of finite positive numbers.

    With `positive=False` zeros are allowed too. The array is a copy.
    """
    kind = "positive" if positive else "nonnegative"
    expected = f"a non-empty list of finite {kind} numbers"
    try:
        raw = np.ma.asarray(values) if np.ma.isMaskedArray(values) else np.asarray(values)
        if raw.dtype.kind not in "iufO" or np.ma.is_masked(raw):
            raise TypeError
        if raw.dtype.kind == "O" and any(isinstance(v, (str, bool)) for v in raw.flat):
            raise TypeError
        array = np.array(raw, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InputError(expected, name=name, value=values, remedy=remedy) from None
    if array.ndim != 1 or array.size == 0:
        raise InputError(expected, name=name, value=array.tolist(), remedy=remedy)
    bad = ~np.isfinite(array) | (array <= 0 if positive else array < 0)
    if bad.any():
        first = int(np.argmax(bad))
        raise InputError(
            f"a finite {kind} number",
            name=f"{name}[{first}]",
            value=float(array[first]),
            remedy=remedy,
        )
    return array


def choice(name: str, value: Any, options: Iterable[str], *, remedy: str = "") -> str:
    """The value, if it is one of the options."""
    allowed = list(options)
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"one of {', '.join(allowed)}", name=name, value=value, remedy=remedy)
    return str(value)


def flag(name: str, value: Any) -> bool:
    """The value, if it is True or False: a text such as "no" would count as true."""
    if not isinstance(value, bool):
        raise InputError("True or False", name=name, value=value)
    return value


def path(name: str, value: Any) -> Path:
    """The value as a Path, from a text or a Path."""
    if not isinstance(value, (str, PathLike)) or not str(value):
        raise InputError("a path, as a text or a Path", name=name, value=value)
    return Path(value)


def same_length(name: str, one: Vector, other_name: str, other: Vector, remedy: str = "") -> None:
    """Refuse two vectors of different lengths; returns nothing."""
    if one.size != other.size:
        raise InputError(
            f"as long as {other_name} ({other.size})",
            name=f"the length of {name}",
            value=int(one.size),
            remedy=remedy,
        )
