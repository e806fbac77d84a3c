"""A grid of the clients that were drawn, and a global model as one vector."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from diminuendo.errors import InputError


class DrawnNodes:
    """A grid on which only the clients that were drawn are connected."""

    def __init__(self, grid: Grid, nodes: set[int]) -> None:
        self._grid, self._nodes = grid, nodes

    def get_node_ids(self) -> list[int]:
        """The nodes that were drawn."""
        return sorted(self._nodes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)


class GlobalModel:
    """The global model as one vector of its floating-point arrays; others stay as they are."""

    def __init__(self, arrays: ArrayRecord) -> None:
        self._arrays = {name: array.numpy() for name, array in arrays.items()}
        self._trained = {
            name: part
            for name, part in self._arrays.items()
            if np.issubdtype(part.dtype, np.floating)
        }
        self.size = sum(part.size for part in self._trained.values())
        if not self.size:
            raise InputError("at least one", name="the arrays of floating-point numbers", value=0)

    def update(self, content: RecordDict) -> Tensor | None:
        """What a reply adds to the model, flat and in float64; None where it is no such model."""
        records = list(content.array_records.values())
        if len(records) != 1:
            return None
        parts = []
        for name, here in self._trained.items():
            there = records[0][name].numpy() if name in records[0] else None
            if there is None or there.shape != here.shape:
                return None
            if not np.issubdtype(there.dtype, np.floating):
                return None
            parts.append((there.astype(np.float64) - here.astype(np.float64)).ravel())
        return torch.from_numpy(np.concatenate(parts))

    def in_its_types(self, arrays: ArrayRecord) -> ArrayRecord:
        """The trained arrays in their own types, and the others as they were.

        An average makes floating-point numbers of whole ones.
        """
        return ArrayRecord(
            {
                name: Array(
                    np.asarray(arrays[name].numpy().astype(part.dtype))
                    if name in self._trained
                    else part
                )
                for name, part in self._arrays.items()
            }
        )

    def moved_by(self, update: Tensor) -> ArrayRecord:
        """The model plus an update, in the arrays' own types."""
        flat, place = update.numpy(), 0
        moved = {}
        for name, part in self._arrays.items():
            if name in self._trained:
                change = flat[place : place + part.size].reshape(part.shape)
                place += part.size
                part = (part.astype(np.float64) + change).astype(part.dtype)
            moved[name] = Array(np.asarray(part))
        return ArrayRecord(moved)
