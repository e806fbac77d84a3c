"""PrivacyEngine: Opacus' entry point, with every step planned, charged and drawn by this library.

Formal guarantees: a gradient reaches the optimiser only after its step was charged; it is
(Σ clip(g_i) + noise) / (examples × sampling rate), over a Poisson sample that this library draws.
`get_epsilon` is a certified upper bound for all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader

from diminuendo import _validate
from diminuendo.adapters.opacus import options
from diminuendo.adapters.opacus.checkpoint import Saving
from diminuendo.adapters.opacus.metered import Accountant, Metered, nominal_plan
from diminuendo.adapters.opacus.parts import (
    PrivateCriterion,
    PrivateHooks,
    PrivateLoader,
    PrivateModule,
    PrivateOptimizer,
    given_parts,
)
from diminuendo.adapters.opacus.run import Run, checked_sigma
from diminuendo.adapters.opacus.validators import Validating
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.planning import Plan, plan
from diminuendo.spending import Payer, Spending, from_ledger

_KEPT_BACK = 2.0**-7
"""The share of a target δ that is kept for rounding errors, which the plan does not count."""


class PrivacyEngine(Validating, Saving):
    """Makes model, optimiser and data loader private, as `opacus.PrivacyEngine` does.

    accountant   taken for compatibility ("prv", "rdp", "gdp"): ε is always this library's certified
                 upper bound
    secure_mode  taken for compatibility: noise is always drawn from a cryptographic generator, and
                 exact
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        _validate.choice("accountant", accountant, ["prv", "rdp", "gdp", Accountant.mechanism()])
        self.secure_mode = secure_mode
        self.accountant = Accountant()
        self.run: Run | None = None
        """What the last `make_private` began."""

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Any = None,
        data_loader: Any,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        poisson_sampling: bool = True,
        clipping: Literal["flat", "per_layer"] = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        schedule: options.Factors | None = None,
        ledger: str | Path | Payer | None = None,
        budget: str | None = None,
    ) -> tuple[Any, ...]:
        """Private counterparts of model, optimiser (and criterion) and loader; no end is planned.

        noise_multiplier  σ: the noise's standard deviation on the sum, in units of the clip norm
        schedule          σ of step t is noise_multiplier × schedule(t), or × the t-th number of a
                          sequence, whose last goes on. Public: not computed from what was released
        ledger, budget    who pays for each step, and by which of its budgets; nobody unless given
        noise_generator   only for tests and experiments: the run is then not private

        The other arguments are Opacus'. Returns (module, optimizer, data_loader), and with
        grad_sample_mode="ghost" (module, optimizer, criterion, data_loader).
        """
        del rand_on_empty  # an empty draw is a batch of no rows, whatever the model makes of it
        module, optimizer, loader = given_parts(module, optimizer, data_loader)
        options.check(module, optimizer, loader, batch_first, poisson_sampling, grad_sample_mode)
        self.validate(module=module)
        sigma, rate = checked_sigma(noise_multiplier), 1 / len(loader)
        factor = options.factors(schedule)
        clip = options.clip_rule(clipping, max_grad_norm, module)
        nominal = nominal_plan(
            sigma=sigma * factor(1),
            rate=rate,
            clip=clip.sensitivity,
            examples=options.examples(loader),
        )
        spending = self._spending(ledger, budget, None, loader) or Metered(nominal.budget)
        self._begin(
            Run(
                module,
                nominal,
                loader,
                clip=clip,
                spending=spending,
                sigma=lambda step: sigma * factor(step),
                reduction=options.reduction(loss_reduction),
                seed=options.seed(noise_generator),
                reserve=None,
            ),
            optimizer,
        )
        return self._parts(optimizer, criterion, grad_sample_mode, wrap_model)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Any = None,
        data_loader: Any,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        poisson_sampling: bool = True,
        clipping: Literal["flat", "per_layer"] = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        schedule: Any = "uniform",
        ledger: str | Path | Payer | None = None,
        budget: str | None = None,
    ) -> tuple[Any, ...]:
        """The same, with noise planned so that `epochs` epochs cost at most (ε, δ); then it ends.

        schedule          "uniform", as in Opacus; "optimal" for planned noise; or whatever else
                          `dim.plan` takes for a schedule, or a Plan for these data and steps
        ledger, budget    who pays for the whole plan before the first step; nobody unless given

        The other arguments are Opacus'. Returns what `make_private` returns.
        """
        del rand_on_empty
        module, optimizer, loader = given_parts(module, optimizer, data_loader)
        options.check(module, optimizer, loader, batch_first, poisson_sampling, grad_sample_mode)
        self.validate(module=module)
        if len(self.accountant):
            raise InputError(
                "one that nothing was trained with: its steps would come on top of target_epsilon",
                name="the PrivacyEngine",
                value=f"{len(self.accountant)} steps",
                remedy="Make another; a ledger adds up what several runs on the same data cost.",
            )
        clip = options.clip_rule(clipping, max_grad_norm, module)
        delta = _validate.real("target_delta", target_delta, above=0, below=1)
        wanted = options.Wanted(
            examples=options.examples(loader),
            clip=clip.sensitivity,
            steps=_validate.count("epochs", epochs) * len(loader),
            sampling_rate=1 / len(loader),
        )
        target = Budget(epsilon=target_epsilon, delta=delta * (1 - _KEPT_BACK))
        planned = (
            options.checked_plan(schedule, target_epsilon, delta, wanted)
            if isinstance(schedule, Plan)
            else plan(target, parameters=options.trained(module), schedule=schedule, **wanted)
        )
        run = Run(
            module,
            planned,
            loader,
            clip=clip,
            spending=self._spending(ledger, budget, planned, loader),
            sigma=None,
            reduction=options.reduction(loss_reduction),
            seed=options.seed(noise_generator),
            reserve=delta - planned.budget.delta,
        )
        self._begin(run, optimizer)
        return self._parts(optimizer, criterion, grad_sample_mode, wrap_model)

    def get_epsilon(self, delta: float) -> float:
        """A certified upper bound on ε at δ for every step that was charged so far, ≥ 0.

        For steps that were fixed in advance; see `Accountant.get_epsilon`.
        """
        return self.accountant.get_epsilon(delta)

    def close(self) -> None:
        """End the last run: the model gets its own forward back, and a ledger what was not used."""
        if self.run is not None:
            self.run.close()

    # How a run is made

    def _begin(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        try:
            run.private.guard.check_optimizer(optimizer)
        except BaseException:
            run.close()
            raise
        self.accountant.watch(run.private)
        self.run = run

    def _parts(
        self, optimizer: torch.optim.Optimizer, criterion: Any, mode: str, wrap: bool
    ) -> tuple[Any, ...]:
        run = self._current()
        module = PrivateModule(run.model, run) if wrap else PrivateHooks(run.model, run)
        ends = (PrivateOptimizer(optimizer, run), PrivateLoader(run))
        if mode != "ghost":
            return module, *ends
        given = nn.CrossEntropyLoss() if criterion is None else criterion
        return module, ends[0], PrivateCriterion(given, run), ends[1]

    def _spending(
        self,
        ledger: str | Path | Payer | None,
        budget: str | None,
        planned: Plan | None,
        loader: DataLoader[Any],
    ) -> Spending | None:
        if ledger is None and budget is None:
            return None
        if budget is None:
            raise InputError(
                "given with a ledger",
                name="budget",
                value=None,
                remedy='make_private(..., ledger="ledger.sqlite", budget="patients").',
            )
        return from_ledger(ledger, budget, planned, data=loader.dataset)
