"""The seam between who releases and who keeps the budget: ask before every release.

Training and ledger both know this module and not each other. Training needs four verbs of a
`Spending`, in this order:

    resume   begin, or go on from a saved state; returns how many steps are spent
    fits     may I? whether a step would be granted now
    request  ask: the step is charged, or BudgetRefused is raised and nothing has changed
    close    a clean end; what was granted and not asked for goes back

Noise may be drawn only after `request` returned. What was granted counts as spent, whether or not
the step then ran.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

from diminuendo import _later, accounting, events
from diminuendo.accounting.filters import GaussianFilter, RenyiFilter
from diminuendo.budget import Budget
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan


class Spending(ABC):
    """A budget that is asked before each step, and what it has granted so far.

    budget    by whose terms (δ, relation, conversion) ε is stated
    steps     how many single steps were granted
    adaptive  whether steps may be chosen by what earlier ones released
    durable   whether it still knows after a crash which steps may have been released
    unit      what one of the plan's examples must be: "example" for a row, else a person's all

    As a context it resumes at the start and closes at the end.
    """

    adaptive: bool = False
    durable: bool = False
    unit: str = "example"

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self._granted: list[tuple[float, float, int]] = []
        self.steps = 0

    @property
    def granted(self) -> tuple[GaussianStep, ...]:
        """Every granted event, in order; equal neighbours are one event with a count."""
        return tuple(
            GaussianStep(noise_multiplier=sigma, sampling_rate=rate, count=count)
            for sigma, rate, count in self._granted
        )

    @abstractmethod
    def fits(self, event: GaussianStep) -> bool:
        """Whether a request would be granted now. Changes nothing."""

    def request(self, event: GaussianStep) -> None:
        """Charge the event, or raise BudgetRefused and change nothing."""
        self._charge(event)
        self._record(event)

    def resume(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        seen: int | None = None,
        receipt: Mapping[str, Any] | None = None,
        events: Iterable[GaussianStep] = (),
    ) -> int:
        """Begin, or go on from a saved `state()`; returns how many steps are spent.

        seen    steps before this one may have been released, as a journal says; None where there
                is no journal
        receipt  what the journal kept of `receipt()`, by which a ledger believes it or not
        events  what the steps after the saved state are. Those that may have been released are
                charged and must not be taken again: the next step is the one after them
        """
        del receipt
        if state is not None:
            self._restore(state)
        self._charge_lost(events, self.steps if seen is None else seen)
        return self.steps

    def close(self, reason: str = "done") -> None:  # noqa: B027
        """A clean end, for the reason that is recorded. What was not asked for goes back."""

    def epsilon(self) -> float:
        """The ε ≥ 0 that may be claimed for what was granted, at the budget's δ and relation.

        Steps that were fixed in advance are accounted, and so is a number of them that was. Who
        stopped a plan early because of what it had released can claim the plan's own ε, and not
        this smaller one. Where steps were chosen on the way, accounting them would not be covered;
        the filter's guarantee is: the whole budget, from the first step on.
        """
        if self.adaptive:
            return self.budget.epsilon if self.steps else 0.0
        return accounting.claim(self.granted, self.budget)

    def state(self) -> dict[str, Any]:
        """What `resume` needs later, as JSON."""
        return {"granted": [events.to_dict(event) for event in self.granted]}

    def receipt(self, upto: int | None = None) -> dict[str, Any]:
        """What a journal that says "steps before `upto` may be released" keeps beside it, as JSON.

        None says that nothing more may be released than what was requested.
        """
        del upto
        return {}

    def cite(self) -> dict[str, Any]:
        """Where the spending is on record, so that a claim can be checked later; else empty."""
        return {}

    def __enter__(self) -> Self:
        self.resume()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close("done" if kind is None else kind.__name__)

    @abstractmethod
    def _charge(self, event: GaussianStep) -> None:
        """Charge the event, or raise BudgetRefused and change nothing."""

    def _record(self, event: GaussianStep) -> None:
        """Keep an event that was charged."""
        self.steps += event.count
        sigma, rate, count = event.noise_multiplier, event.sampling_rate, event.count
        if self._granted and self._granted[-1][:2] == (sigma, rate):
            count += self._granted.pop()[2]
        self._granted.append((sigma, rate, count))

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Charge again what a saved state had been granted."""
        if state.get("run"):
            raise InputError(
                "taken up with the ledger that pays for it",
                name="a run",
                value=state["run"],
                remedy='fit(..., ledger=URL, budget="name").',
            )
        self._refuse_used()
        for data in state["granted"]:
            self.request(events.from_dict(data))

    def _refuse_used(self) -> None:
        if self.steps:
            raise InputError(
                "one that has granted nothing yet",
                name="the spending that goes on from a saved state",
                value=f"{self.steps} steps granted",
            )

    def _charge_lost(self, coming: Iterable[GaussianStep], upto: int) -> None:
        """Charge the steps before `upto`. What would be refused was refused, and not released."""
        with suppress(BudgetRefused):
            for event in first_steps(coming, upto - self.steps):
                self._charge_one_lost(event)

    def _charge_one_lost(self, event: GaussianStep) -> None:
        self.request(event)


