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


def from_values(values: ArrayLike) -> Vector:
    """A measured curve, checked and scaled so that its largest value is one."""
    curve = _validate.vector("influence", values, remedy=_HINT)
    return np.asarray(curve / curve.max())


def from_file(path: str | Path) -> Vector:
    """A measured curve: a JSON list, a JSON object with "influence", or a CSV column."""
    return from_values(_files.read_numbers(path, name="influence", hint=_HINT))
