"""Adaptive spending: may this step be taken, when its σ was chosen after seeing earlier releases?

A filter is asked before a step and answers yes, charging it, or no, changing nothing.

`GaussianFilter` (full-batch steps). Formal guarantee: whatever rule picks each σ_t from what was
released before, the steps that got a yes are together μ-Gaussian differentially private, μ the
budget's: Σ (Δ/σ_t)² ≤ μ² is enough (fully adaptive composition of Gaussian differential privacy,
Smith and Thakurta 2022; Koskela, Tobaben and Honkela 2023). Add-remove or replace-one neighbours.

`RenyiFilter` (full-batch and Poisson-subsampled steps). Formal guarantee: for one order a, fixed
before the first step, the steps that got a yes have Rényi divergence at most B together, whatever
rule picks each (σ_t, rate_t) (Feldman and Zrnic 2021), and so are (B + offset(a, δ), δ)-private.
Add-remove neighbours, or replace-one: there a step's divergence is that of σ/2 for the full batch,
and for a subsampled step at most (a − 1/2)/(a − 1)·D_2a + D_(2a−1), since replacing is removing and
adding (the triangle inequality of Mironov 2017, Proposition 11). Taking, at every step, whichever
order happens to have room would not be covered by that theorem and is not offered.

The order, the budget, δ and the clip norm are not adaptive.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Self, cast

import numpy as np

from diminuendo import _validate
from diminuendo.accounting import renyi
from diminuendo.budget import Budget, Conversion, Relation, as_budget
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep

UNIT = 1 << 200
"""Costs are whole multiples of 2⁻²⁰⁰, rounded up: sums are exact, in any order, reloaded or not."""


_PIECE = 4096
"""Steps whose divergences are worked out at once: each takes as many numbers as the order."""


class _Filter(ABC):
    """A limit, what has been spent of it, and the price of a step; all in units of 2⁻²⁰⁰."""

    kind: str

    def __init__(self, budget: Budget, limit: float) -> None:
        self.budget = budget
        self.limit = math.floor(Fraction(limit) * UNIT)
        self._spent = 0

    @abstractmethod
    def costs(self, steps: Sequence[GaussianStep]) -> list[int]:
        """What each event costs (all `count` of it), in units of 2⁻²⁰⁰, rounded up."""

    @abstractmethod
    def _epsilon(self, spent: Fraction) -> float:
        """A certified ε ≥ 0 of steps that cost this much together, at the budget's δ."""

    @abstractmethod
    def _terms(self) -> dict[str, Any]: ...

    def claim(self, spent: int) -> float:
        """A certified ε of everything that was charged: `spent`, in units of 2⁻²⁰⁰.

        At the budget's δ and relation. Within the limit it is at most the budget's: that is what
        the filter guarantees.
        """
        if spent <= 0:
            return 0.0
        epsilon = self._epsilon(Fraction(spent, UNIT))
        return min(epsilon, self.budget.epsilon) if spent <= self.limit else epsilon

    def fits(self, step: GaussianStep) -> bool:
        """Whether `request` would say yes. Changes nothing."""
        return self._spent + self.costs([step])[0] <= self.limit

    def request(self, step: GaussianStep) -> bool:
        """Yes: the step is charged (all `count` of it) and may be taken. No: nothing changes."""
        cost = self.costs([step])[0]
        if self._spent + cost > self.limit:
            return False
        self._spent += cost
        return True

    @property
    def spent(self) -> float:
        """The share of the limit that is spent, in [0, 1]."""
        return float(Fraction(self._spent, self.limit))

    def state(self) -> dict[str, Any]:
        """Everything that `from_state` needs, as JSON: the budget's terms and what is spent."""
        budget = self.budget
        return {
            "filter": self.kind,
            "epsilon": budget.epsilon,
            "delta": budget.delta,
            "relation": budget.relation,
            "conversion": budget.conversion,
            "spent": str(self._spent),
            **self._terms(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Self:
        """The filter as it was when `state` was taken: the same answers from here on."""
        if state.get("filter") != cls.kind:
            raise InputError(f'"{cls.kind}"', name="filter", value=state.get("filter"))
        try:
            budget = Budget(
                epsilon=state["epsilon"],
                delta=state["delta"],
                relation=cast(Relation, state["relation"]),
                conversion=cast(Conversion, state["conversion"]),
            )
            restored = cls._with_terms(budget, state)
        except (KeyError, TypeError) as error:
            raise InputError("complete", name="the filter's state", value=str(error)) from None
        spent = str(state.get("spent"))
        if not (spent.isascii() and spent.isdecimal()) or int(spent) > restored.limit:
            raise InputError("a whole number within the limit", name="spent", value=spent)
        restored._spent = int(spent)
        return restored

    @classmethod
    @abstractmethod
    def _with_terms(cls, budget: Budget, state: Mapping[str, Any]) -> Self: ...


class GaussianFilter(_Filter):
    """Σ (Δ/σ_t)² ≤ μ², for full-batch steps."""

    kind = "gaussian"

    def __init__(self, budget: Budget | tuple[float, float]) -> None:
        budget = as_budget(budget)
        super().__init__(budget, budget.mu**2 * (1 - 1e-15))

    def costs(self, steps: Sequence[GaussianStep]) -> list[int]:
        """count·(Δ/σ)² of each full-batch event, in units of 2⁻²⁰⁰, rounded up."""
        scale = UNIT * int(self.budget.sensitivity) ** 2
        prices = []
        for step in steps:
            if step.sampling_rate != 1:
                raise InputError(
                    "1 for the Gaussian filter",
                    name="sampling_rate",
                    value=step.sampling_rate,
                    remedy="Subsampled steps need a RenyiFilter; in a ledger, a budget with "
                    'composition="renyi".',
                )
            over, under = step.noise_multiplier.as_integer_ratio()
            prices.append(step.count * -(-scale * under**2 // over**2))
        return prices

    def _epsilon(self, spent: Fraction) -> float:
        mu_squared = float(np.nextafter(float(spent), math.inf))
        return self.budget.epsilon_of(mu_squared / self.budget.sensitivity**2 * (1 + 1e-12))

    def _terms(self) -> dict[str, Any]:
        return {}

    @classmethod
    def _with_terms(cls, budget: Budget, state: Mapping[str, Any]) -> Self:
        del state
        return cls(budget)


class RenyiFilter(_Filter):
    """Σ D_a(σ_t, rate_t) ≤ ε − offset(a, δ) at one whole order a, fixed from the start."""

    kind = "renyi"

    def __init__(self, budget: Budget | tuple[float, float], *, order: int) -> None:
        budget = as_budget(budget)
        self.order = _validate.count("order", order, at_least=2, at_most=4096)
        limit = budget.epsilon - renyi.offset(self.order, budget.delta)
        if limit <= 0:
            raise InputError(
                "large enough that the conversion leaves something to spend",
                name="order",
                value=order,
                remedy="`best_order` finds one.",
            )
        super().__init__(budget, limit * (1 - 1e-12))

    def costs(self, steps: Sequence[GaussianStep]) -> list[int]:
        """count·D_a(σ, rate) of each event, in units of 2⁻²⁰⁰, rounded up."""
        sigmas = np.array([step.noise_multiplier for step in steps])
        rates = np.array([step.sampling_rate for step in steps])
        each = np.empty_like(sigmas)
        for rate in np.unique(rates):
            same = np.flatnonzero(rates == rate)
            for part in np.split(same, range(_PIECE, same.size, _PIECE)):
                each[part] = _divergence(self.budget, self.order, sigmas[part], float(rate))
        if not np.isfinite(each).all():
            raise InputError(
                "large enough for a finite price",
                name="noise_multiplier",
                value=float(sigmas[~np.isfinite(each)][0]),
            )
        return [
            step.count * max(math.ceil(Fraction(cost) * UNIT), 1)
            for step, cost in zip(steps, each.tolist(), strict=True)
        ]

    def _epsilon(self, spent: Fraction) -> float:
        offset, divergence = renyi.offset(self.order, self.budget.delta), float(spent)
        margin = 1e-12 * divergence + 1e-14 * (1 + abs(offset))
        return max(divergence + offset + margin, 0.0)

    def _terms(self) -> dict[str, Any]:
        return {"order": self.order}

    @classmethod
    def _with_terms(cls, budget: Budget, state: Mapping[str, Any]) -> Self:
        return cls(budget, order=state["order"])


def _divergence(
    budget: Budget, order: int, sigmas: _validate.Vector, rate: float
) -> _validate.Vector:
    """An upper bound on a step's Rényi divergence for the budget's relation, for each σ."""
    if budget.relation == "add-remove":
        return renyi.divergence(order, sigmas, rate)
    if rate == 1:
        return renyi.divergence(order, sigmas / budget.sensitivity, rate)
    removed = renyi.divergence(2 * order, sigmas, rate)
    added = renyi.divergence(2 * order - 1, sigmas, rate)
    return (order - 0.5) / (order - 1) * removed + added


def best_order(budget: Budget | tuple[float, float], typical: GaussianStep) -> int:
    """The order at which steps like `typical` can be repeated most often within the budget."""
    budget, sigma = as_budget(budget), np.array([typical.noise_multiplier])
    room = {
        order: (budget.epsilon - renyi.offset(order, budget.delta))
        / float(_divergence(budget, order, sigma, typical.sampling_rate)[0])
        for order in renyi.ORDERS
    }
    order = max(room, key=lambda a: room[a])
    if room[order] <= 0:
        raise InputError(
            "large enough for the Rényi conversion",
            name="epsilon",
            value=budget.epsilon,
            remedy=f"At delta={budget.delta:g} no order fits.",
        )
    return order
