"""LedgerSpending: the budget request of Algorithm 1, made durable.

A plan's steps are granted all at once, or so many ahead; step by step where there is no plan. In
both, steps are *started* in blocks, on disk before any of them is released: after a crash that is
what may have been seen. A block is as long as keeps the ledger near a two-hundredth of the time
that training takes.

Every request has a token and says which step or start it follows. If its answer is lost, the same
request is sent again before any other: it took effect once, or does so now.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

from diminuendo import _validate, events
from diminuendo.errors import BudgetRefused, InputError, UsageError
from diminuendo.events import GaussianStep
from diminuendo.ledger.anchors import LedgerWarning
from diminuendo.ledger.records import Head
from diminuendo.ledger.store import PermissionRefused
from diminuendo.planning import Plan
from diminuendo.spending import PlanSpending, Spending

if TYPE_CHECKING:
    from diminuendo.ledger.book import Ledger

_SHARE = 0.005
_LONGEST_BLOCK = 4096


class LedgerSpending(Spending):
    """Ask a ledger before every step; made by `Ledger.pay`.

        with ledger.pay("patients", plan) as spending:
            private = PrivateGradients(model, plan, spending=spending)

    plan    whose steps will be asked for, in order; without one, any steps, one by one
    ahead   with a plan: "plan" grants all of it at the start, a number that many steps at a time
    block   how many steps are started at a time; as many as the clock says unless given
    data    the identity of the data (`identify`), checked against the budget's
    """

    durable = True

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
        if not isinstance(plan, (Plan, NoneType)):
            raise InputError(
                "a Plan",
                name="plan",
                value=plan,
                remedy="dim.plan(…) makes one; what dim.tune chose has one in .plan.",
            )
        if plan is not None and plan.budget.relation != terms.budget.relation:
            raise InputError(
                f"that of the budget {name!r} ({terms.budget.relation})",
                name="the plan's relation",
                value=plan.budget.relation,
            )
        super().__init__(terms.budget if plan is None else plan.budget)
        self.adaptive, self.unit = plan is None, terms.unit
        self.ledger, self.name, self.run = ledger, name, ""
        self.runs: list[str] = []
        """All runs that have paid: an interrupted one goes on in another."""
        self._order = None if plan is None else PlanSpending(plan)
        self._ahead = ahead if ahead == "plan" else _validate.count("ahead", ahead)
        self._block = None if block is None else _validate.count("block", block)
        self._data, self._label = data, label
        self._first = self._granted_upto = self._started = self._unknown = self._generation = 0
        self._lock = threading.RLock()
        self._process = 0
        self._over = False
        self._nonce = self._window = ""
        self._unanswered: Callable[[], None] | None = None
        """The request whose answer was lost, to be sent again."""
        self._took, self._asked_at, self._asked_steps = 0.0, 0.0, 0

    @property
    def plan(self) -> Plan | None:
        """The plan whose steps are asked for in order, or None where any step may be."""
        return None if self._order is None else self._order.plan

    def resume(
        self,
        state: Mapping[str, Any] | None = None,
        *,
        seen: int | None = None,
        receipt: Mapping[str, Any] | None = None,
        events: Iterable[GaussianStep] = (),
    ) -> int:
        """Open a run, or go on with the one of a saved state; returns how many steps are spent.

        A journal's word (`seen`) is taken only if its `receipt` has the nonce of the run's last
        start. Otherwise a copy of the journal may have gone on, and every step that the ledger has
        as started may have been released. A ledger that does not contain what the state or the
        receipt has seen of it is refused. In the process that has the run open already, and
        without a state, this changes nothing.
        """
        with self._lock:
            if state is not None:
                self._refuse_used()
                for head in (state.get("head"), receipt and receipt.get("head")):
                    if head:
                        self.ledger.expect(Head(**head))
                self.close("resumed from a saved state")
                self._restore(state)
            if state is not None or self._over or self._process != os.getpid():
                self._begin()
            last = bool(self._nonce) and (receipt or {}).get("nonce") == self._nonce
            if seen is not None and (last or self.plan is None):
                self._unknown = min(self._unknown, max(seen, self.steps))
                if last:  # no other copy of the journal is to be believed after this one
                    self._start(self._started, confirmed=None)
            self._charge_lost(events, self._unknown)
            return self.steps

    def begin(self) -> None:
        """Deprecated: `resume()`."""
        _deprecated("begin", "resume")
        self.resume()

    def end(self, reason: str = "done") -> None:
        """Deprecated: `close(reason)`."""
        _deprecated("end", "close")
        self.close(reason)

    def _begin(self) -> None:
        """Open the run, or go on with the one of a restored state; grant the plan if asked so."""
        self._process, self._over, self._unanswered = os.getpid(), False, None
        if self.run and self.plan is not None and self.steps == self.plan.steps:
            self._over = self.ledger.run(self.run).status != "open"
            if self._over:
                return
        before = self.run
        attached = bool(self.run) and self._reattach()
        try:
            if not attached:
                self._open()
            self._asked_at = time.monotonic()
            if self.plan is not None and self._ahead == "plan":
                self._grant(self.plan.steps, start=False)
        except (BudgetRefused, InputError, UsageError):
            if attached or self.run != before:  # what was opened here does not stay open
                self.close("refused")
            raise

    def _reattach(self) -> bool:
        """Whether the restored run is still open; what it started may have been released."""
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
        self._generation, self._nonce = run.generation, run.nonce
        self._granted_upto, self._started = self._first + run.granted, self._first + run.started
        self._unknown = self._started
        return True

    def _open(self) -> None:
        """A new run. A restored state's steps that no earlier run has paid for are charged."""
        if self._window and self.steps:
            self._refuse_window(self.ledger.status(self.name).window)
        paid = self._paid_before() if self.run else 0
        digest = "" if self.plan is None else self.plan.digest
        run = self.ledger.open_run(self.name, label=self._label, data=self._data, plan=digest)
        self.run, self._generation, self._nonce = run.id, run.generation, run.nonce
        self.runs.append(run.id)
        self._first = self._granted_upto = self._started = self._unknown = paid
        if paid < self.steps:
            self._charge_events(_after(self.granted, paid), start=True, partial=False)

    def _refuse_window(self, window: str) -> None:
        """Steps that are chosen on the way can be claimed for one window only."""
        if window != self._window:
            raise UsageError(
                f"This run has no plan and began in {self._window}; now it is {window}. What it "
                "may claim is the limit of one window. Begin another run."
            )

    def _paid_before(self) -> int:
        """Up to where the run that is over has paid for this state's steps and the next ones.

        Where a copy of the state went on with it, the next ones were the copy's.
        """
        before = self.ledger.run(self.run)
        paid = self._first + before.started
        return paid if before.generation == self._generation else min(paid, self.steps)

    def fits(self, event: GaussianStep) -> bool:
        """Whether the event is the plan's next and is granted already, or would be now."""
        if self._over or (self._order is not None and not self._order.fits(event)):
            return False
        granted = self._order is not None and self.steps + event.count <= self._granted_upto
        return granted or self.ledger.fits(self.name, [event])

    def request(self, event: GaussianStep) -> None:
        """Charge the event durably, or raise BudgetRefused and change nothing."""
        with self._lock:
            super().request(event)

    def _charge(self, event: GaussianStep) -> None:
        self._refuse_others()
        if self._order is not None:
            self._order._charge(event)
        if self.steps < self._unknown:
            raise UsageError(
                f"Steps {self.steps + 1} to {self._unknown} of the run {self.run} may have been "
                "released before it was resumed, and cannot be taken again. Give resume() the "
                "events of these steps, so that they are counted as spent."
            )
        if self._unanswered is not None:
            self._unanswered()
        upto = self.steps + event.count
        if self.plan is None:
            self._charge_chosen(event)
            self._count_lost(self._granted_upto - upto)
        elif upto > self._granted_upto:
            self._grant_next(upto)
        elif upto > self._started:
            block = max(upto, min(self.steps + self._length(), self._granted_upto))
            self._start(block, confirmed=self._confirmed())

    def _charge_chosen(self, event: GaussianStep) -> None:
        """A step without a plan. If the run's first one is refused, the run does not stay open."""
        try:
            self._charge_events([event], start=True, partial=False)
        except (BudgetRefused, InputError):
            if self._granted_upto == self._first:
                self.close("refused")
                self._process, self._over = 0, False
            raise

    def _refuse_others(self) -> None:
        """A run ends once, and is one process's: a fork would release the same steps again."""
        if self._over:
            raise UsageError(
                f"The run {self.run} has ended, and what it had left was returned. "
                "resume() goes on in another run."
            )
        if not self._process:
            self._begin()
        if self._process != os.getpid():
            raise UsageError(
                f"The run {self.run} belongs to process {self._process}, which began it, and this "
                f"is process {os.getpid()}. Begin a run of its own here: ledger.pay(…)."
            )

    def _count_lost(self, steps: int) -> None:
        """Without a plan, grants whose answer was lost or not used count as taken."""
        self._first -= steps
        self._granted_upto -= steps
        self._started -= steps

    def _charge_one_lost(self, event: GaussianStep) -> None:
        """A step that was started before a crash is charged already."""
        if self.steps + event.count > self._started:
            self.request(event)
        else:
            self._record(event)

    def _record(self, event: GaussianStep) -> None:
        super()._record(event)
        if self._order is not None:
            self._order._record(event)

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
        first, confirmed, token = self._granted_upto - self._first, self._confirmed(), _token()

        def ask() -> None:
            grant = self.ledger.grant(
                self.run,
                coming,
                first=first,
                start=start,
                partial=partial,
                confirmed=confirmed,
                generation=self._generation,
                token=token,
            )
            if self.plan is None and self._window and self.steps:
                self._refuse_window(grant.window)
            self._window = grant.window
            self._granted_upto = self._first + grant.first + grant.steps
            if start:
                self._started, self._nonce = self._granted_upto, grant.nonce

        self._send(ask)

    def _start(self, upto: int, *, confirmed: int | None) -> None:
        previous, token = self._nonce, _token()

        def ask() -> None:
            self._nonce = self.ledger.start(
                self.run,
                upto - self._first,
                previous=previous,
                confirmed=confirmed,
                generation=self._generation,
                token=token,
            )
            self._started = upto

        self._send(ask)

    def _send(self, ask: Callable[[], None]) -> None:
        """Send a request; if its answer is lost, keep it to be sent again before the next one."""
        begun = time.monotonic()
        self._unanswered = functools.partial(self._send, ask)
        try:
            ask()
        except (InputError, BudgetRefused, UsageError):
            self._unanswered = None
            raise
        self._unanswered = None
        self._asked_at, self._asked_steps = time.monotonic(), self.steps
        self._took = self._asked_at - begun

    def receipt(self, upto: int | None = None) -> dict[str, Any]:
        """What a journal keeps, to be believed later: the run's last start and the ledger's head.

        upto  the number of steps that the journal is about to say may be released. They are started
              here and now, so that no older copy of the journal has the nonce of the last start.
        """
        with self._lock:
            if upto is not None and self.plan is not None:
                self._refuse_others()
                if self._unanswered is not None:
                    self._unanswered()
                self._start(max(self._started, min(upto, self._granted_upto)), confirmed=None)
            return {"run": self.run, "nonce": self._nonce, "head": self._head()}

    def _head(self) -> dict[str, Any] | None:
        seen = self.ledger.seen
        return None if seen is None else asdict(seen)

    def _confirmed(self) -> int:
        """Whoever asks for the next step has taken those before it."""
        return max(min(self.steps, self._started) - self._first, 0)

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

    def close(self, reason: str = "done") -> None:
        """A clean end: what was granted and not asked for goes back. A fork ends nothing."""
        with self._lock:
            if self._process != os.getpid() or self._over:
                return
            run = self.ledger.run(self.run)
            if run.status == "open" and run.generation == self._generation:
                used = min(max(self.steps, self._unknown), self._started) - self._first
                self._close_run(used, reason)
            self._over = True  # not before: who could not reach the ledger can close it again

    def _close_run(self, used: int, reason: str) -> None:
        """End the run; where the database lets only an officer give back, it stays open."""
        try:
            generation = self._generation
            self.ledger.close_run(self.run, used=used, reason=reason, generation=generation)
        except PermissionRefused:
            warnings.warn(
                f"Run {self.run} stays open, because its database user may not give budget back. "
                f"An officer can: diminuendo ledger reclaim {self.run}",
                LedgerWarning,
                stacklevel=4,
            )

    def state(self) -> dict[str, Any]:
        """What `resume` needs later, as JSON: what was granted, and in which runs."""
        return {
            **super().state(),
            "run": self.run,
            "runs": self.runs,
            "first": self._first,
            "turn": self._generation,
            "window": self._window if self.plan is None else "",
            "head": self._head(),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """What a saved run had been granted; the ledger has charged it."""
        self._refuse_used()
        for data in state["granted"]:
            self._record(events.from_dict(data))
        self.run, self.runs = str(state.get("run", "")), list(state.get("runs", ()))
        self._first, self._generation = int(state.get("first", 0)), int(state.get("turn", 0))
        self._window = str(state.get("window", ""))

    def cite(self) -> dict[str, Any]:
        """The ledger, budget and runs that paid, and the chain's head as it is now."""
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


def _token() -> str:
    return uuid.uuid4().hex


def _deprecated(old: str, new: str) -> None:
    message = f"LedgerSpending.{old} is now {new}, and will go with the next version."
    warnings.warn(message, DeprecationWarning, stacklevel=3)


def _after(granted: Sequence[GaussianStep], step: int) -> list[GaussianStep]:
    """What was granted from a step on."""
    later, at = [], 0
    for event in granted:
        at += event.count
        if at > step:
            later.append(replace(event, count=min(event.count, at - step)))
    return later
