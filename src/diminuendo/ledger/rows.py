"""The ledger's tables as values: budgets with what is spent, runs, and a run's grants."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, select

from diminuendo import _validate
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.ledger import schema
from diminuendo.ledger.address import shown
from diminuendo.ledger.records import Record, canonical
from diminuendo.ledger.store import record_of
from diminuendo.ledger.terms import Terms, text

OPEN, CLOSED, RELEASED = "open", "closed", "released"


@dataclass(frozen=True)
class Head:
    """The chain's end: cite it, and that it was there can be checked later."""

    ledger: str
    seq: int
    digest: str


@dataclass(frozen=True)
class Status:
    """A budget and what is left of it."""

    terms: Terms
    spent_units: int

    @property
    def spent(self) -> float:
        """The share that is spent, rounded up."""
        share = Fraction(self.spent_units, self.terms.limit)
        return math.nextafter(float(share), math.inf) if self.spent_units else 0.0

    @property
    def epsilon(self) -> float:
        """Certified ε of what was granted, at the budget's δ."""
        return self.terms.epsilon_spent(self.spent_units)

    @property
    def left(self) -> Budget | None:
        return self.terms.left(self.spent_units)


@dataclass(frozen=True)
class Run:
    """A run's account. Steps below `started` may have been released; below `confirmed`, were."""

    id: str
    budget: str
    status: str
    granted: int
    started: int
    confirmed: int
    spent_units: int
    opened: Mapping[str, Any]

    @property
    def turn(self) -> int:
        """How often the run changed hands (`Ledger.resume_run`)."""
        return int(self.opened["turn"])


def same_terms(known: Terms, asked: Terms) -> None:
    for name, mine in known.to_dict().items():
        theirs = asked.to_dict()[name]
        if mine != theirs:
            raise InputError(
                f"made with its own terms ({name} {mine!r})",
                name=f"the budget {known.name!r}",
                value=theirs,
                remedy="A budget's terms never change; make another under another name.",
            )


def refuse_second(known: Iterable[Terms], terms: Terms, beside: bool) -> None:
    """A second budget for the same data only where that is meant."""
    same = [t.name for t in known if terms.data is not None and t.data == terms.data]
    if same and not beside:
        raise InputError(
            "the first budget for its data",
            name="the budget",
            value=terms.name,
            remedy=f"These data have the budget {same[0]!r}: use it, or say that a second is "
            "meant (beside=True, --beside); what the two spend adds up.",
        )


def refuse_other_data(terms: Terms, data: str | None) -> None:
    if data is not None and terms.data is not None and data != terms.data:
        raise InputError(
            f"the data of the budget {terms.name!r} ({terms.data})",
            name="the data",
            value=data,
            remedy="Use the budget of these data, or make one.",
        )


def all_terms(connection: Connection) -> dict[str, Terms]:
    rows = connection.execute(select(schema.budgets))
    return {row.name: _terms(row.terms) for row in rows}


@lru_cache(maxsize=64)
def _terms(text: str) -> Terms:
    return Terms.from_dict(json.loads(text))


def add_budget(connection: Connection, terms: Terms) -> None:
    connection.execute(
        schema.budgets.insert().values(name=terms.name, terms=canonical(terms.to_dict()), spent="0")
    )


def status_of(row: Any) -> Status:
    return Status(_terms(row.terms), int(row.spent))


def budget_in(connection: Connection, name: str) -> Status:
    row = connection.execute(
        select(schema.budgets).where(schema.budgets.c.name == text("budget", name))
    ).one_or_none()
    if row is None:
        names = connection.execute(select(schema.budgets.c.name).limit(6)).scalars().all()
        known = ", ".join(names) if names else "none yet"
        raise InputError(
            f"one of the ledger's ({known})",
            name="the budget",
            value=name,
            remedy=f"Is {shown(connection.engine.url)} the ledger you mean? `diminuendo ledger "
            "create` makes a budget.",
        )
    return status_of(row)


def set_budget(connection: Connection, status: Status, spent: int) -> None:
    name = status.terms.name
    connection.execute(
        schema.budgets.update().where(schema.budgets.c.name == name).values(spent=str(spent))
    )


def run_of(row: Any) -> Run:
    return Run(
        row.id,
        row.budget,
        row.status,
        row.granted,
        row.started,
        row.confirmed,
        int(row.spent),
        json.loads(row.opened),
    )


def run_in(connection: Connection, run: str) -> Run:
    row = connection.execute(select(schema.runs).where(schema.runs.c.id == str(run))).one_or_none()
    if row is None:
        raise InputError(
            "a run of this ledger",
            name="the run",
            value=run,
            remedy="`diminuendo ledger show BUDGET` lists them.",
        )
    return run_of(row)


def open_run_in(connection: Connection, run: str, turn: int | None = None) -> Run:
    found = run_in(connection, run)
    if found.status != OPEN:
        raise InputError(
            "open",
            name=f"the run {run}",
            value=found.status,
            remedy="What is over stays over; open another run.",
        )
    if turn is not None and turn != found.turn:
        raise InputError(
            "in the hands of this process",
            name=f"the run {run}",
            value=f"process {found.opened['pid']} on {found.opened['host']}",
            remedy="It was taken up there; this one is over.",
        )
    return found


def set_run(connection: Connection, run: Run) -> None:
    connection.execute(
        schema.runs.update()
        .where(schema.runs.c.id == run.id)
        .values(
            status=run.status,
            granted=run.granted,
            started=run.started,
            confirmed=run.confirmed,
            spent=str(run.spent_units),
            opened=canonical(run.opened),
        )
    )


def confirmed_of(run: Run, confirmed: int | None) -> int:
    if confirmed is None:
        return run.confirmed
    confirmed = _validate.count("confirmed", confirmed, at_least=0)
    if not run.confirmed <= confirmed <= run.started:
        raise InputError(
            f"from {run.confirmed} (confirmed before) to {run.started} (started)",
            name="confirmed",
            value=confirmed,
        )
    return confirmed


def grants_of(connection: Connection, run: str) -> Iterator[Record]:
    """A run's grants, the last first, a page at a time."""
    before = None
    while True:
        query = select(schema.records).where(
            schema.records.c.run == run, schema.records.c.kind == "grant"
        )
        if before is not None:
            query = query.where(schema.records.c.seq < before)
        rows = connection.execute(query.order_by(schema.records.c.seq.desc()).limit(16)).all()
        if not rows:
            return
        yield from (record_of(row) for row in rows)
        before = rows[-1].seq
