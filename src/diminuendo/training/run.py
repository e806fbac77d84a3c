"""A run from its checkpoint to its end: what `fit` does once everything has been checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from diminuendo.errors import BudgetRefused, InputError
from diminuendo.training.captured import Captured
from diminuendo.training.checkpoint import Checkpoint
from diminuendo.training.groups import Groups
from diminuendo.training.journal import steps_ahead
from diminuendo.training.kept import same_randomness
from diminuendo.training.learning_rates import PlannedRates
from diminuendo.training.plateau import OnPlateau
from diminuendo.training.probe import Loss, Shapes, refuse_mixing
from diminuendo.training.progress import Progress, bar
from diminuendo.training.result import Result, Status, result_of
from diminuendo.training.sampling import Source, precision_of
from diminuendo.training.signals import stop_signals
from diminuendo.training.step import PrivateGradients
from diminuendo.training.tracking import Tracking

_TRIED = 4
"""Rows at which a model is tried out at least before anything is charged."""


class Run:
    """A model, its optimiser and their checkpoint, trained by private gradients."""

    def __init__(
        self,
        private: PrivateGradients,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | OnPlateau | None,
        checkpoint: Checkpoint | None,
        every: int,
        track: Tracking,
        record: bool = False,
    ) -> None:
        self._private, self._optimizer, self._lr_scheduler = private, optimizer, lr_scheduler
        self._track = track
        self._checkpoint, self._every = checkpoint, every
        self._record = record
        self._due = 0
        self._began: int | None = None

    def resume(self) -> None:
        """Take up the checkpoint, or begin; what may have been released after it stays spent."""
        state = None if self._checkpoint is None else self._checkpoint.load()
        if state is None:
            self._private.begin()
            return
        self._check_kinds(state["kinds"])
        self._private.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._lr_scheduler is not None:
            self._lr_scheduler.load_state_dict(state["lr_scheduler"])
        self._private.load_state_dict(state)
        if isinstance(self._lr_scheduler, PlannedRates):
            self._lr_scheduler.catch_up(self._private.step)
        _set_generators(self._private, state["generators"])

    def train(
        self,
        data: Any,
        loss: Loss,
        *,
        groups: Any = None,
        workers: int = 0,
        progress: Progress,
    ) -> Result:
        """Every step that the plan and the budget allow, or until a signal asks to stop."""
        private = self._private
        status: Status = "done"
        reason = "every step of the plan was taken"
        if private.policy is None and private.step >= private.plan.steps:
            reason += " before; nothing was trained now (another run needs another folder)"
        seen: float | None = None
        losses_of_step: list[Tensor] = []
        shown = bar(progress.shown, private, self._track.epsilon)
        with stop_signals() as stopped, shown as advance:
            try:
                self._save_when_due()
                metric = self._metric
                take = self._steps(loss, data, groups)
                for batch in private.batches(data, groups=groups, workers=workers):
                    before, rows = private.step, private.drawn
                    losses = take(*_pair(batch, self._device))
                    if progress.reveal_training_loss:
                        losses_of_step.append(losses[:rows].clone())
                    if private.step == before:
                        continue
                    rate = self._track.rate_of(self._optimizer)
                    if metric is not None:
                        metric.after_step(private, loss)
                    elif isinstance(self._lr_scheduler, LRScheduler):
                        self._lr_scheduler.step()
                    if progress.after_step is not None:
                        progress.after_step(private.step, private)
                    seen = _mean(losses_of_step)
                    losses_of_step = []
                    advance(seen)
                    self._track.step(rate, seen)
                    if private.group.any(stopped.is_set()):
                        status, reason = "interrupted", "a signal asked to stop"
                        break
                    self._save_when_due()
            except BudgetRefused as refusal:
                status, reason = "refused", str(refusal)
        if status == "done" and (private.policy is not None or private.step < private.plan.steps):
            status, reason = "refused", "too little is left of the budget for another step"
        private.verify()
        self._save()
        return result_of(
            private,
            status,
            reason,
            revealed=progress.reveal_training_loss,
            training_loss=seen,
        )

    def _steps(self, loss: Loss, data: Any, groups: Any) -> Captured:
        """What takes a step for a batch (x, y); tries out at public sizes whether examples mix."""
        private, metric = self._private, self._metric
        model = private.engine.model  # not what torch.compile made of it
        shapes = Shapes(model)
        _try_public_sizes(private, loss, data, groups, shapes)

        def losses(x: Tensor, y: Tensor) -> Tensor:
            if len(x) == 0:  # nothing to compute, and not every layer takes an empty batch
                return torch.zeros(0, device=x.device)
            # blank rows alone would tell too little of a shape
            if (private.drawn or 0) > 1 and shapes.new(x, model.training):
                with private.engine.unrecorded():
                    refuse_mixing(model, loss, x, y, shapes.others(x))
            outputs = private.model(x)
            private.guard.expect(outputs)
            if metric is not None:  # blank rows are nobody's, and how many there are is private
                metric.count(private.step, outputs[: private.drawn], y[: private.drawn])
            return loss(outputs, y)

        why_not = "they are not to be recorded" if not self._record else None
        if metric is not None:
            why_not = "a learning rate follows a metric"
        return Captured(private, losses, self._optimizer, why_not)

    @property
    def _device(self) -> torch.device:
        return self._private.engine.parameters[0].device

    @property
    def _metric(self) -> OnPlateau | None:
        return self._lr_scheduler if isinstance(self._lr_scheduler, OnPlateau) else None

    def _check_kinds(self, kinds: dict[str, str | None]) -> None:
        """The optimiser and the schedule must be of the kinds that were saved."""
        for name, kind in self._kinds().items():
            if kinds[name] != kind:
                raise InputError(
                    f"of the checkpoint's kind ({kinds[name]})",
                    name=name,
                    value=kind,
                    remedy="Resume with what the checkpoint was made with, or start in another "
                    "folder.",
                )

    def _kinds(self) -> dict[str, str | None]:
        both = {"optimizer": self._optimizer, "lr_scheduler": self._lr_scheduler}
        return {name: type(part).__name__ if part else None for name, part in both.items()}

    def _save_when_due(self) -> None:
        step = self._private.step
        self._began = step if self._began is None else self._began
        if step >= self._due:
            self._save()
            self._due = step + steps_ahead(step - self._began, self._every)

    def _save(self) -> None:
        if self._checkpoint is None or not self._checkpoint.writes:
            return
        scheduler = self._lr_scheduler
        self._checkpoint.save(
            self._private.step,
            {
                **self._private.state_dict(),
                "model": self._private.model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "lr_scheduler": scheduler.state_dict() if scheduler else None,
                "kinds": self._kinds(),
                "generators": _generators(self._private),
            },
        )


def _try_public_sizes(
    private: PrivateGradients, loss: Loss, data: Any, groups: Any, shapes: Shapes
) -> None:
    """Refuse a model that mixes examples before the first draw is made, whatever that will hold.

    A draw of one row shows nothing, and it would be charged. So the first rows of the dataset are
    tried, as many as a draw is expected to have, and fewer: sizes that are public.
    """
    model, parameters = private.engine.model, private.engine.parameters
    source = Source(data, precision_of(private.model))
    private.sampler.check(source, Groups.of(groups))
    size = private.sampler.expected(private.step, at_least=_TRIED)
    over = private.policy is None and private.step >= private.plan.steps
    if size < 2 or over or private.sampler.rate(private.step) == 1:  # all rows come first anyway
        return
    device = parameters[0].device
    with same_randomness(model, device):
        rows = source.batches(iter([torch.arange(size)]), generator=torch.Generator())
        x, y = _pair(next(rows), device)
        if len(x) < 2:
            return
        shapes.new(x, model.training)
        with private.engine.unrecorded():
            refuse_mixing(model, loss, x, y, shapes.others(x))
        private.engine.probe_if_due(loss(private.model(x), y))


def _pair(batch: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise InputError(
            "pairs (x, y)",
            name="the examples",
            value=type(batch).__name__,
            remedy="For other kinds, write the loop yourself with PrivateGradients.",
        )
    x, y = (part.to(device) for part in batch)
    return x, y


def _mean(parts: list[Tensor]) -> float | None:
    """Over all parts of a step; None where nothing was drawn, or nothing is to be shown."""
    losses = torch.cat(parts) if parts else torch.zeros(0)
    return float(losses.mean()) if len(losses) else None


def _generators(private: PrivateGradients) -> list[Tensor]:
    """PyTorch's own generators, which dropout draws from: the CPU's, and the model's GPU's."""
    device = private.engine.parameters[0].device
    return [torch.get_rng_state()] + (
        [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    )


def _set_generators(private: PrivateGradients, states: list[Tensor]) -> None:
    device = private.engine.parameters[0].device
    torch.set_rng_state(states[0])
    if device.type == "cuda" and len(states) > 1:
        torch.cuda.set_rng_state(states[1], device)
