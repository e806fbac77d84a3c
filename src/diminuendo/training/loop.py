"""fit(...): the whole run in one call; it ends when the plan, the budget or a person says so."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, Unpack

import torch
from torch import nn

from diminuendo import _later, _validate
from diminuendo.errors import InputError, UsageError
from diminuendo.planning import Plan
from diminuendo.spending import Payer, Spending, from_ledger
from diminuendo.training.checkpoint import Checkpoint, Checkpoints, Identity
from diminuendo.training.compute import Compute
from diminuendo.training.distributed import Group, for_all_ranks
from diminuendo.training.groups import Groups
from diminuendo.training.guard import check_scheduler, check_unit
from diminuendo.training.learning_rates import follow_plan
from diminuendo.training.mechanism import NoiseName
from diminuendo.training.optim import PrivateDescent
from diminuendo.training.plateau import OnPlateau
from diminuendo.training.probe import Loss
from diminuendo.training.progress import AfterStep, Progress, reading, running_epsilon
from diminuendo.training.result import Result
from diminuendo.training.run import Run
from diminuendo.training.sampling import Source, arrays_of, as_trained, precision_of
from diminuendo.training.step import ClipRule, Policy, PrivateGradients
from diminuendo.training.tracking import Tracking
from diminuendo.training.usable import refuse_not_finite

_Settings = TypeVar("_Settings", Compute, Progress)


class Chosen(Protocol):
    """How to train, as `dim.tune` chooses it: a plan, its learning rate and its clipping rule."""

    @property
    def plan(self) -> Plan:
        """Steps, noise, clip norm, momentum and the shape of the learning rate."""
        ...

    @property
    def lr(self) -> float:
        """The learning rate, or what the plan's are multiplied by."""
        ...

    @property
    def clip(self) -> ClipRule:
        """How gradients are clipped."""
        ...


class _Deprecated(TypedDict, total=False):
    """Arguments that will go with the next version."""

    source: Any
    checkpoint_every: int
    workers: int
    micro_batch: int | None
    after_step: AfterStep | None
    reveal_training_loss: bool


_INSTEAD = {
    "source": "spending=ledger.pay(budget, plan, data=source)",
    "checkpoint_every": "folder=Checkpoints(folder, every)",
    "workers": "device=Compute(workers=…)",
    "micro_batch": "device=Compute(micro_batch=…)",
    "after_step": "progress=Progress(after_step=…)",
    "reveal_training_loss": "progress=Progress(reveal_training_loss=True)",
}


