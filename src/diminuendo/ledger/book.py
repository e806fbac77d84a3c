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
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Row, Select, select

from diminuendo import _validate
from diminuendo.accounting.filters import best_order
from diminuendo.budget import Budget
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger import address, process, renamed, rows, schema
from diminuendo.ledger.capacity import (
    NotEnoughLeft,
    affordable,
    noise_factor_to_fit,
    refund_of,
    refusal,
)
from diminuendo.ledger.records import Record, canonical, pack
from diminuendo.ledger.rows import CLOSED, OPEN, RECLAIMED, Head, Run, Status
from diminuendo.ledger.store import Change, Store
from diminuendo.ledger.terms import Terms, text
from diminuendo.planning import Plan

_TYPICAL = GaussianStep(noise_multiplier=1.0, sampling_rate=0.01)


@dataclass(frozen=True)
class Grant:
    """What was granted: `steps` steps of the run, the first of them number `first` (from 0)."""

    first: int
    steps: int


class Ledger:
    """A ledger at a URL: sqlite:///path, a path, or postgresql://…; created on first use.

    patience  how many seconds to wait for a busy or absent database before an error
    create    False refuses to create a ledger that does not exist yet
    """

    def __init__(
        self, url: str | Path | None = None, *, patience: float = 30.0, create: bool = True
    ) -> None:
        self.url = address.parse(address.default() if url is None else url)
        if not create:
            address.refuse_absent(self.url)
        self._store = Store(self.url, patience=_validate.positive("patience", patience))
        self._store.prepare()
        self._terms: dict[str, Terms] = {}

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

    def close(self) -> None:
        """Close the connections. Open runs stay open."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @renamed.arguments(beside="allow_second")
    def create(
        self,
        name: str,
        budget: Budget,
        *,
        data: str | None = None,
        unit: str = "example",
        composition: str = "gaussian",
        order: int | None = None,
        typical: GaussianStep | None = None,
        allow_second: bool = False,
        token: str | None = None,
    ) -> Status:
        """Create a budget. Repeating the call changes nothing; other terms are refused.

        composition  "gaussian" for full-batch steps, "renyi" where steps are subsampled
        order        the Rényi order, at least 2; by default the best one for steps like `typical`
        allow_second  allow a second budget for the same data: the two add up to more than either
        """
        if composition == "renyi" and order is None:
            order = best_order(budget, typical or _TYPICAL)
        terms = Terms(
            name=name, budget=budget, data=data, unit=unit, composition=composition, order=order
        )

        def work(change: Change) -> Record:
            known = rows.all_terms(change.connection)
            if name in known:
                raise _Exists(known[name])
            rows.refuse_second_budget(known.values(), terms, allow_second)
            rows.add_budget(change.connection, terms)
            return change.append(
                "create", budget=name, body={"terms": terms.to_dict(), "by": process.user_name()}
            )

        same = _answers("create", budget=name, body={"terms": terms.to_dict()})
        try:
            self._store.change(work, token=token, same=same)
        except _Exists as exists:
            rows.require_same_terms(exists.terms, terms)
        return self.status(name)

    def budgets(self) -> list[Status]:
        """Every budget with what is spent of it, by name."""
        found = self._store.read(
            lambda c: c.execute(select(schema.budgets).order_by(schema.budgets.c.name)).all()
        )
        return [rows.status_of(row) for row in found]

    def status(self, name: str) -> Status:
        """A budget and what is spent of it."""
        return self._store.read(lambda connection: rows.budget_in(connection, name))

    def remaining(self, name: str) -> Budget:
        """What is left, as a budget to plan with. For subsampled plans see `scaled_to_fit`."""
        status = self.status(name)
        left = status.left
        if left is None:
            raise BudgetRefused(f"Nothing is left of the budget {name!r}.")
        return left

    def fits(self, name: str, events: Sequence[GaussianStep]) -> bool:
        """Whether a grant of these events would be given now."""
        status = self.status(name)
        return status.spent_units + sum(status.terms.costs(events)) <= status.terms.limit

    def scaled_to_fit(self, name: str, plan: Plan) -> Plan:
        """The plan if it fits; otherwise the plan with every σ scaled up until it fits."""
        status = self.status(name)
        factor = noise_factor_to_fit(status, plan.events)
        return plan if factor == 1 else plan.louder(factor)

    def fitting(self, name: str, plan: Plan) -> Plan:
        """Deprecated name of `scaled_to_fit`."""
        renamed.warn("Ledger.fitting", "Ledger.scaled_to_fit")
        return self.scaled_to_fit(name, plan)

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
        opened = {"label": label, "plan": plan, "turn": 0, **process.this_process()}

        def work(change: Change) -> Record:
            terms = rows.budget_in(change.connection, name).terms
            rows.refuse_other_data(terms, data)
            run = uuid.uuid4().hex[:16]
            self._terms[run] = terms
            change.connection.execute(
                schema.runs.insert().values(
                    id=run,
                    budget=name,
                    status=OPEN,
                    granted=0,
                    started=0,
                    confirmed=0,
                    spent="0",
                    opened=canonical(opened),
                )
            )
            return change.append("open", budget=name, run=run, body=opened)

        same = _answers("open", budget=name, body={"label": label, "plan": plan})
        return self.run(self._store.change(work, token=token, same=same).run)

    def resume_run(self, run: str, *, data: str | None = None, token: str | None = None) -> Run:
        """Take an open run over into this process; its `generation` goes up by one.

        From then on the process that had it before is refused. Taking over is itself refused
        while the process that owns the run is known to be alive.
        """

        def work(change: Change) -> Record:
            before = rows.open_run_in(change.connection, run)
            rows.refuse_other_data(rows.budget_in(change.connection, before.budget).terms, data)
            if before.opened["pid"] != os.getpid() and process.is_alive(before.opened):
                raise _still_alive(before)
            owner = {**process.this_process(), "turn": before.generation + 1}
            rows.set_run(change.connection, replace(before, opened={**before.opened, **owner}))
            return change.append("resume", budget=before.budget, run=run, body=owner)

        record = self._store.change(work, token=token, same=_answers("resume", run=run))
        now = self.run(run)
        return replace(now, opened={**now.opened, "turn": record.body["turn"]})

    def run(self, run: str) -> Run:
        """A run by its id."""
        return self._store.read(lambda connection: rows.run_in(connection, run))

    def runs(self, name: str | None = None) -> list[Run]:
        """The runs of a budget, or all, in the order in which they were opened."""
        opened = (
            select(schema.runs)
            .join(schema.records, schema.records.c.run == schema.runs.c.id)
            .where(schema.records.c.kind == "open")
            .order_by(schema.records.c.seq)
        )
        if name is not None:
            self.status(name)
            opened = opened.where(schema.runs.c.budget == name)
        found = self._store.read(lambda connection: connection.execute(opened).all())
        return [rows.run_of(row) for row in found]

    @renamed.arguments(most="partial", turn="generation")
    def grant(
        self,
        run: str,
        events: Sequence[GaussianStep],
        *,
        start: bool = True,
        partial: bool = False,
        confirmed: int | None = None,
        generation: int | None = None,
        token: str | None = None,
    ) -> Grant:
        """Charge the events to the run's budget, or raise BudgetRefused and change nothing.

        start       the steps may be released from now on; False if `start` will say when
        partial     grant as many of the steps, from the first on, as fit
        confirmed   how many of the run's steps are known to have been taken
        generation  the run's generation as the caller knows it; refused if it was taken over since
        """
        asked = list(events)
        if not asked or not all(isinstance(event, GaussianStep) for event in asked):
            raise InputError("at least one event (GaussianStep)", name="events", value=asked[:1])
        costs = self._terms_of(run).costs(asked)

        def work(change: Change) -> Record:
            before = rows.open_run_in(change.connection, run, generation)
            status = rows.budget_in(change.connection, before.budget)
            granted_events, cost = affordable(status, asked, costs, partial)
            steps = sum(event.count for event in granted_events)
            granted = before.granted + steps
            rows.set_budget(change.connection, status, status.spent_units + cost)
            rows.set_run(
                change.connection,
                replace(
                    before,
                    granted=granted,
                    started=granted if start else before.started,
                    confirmed=rows.confirmed_of(before, confirmed),
                    spent_units=before.spent_units + cost,
                ),
            )
            body = {
                "events": pack(granted_events),
                "first": before.granted,
                "steps": steps,
                "cost": str(cost),
                "started": start,
                "confirmed": rows.confirmed_of(before, confirmed),
            }
            return change.append("grant", budget=before.budget, run=run, body=body)

        def same(record: Record) -> bool:
            given, wanted = list(record.body["events"]), pack(asked)
            if partial and given:
                wanted = wanted[: len(given)]
                wanted[-1][2] = min(wanted[-1][2], given[-1][2])
            return given == wanted and record.body["started"] is start

        as_before = _answers("grant", run=run, also=same)
        try:
            body = self._store.change(work, token=token, same=as_before).body
        except NotEnoughLeft as no:
            raise BudgetRefused(refusal(no.status, asked, sum(costs))) from None
        return Grant(int(body["first"]), int(body["steps"]))

    def _terms_of(self, run: str) -> Terms:
        """Terms never change, so that prices are computed before the head is locked."""
        if run not in self._terms:
            self._terms[run] = self._store.read(
                lambda c: rows.budget_in(c, rows.run_in(c, run).budget).terms
            )
        return self._terms[run]

    @renamed.arguments(turn="generation")
    def start(
        self,
        run: str,
        upto: int,
        *,
        confirmed: int | None = None,
        generation: int | None = None,
        token: str | None = None,
    ) -> None:
        """Record durably that the run's granted steps before number `upto` may be released."""
        upto = _validate.count("upto", upto, at_least=0)

        def work(change: Change) -> Record:
            before = rows.open_run_in(change.connection, run, generation)
            if not before.started <= upto <= before.granted:
                raise InputError(
                    f"from {before.started} to {before.granted}, what was granted",
                    name="upto",
                    value=upto,
                )
            now = replace(before, started=upto, confirmed=rows.confirmed_of(before, confirmed))
            rows.set_run(change.connection, now)
            body = {"upto": upto, "confirmed": now.confirmed}
            return change.append("start", budget=before.budget, run=run, body=body)

        self._store.change(work, token=token, same=_answers("start", run=run, body={"upto": upto}))

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
        used = _validate.count("used", used, at_least=0)
        text("reason", reason)

        def work(change: Change) -> Record:
            before = rows.open_run_in(change.connection, run, generation)
            if not before.confirmed <= used <= before.started:
                raise InputError(
                    f"from {before.confirmed} (confirmed) to {before.started} (started)",
                    name="used",
                    value=used,
                )
            return self._return(change, before, used, CLOSED, "close", {"reason": reason})

        self._store.change(work, token=token, same=_answers("close", run=run, body={"used": used}))
        return self.run(run)

    def reclaim(
        self, run: str, *, by: str = "", unreleased: bool = False, token: str | None = None
    ) -> Run:
        """End the run of a process that died, and give back the cost of what it never released.

        The caller asserts that the process is dead; the assertion and the name `by` are recorded.
        Steps after `started` were then never released. With `unreleased` the caller also asserts
        that nobody has seen any result of the steps after `confirmed`.
        """
        person = text("by", by or process.user_name())

        def work(change: Change) -> Record:
            before = rows.open_run_in(change.connection, run)
            if process.is_alive(before.opened):
                raise _still_alive(before)
            used = before.confirmed if unreleased else before.started
            assertion = {"by": person, "assumed": process.reclaim_assumption(before, unreleased)}
            return self._return(change, before, used, RECLAIMED, "reclaim", assertion)

        self._store.change(work, token=token, same=_answers("reclaim", run=run))
        return self.run(run)

    def release(
        self, run: str, *, by: str = "", unreleased: bool = False, token: str | None = None
    ) -> Run:
        """Deprecated name of `reclaim`."""
        renamed.warn("Ledger.release", "Ledger.reclaim")
        return self.reclaim(run, by=by, unreleased=unreleased, token=token)

    def _return(
        self,
        change: Change,
        before: Run,
        used: int,
        status: str,
        kind: str,
        details: Mapping[str, Any],
    ) -> Record:
        """End a run and give back the cost of its steps from number `used` on."""
        terms_and_spent = rows.budget_in(change.connection, before.budget)
        returned = 0
        for grant in rows.grants_of(change.connection, before.id):
            if grant.body["first"] + grant.body["steps"] <= used:
                break
            returned += refund_of(terms_and_spent.terms, grant.body, used)
        rows.set_budget(change.connection, terms_and_spent, terms_and_spent.spent_units - returned)
        now = replace(
            before,
            status=status,
            started=used,
            confirmed=used if kind == "close" else before.confirmed,
            spent_units=before.spent_units - returned,
        )
        rows.set_run(change.connection, now)
        body = {"used": used, "returned": str(returned), **details}
        return change.append(kind, budget=before.budget, run=before.id, body=body)

    @renamed.arguments(most="partial")
    def charge(
        self, name: str, events: Sequence[GaussianStep], *, label: str = "", partial: bool = False
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
        self, *, upto: int | None = None, run: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """All records, or those of one run, in order and as stored, read page by page."""
        after = 0
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

    def write_transaction(self, work: Callable[[Change], Record]) -> Record:
        """Run `work`, which appends one record, in a transaction (for `import`)."""
        return self._store.change(work)


def _answers(
    kind: str,
    *,
    budget: str | None = None,
    run: str | None = None,
    body: Mapping[str, Any] | None = None,
    also: Callable[[Record], bool] = lambda _: True,
) -> Callable[[Record], bool]:
    """A test whether a record is the answer to this request."""
    told = json.loads(canonical(body or {}))

    def same(record: Record) -> bool:
        return (
            record.kind == kind
            and budget in (None, record.budget)
            and run in (None, record.run)
            and all(record.body[name] == value for name, value in told.items())
            and also(record)
        )

    return same


def _still_alive(run: Run) -> InputError:
    return InputError(
        "dead",
        name=f"the process of run {run.id}",
        value=f"process {run.opened['pid']}, which is alive on this machine",
        remedy="Stop it first. A run that ends by itself gives back what it did not use.",
    )


def _all(query: Select[Any], connection: Connection) -> Sequence[Row[Any]]:
    return connection.execute(query).all()


class _Exists(Exception):
    def __init__(self, terms: Terms) -> None:
        self.terms = terms
