"""LedgerSpending: the budget request of Algorithm 1, made durable.

A plan's steps are granted all at once, or so many ahead; step by step where there is no plan. In
both, steps are *started* in blocks, on disk before any of them is released: after a crash that is
what may have been seen. A block is as long as keeps the ledger near a two-hundredth of the time
that training takes.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, Self

from diminuendo import _validate, events
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger.book import Ledger
from diminuendo.ledger.rows import taken_over
from diminuendo.planning import Plan
from diminuendo.spending import PlanSpending, Spending

_SHARE = 0.005
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
        self.runs: list[str] = []
        """All runs that have paid: an interrupted one goes on in another."""
        self._order = None if plan is None else PlanSpending(plan)
        self._ahead = ahead if ahead == "plan" else _validate.count("ahead", ahead)
        self._block = None if block is None else _validate.count("block", block)
        self._data, self._label = data, label
        self._first = self._granted_upto = self._started = self._unknown = self._turn = 0
        self._lock = threading.RLock()
        self._process = 0
        self._over = self._in_doubt = self._alone = False
        self._took, self._asked_at, self._asked_steps = 0.0, 0.0, 0

    @property
    def plan(self) -> Plan | None:
        return None if self._order is None else self._order.plan

    def begin(self) -> None:
        """Open the run, or go on with the one of a restored state; grant the plan if asked so."""
        self._process, self._over, self._in_doubt = os.getpid(), False, False
        if self.run and self.plan is not None and self.steps == self.plan.steps:
            self._over = self.ledger.run(self.run).status != "open"
            if self._over:
                return
        attached = bool(self.run) and self._reattach()
        try:
            if not attached:
                self._open()
            self._asked_at = time.monotonic()
            if self.plan is not None and self._ahead == "plan":
                self._grant(self.plan.steps, start=False)
        except BudgetRefused:
            self.end("refused")
            raise

    def _reattach(self) -> bool:
        """Whether the restored run is still open; what it started may have been released.

        That the state was the last to have the run shows in whose turn it was: a copy of it that
        went on elsewhere may have released what was started since.
        """
        before = self.ledger.run(self.run)
        if before.budget != self.name:
            raise InputError(
                f"that of the run that is taken up ({before.budget})",
                name="the budget",
                value=self.name,
            )
        if before.status != "open":
            return False
        run = self.ledger.resume_run(self.run, data=self._data)
        self._alone, self._turn = run.generation == self._turn + 1, run.generation
        self._granted_upto, self._started = self._first + run.granted, self._first + run.started
        self._unknown = self._started
        return True

    def _open(self) -> None:
        """A new run. A restored state's steps that no earlier run has paid for are charged."""
        paid = self._paid_before() if self.run else 0
        digest = "" if self.plan is None else self.plan.digest
        run = self.ledger.open_run(self.name, label=self._label, data=self._data, plan=digest)
        self.run, self._turn, self._alone = run.id, run.generation, False
        self.runs.append(run.id)
        self._first = self._granted_upto = self._started = self._unknown = paid
        if paid < self.steps:
            self._charge_events(_after(self.granted, paid), start=True, partial=False)

    def _paid_before(self) -> int:
        """Up to where the run that is over has paid for this state's steps and the next ones.

        Where a copy of the state went on with it, the next ones were the copy's.
        """
        before = self.ledger.run(self.run)
        paid = self._first + before.started
        return paid if before.generation == self._turn else min(paid, self.steps)

    def fits(self, event: GaussianStep) -> bool:
        if self._over or (self._order is not None and not self._order.fits(event)):
            return False
        granted = self._order is not None and self.steps + event.count <= self._granted_upto
        return granted or self.ledger.fits(self.name, [event])

    def request(self, event: GaussianStep) -> None:
        with self._lock:
            super().request(event)

    def _charge(self, event: GaussianStep) -> None:
        self._check_hands()
        if self._order is not None:
            self._order.check(event)
        if self.steps < self._unknown:
            raise InputError(
                f"past step {self._unknown}",
                name="the next step",
                value=self.steps + 1,
                remedy="Steps up to there may have been released before the crash: skip them.",
            )
        if self._in_doubt:
            self._look_again()
        upto = self.steps + event.count
        if self.plan is None:
            self._charge_events([event], start=True, partial=False)
            self._count_lost(self._granted_upto - upto)
        elif upto > self._granted_upto:
            self._grant_next(upto)
        elif upto > self._started:
            self._start(max(upto, min(self.steps + self._length(), self._granted_upto)))

    def _check_hands(self) -> None:
        """A run ends once, and is one process's: a fork would release the same steps again."""
        if self._over:
            raise InputError(
                "open", name="the run", value="ended", remedy="What it had left was returned."
            )
        if not self._process:
            self.begin()
        if self._process != os.getpid():
            raise InputError(
                f"asked by the process that began it ({self._process})",
                name="the run",
                value=os.getpid(),
                remedy="Begin another in this process.",
            )

    def _look_again(self) -> None:
        """After an answer that was lost: what was granted all the same."""
        run = self.ledger.run(self.run)
        if run.status != "open" or run.generation != self._turn:
            raise taken_over(run)
        self._granted_upto, self._started = self._first + run.granted, self._first + run.started
        self._in_doubt = False

    def _count_lost(self, steps: int) -> None:
        """Without a plan, grants whose answer was lost or not used count as taken."""
        self._first -= steps
        self._granted_upto -= steps
        self._started -= steps

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

    def _grant_next(self, upto: int) -> None:
        """At least up to there; and some ahead, as many as fit."""
        if upto > self._granted_upto + 1:
            self._grant(upto, start=True)
        else:
            ahead = self._length() if self._ahead == "plan" else int(self._ahead)
            self._grant(self._granted_upto + ahead, start=True, partial=True)

    def _grant(self, upto: int, *, start: bool, partial: bool = False) -> None:
        """The plan's steps from the first that is not granted yet."""
        plan, at = self.plan, self._granted_upto
        assert plan is not None
        upto = min(upto, plan.steps)
        if at < upto:
            coming = events.from_schedule(plan.sigmas[at:upto], plan.rates[at:upto])
            self._charge_events(list(coming), start=start, partial=partial)

    def _charge_events(self, coming: list[GaussianStep], *, start: bool, partial: bool) -> None:
        begun, self._in_doubt = time.monotonic(), True
        confirmed = self._confirmed()
        grant = self.ledger.grant(
            self.run,
            coming,
            start=start,
            partial=partial,
            confirmed=confirmed,
            generation=self._turn,
        )
        self._granted_upto = self._first + grant.first + grant.steps
        if start:
            self._started = self._granted_upto
        self._measure(begun)

    def _start(self, upto: int) -> None:
        begun, self._in_doubt = time.monotonic(), True
        confirmed = self._confirmed()
        self.ledger.start(self.run, upto - self._first, confirmed=confirmed, generation=self._turn)
        self._started = upto
        self._measure(begun)

    def _confirmed(self) -> int:
        """Whoever asks for the next step has taken those before it."""
        return max(min(self.steps, self._started) - self._first, 0)

    def _measure(self, begun: float) -> None:
        self._asked_at, self._asked_steps = time.monotonic(), self.steps
        self._took, self._in_doubt = self._asked_at - begun, False

    def _length(self) -> int:
        """So many steps that asking takes a two-hundredth of the time that taking them does."""
        if self._block is not None:
            return self._block
        taken = self.steps - self._asked_steps
        if taken <= 0:
            return 8
        each = (time.monotonic() - self._asked_at) / taken
        wanted = math.ceil(self._took / (_SHARE * max(each, 1e-9)))
        return min(max(wanted, 1), _LONGEST_BLOCK)

    def end(self, reason: str = "done") -> None:
        """A clean end: what was granted and not asked for goes back. A fork ends nothing."""
        with self._lock:
            if self._process != os.getpid() or self._over:
                return
            self._over = True
            run = self.ledger.run(self.run)
            if run.status == "open" and run.generation == self._turn:
                used = min(max(self.steps, self._unknown), self._started) - self._first
                self.ledger.close_run(self.run, used=used, reason=reason, generation=self._turn)

    def epsilon(self) -> float:
        """Of a plan's steps, their own; of steps chosen on the way, what the filter guarantees."""
        if self.plan is not None:
            return super().epsilon()
        return self.budget.epsilon if self.steps else 0.0

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "run": self.run,
            "runs": self.runs,
            "first": self._first,
            "turn": self._turn,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """What a saved run had been granted. `begin` goes on with it where it is still open."""
        if self.steps:
            raise InputError("restored before the first request", name="spending", value=self.steps)
        for data in state["granted"]:
            self.note(events.from_dict(data))
        self.run, self.runs = str(state.get("run", "")), list(state.get("runs", ()))
        self._first, self._turn = int(state.get("first", 0)), int(state.get("turn", 0))

    def not_released_from(self, step: int) -> int:
        """Believed of a run that nobody else had since; otherwise the ledger knows better."""
        if self._alone:
            self._unknown = min(self._unknown, max(step, self.steps))
        return max(self._unknown, self.steps)

    def cite(self) -> dict[str, Any]:
        head = self.ledger.head
        return {
            "ledger": head.ledger,
            "address": self.ledger.address,
            "budget": self.name,
            "run": self.run,
            "runs": self.runs,
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


def _after(granted: Sequence[GaussianStep], step: int) -> list[GaussianStep]:
    """What was granted from a step on."""
    found, at = [], 0
    for event in granted:
        at += event.count
        if at > step:
            found.append(replace(event, count=min(event.count, at - step)))
    return found
