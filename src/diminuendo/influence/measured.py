"""An influence measured elsewhere: an array, or a CSV or JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike

from diminuendo import _files, _validate
from diminuendo._validate import Vector

_HINT = (
    "It holds one positive number for each step, in order: a JSON list, or a CSV column named "
    "'influence' (or a single column)."
)


class Marked(np.ndarray[tuple[int], np.dtype[np.float64]]):
    """A curve that carries a sentence about its origin, which plans made from it repeat.

    Copies, slices, pickles and what is computed from it carry the sentence on.
    """

    __array_priority__ = 1.0
    origin: str = "an influence made of one that may not be private"

    def __array_finalize__(self, made_from: object) -> None:
        if isinstance(made_from, Marked):
            self.origin = made_from.origin

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments, state = cast("tuple[Any, ...]", super().__reduce__())
        return make, arguments, (state, self.origin)

    def __setstate__(self, state: Any) -> None:
        held, self.origin = state
        super().__setstate__(held)


def mark(curve: Vector, origin: str | None) -> Vector:
    """The curve with a sentence about its origin; unchanged where `origin` is None."""
    if origin is None:
        return curve
    marked = curve.view(Marked)
    marked.origin = origin
    return marked


def origin_of(values: object) -> str | None:
    """The sentence about its origin that a curve carries, or None."""
    return values.origin if isinstance(values, Marked) else None


def from_values(values: ArrayLike) -> Vector:
    """A measured curve q_1…q_T, checked and scaled so that its largest value is one."""
    curve = _validate.vector("influence", values, remedy=_HINT)
    return mark(np.asarray(curve / curve.max()), origin_of(values))


def from_file(path: str | Path) -> Vector:
    """A measured curve: a JSON list, a JSON object with "influence", or a CSV column."""
    return from_values(_files.read_numbers(path, name="influence", hint=_HINT))