def fit(
    model: nn.Module,
    data: Any,
    plan: Plan | Chosen,
    *,
    loss: Loss,
    groups: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float | None = None,
    lr_scheduler: torch.optim.lr_scheduler.LRScheduler | OnPlateau | None = None,
    strict: bool = False,
    clip: ClipRule | None = None,
    spending: Spending | None = None,
    ledger: str | Path | Payer | None = None,
    budget: str | None = None,
    policy: Policy | None = None,
    noise: NoiseName = "exact",
    seed: int | None = None,
    folder: str | Path | Checkpoints | None = None,
    device: torch.device | str | Compute | None = None,
    progress: bool | Progress = True,
    **deprecated: Unpack[_Deprecated],
) -> Result:
    """Train `model` on `data` by the plan; the model is changed in place.

    plan          what to run; or what `dim.tune` chose, whose learning rate and clipping rule are
                  then followed, too, unless others are given
    loss          gives one loss per example: reduction="none"
    groups        whose each row is, where several are one person's: a column with an entry for
                  each row. Each step draws persons, and one row of each; the plan's examples are
                  persons, and so is who the claim protects
    optimizer     any; plain descent with `lr` (and the plan's momentum) unless given
    lr            the learning rate of that; where the plan has learning rates, their unit. Left
                  out for a table of features, labels and CrossEntropyLoss, it is chosen on
                  synthetic data of the same public shape, and said
    lr_scheduler  stepped after each step; the plan's own learning rates unless given. One that
                  differs from what the noise was planned for is warned about before anything is
                  spent; strict=True refuses it. An `OnPlateau` follows a metric, public or paid
    clip          the plan's norm, flat, unless given (customary name: max grad norm)
    spending      who pays: `ledger.pay("patients", plan, data=…)`, say; the plan's own budget, and
                  nobody's ledger, unless given
    ledger        a ledger or its URL, and `budget` the name of the budget there that pays: short
                  for spending=ledger.pay(budget, plan, data=data)
    policy        picks σ by what it is shown and nothing else, or it cannot be resumed exactly
    noise         "exact": what is released is a post-processing of the ideal Gaussian mechanism;
                  "fast", for experiments: PyTorch's, and the claim is for real arithmetic only
    seed          only for tests and experiments: the run is then not private
    folder        where checkpoints go, and where an interrupted run is taken up again; a
                  `Checkpoints` says how often, too
    device        where to train; the model is moved there. A `Compute` says how many examples are
                  held in memory at once (micro-batches), and how many processes load them, too
    progress      whether a bar is shown; a `Progress` says what is called after each step, and
                  which experiment tracker is told, too

    Returns a `Result`: how the run ended and what it spent.
    """
    plan, lr, clip = _followed(plan, lr, clip)
    if not torch.is_grad_enabled():
        raise UsageError(
            "Training needs gradients: leave torch.no_grad() or torch.inference_mode() first."
        )
    if not isinstance(model, nn.Module):
        raise InputError("a Module", name="model", value=model)
    if not callable(loss):
        raise InputError(
            "a function that gives one loss per example",
            name="loss",
            value=loss,
            remedy='torch.nn.CrossEntropyLoss(reduction="none"), say.',
        )
    persons = Groups.of(groups)
    refuse_not_finite(data, precision_of(model))
    _warn_of(deprecated)
    source = deprecated.get("source", data)
    checkpoints = _checkpoints(folder, deprecated)
    compute = _with(Compute.of(device), deprecated, "workers", "micro_batch")
    watching = _with(Progress.of(progress), deprecated, "after_step", "reveal_training_loss")
    group = Group.current()
    if ledger is not None or budget is not None:
        if budget is None or spending is not None:
            raise InputError(
                "given with a ledger, instead of a spending",
                name="budget",
                value=budget,
                remedy='fit(..., ledger="ledger.sqlite", budget="patients").',
            )
        planned = plan if policy is None else None
        spending = _paid_by(ledger, budget, planned, source, group, watching.shown)
    compute.move(model)
    if optimizer is None and lr is None and group.world == 1:
        lr = _learning_rate(model, data, plan, loss)
    journal = None if checkpoints is None else checkpoints.journal(plan, writes=group.first)
    pad, data = _arranged(model, data, plan, compute, group)
    private = PrivateGradients(
        model,
        plan,
        clip=clip,
        spending=spending,
        policy=policy,
        micro_batch=compute.micro_batch,
        pad=pad,
        journal=journal,
        noise=noise,
        seed=seed,
    )
    checkpoint = None
    try:
        steps_by = _descent(model, plan, lr) if optimizer is None else optimizer
        check_unit(private.spending, grouped=persons is not None)
        private.guard.check_optimizer(steps_by)
        scheduler = lr_scheduler
        if policy is None:
            scheduler = follow_plan(steps_by, plan, lr_scheduler, strict=strict)
            if lr_scheduler is not None and private.watch is not None:
                private.watch.stop()  # what there was to say about it has been said
        else:
            check_scheduler(lr_scheduler, steps_by)
        if isinstance(lr_scheduler, OnPlateau):
            lr_scheduler.begin(private, loss, data)
        if checkpoints is not None and journal is not None:
            identity = Identity.of(
                model, plan.digest, plan.examples, private.seeds.fixed, private.noise
            )
            checkpoint = Checkpoint(checkpoints.folder, identity, journal, writes=group.first)
            group.agree(checkpoint.hold)
        every = plan.steps if checkpoints is None else checkpoints.every
        with Tracking(watching.logger, private, running_epsilon(private)) as track:
            run = Run(private, steps_by, scheduler, checkpoint, every, track, compute.record)
            run.resume()
            try:
                result = run.train(
                    data,
                    loss,
                    groups=persons,
                    workers=compute.workers,
                    progress=watching,
                )
            except BaseException as error:
                private.spending.close(type(error).__name__)
                raise
            private.spending.close(result.status)
            result = replace(result, ledger=private.spending.cite())
            track.end(result)
        return result
    finally:
        private.close()
        if checkpoint is not None:
            checkpoint.close()


