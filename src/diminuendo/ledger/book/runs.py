"""Runs: opening them, charging their steps, starting, closing and reclaiming."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from diminuendo import _validate
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.ledger import approval, operations, process, renamed, rows
from diminuendo.ledger.book.budgets import Budgets
from diminuendo.ledger.capacity import NotEnoughLeft, refusal
from diminuendo.ledger.records import Event
from diminuendo.ledger.state import Run
from diminuendo.ledger.terms import Terms, text


@dataclass(frozen=True)
class Grant:
    """What was granted: `steps` steps of the run, the first of them number `first` (from 0).

    nonce   of the start, if the steps were started with the grant
    window  the window that they are charged to, where the budget has windows
    """

    first: int
    steps: int
    nonce: str = ""
    window: str = ""


class Runs(Budgets):
    """The part of a `Ledger` that knows runs."""

    def open_run(
        self,
        name: str,
        *,
        label: str = "",
        data: str | None = None,
        plan: str = "",
        token: str | None = None,
    ) -> Run:
        """Open a run on a budget and return it. This costs nothing yet.

        data  the identity of the run's data (`identify`); refused if the budget is for other data
        """
        text("label", label, empty=True)
        text("plan", plan, empty=True)
        work = functools.partial(operations.open_run, name=name, label=label, plan=plan, data=data)
        same = operations.answers("open", budget=name, body={"label": label, "plan": plan})
        return self.run(self._change(work, token=token, same=same).run)

    def resume_run(self, run: str, *, data: str | None = None, token: str | None = None) -> Run:
        """Take an open run over into this process; its `generation` goes up by one.

        From then on the process that had it before is refused. Taking over is itself refused
        while the process that owns the run is known to be alive. Steps before `started` may have
        been released by it: go on from there.
        """
        work = functools.partial(operations.resume_run, run=run, data=data)
        same = operations.answers("resume", run=run)
        record = self._change(work, token=token, same=same)
        now = self.run(run)
        return replace(now, opened={**now.opened, "turn": record.body["turn"]})

    def run(self, run: str) -> Run:
        """A run by its id."""
        return self._store.read(lambda connection: rows.run_in(connection, run))

    def runs(self, name: str | None = None) -> list[Run]:
        """The runs of a budget, or all, in the order in which they were opened."""
        if name is not None:
            self.status(name)
        return self._store.read(lambda connection: rows.all_runs(connection, name))

    @renamed.arguments(most="partial", turn="generation")
    def grant(
        self,
        run: str,
        events: Sequence[Event],
        *,
        first: int | None = None,
        start: bool = True,
        partial: bool = False,
        confirmed: int | None = None,
        generation: int | None = None,
        token: str | None = None,
    ) -> Grant:
        """Charge the events to the run's budget, or raise BudgetRefused and change nothing.

        first       the number (from 0) that the caller expects the first of the steps to have;
                    refused if the run was granted other steps in the meantime
        start       the steps may be released from now on; False if `start` will say when
        partial     grant as many of the steps, from the first on, as fit
        confirmed   how many of the run's steps are known to have been taken
        generation  the run's generation as the caller knows it; refused if it was taken over since
        """
        asked = _checked(events)
        costs = [terms.costs(asked) for terms in self._terms_of(run)]
        request = operations.GrantRequest(
            run, asked, costs, first, start, partial, confirmed, generation
        )
        work = functools.partial(operations.grant, request=request)
        same = operations.answers("grant", run=run, also=request.is_answered_by)
        try:
            record = self._change(work, token=token, same=same)
        except NotEnoughLeft as error:
            raise BudgetRefused(refusal(error.status, asked, error.cost)) from None
        nonce = record.token if start else ""
        window = record.body.get("windows", [""])[0]
        return Grant(int(record.body["first"]), int(record.body["steps"]), nonce, window)

    def _terms_of(self, run: str) -> list[Terms]:
        """The terms of a run's budget, of the one that it is a part of, and so on.

        Terms never change, so that prices are computed before the head is locked.
        """
        known: dict[str, list[Terms]] = self.__dict__.setdefault("_terms", {})
        if run not in known:
            chain = self._store.read(lambda c: rows.chain_of(c, rows.run_in(c, run).budget))
            known[run] = [status.terms for status in chain]
        return known[run]

    @renamed.arguments(turn="generation")
    def start(
        self,
        run: str,
        upto: int,
        *,
        previous: str | None = None,
        confirmed: int | None = None,
        generation: int | None = None,
        token: str | None = None,
    ) -> str:
        """Record durably that the run's granted steps before number `upto` may be released.

        previous  the nonce of the run's last start as the caller knows it; refused if another
                  process has started steps since
        Returns the nonce of this start, which is the run's `nonce` until the next one.
        """
        work = functools.partial(
            operations.start,
            run=run,
            upto=_validate.count("upto", upto, at_least=0),
            previous=previous,
            confirmed=confirmed,
            generation=generation,
        )
        same = operations.answers("start", run=run, body={"upto": upto})
        return self._change(work, token=token, same=same).token

    @renamed.arguments(turn="generation")
    def close_run(
        self,
        run: str,
        *,
        used: int,
        reason: str = "done",
        generation: int | None = None,
        token: str | None = None,
    ) -> Run:
        """End a run cleanly: `used` steps were taken; the cost of the others is given back.

        Only the run's own process can say that. On a budget that needs two persons, everything
        that was started stays spent, and `reclaim` gives back the rest of it.
        """
        work = functools.partial(
            operations.close_run,
            run=run,
            used=_validate.count("used", used, at_least=0),
            reason=text("reason", reason),
            generation=generation,
        )
        same = operations.answers("close", run=run, also=lambda r: int(r.body["used"]) >= used)
        self._change(work, token=token, same=same)
        return self.run(run)

    def reclaim(
        self,
        run: str,
        *,
        by: str = "",
        unreleased: bool = False,
        dead: bool = False,
        token: str | None = None,
    ) -> Run:
        """End the run of a process that died, and give back the cost of what it never released.

        dead        the caller asserts that the process is dead, which is needed where this machine
                    cannot tell: after a reboot, on another host, in another container
        unreleased  the caller also asserts that nobody has seen any result of the steps after
                    `confirmed`
        by          who asserts it; recorded with the assertion

        Refused while the process is known to be alive. Steps after `started` were never released.
        For a budget that needs two persons, the first call raises Proposed and the same call by
        another person acts.
        """
        person = text("by", by or process.user_name())
        work = functools.partial(
            operations.reclaim, run=run, by=person, unreleased=unreleased, dead=dead
        )
        same = operations.answers("reclaim", run=run)
        record = self._change(work, token=token, same=same)
        approval.raise_proposed(record)
        return self.run(run)

    def refuse_alive(self, run: str, *, dead: bool = False) -> None:
        """Raise what `reclaim` would if the run is over, or its process is or may be alive."""
        found = self._store.read(lambda connection: rows.open_run_in(connection, run))
        operations.refuse_alive(found, dead=dead)

    def release(
        self, run: str, *, by: str = "", unreleased: bool = False, token: str | None = None
    ) -> Run:
        """Deprecated name of `reclaim`."""
        renamed.warn("Ledger.release", "Ledger.reclaim")
        return self.reclaim(run, by=by, unreleased=unreleased, token=token)

    @renamed.arguments(most="partial")
    def charge(
        self, name: str, events: Sequence[Event], *, label: str = "", partial: bool = False
    ) -> Run:
        """Charge a release made by another program, as a run that is closed at once."""
        for status in self._chain(name):  # what has no price here is refused before a run is opened
            status.terms.costs(_checked(events))
        run = self.open_run(name, label=label)
        try:
            used = self.grant(run.id, events, partial=partial).steps
        except (BudgetRefused, InputError):
            self.close_run(run.id, used=0, reason="refused")
            raise
        return self.close_run(run.id, used=used)


def _checked(events: Sequence[Event]) -> list[Event]:
    """The events that are asked for; raises InputError for none, and for anything else."""
    asked = list(events)
    if not asked or not all(isinstance(event, Event) for event in asked):
        expected = "at least one event (GaussianStep or Mechanism)"
        raise InputError(expected, name="events", value=asked[:1])
    return asked
