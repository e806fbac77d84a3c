"""LedgerSpending: the budget request of Algorithm 1, made durable.

A plan's steps are granted all at once, or so many ahead; step by step where there is no plan. In
both, steps are *started* in blocks, on disk before any of them is released: after a crash that is
what may have been seen. A block is as long as keeps the ledger below a hundredth of the time that
training takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

from diminuendo import _validate, events
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger.book import Ledger
from diminuendo.planning import Plan
from diminuendo.spending import PlanSpending, Spending

_SHARE = 0.01
_LONGEST_BLOCK = 4096


class LedgerSpending(Spending):
    """Ask a ledger before every step. Use as a context, or call `begin` and `end`.

        with LedgerSpending(ledger, "patients", plan) as spending:
            private = PrivateGradients(model, plan, spending=spending)

    plan    whose steps will be asked for, in order; without one, any steps, one by one
    ahead   with a plan: "plan" grants all of it at the start, a number that many steps at a time
    block   how many steps are started at a time; as many as the clock says unless given
    data    the identity of the data (`identify`), checked against the budget's
    """

    def __init__(
        self,
        ledger: Ledger,
        name: str,
        plan: Plan | None = None,
        *,
        ahead: int | Literal["plan"] = "plan",
        block: int | None = None,
        data: str | None = None,
        label: str = "",
    ) -> None:
        terms = ledger.status(name).terms
        if plan is not None and plan.budget.relation != terms.budget.relation:
            raise InputError(
                f"that of the budget {name!r} ({terms.budget.relation})",
                name="the plan's relation",
                value=plan.budget.relation,
            )
        super().__init__(terms.budget if plan is None else plan.budget)
        self.ledger, self.name, self.run = ledger, name, ""
        self._order = None if plan is None else PlanSpending(plan)
        self._ahead = ahead if ahead == "plan" else _validate.count("ahead", ahead)
        self._block = None if block is None else _validate.count("block", block)
        self._data, self._label = data, label
        self._first = self._granted_upto = self._started = self._unknown = 0
        self._took, self._asked_at, self._asked_steps = 0.0, 0.0, 0

    @property
    def plan(self) -> Plan | None:
        return None if self._order is None else self._order.plan

    def begin(self) -> None:
        """Open the run, or go on with the one of a restored state; grant the plan if asked so."""
        if not self.run or not self._reattach():
            digest = "" if self.plan is None else self.plan.digest
            self.run = self.ledger.open_run(
                self.name, label=self._label, data=self._data, plan=digest
            ).id
            self._first = self._granted_upto = self._started = self._unknown = self.steps
        self._asked_at = time.monotonic()
        if self.plan is not None and self._ahead == "plan" and self._granted_upto < self.plan.steps:
            try:
                self._grant(self.plan.steps - self.steps, start=False)
            except BudgetRefused:
                self.end("refused")
                raise

    def _reattach(self) -> bool:
        """Whether the restored run is still open; what it started may have been released."""
        run = self.ledger.run(self.run)
        if run.status != "open":
            return False
        self._granted_upto, self._started = self._first + run.granted, self._first + run.started
        self._unknown = self._started
        return True

    def fits(self, event: GaussianStep) -> bool:
        if self._order is not None and not self._order.fits(event):
            return False
        return self.steps + event.count <= self._granted_upto or self.ledger.fits(
            self.name, [event]
        )

    def _charge(self, event: GaussianStep) -> None:
        if not self.run:
            self.begin()
        if self._order is not None:
            self._order.check(event)
        if self.steps < self._unknown:
            raise InputError(
                f"past step {self._unknown}",
                name="the next step",
                value=self.steps + 1,
                remedy="Steps up to there may have been released before the crash: skip them.",
            )
        upto = self.steps + event.count
        if upto > self._granted_upto:
            self._grant_next(event)
        elif upto > self._started:
            self._start(max(upto, min(self.steps + self._length(), self._granted_upto)))

    def skip(self, event: GaussianStep) -> None:
        """Count a step that was started before a crash: it is charged, and not taken again."""
        if self.steps + event.count > self._started:
            self.request(event)
        else:
            self.note(event)

    def note(self, event: GaussianStep) -> None:
        super().note(event)
        if self._order is not None:
            self._order.note(event)

    def _grant_next(self, event: GaussianStep) -> None:
        if self.plan is None or event.count > 1:
            self._charge_events([event], start=True, most=False)
        else:
            ahead = self._length() if self._ahead == "plan" else int(self._ahead)
            self._grant(ahead, start=True)

    def _grant(self, steps: int, *, start: bool) -> None:
        """The plan's next steps; without `start`, all of them or none."""
        plan = self.plan
        assert plan is not None
        upto = min(self.steps + steps, plan.steps)
        coming = events.from_schedule(plan.sigmas[self.steps : upto], plan.rates[self.steps : upto])
        self._charge_events(list(coming), start=start, most=start)

    def _charge_events(self, coming: list[GaussianStep], *, start: bool, most: bool) -> None:
        begun = time.monotonic()
        grant = self.ledger.grant(
            self.run, coming, start=start, most=most, confirmed=self._confirmed()
        )
        self._granted_upto = self._first + grant.first + grant.steps
        if start:
            self._started = self._granted_upto
        self._measure(begun)

    def _start(self, upto: int) -> None:
        begun = time.monotonic()
        self.ledger.start(self.run, upto - self._first, confirmed=self._confirmed())
        self._started = upto
        self._measure(begun)

    def _confirmed(self) -> int:
        """Whoever asks for the next step has taken those before it."""
        return max(min(self.steps, self._started) - self._first, 0)

    def _measure(self, begun: float) -> None:
        self._asked_at, self._asked_steps = time.monotonic(), self.steps
        self._took = self._asked_at - begun

    def _length(self) -> int:
        """So many steps that asking takes a hundredth of the time that taking them does."""
        if self._block is not None:
            return self._block
        taken = self.steps - self._asked_steps
        if taken <= 0:
            return 8
        each = (time.monotonic() - self._asked_at) / taken
        wanted = math.ceil(self._took / (_SHARE * max(each, 1e-9)))
        return min(max(wanted, 1), _LONGEST_BLOCK)

    def end(self, reason: str = "done") -> None:
        """A clean end: what was granted and not asked for goes back."""
        if self.run and self.ledger.run(self.run).status == "open":
            used = max(self.steps, self._unknown) - self._first
            self.ledger.close_run(self.run, used=used, reason=reason)

    def epsilon(self) -> float:
        """Of a plan's steps, their own; of steps chosen on the way, what the filter guarantees."""
        if self.plan is not None:
            return super().epsilon()
        return self.budget.epsilon if self.steps else 0.0

    def state(self) -> dict[str, Any]:
        return {**super().state(), "run": self.run, "first": self._first}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What a saved run had been granted. `begin` goes on with it where it is still open."""
        if self.steps:
            raise InputError("restored before the first request", name="spending", value=self.steps)
        for data in state["granted"]:
            self.note(events.from_dict(data))
        self.run, self._first = str(state.get("run", "")), int(state.get("first", 0))

    def not_released_from(self, step: int) -> None:
        self._unknown = min(self._unknown, max(step, self.steps))

    def cite(self) -> dict[str, Any]:
        head = self.ledger.head
        return {
            "ledger": head.ledger,
            "address": self.ledger.address,
            "budget": self.name,
            "run": self.run,
            "record": head.seq,
            "head": head.digest,
        }

    def __enter__(self) -> Self:
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end("done" if kind is None else kind.__name__)
