"""What the adapters to training frameworks share: a whole training step as one module.

A framework computes a loss in a method of its own, from parts of the model that it calls as it
likes. As the forward pass of one module the engine watches all of it, and the guard compares the
losses themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from diminuendo.errors import InputError
from diminuendo.planning import Plan
from diminuendo.spending import Spending
from diminuendo.training import PrivateGradients, Result
from diminuendo.training.mechanism import NoiseName
from diminuendo.training.run import Status


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


class Spent(Protocol):
    """What a result tells: `PrivateGradients` has it, and so has a strategy for clients."""

    plan: Plan
    spending: Spending
    step: int
    lost: int
    noise: NoiseName
    unit: str

    @property
    def private(self) -> bool:
        """False where a fixed seed makes the noise predictable."""

    @property
    def delta_added(self) -> float:
        """What is to be added to δ for rounding errors."""


def result_of(private: Spent, interrupted: str = "") -> Result:
    """How a run ended and what it spent, where a framework ran it.

    interrupted  why somebody stopped it before the plan or the budget did; empty where nobody did
    """
    spending, steps = private.spending, private.plan.steps
    status: Status = "done"
    reason = "every step of the plan was taken"
    if private.lost:
        reason += f", except for {private.lost} that a crash had cost"
    if interrupted and private.step < steps:
        status, reason = "interrupted", interrupted
    elif private.step < steps:
        status, reason = "refused", "too little is left of the budget for another step"
    return Result(
        status,
        reason,
        private.step,
        spending.granted,
        spending.epsilon(),
        spending.budget.delta,
        spending.budget.relation,
        private.private,
        private.lost,
        noise=private.noise,
        delta_added=private.delta_added,
        unit=private.unit,
        ledger=spending.cite(),
    )
