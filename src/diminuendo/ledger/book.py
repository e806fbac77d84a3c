"""Ledger: who spent what of a dataset's budget, what is left, and a no before it is overspent.

Formal guarantees, for every budget in a ledger: the events granted to all runs together, less those
returned unused, never cost more than the budget's filter allows, whatever the number of programs
that ask at once; a grant is on disk before the asker hears of it; and so the releases that were
made under grants are together (ε, δ)-private for the budget's relation, even if every σ was chosen
after seeing what was released before (accounting/filters.py). Not covered: releases made without
asking, and a person's word given to `release`.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from sqlalchemy import Connection, Row, Select, select

from diminuendo import _validate
from diminuendo.accounting.filters import best_order
from diminuendo.budget import Budget
from diminuendo.errors import BudgetRefused, InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger import address, process, rows, schema
from diminuendo.ledger.identity import Progress, identify, silent
from diminuendo.ledger.records import Record, canonical, pack
from diminuendo.ledger.room import NoRoom, affordable, louder_by, refund_of, refusal
from diminuendo.ledger.rows import CLOSED, OPEN, RELEASED, Head, Run, Status
from diminuendo.ledger.spending import LedgerSpending
from diminuendo.ledger.store import Change, Store
from diminuendo.ledger.terms import Terms, text
from diminuendo.planning import Plan

_TYPICAL = GaussianStep(noise_multiplier=1.0, sampling_rate=0.01)


@dataclass(frozen=True)
class Grant:
    """What was granted: so many steps, from the run's step `first` on."""

    first: int
    steps: int


