"""Who is audited: something that trains on canaries by a plan and shows what it released."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diminuendo.audit.canaries import Canaries
from diminuendo.errors import UsageError
from diminuendo.planning import Plan
from diminuendo.training import PrivateGradients, Progress, fit

See = Callable[[Sequence[Tensor]], None]
"""Takes a step's private gradient, one tensor for each parameter."""

Train = Callable[[Canaries, Plan, See], None]
"""Trains `canaries.model()` on `canaries.data` with `canaries.loss` by the plan, and shows every
step's private gradient, in order."""


def by_fit(**options: Any) -> Train:
    """A `Train` that calls `training.fit` with these options (clip, noise, device, seed, …)."""

    def train(canaries: Canaries, plan: Plan, see: See) -> None:
        def after_step(step: int, private: PrivateGradients) -> None:
            del step
            see(private.released)

        given: dict[str, Any] = {"lr": 1e-6, **options}
        result = fit(
            canaries.model(),
            canaries.data,
            plan,
            loss=canaries.loss,
            progress=Progress(shown=False, after_step=after_step),
            **given,
        )
        if result.status != "done":
            raise UsageError(f"The audited training ended early: {result.reason}.")

    return train


def by_loop(**options: Any) -> Train:
    """A `Train` that runs a loop of its own around `training.PrivateGradients` with these options
    (clip, noise, micro_batch, seed, …)."""

    def train(canaries: Canaries, plan: Plan, see: See) -> None:
        model = canaries.model()
        private = PrivateGradients(model, plan, **options)
        try:
            for index, weight in private.batches(canaries.data):
                before = private.step
                outputs = model(index) if len(index) else torch.zeros(0)
                private.backward(canaries.loss(outputs, weight))
                if private.step > before:
                    see(private.released)
                    model.zero_grad(set_to_none=True)
        finally:
            private.close()

    return train
