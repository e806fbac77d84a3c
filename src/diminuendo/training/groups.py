"""Several rows of one person: whoever is drawn takes part with one of their rows.

Formal guarantee: in every step each person takes part independently with the plan's sampling rate,
with at most one row and so at most one clipped gradient. Which of their rows that is, every step
draws anew, uniformly. Adding or removing a person with all their rows then changes the sum of a
step by at most the clip norm, and only if the person was drawn: the plan's claim is for persons
(its relation is between sets of persons), with `examples` as their number.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from diminuendo.errors import InputError
from diminuendo.training.seeds import Seeds


class Groups:
    """Which rows belong to whom, from a column with one entry for each row.

    column  identifiers of persons (households, …): an array, a list or a tensor of whole numbers
            or text; equal entries are one person
    """

    def __init__(self, column: Any) -> None:
        entries = np.asarray(column.cpu() if isinstance(column, Tensor) else column)
        if entries.ndim != 1 or entries.size == 0:
            raise InputError(
                "one column with an entry for each row", name="groups", value=entries.shape
            )
        if entries.dtype.kind == "O" and all(isinstance(entry, str) for entry in entries):
            entries = entries.astype(str)
        if entries.dtype.kind not in "iuSU":
            raise InputError(
                "whole numbers or text",
                name="groups",
                value=str(entries.dtype),
                remedy="Every row needs to belong to somebody: a missing entry is not one.",
            )
        _, person, counts = np.unique(entries, return_inverse=True, return_counts=True)
        self.rows = int(entries.size)
        self._order = np.argsort(person, kind="stable")
        self._counts = counts
        self._first = np.cumsum(counts) - counts

    @classmethod
    def of(cls, column: Any) -> Groups | None:
        """The groups of a column, or groups as they are; None for None."""
        return column if column is None or isinstance(column, cls) else cls(column)

    def __len__(self) -> int:
        return len(self._counts)

    def one_row_each(self, persons: Tensor, seeds: Seeds, step: int) -> Tensor:
        """The index of one row of each of these persons (0, 1, …), drawn for this step."""
        chosen = persons.numpy()
        generator = seeds.generator("rows", step)
        uniform = torch.rand(len(chosen), dtype=torch.float64, generator=generator, device="cpu")
        counts = self._counts[chosen]
        nth = np.minimum((uniform.numpy() * counts).astype(np.int64), counts - 1)
        return torch.from_numpy(self._order[self._first[chosen] + nth])