class Ledger:
    """A ledger at a URL: sqlite:///path, a path, or postgresql://…; made on first use.

    patience  how many seconds to wait for a busy or absent database before an error
    create    False refuses a file that is not there, as somebody does who only wants to spend
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
        return f"Ledger({self._store.shown})"

    @property
    def address(self) -> str:
        """Where it is, without anything secret."""
        return self._store.shown

    @property
    def head(self) -> Head:
        row = self._store.read(lambda c: c.execute(select(schema.head)).one())
        return Head(row.ledger, row.seq, row.digest)

    def close(self) -> None:
        """Close the connections. Runs stay as they are."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        beside: bool = False,
        token: str | None = None,
    ) -> Status:
        """Make a budget. The same one again changes nothing; other terms are refused.

        composition  "gaussian" for full-batch steps, "renyi" where steps are subsampled
        order        the Rényi order; that which suits steps like `typical` best unless given
        beside       allow a second budget for the same data: what the two spend adds up
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
            rows.refuse_second(known.values(), terms, beside)
            rows.add_budget(change.connection, terms)
            return change.append(
                "create", budget=name, body={"terms": terms.to_dict(), "by": process.person()}
            )

        same = _asked("create", budget=name, body={"terms": terms.to_dict()})
        try:
            self._store.change(work, token=token, same=same)
        except _Exists as exists:
            rows.same_terms(exists.terms, terms)
        return self.status(name)

    def budgets(self) -> list[Status]:
        found = self._store.read(
            lambda c: c.execute(select(schema.budgets).order_by(schema.budgets.c.name)).all()
        )
        return [rows.status_of(row) for row in found]

    def status(self, name: str) -> Status:
        return self._store.read(lambda connection: rows.budget_in(connection, name))

    def remaining(self, name: str) -> Budget:
        """What is left, to plan with. For a subsampled plan see `fitting`."""
        status = self.status(name)
        left = status.left
        if left is None:
            raise BudgetRefused(f"Nothing is left of the budget {name!r}.")
        return left

    def fits(self, name: str, events: Sequence[GaussianStep]) -> bool:
        """Whether a grant of these would be given now."""
        status = self.status(name)
        return status.spent_units + sum(status.terms.costs(events)) <= status.terms.limit

    def fitting(self, name: str, plan: Plan) -> Plan:
        """The plan itself where it fits, or with every σ as much louder as it takes."""
        status = self.status(name)
        factor = louder_by(status, plan.events)
        return plan if factor == 1 else plan.with_noise_scaled(factor)

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
        """Begin a run on a budget. Costs nothing yet.

        data  the identity of the run's data; refused where it is not the budget's
        """
        text("label", label, empty=True)
        text("plan", plan, empty=True)
        opened = {"label": label, "plan": plan, "turn": 0, **process.here()}

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

        same = _asked("open", budget=name, body={"label": label, "plan": plan})
        return self.run(self._store.change(work, token=token, same=same).run)

    def resume_run(self, run: str, *, data: str | None = None, token: str | None = None) -> Run:
        """Go on with an open run in this process: it is this one's `turn` now.

        Whoever had it before is refused from here on where it says whose turn it is. Refused
        while another process that is known to live has it.
        """

        def work(change: Change) -> Record:
            before = rows.open_run_in(change.connection, run)
            rows.refuse_other_data(rows.budget_in(change.connection, before.budget).terms, data)
            if before.opened["pid"] != os.getpid() and process.alive(before.opened):
                raise _still_alive(before)
            taken = {**process.here(), "turn": before.turn + 1}
            rows.set_run(change.connection, replace(before, opened={**before.opened, **taken}))
            return change.append("resume", budget=before.budget, run=run, body=taken)

        turn = self._store.change(work, token=token, same=_asked("resume", run=run)).body["turn"]
        now = self.run(run)
        return replace(now, opened={**now.opened, "turn": turn})

    def run(self, run: str) -> Run:
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

    def grant(
        self,
        run: str,
        events: Sequence[GaussianStep],
        *,
        start: bool = True,
        most: bool = False,
        confirmed: int | None = None,
        turn: int | None = None,
        token: str | None = None,
    ) -> Grant:
        """Charge the events to the run's budget, or raise BudgetRefused and change nothing.

        start      the steps may be released from now on; False where `start` will say when
        most       as many of the events, from the first on, as there is room for
        confirmed  how many of the run's steps are known to have been taken
        turn       whose turn the asker thinks it is (`resume_run`)
        """
        asked = list(events)
        if not asked or not all(isinstance(event, GaussianStep) for event in asked):
            raise InputError("at least one event (GaussianStep)", name="events", value=asked[:1])
        costs = self._terms_of(run).costs(asked)

        def work(change: Change) -> Record:
            before = rows.open_run_in(change.connection, run, turn)
            status = rows.budget_in(change.connection, before.budget)
            given, cost = affordable(status, asked, costs, most)
            steps = sum(event.count for event in given)
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
                "events": pack(given),
                "first": before.granted,
                "steps": steps,
                "cost": str(cost),
                "started": start,
                "confirmed": rows.confirmed_of(before, confirmed),
            }
            return change.append("grant", budget=before.budget, run=run, body=body)

        def same(record: Record) -> bool:
            given, wanted = list(record.body["events"]), pack(asked)
            if most and given:
                wanted = wanted[: len(given)]
                wanted[-1][2] = min(wanted[-1][2], given[-1][2])
            return given == wanted and record.body["started"] is start

        as_before = _asked("grant", run=run, also=same)
        try:
            body = self._store.change(work, token=token, same=as_before).body
        except NoRoom as no:
            raise BudgetRefused(refusal(no.status, asked, sum(costs))) from None
        return Grant(int(body["first"]), int(body["steps"]))

    def _terms_of(self, run: str) -> Terms:
        """Terms never change, and prices are worked out before others are made to wait."""
        if run not in self._terms:
            self._terms[run] = self._store.read(
                lambda c: rows.budget_in(c, rows.run_in(c, run).budget).terms
            )
        return self._terms[run]

    def start(
        self,
        run: str,
        upto: int,
        *,
        confirmed: int | None = None,
        turn: int | None = None,
        token: str | None = None,
    ) -> None:
        """Durably: the run's granted steps before `upto` may be released from now on."""
        upto = _validate.count("upto", upto, at_least=0)

        def work(change: Change) -> Record:
            before = rows.open_run_in(change.connection, run, turn)
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

        self._store.change(work, token=token, same=_asked("start", run=run, body={"upto": upto}))

    def close_run(
        self,
        run: str,
        *,
        used: int,
        reason: str = "done",
        turn: int | None = None,
        token: str | None = None,
    ) -> Run:
        """A clean end: `used` steps were taken, and what was granted beyond goes back."""
        used = _validate.count("used", used, at_least=0)
        text("reason", reason)

        def work(change: Change) -> Record:
            before = rows.open_run_in(change.connection, run, turn)
            if not before.confirmed <= used <= before.started:
                raise InputError(
                    f"from {before.confirmed} (confirmed) to {before.started} (started)",
                    name="used",
                    value=used,
                )
            return self._return(change, before, used, CLOSED, "close", {"reason": reason})

        self._store.change(work, token=token, same=_asked("close", run=run, body={"used": used}))
        return self.run(run)

    def release(
        self, run: str, *, by: str = "", unreleased: bool = False, token: str | None = None
    ) -> Run:
        """A person looked at a run that died: what it cannot have released goes back.

        Assumed, and recorded with who said so: the run's process is dead. Steps past `started`
        then were never released. With `unreleased` the person also says that nobody has seen
        anything of the steps past `confirmed`.
        """
        person = text("by", by or process.person())

        def work(change: Change) -> Record:
            before = rows.open_run_in(change.connection, run)
            if process.alive(before.opened):
                raise _still_alive(before)
            used = before.confirmed if unreleased else before.started
            said = {"by": person, "assumed": process.assumption(before, unreleased)}
            return self._return(change, before, used, RELEASED, "release", said)

        self._store.change(work, token=token, same=_asked("release", run=run))
        return self.run(run)

    def _return(
        self,
        change: Change,
        before: Run,
        used: int,
        status: str,
        kind: str,
        said: Mapping[str, Any],
    ) -> Record:
        """End a run and give back the cost of its steps from `used` on."""
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
        body = {"used": used, "returned": str(returned), **said}
        return change.append(kind, budget=before.budget, run=before.id, body=body)

    def charge(
        self, name: str, events: Sequence[GaussianStep], *, label: str = "", most: bool = False
    ) -> Run:
        """Charge a release that is made elsewhere: a run that is closed at once, all of it used."""
        run = self.open_run(name, label=label)
        try:
            used = self.grant(run.id, events, most=most).steps
        except BudgetRefused:
            self.close_run(run.id, used=0, reason="refused")
            raise
        return self.close_run(run.id, used=used)

    def raw_records(
        self, *, upto: int | None = None, run: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """Records in order, as they are stored, read in pieces; all, or a run's."""
        after = 0
        while True:
            query = select(schema.records).where(schema.records.c.seq > after)
            if upto is not None:
                query = query.where(schema.records.c.seq <= upto)
            if run is not None:
                query = query.where(schema.records.c.run == run)
            page = query.order_by(schema.records.c.seq).limit(1000)
            found = self._store.read(partial(_all, page))
            if not found:
                return
            yield from (dict(row._mapping) for row in found)
            after = found[-1].seq

    def records(self, *, upto: int | None = None, run: str | None = None) -> Iterator[Record]:
        """Records in order, all or a run's."""
        for row in self.raw_records(upto=upto, run=run):
            yield Record(**{**row, "body": json.loads(row["body"])})

    def reading(self, work: Callable[[Connection], Any]) -> Any:
        """Read from one state of the database (for `verify` and `export`)."""
        return self._store.read(work)

    def changing(self, work: Callable[[Change], Record]) -> Record:
        """Append one record in a transaction (for `import`)."""
        return self._store.change(work)


def _asked(
    kind: str,
    *,
    budget: str | None = None,
    run: str | None = None,
    body: Mapping[str, Any] | None = None,
    also: Callable[[Record], bool] = lambda _: True,
) -> Callable[[Record], bool]:
    """Whether a record answers this request: a token that named another one is refused."""
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
        remedy="Stop it first; a run that ends by itself returns what it did not use.",
    )


def _all(query: Select[Any], connection: Connection) -> Sequence[Row[Any]]:
    return connection.execute(query).all()


class _Exists(Exception):
    def __init__(self, terms: Terms) -> None:
        self.terms = terms
