"""The class Ledger: who spent how much of a dataset's budget, and a refusal before it is overspent.

Formal guarantees, for every budget in a ledger: the events granted to all runs together, less those
returned unused, never cost more than the budget's filter allows, whatever the number of programs
that ask at once; a grant is on disk before the asker hears of it; and so the releases that were
made under grants are together (ε, δ)-private for the budget's relation, even if every σ was chosen
after seeing what was released before (accounting/filters.py). Not covered: releases made without
asking, and what a person asserts when they `reclaim` a run.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from sqlalchemy import Connection, Row, Select, select

from diminuendo import _validate
from diminuendo.accounting.filters import best_order
from diminuendo.budget import Budget, as_budget
from diminuendo.errors import BudgetRefused, InputError, UsageError
from diminuendo.events import GaussianStep
from diminuendo.ledger import address, keys, operations, process, renamed, rows, schema
from diminuendo.ledger.anchors import Anchor, LedgerWarning, configured, parse, publish
from diminuendo.ledger.capacity import NotEnoughLeft, noise_factor_to_fit, refusal
from diminuendo.ledger.engine import weaknesses
from diminuendo.ledger.identity import Progress, identify, silent
from diminuendo.ledger.keys import Key
from diminuendo.ledger.records import Event, Head, Record
from diminuendo.ledger.rows import Run, Status
from diminuendo.ledger.spending import LedgerSpending
from diminuendo.ledger.store import Change, Store
from diminuendo.ledger.terms import Terms, text
from diminuendo.planning import Plan

_TYPICAL = GaussianStep(noise_multiplier=1.0, sampling_rate=0.01)


@dataclass(frozen=True)
class Grant:
    """What was granted: `steps` steps of the run, the first of them number `first` (from 0).

    nonce  of the start, if the steps were started with the grant
    """

    first: int
    steps: int
    nonce: str = ""


class Proposed(UsageError):
    """The request is on record and waits for a second person."""


def _proposed(record: Record) -> str:
    return (
        f"This needs two people. It is on record as proposed by {record.body['user']} (record "
        f"{record.seq}); it takes effect when somebody else asks for the same."
    )


class Ledger:
    """A ledger at a URL: sqlite:///path, a path, or postgresql://…; created on first use.

    patience  how many seconds to wait for a busy or absent database before an error
    create    False refuses to create a ledger that does not exist yet
    readonly  change nothing, not even the schema version: for who may only read
    key       signs every record: file:/path, env:NAME or command:…; $DIMINUENDO_LEDGER_KEY
    anchors   places where heads are published as they move; $DIMINUENDO_LEDGER_ANCHORS
    """

    def __init__(
        self,
        url: str | Path | None = None,
        *,
        patience: float = 30.0,
        create: bool = True,
        readonly: bool = False,
        key: str | Key | None = None,
        anchors: Sequence[str | Anchor] | None = None,
    ) -> None:
        self.url = address.parse(address.default() if url is None else url)
        if not create or readonly:
            address.refuse_absent(self.url)
        self._store = Store(
            self.url,
            patience=_validate.positive("patience", patience),
            create=create and not readonly,
            readonly=readonly,
            key=keys.configured() if key is None else keys.load(key),
        )
        places = configured() if anchors is None else anchors
        self.anchors = [parse(place, _second_ledger) for place in places]
        try:
            self._store.prepare()
        except BaseException:
            self._store.close()
            raise
        self._terms: dict[str, list[Terms]] = {}
        if not readonly:
            for weakness in self.weaknesses():
                warnings.warn(
                    f"The ledger {self.address}: {weakness}.", LedgerWarning, stacklevel=2
                )

    def __repr__(self) -> str:
        return f"Ledger({self._store.display})"

    @property
    def address(self) -> str:
        """The URL, without passwords."""
        return self._store.display

    @property
    def head(self) -> Head:
        """The last record of the chain: its number and digest, and the ledger's id."""
        row = self._store.read(lambda c: c.execute(select(schema.head)).one())
        return Head(row.ledger, row.seq, row.digest)

    @property
    def seen(self) -> Head | None:
        """The highest head that this object has seen; None before the first change."""
        return self._store.seen

    def expect(self, head: Head) -> None:
        """Raise LedgerError unless the ledger contains a head that was seen earlier.

        It lacks it if it was restored from an older copy, or if a standby was promoted that had
        not received everything. From then on every change checks for the head as well.
        """
        self._store.expect(head)

    def weaknesses(self) -> list[str]:
        """Settings of the database server with which acknowledged charges can be lost."""
        return self._store.read(weaknesses)

    def close(self) -> None:
        """Publish the head where that is due, and close the connections. Open runs stay open."""
        publish(self.anchors, self._store.seen, all_of_them=True)
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @renamed.arguments(beside="allow_second")
    def create(
        self,
        name: str,
        budget: Budget | tuple[float, float],
        *,
        data: str | None = None,
        unit: str = "example",
        composition: str = "gaussian",
        order: int | None = None,
        typical: GaussianStep | None = None,
        parent: str | None = None,
        two_persons: bool = False,
        allow_second: bool = False,
        token: str | None = None,
    ) -> Status:
        """Create a budget. Repeating the call changes nothing; other terms are refused.

        composition   "gaussian" for full-batch steps, "renyi" where steps are subsampled
        order         the Rényi order, at least 2; by default the best one for steps like `typical`
        parent        the budget that this one is a part of: an extract of the same people's data,
                      a team's or a year's share. Charges here count there too
        two_persons   reclaiming a run, and a second budget for the same data, need two people: the
                      first call is recorded as a proposal, the same call by another person acts
        allow_second  allow a second budget for the same data: the two add up to more than either
        """
        budget = as_budget(budget)
        if composition == "renyi" and order is None:
            order = best_order(budget, typical or _TYPICAL)
        terms = Terms(
            name=name,
            budget=budget,
            data=data,
            unit=unit,
            composition=composition,
            order=order,
            parent=parent,
            two_persons=two_persons,
        )
        work = functools.partial(operations.create, terms=terms, allow_second=allow_second)
        same = operations.answers("create", budget=name, body={"terms": terms.to_dict()})
        try:
            record = self._change(work, token=token, same=same)
        except operations.BudgetExists as error:
            rows.require_same_terms(error.terms, terms)
        else:
            if record.kind == "propose":
                raise Proposed(_proposed(record))
        return self.status(name)

    def budgets(self) -> list[Status]:
        """Every budget with what is spent of it, by name."""
        return self._store.read(rows.all_budgets)

    def status(self, name: str) -> Status:
        """A budget and what is spent of it."""
        return self._store.read(lambda connection: rows.budget_in(connection, name))

    def remaining(self, name: str) -> Budget:
        """What is left, as a budget to plan with. For subsampled plans see `scaled_to_fit`."""
        chain = self._store.read(lambda connection: rows.chain_of(connection, name))
        lefts = [status.left for status in chain]
        for status, left in zip(chain, lefts, strict=True):
            if left is None:
                raise BudgetRefused(f"Nothing is left of the budget {status.terms.name!r}.")
        same = [left for left in lefts if left and left.delta == chain[0].terms.budget.delta]
        return min(same, key=lambda left: left.epsilon)

    def fits(self, name: str, events: Sequence[Event]) -> bool:
        """Whether a grant of these events would be given now."""
        chain = self._store.read(lambda connection: rows.chain_of(connection, name))
        return all(
            status.spent_units + sum(status.terms.costs(events)) <= status.terms.limit
            for status in chain
        )

    def scaled_to_fit(self, name: str, plan: Plan) -> Plan:
        """The plan if it fits; otherwise the plan with every σ scaled up until it fits."""
        chain = self._store.read(lambda connection: rows.chain_of(connection, name))
        factor = max(noise_factor_to_fit(status, plan.events) for status in chain)
        return plan if factor == 1 else plan.with_noise_scaled(factor)

    def fitting(self, name: str, plan: Plan) -> Plan:
        """Deprecated name of `scaled_to_fit`."""
        renamed.warn("Ledger.fitting", "Ledger.scaled_to_fit")
        return self.scaled_to_fit(name, plan)

    def pay(
        self,
        name: str,
        plan: Plan | None = None,
        *,
        data: Any = None,
        label: str = "",
        ahead: int | Literal["plan"] = "plan",
        progress: Progress = silent,
    ) -> LedgerSpending:
        """A spending that asks this budget before every step, for `fit` or `PrivateGradients`.

        Charges nothing yet: the run opens when training begins.

        plan      whose steps will be asked for, in order; without one, any steps, one by one
        data      the run's data, or the files that they came from: refused where they are not the
                  budget's. They are read only where the budget is tied to data
        ahead     with a plan: "plan" charges all of it at the start, a number that many steps at a
                  time
        progress  told how many bytes of the data have been read, and of how many
        """
        compared = data is not None and self.status(name).terms.data is not None
        identity = identify(data, progress=progress) if compared else None
        return LedgerSpending(self, name, plan, ahead=ahead, data=identity, label=label)

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
        asked = list(events)
        if not asked or not all(isinstance(event, Event) for event in asked):
            expected = "at least one event (GaussianStep or Mechanism)"
            raise InputError(expected, name="events", value=asked[:1])
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
        return Grant(int(record.body["first"]), int(record.body["steps"]), nonce)

    def _terms_of(self, run: str) -> list[Terms]:
        """The terms of a run's budget, of the one that it is a part of, and so on.

        Terms never change, so that prices are computed before the head is locked.
        """
        if run not in self._terms:
            chain = self._store.read(lambda c: rows.chain_of(c, rows.run_in(c, run).budget))
            self._terms[run] = [status.terms for status in chain]
        return self._terms[run]

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
        """End a run cleanly: `used` steps were taken; the cost of the others is given back."""
        work = functools.partial(
            operations.close_run,
            run=run,
            used=_validate.count("used", used, at_least=0),
            reason=text("reason", reason),
            generation=generation,
        )
        same = operations.answers("close", run=run, body={"used": used})
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
        if record.kind == "propose":
            raise Proposed(_proposed(record))
        return self.run(run)

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
        run = self.open_run(name, label=label)
        try:
            used = self.grant(run.id, events, partial=partial).steps
        except BudgetRefused:
            self.close_run(run.id, used=0, reason="refused")
            raise
        return self.close_run(run.id, used=used)

    def raw_records(
        self, *, after: int = 0, upto: int | None = None, run: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """All records, or those of one run, in order and as stored, read page by page."""
        while True:
            query = select(schema.records).where(schema.records.c.seq > after)
            if upto is not None:
                query = query.where(schema.records.c.seq <= upto)
            if run is not None:
                query = query.where(schema.records.c.run == run)
            page = query.order_by(schema.records.c.seq).limit(1000)
            found = self._store.read(functools.partial(_all, page))
            if not found:
                return
            yield from (dict(row._mapping) for row in found)
            after = found[-1].seq

    def records(self, *, upto: int | None = None, run: str | None = None) -> Iterator[Record]:
        """All records, or those of one run, in order."""
        for row in self.raw_records(upto=upto, run=run):
            yield Record(**{**row, "body": json.loads(row["body"])})

    def read_transaction(self, work: Callable[[Connection], Any]) -> Any:
        """Run `work` on one state of the database (for `verify` and `export`)."""
        return self._store.read(work)

    def administer(self, work: Callable[[Connection], None]) -> None:
        """Run `work` on the database in one transaction, outside the chain (for `roles`)."""
        self._store.administer(work)

    def write_transaction(self, work: Callable[[Change], Record]) -> Record:
        """Run `work`, which appends one record, in a transaction (for `import`)."""
        return self._change(work)

    def _change(
        self,
        work: Callable[[Change], Record],
        *,
        token: str | None = None,
        same: Callable[[Record], bool] = lambda _: True,
    ) -> Record:
        record = self._store.change(work, token=token, same=same)
        publish(self.anchors, self._store.seen)
        return record


def _second_ledger(url: str) -> Ledger:
    """A ledger that keeps the heads of another, without anchors of its own."""
    return Ledger(url, anchors=())


def _all(query: Select[Any], connection: Connection) -> Sequence[Row[Any]]:
    return connection.execute(query).all()
