"""What the adapters to training frameworks share: a whole training step as one module.

A framework computes a loss in a method of its own, from parts of the model that it calls as it
likes. As the forward pass of one module the engine watches all of it, and the guard compares the
losses themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan
from diminuendo.training import PrivateGradients, Result
from diminuendo.training.result import Spent, Status, result_of


class LossesOf(nn.Module):
    """A module whose forward pass gives one loss for each example of a batch."""

    def __init__(self, model: nn.Module, losses: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self._losses = losses

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """One loss for each example, of shape (N,)."""
        return self._losses(*args, **kwargs)


class MapStyle:
    """A dataset one example at a time, so that a collate function sees examples in all cases."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


class Steps:
    """The plan's steps as what a framework takes for a loader: an epoch at a time.

    An epoch is as many steps as draw every example once on average. `batch` gives the first part
    of the next step's sample, or None where there is no next step; then `ended` is called.
    """

    batch_sampler = None

    def __init__(self, plan: Plan, batch: Callable[[], Any], ended: Callable[[], None]) -> None:
        self._batch, self._ended = batch, ended
        self.dataset = range(plan.examples)
        self._length = max(1, min(plan.steps, round(1 / float(plan.rates.mean()))))

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._length):
            batch = self._batch()
            if batch is None:
                self._ended()
                return
            yield batch


def rows_in(batch: Any) -> int:
    """How many rows the first tensor of a batch has."""
    for part in tree_leaves(batch):
        if isinstance(part, Tensor) and part.dim():
            return len(part)
    raise InputError("one with a tensor in it", name="a batch", value=type(batch).__name__)


def set_secret_randomness(private: PrivateGradients) -> None:
    """Seed PyTorch, numpy and Python by what nobody knows, unless the run is seeded itself.

    Frameworks set them to a number that is written in a file. Dropout and augmentation go by an
    example's place in the batch: to whoever knows the numbers, one example more changes what
    happens to all after it, by more than the clip norm.
    """
    number = private.seeds.number("dropout", private.step)
    torch.manual_seed(number)
    torch.set_rng_state(private.seeds.generator("dropout", private.step).get_state())
    random.seed(number)
    np.random.seed([number & 0xFFFFFFFF, number >> 32])  # noqa: NPY002


def how_it_ended(private: Spent, interrupted: str) -> Result:
    """How a run ended and what it spent, where a framework ran it.

    interrupted  why it would have ended before the plan, if not for want of budget
    """
    steps, spending = private.plan.steps, private.spending
    status: Status = "done"
    reason = "every step of the plan was taken"
    if private.step < steps:
        coming = GaussianStep(
            noise_multiplier=float(private.plan.sigmas[private.step]),
            sampling_rate=float(private.plan.rates[private.step]),
        )
        status, reason = "interrupted", interrupted
        if not spending.fits(coming):
            status, reason = "refused", "too little is left of the budget for another step"
    return replace(result_of(private, status, reason), ledger=spending.cite())
