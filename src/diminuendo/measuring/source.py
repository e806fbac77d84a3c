"""Where measurements come from: auxiliary data, or private data that nobody paid for."""

from __future__ import annotations

from typing import Literal

from diminuendo import _validate
from diminuendo.errors import InputError

Source = Literal["auxiliary", "private"]

NOT_PRIVATE = (
    "an influence measured on the private data without paying for it: what is made of it is NOT "
    "private, whatever epsilon says"
)
"""The warning that plans repeat when they use a measurement of private data."""


def check_source(source: Source, not_private: bool) -> None:
    """Refuse private data unless the caller has said that the result is not private."""
    _validate.choice("source", source, ["auxiliary", "private"])
    if source == "private" and not not_private:
        raise InputError(
            "True with private data",
            name="not_private",
            value=not_private,
            remedy="A measurement of private data is not private. Use auxiliary data of the same "
            "shape.",
        )
