"""What a private fit will run, and what it costs: the plan from what was given, the rest chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sklearn.base import BaseEstimator

from diminuendo import _validate, accounting
from diminuendo.adapters.sklearn.around import Cost
from diminuendo.adapters.sklearn.preprocessing import paid_by
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan, plan
from diminuendo.planning.planner import steps_of
from diminuendo.tuning import Candidate, Settings, Shape, Space, settings_for
from diminuendo.tuning.space import make_plan


class Planned(BaseEstimator):  # type: ignore[misc]
    """An estimator's parameters that decide what is run."""

    epsilon: float
    delta: float
    plan: Plan | Any
    steps: int | None
    epochs: float | None
    lr: float | None
    clip: float | None
    gamma: float | None
    schedule: str | None
    momentum: float | None
    sampling_rate: float
    hidden: int
    scaler: Any
    ledger: str | None
    budget: str | None
    random_state: int | None
    progress: bool

    def _budget(self) -> Budget:
        return Budget(epsilon=self.epsilon, delta=self.delta)

    def _planned(
        self, examples: int, columns: int, outputs: int, parameters: int, scaling: Any
    ) -> tuple[Plan, float]:
        """The plan and its learning rate; with what scaling releases, within the budget."""
        if self.plan is not None:
            return self._given_plan(examples, scaling)
        budget = self._budget()
        make, lr = self._maker(examples, columns, outputs, parameters)
        return (make(budget) if scaling is None else _beside(scaling, budget, make)), lr

    def _given_plan(self, examples: int, scaling: Any) -> tuple[Plan, float]:
        """A plan or what `tune` chose, with its learning rate."""
        chosen: Any = getattr(self.plan, "best", self.plan)  # of a TuningResult
        given = getattr(chosen, "plan", chosen)
        if not isinstance(given, Plan):
            raise InputError("a Plan, or what tune found", name="plan", value=self.plan)
        if given is not chosen:
            self._check_choice(chosen)
        if given.examples != examples:
            raise InputError(
                f"for the {examples} examples that there are",
                name="the plan",
                value=f"one for {given.examples}",
                remedy="A fold of a cross-validation has fewer: give epsilon and delta there.",
            )
        if scaling is not None:
            raise InputError(
                "left out where a PrivateScaler is to share the budget",
                name="plan",
                value="given",
                remedy="Give epsilon and delta, or scale in a Pipeline for a budget apart.",
            )
        lr = getattr(chosen, "lr", None) if given is not chosen and self.lr is None else self.lr
        return given, _validate.positive("lr", lr, remedy="A plan alone does not tell it.")

    def _check_choice(self, chosen: Any) -> None:
        """What `tune` chose must be for a model of this kind."""
        hidden, rule = getattr(chosen, "hidden", None), chosen.candidate.clipping
        if hidden != self.hidden:
            raise InputError(
                f"that of the choice ({'a model of its own' if hidden is None else hidden})",
                name="hidden",
                value=self.hidden,
                remedy='Or tune with models=[hidden units] or ["linear"] alone.',
            )
        if rule != "flat":
            raise InputError(
                "a choice with flat clipping",
                name="plan",
                value=rule,
                remedy='Tune with space=Space(clipping="flat"), or train with fit.',
            )

    def _maker(
        self, examples: int, columns: int, outputs: int, parameters: int
    ) -> tuple[Callable[[Budget], Plan], float]:
        """How to plan for a budget, and the learning rate: as given, the rest chosen."""
        steps = self.steps
        if self.epochs is not None:
            steps = steps_of(self.epochs, self.steps, self.sampling_rate)
        given = {"steps": steps, "lr": self.lr, "clip": self.clip}
        left_out = [name for name, value in given.items() if value is None]
        common: dict[str, Any] = {"examples": examples, "parameters": parameters}
        if not left_out:
            lr = _validate.positive("lr", self.lr)
            common |= {"steps": steps, "clip": self.clip, "sampling_rate": self.sampling_rate}
            common |= {"momentum": self.momentum, "schedule": self.schedule or "optimal"}
            gamma = 0.98 if self.gamma is None else self.gamma
            return lambda budget: plan(budget, gamma=gamma, **common), lr
        candidate = self._choose(examples, columns, outputs, given, left_out)
        if self.schedule is None and self.gamma is None:
            return lambda budget: make_plan(candidate, budget, examples, parameters), candidate.lr
        common |= {"steps": candidate.steps, "clip": candidate.clip}
        common |= {"sampling_rate": self.sampling_rate, "momentum": candidate.momentum or None}
        common |= {"schedule": self.schedule or "optimal", "gamma": self.gamma}
        return lambda budget: plan(budget, **common), candidate.lr

    def _choose(
        self, examples: int, columns: int, outputs: int, given: dict[str, Any], missing: list[str]
    ) -> Candidate:
        """Good settings for what nobody gave, from synthetic data of the same public shape."""
        own_noise = self.schedule is not None or self.gamma is not None
        fixed = Space(
            **given,
            momentum=self.momentum,
            sampling_rate=self.sampling_rate,
            fall=1.0 if own_noise else None,
            lr_shape="constant" if own_noise else None,
        )
        found = self._settings(examples, columns, outputs, fixed)
        found.say(", ".join(missing), stacklevel=7)
        return found.candidate

    def _settings(self, examples: int, columns: int, outputs: int, fixed: Space) -> Settings:
        """What is best on synthetic data of this shape."""
        shape = Shape(
            examples=examples, features=columns, classes=outputs, largest_norm=columns**0.5
        )
        return settings_for(
            self._budget(), shape, hidden=self.hidden, fixed=fixed, progress=self.progress
        )

    def cost_of_a_fit(self, changed: dict[str, Any]) -> Cost:
        """What one fit costs with these parameters changed."""
        own = type(self)(**self._with(changed))  # clone(self) would ask this again
        if own.plan is not None:
            best: Any = getattr(own.plan, "best", own.plan)
            given: Plan = getattr(best, "plan", best)
            return Cost(given.events, given.budget, paid_by(own.ledger, own.budget))
        budget = own._budget()
        if own.sampling_rate == 1:  # all full-batch plans of one budget cost the same
            events: tuple[GaussianStep, ...] = (GaussianStep(noise_multiplier=budget.R**-0.5),)
        elif own.lr is None or own.clip is None or (own.steps is None and own.epochs is None):
            events = ()  # its settings are chosen when it is fitted
        else:
            events = own._planned(1000, 1, 2, 2, None)[0].events
        return Cost(events, budget, paid_by(own.ledger, own.budget))

    def _with(self, changed: dict[str, Any]) -> dict[str, Any]:
        shallow = {name: value for name, value in changed.items() if "__" not in name}
        return {**self.get_params(deep=False), **shallow}


def _beside(first: GaussianStep, budget: Budget, make: Any) -> Plan:
    """A plan whose steps, together with an earlier release, cost no more than the budget."""
    left = budget.R - 1 / first.noise_multiplier**2
    if left <= 0:
        raise InputError(
            "less than the whole budget",
            name="what the scaler spends",
            value=f"noise multiplier {first.noise_multiplier:.3g}",
            remedy="Give the scaler a smaller epsilon, or the estimator a larger one.",
        )
    epsilon = budget.epsilon_of(left)
    while epsilon > 0:
        planned: Plan = make(replace(budget, epsilon=epsilon))
        beyond = accounting.claim((first, *planned.events), budget) - budget.epsilon
        if beyond <= 0:
            return planned
        epsilon -= 1.1 * beyond + 1e-9 * budget.epsilon
    raise InputError("less than the whole budget", name="what the scaler spends", value=first)
