"""fit(...): the whole run in one call; it ends when the plan, the budget or a person says so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from diminuendo import _validate
from diminuendo.errors import BudgetRefused, DiminuendoError, InputError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan
from diminuendo.spending import NotedSpending, Spending, from_ledger
from diminuendo.training.checkpoint import Checkpoint, Identity
from diminuendo.training.distributed import Group
from diminuendo.training.optim import PrivateDescent
from diminuendo.training.progress import bar, reading
from diminuendo.training.sampling import precision_of
from diminuendo.training.step import ClipRule, Policy, PrivateGradients

Status = Literal["done", "refused", "interrupted"]


@dataclass(frozen=True)
class Result:
    """How a run ended and what it spent.

    Holds nothing that was not paid for, except for `training_loss` where it was asked to be
    revealed: the last batch's mean loss. `lost` steps were spent by a crash and not taken.
    """

    status: Status
    reason: str
    steps: int
    events: tuple[GaussianStep, ...]
    epsilon: float
    delta: float
    relation: str
    private: bool
    lost: int = 0
    revealed: bool = False
    training_loss: float | None = None
    ledger: dict[str, Any] = field(default_factory=dict)
    """Where the spending is on record: ledger, budget, run and chain head."""


def fit(
    model: nn.Module,
    data: Any,
    plan: Plan,
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    lr: float | None = None,
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    clip: ClipRule | None = None,
    spending: Spending | None = None,
    ledger: str | None = None,
    budget: str | None = None,
    source: Any = None,
    policy: Policy | None = None,
    micro_batch: int | None = None,
    seed: int | None = None,
    folder: str | Path | None = None,
    checkpoint_every: int = 50,
    workers: int = 0,
    device: torch.device | str | None = None,
    progress: bool = True,
    reveal_training_loss: bool = False,
    after_step: Callable[[int, PrivateGradients], None] | None = None,
) -> Result:
    """Train `model` on `data` by the plan; the model is changed in place.

    loss          gives one loss per example: reduction="none"
    optimizer     any; plain descent with `lr` (and the plan's momentum) unless given
    ledger        URL of a ledger, and `budget` the name of the budget there that pays
    source        the files that the budget's data are known by, where that is not `data`
    policy        picks σ by what it is shown and nothing else, or it cannot be resumed exactly
    folder        where checkpoints go, and where an interrupted run is taken up again
    device        where to train; the model is moved there
    reveal_training_loss
                  shows the mean loss of each batch in the bar, and the last one's in the result;
                  the privacy claim does not cover it
    """
    for name, value, kind in (("model", model, nn.Module), ("plan", plan, Plan)):
        if not isinstance(value, kind):
            raise InputError(f"a {kind.__name__}", name=name, value=value)
    if not callable(loss):
        raise InputError(
            "a function that gives one loss per example",
            name="loss",
            value=loss,
            remedy='torch.nn.CrossEntropyLoss(reduction="none"), say.',
        )
    if ledger is not None or budget is not None:
        if seed is not None:
            raise InputError(
                "left out with a ledger",
                name="seed",
                value=seed,
                remedy="A seeded run is not private: no budget can pay for it.",
            )
        spending = _from_ledger(ledger, budget, plan, policy, spending, source or data, progress)
    if device is not None:
        _move(model, device)
    private = PrivateGradients(
        model,
        plan,
        clip=clip,
        spending=spending,
        policy=policy,
        micro_batch=micro_batch,
        seed=seed,
    )
    checkpoint = None
    try:
        steps_by = optimizer or PrivateDescent(
            model.parameters(),
            lr=_validate.positive("lr", lr, remedy="Or give an optimizer."),
            beta=plan.momentum or 0.0,
        )
        _check_optimizer(steps_by, private)
        _check_scheduler(lr_scheduler, steps_by)
        every = _validate.count("checkpoint_every", checkpoint_every)
        checkpoint = _checkpoint(folder, private)
        run = _Run(private, steps_by, lr_scheduler, checkpoint, every)
        run.resume()
        try:
            result = run.train(data, loss, workers, progress, reveal_training_loss, after_step)
        except BaseException as error:
            run.end(type(error).__name__)
            raise
        run.end(result.status)
        return replace(result, ledger=private.spending.cite())
    finally:
        private.close()
        if checkpoint is not None:
            checkpoint.close()


def _from_ledger(
    url: str | None,
    name: str | None,
    plan: Plan,
    policy: Policy | None,
    spending: Spending | None,
    data: Any,
    shown: bool,
) -> Spending:
    if name is None or spending is not None:
        raise InputError(
            "given with a ledger, instead of a spending",
            name="budget",
            value=name,
            remedy='fit(..., ledger="ledger.sqlite", budget="patients").',
        )
    if not Group.current().first:
        return NotedSpending(plan.budget)
    with reading(shown) as progress:
        return from_ledger(
            url, name, plan if policy is None else None, data=data, progress=progress
        )


def _move(model: nn.Module, device: torch.device | str) -> None:
    try:
        model.to(device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InputError(
            "a device that is there", name="device", value=str(device), remedy=f"({error})"
        ) from None


def _check_optimizer(optimizer: torch.optim.Optimizer, private: PrivateGradients) -> None:
    """Its parameters must be the model's: others would be trained without privacy, or not."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError(
            "an optimizer that was made",
            name="optimizer",
            value=optimizer,
            remedy="Write torch.optim.Adam(model.parameters(), lr=0.001), say.",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InputError(
            "one that takes one gradient a step",
            name="optimizer",
            value="LBFGS",
            remedy="It asks for several, and each would have to be paid for.",
        )
    covered = {id(parameter) for parameter in private.engine.parameters}
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained or any(id(parameter) not in covered for parameter in trained):
        raise InputError(
            "made of the model's own parameters",
            name="optimizer",
            value=type(optimizer).__name__,
            remedy="Parameters outside the model get no private gradient: make them part of it.",
        )


def _check_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """What would fail, or do nothing, after the first step was paid."""
    if scheduler is None:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise InputError(
            "one that needs no loss",
            name="lr_scheduler",
            value="ReduceLROnPlateau",
            remedy="The training loss is not released; take a scheduler that counts steps.",
        )
    if getattr(scheduler, "optimizer", None) is not optimizer:
        raise InputError(
            "a scheduler that was made for the optimizer that is given",
            name="lr_scheduler",
            value=scheduler,
        )


def _checkpoint(folder: str | Path | None, private: PrivateGradients) -> Checkpoint | None:
    if folder is None:
        return None
    plan = private.plan
    identity = Identity.of(private.model, plan.digest, plan.examples, private.seeds.fixed)
    return Checkpoint(folder, identity, hold=private.group.first)


class _Run:
    def __init__(
        self,
        private: PrivateGradients,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        checkpoint: Checkpoint | None,
        every: int,
    ) -> None:
        self.private, self.optimizer, self.lr_scheduler = private, optimizer, lr_scheduler
        self.checkpoint, self.every = checkpoint, every
        self.reserved = self.lost = 0
        self._since: list[GaussianStep] = []
        if checkpoint is not None and private.policy is not None and private.group.first:
            private.granted = self._write_down

    def resume(self) -> None:
        """Take up the checkpoint; what was reserved after it stays spent, unless it is replayed."""
        private = self.private
        if self.checkpoint is None:
            self._begin()
            return
        state, journal = self.checkpoint.load(), self.checkpoint.reserved()
        if state is not None:
            self._check_kinds(state)
            private.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(state["lr_scheduler"])
            private.spending.restore(state["spending"])
            _set_generators(private, state["generators"])
            private.step, self.lost = state["step"], state["lost"]
            private.released = tuple(state["released"])
        self._begin()
        known = journal.upto if private.private else private.step
        go_on = private.group.agree(lambda: private.spending.not_released_from(known))
        if private.private:
            before = private.step
            if private.policy is None:
                lost = slice(before, go_on)
                schedule = zip(private.plan.sigmas[lost], private.plan.rates[lost], strict=True)
                skipped = [GaussianStep(noise_multiplier=s, sampling_rate=p) for s, p in schedule]
            else:
                skipped = list(journal.events[max(before - journal.since, 0) :])
            with suppress(BudgetRefused):  # what would be refused was refused, and not released
                private.skip(skipped)
            self.lost += private.step - before

    def _check_kinds(self, state: dict[str, Any]) -> None:
        """The optimiser and the schedule must be of the kinds that were saved."""
        for name, mine in (("optimizer", self.optimizer), ("lr_scheduler", self.lr_scheduler)):
            kind = type(mine).__name__ if mine is not None else None
            if state["kinds"][name] != kind:
                raise InputError(
                    f"of the checkpoint's kind ({state['kinds'][name]})",
                    name=name,
                    value=kind,
                    remedy="Resume with what the checkpoint was made with, or start in another "
                    "folder.",
                )

    def _begin(self) -> None:
        self.private.group.agree(self.private.spending.begin)

    def end(self, reason: str) -> None:
        """What was granted and not asked for goes back."""
        if self.private.group.first:
            self.private.spending.end(reason)

    def train(
        self,
        data: Any,
        loss: Callable[[Tensor, Tensor], Tensor],
        workers: int,
        progress: bool,
        reveal: bool,
        after_step: Callable[[int, PrivateGradients], None] | None,
    ) -> Result:
        private = self.private
        status: Status = "done"
        reason = "every step of the plan was taken"
        if private.policy is None and private.step >= private.plan.steps:
            reason += " before; nothing was trained now (another run needs another folder)"
        batches = _Batches(private, loss, workers)
        seen: float | None = None
        with _stop_signals() as stopped, bar(progress, private) as advance:
            try:
                self._reserve()
                for losses in batches.losses(data):
                    before = private.step
                    private.backward(losses)
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
                    if private.step == before:
                        continue
                    if self.lr_scheduler is not None:
                        self.lr_scheduler.step()
                    if after_step is not None:
                        after_step(private.step, private)
                    seen = _mean(losses) if reveal else None
                    advance(seen)
                    if private.group.any(stopped.is_set()):
                        status, reason = "interrupted", "a signal asked to stop"
                        break
                    self._reserve()
            except BudgetRefused as refusal:
                status, reason = "refused", str(refusal)
            except BaseException:
                self._give_back()
                raise
        if status == "done" and (private.policy is not None or private.step < private.plan.steps):
            status, reason = "refused", "the budget has no room for another step"
        self._save()
        return Result(
            status,
            reason,
            private.step,
            private.spending.granted,
            private.spending.epsilon(),
            private.spending.budget.delta,
            private.spending.budget.relation,
            private.private,
            self.lost,
            reveal,
            seen,
        )

    def _reserve(self) -> None:
        """Before the next block of steps: a checkpoint of where we are, then the reservation."""
        if self.checkpoint is None or self.private.step < self.reserved:
            return
        self._save()
        self.reserved = self.private.step + self.every
        if self.private.policy is None:
            self.reserved = min(self.reserved, self.private.plan.steps)
            if self.private.group.first:
                self.checkpoint.reserve(self.reserved)
        self.private.group.barrier()

    def _write_down(self, event: GaussianStep) -> None:
        """A policy's event, durably, before anything of its step is released."""
        assert self.checkpoint is not None
        self._since.append(event)
        since = self.private.step + 1 - len(self._since)
        self.checkpoint.reserve(self.private.step + 1, since, self._since)

    def _give_back(self) -> None:
        """After an error, unlike after a crash, it is known which steps were never asked for."""
        if self.checkpoint is None or not self.private.group.first:
            return
        if self.private.policy is None:  # a policy's journal never runs ahead
            self.checkpoint.reserve(self.private.charged)

    def _save(self) -> None:
        if self.checkpoint is None or not self.private.group.first:
            return
        private = self.private
        self.checkpoint.save(
            private.step,
            {
                "model": private.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "lr_scheduler": self.lr_scheduler.state_dict() if self.lr_scheduler else None,
                "kinds": {
                    "optimizer": type(self.optimizer).__name__,
                    "lr_scheduler": type(self.lr_scheduler).__name__ if self.lr_scheduler else None,
                },
                "spending": private.spending.state(),
                "released": list(private.released) if private.policy is not None else [],
                "lost": self.lost,
                "generators": _generators(private),
            },
        )
        self._since = []
        self.checkpoint.reserve(private.step, since=private.step)


class _Batches:
    """The plan's batches as losses, one per example, on the model's device."""

    def __init__(
        self, private: PrivateGradients, loss: Callable[[Tensor, Tensor], Tensor], workers: int
    ) -> None:
        self.private, self.loss, self.workers = private, loss, workers
        self._where = next(private.model.parameters()).device
        self._checked = False

    def losses(self, data: Any) -> Iterator[Tensor]:
        for batch in self.private.batches(data, workers=self.workers):
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise InputError(
                    "pairs (x, y)",
                    name="the examples",
                    value=type(batch).__name__,
                    remedy="For other kinds, write the loop yourself with PrivateGradients.",
                )
            x, y = (part.to(self._where) for part in batch)
            if len(x) == 0:  # nothing to compute, and not every layer takes an empty batch
                yield torch.zeros(0, device=self._where)
                continue
            if not self._checked and len(x) > 1:
                self._refuse_mixing(x[:2], y[:2])
                self._checked = True
            yield self.loss(self.private.model(x), y)

    @torch.no_grad()
    def _refuse_mixing(self, x: Tensor, y: Tensor) -> None:
        """An example's loss must be the same alone and in company, or clipping bounds nothing.

        Asked in both modes; a model that is random in one of them (by dropout) is let be there.
        """
        model = self.private.engine.model  # not what torch.compile made of it
        modes = [(module, module.training) for module in model.modules()]
        devices = [x.device] if x.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                self._compare(model, x, y)
                model.eval()
                self._compare(model, x, y)
        except DiminuendoError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise InputError(
                "what the model and the loss take",
                name="the first examples",
                value=f"x of shape {tuple(x.shape[1:])}, y of shape {tuple(y.shape[1:])}",
                remedy=f"(x {x.dtype}, y {y.dtype}, the model {precision_of(model)}.) {error}",
            ) from error
        finally:
            for module, mode in modes:
                module.training = mode

    def _compare(self, model: nn.Module, x: Tensor, y: Tensor) -> None:
        both, again, alone = (self.loss(model(x[:n]), y[:n]).flatten()[:1] for n in (2, 2, 1))
        certain = torch.equal(both, again) and bool(torch.isfinite(alone).all())
        if certain and not torch.allclose(both, alone, rtol=1e-2, atol=1e-3):
            raise InputError(
                "the same for an example alone and beside another",
                name="the loss",
                value="a loss that differs",
                remedy="The model or the loss mixes examples (by a mean over the batch, say: a "
                'loss needs reduction="none"), so '
                "that clipping would not bound what one of them adds.",
            )


def _mean(losses: Tensor) -> float | None:
    return float(losses.detach().mean()) if len(losses) else None


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM ask for a stop after the current step; a second one stops at once."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
