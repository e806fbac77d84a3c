"""An influence measured elsewhere: an array, or a CSV or JSON file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _files, _validate
from diminuendo._validate import Vector

_HINT = (
    "It holds one positive number for each step, in order: a JSON list, or a CSV column named "
    "'influence' (or a single column)."
)


class Marked(np.ndarray[tuple[int], np.dtype[np.float64]]):
    """A curve with a warning that plans made from it repeat: what it was measured on."""

    said: str


def mark(curve: Vector, said: str | None) -> Vector:
    """The curve with words that go along with it; as it is where there are none."""
    if said is None:
        return curve
    marked = curve.view(Marked)
    marked.said = said
    return marked


def said_of(values: object) -> str | None:
    """The words that a curve carries."""
    return values.said if isinstance(values, Marked) else None


def from_values(values: ArrayLike) -> Vector:
    """A measured curve, checked and scaled so that its largest value is one."""
    curve = _validate.vector("influence", values, remedy=_HINT)
    return mark(np.asarray(curve / curve.max()), said_of(values))


def from_file(path: str | Path) -> Vector:
    """A measured curve: a JSON list, a JSON object with "influence", or a CSV column."""
    return from_values(_files.read_numbers(path, name="influence", hint=_HINT))
