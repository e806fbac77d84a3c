"""One private training: what model, optimiser and loader of a `make_private` share."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from diminuendo import _validate
from diminuendo.adapters._stepping import set_secret_randomness
from diminuendo.errors import BudgetRefused, DiminuendoError, InputError, UsageError
from diminuendo.planning import Plan
from diminuendo.spending import Spending
from diminuendo.training import Flat, PerLayer, PrivateGradients, Released
from diminuendo.training.mean_loss import track
from diminuendo.training.reduced import Reduced

Clipping = Flat | PerLayer


class Run:
    """A `PrivateGradients`, and which of its gradients the optimiser may step by.

    plan       fixes every step; or the nominal one of a run whose length nobody planned, together
               with `sigma`: the noise multiplier of step t = 1, 2, …
    reserve    the part of δ that was kept back for rounding errors; None where nobody promised a δ
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loader: DataLoader[Any],
        *,
        clip: Clipping,
        spending: Spending | None,
        sigma: Callable[[int], float] | None,
        reduction: Literal["mean", "sum"],
        seed: int | None,
        reserve: float | None,
    ) -> None:
        self.model, self.plan, self.loader = model, plan, loader
        self.clip, self.sigma, self.reduction, self.reserve = clip, sigma, reduction, reserve
        self.epoch = len(loader)
        # The closures below must not hold the run: who drops it ends it.
        own = weakref.ref(self)

        def next_clip(step: int) -> Clipping:
            del step
            run = own()
            assert run is not None
            return run.clip

        def next_sigma(released: Released) -> float:
            run = own()
            assert run is not None
            assert run.sigma is not None
            return run.sigma(released.step + 1)

        self.private = PrivateGradients(
            model,
            plan,
            clip=next_clip,
            spending=spending,
            policy=None if sigma is None else next_sigma,
            seed=seed,
        )
        self._numbers: tuple[float, ...] | None = None
        self._fresh: list[Tensor] | None = None
        self._parts_left = False
        self._added_to = False

        def added(parameter: Tensor) -> None:
            del parameter
            run = own()
            if run is not None:
                run._added_to = True

        trained: list[Any] = list(self.private.engine.parameters)
        self._hooks = [part.register_post_accumulate_grad_hook(added) for part in trained]
        self._end = weakref.finalize(self, _close, self.private.spending)

    # The loop, in the order of its lines

    def batches(self) -> Iterator[Any]:
        """One epoch: as many steps as the given loader has batches."""
        private = self.private
        private.begin()
        last = private.step + self.epoch
        if self.sigma is None:
            if private.step >= self.plan.steps:
                raise BudgetRefused(
                    f"The {self.plan.steps} steps that were planned are taken: more would cost "
                    "more than target_epsilon. Plan for more epochs from the start."
                )
            last = min(last, self.plan.steps)
        loader = self.loader
        set_secret_randomness(private)  # a script's own seed is known to whoever reads the script
        yield from private.batches(
            loader.dataset,
            epochs=1,
            workers=loader.num_workers,
            pin_memory=loader.pin_memory and torch.cuda.is_available(),
            collate=loader.collate_fn,
        )
        if private.step < last:
            raise BudgetRefused(
                f"Too little is left of the budget for step {private.step + 1} (noise multiplier "
                f"{self.next_sigma:g}). The steps before it were taken and are paid for."
            )
        if self.sigma is None and last == self.plan.steps:
            self._settle()

    def outputs(self, outputs: Any) -> Any:
        """What the model returned for the batch, marked so that a loss finds back here."""
        self.private.guard.expect(outputs)
        return track(outputs, self.take_step)

    @property
    def recording(self) -> bool:
        """Whether a call of the model now is the loop's own, with a gradient."""
        return self.private.engine.recording

    @property
    def empty(self) -> bool:
        """Whether the batch that was drawn last has no example."""
        return self.private.waiting == 0

    def take_step(self, reduced: Reduced) -> None:
        """`loss.backward()`: refuse what is no mean over examples, else charge and release."""
        given = reduced.as_kind(self.reduction)
        if given is None:
            raise UsageError(
                f"The loss is a {reduced.kind} over examples, and make_private was told "
                f'loss_reduction="{self.reduction}". Make the two agree.'
            )
        if self._numbers not in (None, given.numbers):
            raise UsageError(
                f"The loss is multiplied by {_product(given.numbers):g} here and was by "
                f"{_product(self._numbers or ()):g} before. A factor that follows the batch (its "
                "size, say) would let one example change what others add: scale the learning rate "
                "instead."
            )
        self.backward(given.losses)
        self._numbers = given.numbers

    def backward(self, losses: Tensor) -> None:
        """One loss per example: the step is charged and released, or a part of it is summed."""
        private = self.private
        if private.waiting is None and self.plan.rates[0] < 1:
            raise UsageError(
                "Every private step takes a batch of its own from the private loader, and none is "
                "waiting: the batch came from elsewhere, or was used before."
            )
        before = private.step
        private.backward(losses)
        self._parts_left = private.step == before
        if self._parts_left:
            return
        parameters = private.engine.parameters
        gradients = [parameter.grad for parameter in parameters]
        if self.reduction == "sum":
            for gradient in gradients:
                assert gradient is not None
                gradient.mul_(self.expected_batch)
        self._fresh = [gradient for gradient in gradients if gradient is not None]
        self._added_to = False

    def take_gradient(self) -> bool:
        """Before the optimiser steps: whether there is a whole gradient, and it is a private one.

        False within a batch that is split. Raises where anything else would be stepped by.
        """
        if self._parts_left:
            return False
        if self._fresh is None:
            raise UsageError(
                "optimizer.step() comes after loss.backward() on a loss of the batch that the "
                "private loader gave, computed from the private model's outputs in training mode. "
                "Where marks get lost on the way (in a torch.autograd.Function, say), write "
                "optimizer.backward(losses) with one loss per example."
            )
        parameters = self.private.engine.parameters
        others = any(p.grad is not g for p, g in zip(parameters, self._fresh, strict=True))
        if others or self._added_to:
            raise UsageError(
                "A parameter's .grad is not the private gradient that was released. Nothing but "
                "loss.backward() may fill it, and zero_grad() comes after step()."
            )
        self._fresh = None
        return True

    # What a script may look at, or set

    @property
    def expected_batch(self) -> float:
        """Examples × sampling rate: by what the sum of gradients is divided."""
        return self.plan.examples * float(self.plan.rates[0])

    @property
    def next_sigma(self) -> float:
        """The noise multiplier of the next step."""
        step = self.private.step
        if self.sigma is not None:
            return self.sigma(step + 1)
        return float(self.plan.sigmas[min(step, self.plan.steps - 1)])

    def split(self, limit: int | None) -> None:
        """From now on at most so many examples at once; refused where rounding would cost more δ
        than was kept back."""
        sampler = self.private.sampler
        before, smallest = sampler.micro_batch, sampler.smallest
        sampler.micro_batch = limit
        if self.reserve is not None and self.private.delta_added > self.reserve:
            sampler.micro_batch, sampler.smallest = before, smallest
            raise InputError(
                f"larger: each part adds to δ, and {self.reserve:.2g} of it was kept back",
                name="max_physical_batch_size",
                value=limit,
            )

    def close(self) -> None:
        """Give the model its own forward back, and the ledger what was not used."""
        self.private.close()
        for hook in self._hooks:
            hook.remove()
        self._settle()

    def _settle(self) -> None:
        if self._end.detach() is not None:
            self.private.spending.close()


def _close(spending: Spending) -> None:
    """Where nobody ended the run: the ledger may be gone by now, and then keeps it open."""
    with suppress(DiminuendoError):
        spending.close("the run was dropped")


def _product(numbers: tuple[float, ...]) -> float:
    result = 1.0
    for number in numbers:
        result *= number
    return result


def checked_sigma(value: Any) -> float:
    """A noise multiplier above 0, or InputError: without noise ε is infinite."""
    return _validate.positive("noise_multiplier", value, remedy="Without noise ε is infinite.")
