"""The ledger's tables as Python values: budgets with what is spent, runs, and a run's grants."""

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
from diminuendo.errors import InputError, LedgerError
from diminuendo.ledger import renamed, schema
from diminuendo.ledger.address import display
from diminuendo.ledger.records import Record, canonical
from diminuendo.ledger.store import record_of
from diminuendo.ledger.terms import Terms, text

OPEN, CLOSED, RECLAIMED = "open", "closed", "reclaimed"
RELEASED = "released"
"""What ledgers of the version before call a reclaimed run."""


@dataclass(frozen=True)
class Head:
    """The last record of the chain. Cite it, and `verify` can check later that it was there."""

    ledger: str
    seq: int
    digest: str


@dataclass(frozen=True)
class Status:
    """A budget and what is spent of it; `spent_units` counts units of 2⁻²⁰⁰ (`Terms.limit`)."""

    terms: Terms
    spent_units: int

    @property
    def spent(self) -> float:
        """The share of the limit that is spent, rounded up; above 1 only after an import."""
        share = Fraction(self.spent_units, self.terms.limit)
        return math.nextafter(float(share), math.inf) if self.spent_units else 0.0

    @property
    def epsilon(self) -> float:
        """Certified ε of what was granted, at the budget's δ."""
        return self.terms.epsilon_spent(self.spent_units)

    @property
    def left(self) -> Budget | None:
        """What is left as a budget with the same δ, or None if that is nothing."""
        return self.terms.left(self.spent_units)


@dataclass(frozen=True)
class Run:
    """A run and its counts of steps.

    granted    steps that are charged
    started    of these, steps that may have been released
    confirmed  of these, steps that are known to have been taken
    """

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
        """Deprecated name of `generation`."""
        renamed.warn("Run.turn", "Run.generation")
        return self.generation

    @property
    def generation(self) -> int:
        """How many times the run was taken over by another process (`Ledger.resume_run`)."""
        return int(self.opened["turn"])


def require_same_terms(known: Terms, asked: Terms) -> None:
    for name, mine in known.to_dict().items():
        theirs = asked.to_dict()[name]
        if mine != theirs:
            raise InputError(
                f"created with the terms it has ({name} {mine!r})",
                name=f"the budget {known.name!r}",
                value=theirs,
                remedy="A budget's terms never change; create another budget under another name.",
            )


def refuse_second_budget(known: Iterable[Terms], terms: Terms, allow_second: bool) -> None:
    """Raise InputError if the data already have a budget and no second one is allowed."""
    same = [t.name for t in known if terms.data is not None and t.data == terms.data]
    if same and not allow_second:
        raise InputError(
            "the first budget for its data",
            name="the budget",
            value=terms.name,
            remedy=f"These data have the budget {same[0]!r}: use it, or allow a second one "
            "(allow_second=True, --allow-second). What the two spend adds up.",
        )


def refuse_other_data(terms: Terms, data: str | None) -> None:
    if data is not None and terms.data is not None and data != terms.data:
        raise InputError(
            f"the data of the budget {terms.name!r} ({terms.data})",
            name="the data",
            value=data,
            remedy="Use the budget of these data, or create one.",
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
            remedy=f"Is {display(connection.engine.url)} the ledger you mean? `diminuendo ledger "
            "create` creates a budget.",
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


def open_run_in(connection: Connection, run: str, generation: int | None = None) -> Run:
    found = run_in(connection, run)
    if found.status != OPEN:
        raise InputError(
            "open",
            name=f"the run {run}",
            value=found.status,
            remedy="A run that has ended stays ended; open another one.",
        )
    if generation is not None and generation != found.generation:
        raise taken_over(found)
    return found


def taken_over(run: Run) -> LedgerError:
    """The error for a process whose run was taken over by another."""
    opened = run.opened
    return LedgerError(
        f"Run {run.id} now belongs to another process (process {opened['pid']} on host "
        f"{opened['host']}). Nothing was charged. Resume the run there; if that process is dead, "
        f"end the run with `diminuendo ledger reclaim {run.id}`."
    )


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
    """A run's grants, the last one first, read page by page."""
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
