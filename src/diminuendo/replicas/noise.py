"""Gaussian noise for many replicas: the numbers that `training.fit` draws for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diminuendo.replicas import kernels
from diminuendo.replicas.batch import AddNoise, Batch
from diminuendo.training.cores import side_by_side
from diminuendo.training.seeds import Seeds


class Noise:
    """Rows of Gaussian noise, one for each replica, equal to the trainer's fast noise in that step.

    On a CPU every row has its own generator, and rows are filled by as many threads as torch has;
    on a GPU one kernel draws what the generators would.
    """

    def __init__(self, seeds: Sequence[Seeds], parameters: int, like: Tensor) -> None:
        self.seeds, self.rows = seeds, like.new_empty(len(seeds), parameters)
        single = like.dtype is torch.float32
        self._philox = kernels.philox(parameters, like.device) if single else None

    def fill(self, stds: Sequence[float], step: int, purpose: str = "noise") -> Tensor:
        """The first len(stds) rows, with these standard deviations; `step` counts from zero."""
        rows = self.rows[: len(stds)]
        if self._philox is None:
            side_by_side(
                lambda row: self._draw(slice(row, row + 1), stds, step, purpose), len(stds)
            )
        else:
            self._philox.fill(rows, self._philox.order, *self._on_device(stds, step, purpose))
        return rows

    def adder(self, batch: Batch, stds: Sequence[float], step: int) -> AddNoise:
        """A function that draws one step's noise into the batch's sums, some rows at a time."""
        philox = self._philox
        if philox is None:
            return lambda rows, place: batch.set_noise(rows, self._draw(place, stds, step, "noise"))
        seeds, scales = self._on_device(stds, step, "noise")

        def add(rows: slice, place: slice) -> None:
            for part, order in zip(batch.sums, batch.orders, strict=True):
                philox.fill(part[rows], order, seeds[place], scales[place])

        return add

    def _on_device(self, stds: Sequence[float], step: int, purpose: str) -> tuple[Tensor, ...]:
        """Seeds and standard deviations, copied to the GPU without waiting for it."""
        numbers = [own.number(purpose, step) for own in self.seeds[: len(stds)]]
        both = torch.tensor(numbers), torch.tensor(stds, dtype=self.rows.dtype)
        return tuple(p.pin_memory().to(self.rows.device, non_blocking=True) for p in both)

    def _draw(self, place: slice, stds: Sequence[float], step: int, purpose: str) -> Tensor:
        rows = self.rows[place]
        for row, own in zip(range(place.start, place.stop), rows, strict=True):
            generator = self.seeds[row].generator(purpose, step, rows.device)
            own.normal_(0.0, stds[row], generator=generator)
        return rows