def _descent(model: nn.Module, plan: Plan, lr: float | None) -> PrivateDescent:
    """The paper's own optimiser."""
    remedy = (
        "Or give an optimizer. It is chosen for classes by CrossEntropyLoss from arrays with one "
        "row for each example."
    )
    rate = _validate.positive("lr", lr, remedy=remedy)
    return PrivateDescent(model.parameters(), lr=rate, beta=plan.momentum or 0.0)


# The part of a GPU's free memory that a dataset of tensors may take.
_RESIDENT = 0.25


def _arranged(
    model: nn.Module, data: Any, plan: Plan, compute: Compute, group: Group
) -> tuple[bool, Any]:
    """Whether to fill batches up, and the data: as a recording wants them, if one may be made."""
    device = next((parameter.device for parameter in model.parameters()), None)
    recorded = compute.record and group.world == 1
    if not recorded or device is None or device.type != "cuda":
        return bool(compute.pad), data
    source = Source(data, precision_of(model))
    sampled = bool(min(plan.rates.tolist()) < 1)
    pad = sampled and source.fillable() if compute.pad is None else compute.pad
    free, _ = torch.cuda.mem_get_info(device)
    there = source.on(device, _RESIDENT * free)
    return pad, data if there is None else there


def _learning_rate(model: nn.Module, data: Any, plan: Plan, loss: Loss) -> float | None:
    """A good one from synthetic data, where that stands for these; otherwise None."""
    arrays = arrays_of(data)
    if arrays is None or len(arrays) != 2 or type(loss) is not nn.CrossEntropyLoss:
        return None
    rows = as_trained(arrays[0], precision_of(model))
    if rows.dim() != 2 or not rows.is_floating_point() or loss.weight is not None:
        return None
    found: float = _later("diminuendo.training", "learning_rate_for")(model, plan, rows.shape[1])
    return found


def _followed(
    plan: Plan | Chosen, lr: float | None, clip: ClipRule | None
) -> tuple[Plan, float | None, ClipRule | None]:
    """The plan, learning rate and clipping rule: those given, else those of a choice."""
    if isinstance(plan, Plan):
        return plan, lr, clip
    if not isinstance(getattr(plan, "plan", None), Plan):
        raise InputError("a Plan, or what dim.tune chose", name="plan", value=plan)
    return plan.plan, plan.lr if lr is None else lr, plan.clip if clip is None else clip


def _warn_of(deprecated: _Deprecated) -> None:
    """A warning for each argument that will go, with what to write instead."""
    for name in deprecated:
        if name not in _INSTEAD:
            raise TypeError(f"fit() got an unexpected keyword argument {name!r}")
        warnings.warn(
            f"fit({name}=…) will go with the next version: write {_INSTEAD[name]}.",
            DeprecationWarning,
            stacklevel=3,
        )


def _checkpoints(
    folder: str | Path | Checkpoints | None, deprecated: _Deprecated
) -> Checkpoints | None:
    if folder is None or isinstance(folder, Checkpoints):
        return folder
    every = deprecated.get("checkpoint_every", Checkpoints.every)
    return Checkpoints(folder, _validate.count("checkpoint_every", every))


def _with(settings: _Settings, deprecated: _Deprecated, *names: str) -> _Settings:
    """The settings, with those of these names that came as arguments of their own."""
    given: dict[str, Any] = {**deprecated}
    return replace(settings, **{name: given[name] for name in names if name in deprecated})


def _paid_by(
    ledger: str | Path | Payer | None,
    budget: str,
    plan: Plan | None,
    data: Any,
    group: Group,
    shown: bool,
) -> Spending:
    def make() -> Spending:
        with reading(shown) as progress:
            return from_ledger(ledger, budget, plan, data=data, progress=progress)

    return for_all_ranks(group, make)
