"""The seam between who releases and who keeps the budget: `request(event)` before every release.

Training and ledger both know this module and not each other. A `Spending` answers a request by
recording it, or by raising BudgetRefused with nothing changed; only after it returned may noise be
drawn. What was granted counts as spent, whether or not the step then ran.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from diminuendo import accounting, events
from diminuendo.accounting.filters import GaussianFilter, RenyiFilter
from diminuendo.budget import Budget
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan


class Spending(ABC):
    """A budget that is asked before each step, and what it has granted so far."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._granted: list[tuple[float, float, int]] = []
        self.steps = 0

    @property
    def granted(self) -> tuple[GaussianStep, ...]:
        """Everything granted, in order, runs of equal steps gathered."""
        return tuple(
            GaussianStep(noise_multiplier=sigma, sampling_rate=rate, count=count)
            for sigma, rate, count in self._granted
        )

    def begin(self) -> None:  # noqa: B027
        """Called once before the first request, by the first of several ranks."""

    def end(self, reason: str = "done") -> None:  # noqa: B027
        """Called once at a clean end, by the first of several ranks; `reason` is recorded."""

    def cite(self) -> dict[str, Any]:
        """Where the spending is on record, so that a claim can be checked later."""
        return {}

    @abstractmethod
    def fits(self, event: GaussianStep) -> bool:
        """Whether a request would be granted now. Changes nothing."""

    def request(self, event: GaussianStep) -> None:
        """Charge the event, or raise BudgetRefused and change nothing."""
        self._charge(event)
        self.note(event)

    @abstractmethod
    def _charge(self, event: GaussianStep) -> None: ...

    def note(self, event: GaussianStep) -> None:
        """Record an event that was charged elsewhere (by the first of several ranks)."""
        self.steps += event.count
        sigma, rate, count = event.noise_multiplier, event.sampling_rate, event.count
        if self._granted and self._granted[-1][:2] == (sigma, rate):
            count += self._granted.pop()[2]
        self._granted.append((sigma, rate, count))

    def skip(self, event: GaussianStep) -> None:
        """Charge a step that may have been released before a crash and is not taken again."""
        self.request(event)

    def not_released_from(self, step: int) -> int:
        """Told after `restore` and `begin`: from this step on nothing can have been released.

        Returns the step to go on from: the ones before it may have been.
        """
        return max(step, self.steps)

    def epsilon(self) -> float:
        """A certified upper bound on what has been granted, at the budget's δ and relation."""
        sigmas, rates = schedule(self.granted)
        if (rates == 1).all():
            spent = accounting.account.releases(sigmas, rates).spent if sigmas.size else 0.0
            return self.budget.epsilon_of(spent)
        return accounting.epsilon(sigmas, self.budget.delta, rates, relation=self.budget.relation)

    def state(self) -> dict[str, Any]:
        """What `restore` needs, as JSON."""
        return {"granted": [events.to_dict(event) for event in self.granted]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Charge again what a saved state had been granted."""
        if state.get("run"):
            raise InputError(
                "taken up with the ledger that pays for it",
                name="a run",
                value=state["run"],
                remedy='fit(..., ledger=URL, budget="name").',
            )
        if self._granted:
            raise InputError("restored before the first request", name="spending", value=self.steps)
        for data in state["granted"]:
            self.request(events.from_dict(data))


def schedule(granted: Iterable[GaussianStep]) -> tuple[np.ndarray, np.ndarray]:
    """Noise multipliers and sampling rates, one for each single step."""
    rows = list(granted)
    counts = np.array([event.count for event in rows], dtype=np.int64)
    sigmas = np.array([event.noise_multiplier for event in rows], dtype=np.float64)
    rates = np.array([event.sampling_rate for event in rows], dtype=np.float64)
    return np.repeat(sigmas, counts), np.repeat(rates, counts)


class PlanSpending(Spending):
    """The plan's own steps, in the plan's order: exactly T of them, and no others."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.budget)
        self.plan = plan
        self._sigmas: list[float] = plan.sigmas.tolist()
        self._rates: list[float] = plan.rates.tolist()

    def _is_next(self, event: GaussianStep) -> bool:
        ahead = slice(self.steps, self.steps + event.count)
        return (
            self.steps + event.count <= self.plan.steps
            and self._sigmas[ahead] == [event.noise_multiplier] * event.count
            and self._rates[ahead] == [event.sampling_rate] * event.count
        )

    def fits(self, event: GaussianStep) -> bool:
        return self._is_next(event)

    def _charge(self, event: GaussianStep) -> None:
        self.check(event)

    def check(self, event: GaussianStep) -> None:
        """Raise BudgetRefused where the event is not the plan's next."""
        if self.steps + event.count > self.plan.steps:
            raise BudgetRefused(
                f"The plan's {self.plan.steps} steps are spent ({self.steps} granted, "
                f"{event.count} more asked for)."
            )
        if not self._is_next(event):
            raise BudgetRefused(
                f"Step {self.steps + 1} of the plan has σ = {self.plan.sigmas[self.steps]:g} at "
                f"rate {self.plan.rates[self.steps]:g}; asked for was {event}."
            )


class AdaptiveSpending(Spending):
    """Any steps, as long as the filter has room: for σ chosen while training."""

    def __init__(self, filter: GaussianFilter | RenyiFilter) -> None:
        super().__init__(filter.budget)
        self._filter = filter

    def fits(self, event: GaussianStep) -> bool:
        return self._filter.fits(event)

    def _charge(self, event: GaussianStep) -> None:
        if not self._filter.request(event):
            raise BudgetRefused(
                f"{1 - self._filter.spent:.3%} of the budget is left, too little for {event}."
            )

    def epsilon(self) -> float:
        """What the filter guarantees: the whole budget, once a first step was granted.

        The steps were chosen adaptively, so accounting them as if they had been fixed in advance
        would not be covered; the filter's guarantee is.
        """
        return self.budget.epsilon if self._granted else 0.0


class NotedSpending(Spending):
    """The record of a rank that does not ask: the first of several asks for all."""

    def fits(self, event: GaussianStep) -> bool:
        raise NotImplementedError(f"the first rank is asked whether {event} fits")

    def _charge(self, event: GaussianStep) -> None:
        raise NotImplementedError(f"the first rank is asked for {event}")

    def restore(self, state: Mapping[str, Any]) -> None:
        for data in state["granted"]:
            self.note(events.from_dict(data))


def from_ledger(
    url: str | None,
    name: str,
    plan: Plan | None,
    *,
    data: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,  # noqa: ARG005
) -> Spending:
    """A ledger's budget behind this seam; `data` is checked to be the budget's."""
    from diminuendo.ledger import Ledger, LedgerSpending, identify

    ledger = Ledger(url, create=False)
    known = data is not None and ledger.status(name).terms.data is not None
    identity = identify(data, progress=progress) if known else None
    return LedgerSpending(ledger, name, plan, data=identity)