def first_steps(events: Iterable[GaussianStep], steps: int) -> Iterator[GaussianStep]:
    """The events of the first so many single steps."""
    left = steps
    for event in events:
        if left <= 0:
            return
        yield event if event.count <= left else replace(event, count=left)
        left -= event.count


class PlanSpending(Spending):
    """The plan's own steps, in the plan's order: exactly T of them, and no others."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.budget)
        self.plan = plan
        self._sigmas: list[float] = plan.sigmas.tolist()
        self._rates: list[float] = plan.rates.tolist()

    def fits(self, event: GaussianStep) -> bool:
        """Whether the event is the plan's next."""
        return self._is_next(event)

    def _is_next(self, event: GaussianStep) -> bool:
        ahead = slice(self.steps, self.steps + event.count)
        return (
            self.steps + event.count <= self.plan.steps
            and self._sigmas[ahead] == [event.noise_multiplier] * event.count
            and self._rates[ahead] == [event.sampling_rate] * event.count
        )

    def _charge(self, event: GaussianStep) -> None:
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
    """Any steps, as long as they fit a privacy filter: for σ chosen while training."""

    adaptive = True

    def __init__(self, filter: GaussianFilter | RenyiFilter) -> None:
        super().__init__(filter.budget)
        self._filter = filter

    def fits(self, event: GaussianStep) -> bool:
        """Whether the filter would grant the event now."""
        return self._filter.fits(event)

    def _charge(self, event: GaussianStep) -> None:
        if not self._filter.request(event):
            raise BudgetRefused(
                f"{1 - self._filter.spent:.3%} of the budget is left, too little for {event}."
            )


@runtime_checkable
class Payer(Protocol):
    """Whoever keeps named budgets and lets a run spend one of them: a ledger."""

    def pay(
        self,
        name: str,
        plan: Plan | None = None,
        *,
        data: Any = None,
        progress: Callable[[int, int], None] = ...,
    ) -> Spending:
        """A spending that asks the budget of this name."""


def _silent(done: int, total: int) -> None:
    del done, total


def from_ledger(
    ledger: str | Path | Payer | None,
    name: str,
    plan: Plan | None,
    *,
    data: Any = None,
    progress: Callable[[int, int], None] = _silent,
) -> Spending:
    """`ledger.pay(name, plan, data=data)` for a ledger, its URL or path, or None for the default.

    progress  told how many bytes of the data have been read for their identity, and of how many
    """
    payer: Payer = (
        ledger if isinstance(ledger, Payer) else _later(__name__, "Ledger")(ledger, create=False)
    )
    return payer.pay(name, plan, data=data, progress=progress)
