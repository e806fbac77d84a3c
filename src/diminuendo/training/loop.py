"""fit(...): the whole run in one call; it ends when the plan, the budget or a person says so."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from diminuendo import _validate
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan
from diminuendo.spending import NotedSpending, Spending, from_ledger
from diminuendo.training.checkpoint import Checkpoint, Identity
from diminuendo.training.distributed import Group
from diminuendo.training.optim import PrivateDescent
from diminuendo.training.step import ClipRule, Policy, PrivateGradients

Status = Literal["done", "refused", "interrupted"]


@dataclass(frozen=True)
class Result:
    """How a run ended and what it spent. Holds nothing that was not paid for."""

    status: Status
    reason: str
    steps: int
    events: tuple[GaussianStep, ...]
    epsilon: float
    delta: float
    relation: str
    private: bool
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
    after_step: Callable[[int, PrivateGradients], None] | None = None,
) -> Result:
    """Train `model` on `data` by the plan; the model is changed in place.

    loss          gives one loss per example: reduction="none"
    optimizer     any; plain descent with `lr` (and the plan's momentum) unless given
    ledger        URL of a ledger, and `budget` the name of the budget there that pays
    source        the files that the budget's data are known by, where that is not `data`
    folder        where checkpoints go, and where an interrupted run is taken up again
    """
    if policy is not None and folder is not None:
        raise InputError(
            "left out with a policy",
            name="folder",
            value=str(folder),
            remedy="What a policy would have chosen before a crash is not known after it.",
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
    private = PrivateGradients(
        model,
        plan,
        clip=clip,
        spending=spending,
        policy=policy,
        micro_batch=micro_batch,
        seed=seed,
    )
    steps_by = optimizer or PrivateDescent(
        model.parameters(),
        lr=_validate.positive("lr", lr, remedy="Or give an optimizer."),
        beta=plan.momentum or 0.0,
    )
    run = _Run(private, steps_by, lr_scheduler, _checkpoint(folder, private), checkpoint_every)
    run.resume()
    try:
        result = run.train(data, loss, device, workers, progress, after_step)
    except BaseException as error:
        run.end(type(error).__name__)
        raise
    run.end(result.status)
    return replace(result, ledger=private.spending.cite())


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
    with Progress(TextColumn("reading the data"), BarColumn(), disable=not shown) as bar:
        task = bar.add_task("", total=None)
        return from_ledger(
            url,
            name,
            plan if policy is None else None,
            data=data,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )


def _checkpoint(folder: str | Path | None, private: PrivateGradients) -> Checkpoint | None:
    if folder is None:
        return None
    plan = private.plan
    identity = Identity.of(private.model, plan.digest, plan.examples, private.seeds.fixed)
    return Checkpoint(folder, identity)


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
        self.checkpoint = checkpoint
        self.every = _validate.count("checkpoint_every", every)
        self.reserved = 0

    def resume(self) -> None:
        """Take up the checkpoint; what was reserved after it stays spent, unless it is replayed."""
        private = self.private
        if self.checkpoint is None:
            self._begin()
            return
        state = self.checkpoint.load()
        self.reserved = self.checkpoint.reserved()
        if state is not None:
            private.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(state["lr_scheduler"])
            private.spending.restore(state["spending"])
            private.step = state["step"]
        self._begin()
        known = self.reserved if private.private else private.step
        go_on = private.group.agree(lambda: private.spending.not_released_from(known))
        if private.private:
            private.skip_to(go_on)
            self.reserved = min(self.reserved, private.step)

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
        device: torch.device | str | None,
        workers: int,
        progress: bool,
        after_step: Callable[[int, PrivateGradients], None] | None,
    ) -> Result:
        private = self.private
        where = device or next(private.model.parameters()).device
        status: Status = "done"
        reason = "every step of the plan was taken"
        self._reserve()
        with _stop_signals() as stopped, _bar(progress, private) as advance:
            try:
                for x, y in private.batches(data, workers=workers):
                    before = private.step
                    private.backward(loss(private.model(x.to(where)), y.to(where)))
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
                    if private.step == before:
                        continue
                    if self.lr_scheduler is not None:
                        self.lr_scheduler.step()
                    if after_step is not None:
                        after_step(private.step, private)
                    advance()
                    if stopped.is_set():
                        status, reason = "interrupted", "a signal asked to stop"
                        break
                    self._reserve()
            except BudgetRefused as refusal:
                status, reason = "refused", str(refusal)
        if status == "done" and private.step < private.plan.steps:
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
        )

    def _reserve(self) -> None:
        """Before the next block of steps: a checkpoint of where we are, then the reservation."""
        if self.checkpoint is None or self.private.step < self.reserved:
            return
        self._save()
        self.reserved = min(self.private.step + self.every, self.private.plan.steps)
        if self.private.group.first:
            self.checkpoint.reserve(self.reserved)
        self.private.group.barrier()

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
                "spending": private.spending.state(),
            },
        )
        self.checkpoint.reserve(private.step)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM ask for a stop after the current step."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        asked.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _bar(shown: bool, private: PrivateGradients) -> Iterator[Callable[[], None]]:
    """Steps, the share of the budget spent, time left. No losses: those are not paid for."""
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    if not (shown and private.group.first):
        yield lambda: None
        return
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=private.plan.steps, completed=private.step)
        yield lambda: bar.update(task, completed=private.step)
