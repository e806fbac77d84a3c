"""The ledger's tables as Python values: budgets with what is spent, runs, and a run's grants.

Every read compares the row with the last record about it, which says what the sums were after it:
a number that somebody changed by hand is an error, not something to spend.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Select, Table, bindparam, func, select

from diminuendo import _validate
from diminuendo.budget import Budget
from diminuendo.errors import InputError, LedgerError, UsageError
from diminuendo.ledger import renamed, schema
from diminuendo.ledger.address import display
from diminuendo.ledger.records import Record, canonical
from diminuendo.ledger.store import Change, computed_digest, record_of
from diminuendo.ledger.terms import Terms, text

OPEN, CLOSED, RECLAIMED = "open", "closed", "reclaimed"
RELEASED = "released"
"""What ledgers of the version before call a reclaimed run."""


def _with_last_record(table: Table, key: str, column: str, *, one: bool) -> Select[Any]:
    """Rows of a table, all or that whose key is `:key`, each beside the last record about it."""
    number = select(func.max(schema.records.c.seq))
    record = schema.records.alias("last_record")
    if one:
        last = number.where(schema.records.c[column] == bindparam("key"))
    else:
        last = number.where(schema.records.c[column] == table.c[key]).correlate(table)
    query = select(table, record).select_from(
        table.outerjoin(record, record.c.seq == last.scalar_subquery())
    )
    return query.where(table.c[key] == bindparam("key")) if one else query


_ONE_BUDGET = _with_last_record(schema.budgets, "name", "budget", one=True)
_ONE_RUN = _with_last_record(schema.runs, "id", "run", one=True)
_SET_BUDGET = schema.budgets.update().where(schema.budgets.c.name == bindparam("key"))
_SET_RUN = schema.runs.update().where(schema.runs.c.id == bindparam("key"))


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
        """ε of what was charged if the amount had been fixed in advance: no certified claim.

        Certified are the limit, `terms.budget.epsilon`, and `odometer`; see `Terms.epsilon_spent`.
        """
        return self.terms.epsilon_spent(self.spent_units)

    @property
    def odometer(self) -> float:
        """ε that is certified at this moment, however it was chosen; see `Terms.odometer`."""
        return self.terms.odometer(self.spent_units)

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
    nonce      the token of the request that last moved `started`
    """

    id: str
    budget: str
    status: str
    granted: int
    started: int
    confirmed: int
    spent_units: int
    opened: Mapping[str, Any]
    nonce: str = ""

    @property
    def turn(self) -> int:
        """Deprecated name of `generation`."""
        renamed.warn("Run.turn", "Run.generation")
        return self.generation

    @property
    def generation(self) -> int:
        """How many times the run was taken over by another process (`Ledger.resume_run`)."""
        return int(self.opened["turn"])


def after(status: Status | None, run: Run | None) -> dict[str, Any]:
    """The sums that a record states: they hold after it."""
    sums: dict[str, Any] = {}
    if status is not None:
        sums["spent"] = str(status.spent_units)
        sums["terms"] = _terms_digest(status.terms)
    if run is not None:
        sums["run"] = [run.status, run.granted, run.started, run.confirmed, str(run.spent_units),
                       run.generation, run.nonce]  # fmt: skip
    return sums


@lru_cache(maxsize=64)
def _terms_digest(terms: Terms) -> str:
    return hashlib.sha256(canonical(terms.to_dict()).encode()).hexdigest()[:32]


def write(
    change: Change,
    kind: str,
    status: Status,
    run: Run | None,
    body: Mapping[str, Any],
    *,
    origin: str = "",
) -> Record:
    """Store a budget and a run as they are from now on, with the record that says why.

    origin  what the record names in place of a run: the ledger that an import comes from
    """
    name = status.terms.name
    change.connection.execute(_SET_BUDGET, {"key": name, "spent": str(status.spent_units)})
    if run is not None:
        change.connection.execute(_SET_RUN, {"key": run.id, **_values(run)})
    return change.append(
        kind,
        budget=name,
        run=origin if run is None else run.id,
        body={**body, "after": after(status, run)},
    )


def write_share(change: Change, status: Status, child: str, run: str, cost: int) -> None:
    """Store what one of its parts was charged, or gave back, in a budget."""
    name = status.terms.name
    now = replace(status, spent_units=status.spent_units + cost)
    change.connection.execute(_SET_BUDGET, {"key": name, "spent": str(now.spent_units)})
    body = {"child": child, "run": run, "cost": str(cost), "after": after(now, None)}
    change.append("share", budget=name, body=body)


def _values(run: Run) -> dict[str, Any]:
    return {
        "status": run.status,
        "granted": run.granted,
        "started": run.started,
        "confirmed": run.confirmed,
        "spent": str(run.spent_units),
        "opened": canonical(run.opened),
        "nonce": run.nonce,
    }


def add_run(connection: Connection, run: Run) -> None:
    """Insert a row for a new run."""
    values = {"id": run.id, "budget": run.budget, **_values(run)}
    connection.execute(schema.runs.insert().values(values))


def add_budget(connection: Connection, terms: Terms) -> Status:
    """Insert a row for a new budget, of which nothing is spent."""
    connection.execute(
        schema.budgets.insert().values(
            name=terms.name,
            terms=canonical(terms.to_dict()),
            spent="0",
            data=data_of(terms.to_dict()),
        )
    )
    return Status(terms, 0)


def data_of(terms: Mapping[str, Any]) -> str:
    """The column by which a budget is found for its data."""
    return terms["data"] or ""


def require_same_terms(existing: Terms, asked: Terms) -> None:
    """Raise InputError, naming the first difference, unless both are the same."""
    for name, mine in existing.to_dict().items():
        theirs = asked.to_dict().get(name)
        if mine != theirs:
            raise InputError(
                f"created with the terms it has ({name} {mine!r})",
                name=f"the budget {existing.name!r}",
                value=theirs,
                remedy="A budget's terms never change; create another budget under another name.",
            )


def first_budget_for(connection: Connection, terms: Terms) -> Status | None:
    """The budget that the data of these terms already have, if any."""
    if terms.data is None:
        return None
    budgets = schema.budgets.c
    query = select(budgets.name).where(budgets.data == terms.data).order_by(budgets.name).limit(1)
    name = connection.execute(query).scalar()
    return None if name is None else budget_in(connection, name)


def second_budget(terms: Terms, first: Status) -> InputError:
    """The error for a second budget for the same data that is not allowed."""
    return InputError(
        "the first budget for its data",
        name="the budget",
        value=terms.name,
        remedy=f"These data have the budget {first.terms.name!r}: use it, or allow a second one "
        "(allow_second=True, --allow-second). What the two spend adds up.",
    )


def is_seconded(
    change: Change, request: Mapping[str, Any], *, budget: str = "", run: str = ""
) -> bool:
    """Whether the last record about a run, or the last proposal about a budget, is this request,
    made by somebody else."""
    columns = schema.records.c
    query = select(schema.records).order_by(columns.seq.desc()).limit(1)
    if run:
        query = query.where(columns.run == run)
    else:
        query = query.where(columns.budget == budget, columns.kind == "propose")
    row = change.connection.execute(query).one_or_none()
    if row is None or row.kind != "propose":
        return False
    body = record_of(row).body
    expected = json.loads(canonical(request))
    return body["user"] != change.user and all(body.get(k) == v for k, v in expected.items())


def refuse_other_data(terms: Terms, data: str | None) -> None:
    """Raise InputError if a run's data are not those of the budget."""
    if data is not None and terms.data is not None and data != terms.data:
        raise InputError(
            f"the data of the budget {terms.name!r} ({terms.data})",
            name="the data",
            value=data,
            remedy="Use the budget of these data, or create one.",
        )


class _Part:
    """Some columns of a row, by name."""

    def __init__(self, table: Table, values: Any) -> None:
        self._mapping = dict(zip(table.columns.keys(), values, strict=True))

    def __getattr__(self, name: str) -> Any:
        return self._mapping[name]


def _parts(row: Any, table: Table) -> tuple[Any, Any]:
    """A row of a table, and the last record about it or None."""
    width = len(table.columns)
    values = tuple(row)
    record = _Part(schema.records, values[width:])
    return _Part(table, values[:width]), None if record.seq is None else record


def _check(what: str, record: Any, expected: Mapping[str, Any], required: bool) -> None:
    """The row must be what its last record says, and that record what it was."""
    stated = None
    if record is not None and computed_digest(record) == record.digest:
        stated = record_of(record).body.get("after", {} if required else expected)
    if stated is None or any(stated.get(name) != value for name, value in expected.items()):
        number = "no record" if record is None else f"its last record (number {record.seq})"
        raise LedgerError(
            f"{what} does not agree with {number}: somebody changed the database by hand. Nothing "
            "was charged. `diminuendo ledger verify` tells more."
        )


@lru_cache(maxsize=64)
def _terms(text: str) -> Terms:
    return Terms.from_dict(json.loads(text))


def status_of(row: Any) -> Status:
    """A row of the table of budgets as a Status."""
    try:
        return Status(_terms(row.terms), int(row.spent))
    except (ValueError, TypeError, KeyError):
        raise LedgerError(_damaged(f"the budget {row.name!r}")) from None


def run_of(row: Any) -> Run:
    """A row of the table of runs as a Run."""
    try:
        opened = json.loads(row.opened)
        run = Run(row.id, row.budget, row.status, row.granted, row.started, row.confirmed,
                  int(row.spent), opened, row.nonce)  # fmt: skip
        run.generation  # noqa: B018  refuses what is not there
    except (ValueError, TypeError, KeyError):
        raise LedgerError(_damaged(f"the run {row.id!r}")) from None
    return run


def _damaged(what: str) -> str:
    return (
        f"The ledger is damaged: a value of {what} cannot be read. Restore the ledger from a "
        "backup, and check that with `diminuendo ledger verify`."
    )


def _checked_status(row: Any) -> Status:
    budget, record = _parts(row, schema.budgets)
    status = status_of(budget)
    _check(f"The budget {status.terms.name!r}", record, after(status, None), True)
    return status


def _checked_run(row: Any) -> Run:
    stored, record = _parts(row, schema.runs)
    run = run_of(stored)
    _check(f"The run {run.id}", record, after(None, run), run.status == OPEN)
    return run


def all_budgets(connection: Connection) -> list[Status]:
    """Every budget, by name."""
    query = _with_last_record(schema.budgets, "name", "budget", one=False)
    query = query.order_by(schema.budgets.c.name)
    return [_checked_status(row) for row in connection.execute(query)]


def existing_budget(connection: Connection, name: str) -> Status | None:
    """A budget, or None if there is none of this name."""
    row = connection.execute(_ONE_BUDGET, {"key": text("budget", name)}).one_or_none()
    return None if row is None else _checked_status(row)


def budget_in(connection: Connection, name: str) -> Status:
    """A budget; raises InputError, with the names that exist, if there is none of this name."""
    status = existing_budget(connection, name)
    if status is None:
        names = connection.execute(select(schema.budgets.c.name).limit(6)).scalars().all()
        existing = ", ".join(names) if names else "none yet"
        raise InputError(
            f"one of the ledger's ({existing})",
            name="the budget",
            value=name,
            remedy=f"Is {display(connection.engine.url)} the ledger you mean? `diminuendo ledger "
            "create` creates a budget.",
        )
    return status


def chain_of(connection: Connection, name: str) -> list[Status]:
    """A budget, the one that it is a part of, and so on."""
    chain = [budget_in(connection, name)]
    while chain[-1].terms.parent is not None:
        chain.append(budget_in(connection, chain[-1].terms.parent))
    return chain


def run_in(connection: Connection, run: str) -> Run:
    """A run; raises InputError if there is none of this id."""
    row = connection.execute(_ONE_RUN, {"key": str(run)}).one_or_none()
    if row is None:
        raise InputError(
            "a run of this ledger",
            name="the run",
            value=run,
            remedy="`diminuendo ledger show BUDGET` lists them.",
        )
    return _checked_run(row)


def all_runs(connection: Connection, name: str | None) -> list[Run]:
    """The runs of a budget, or all, in the order in which they were opened."""
    opened = schema.records.alias("opened")
    query = (
        _with_last_record(schema.runs, "id", "run", one=False)
        .join(opened, (opened.c.run == schema.runs.c.id) & (opened.c.kind == "open"))
        .order_by(opened.c.seq)
    )
    if name is not None:
        query = query.where(schema.runs.c.budget == name)
    return [_checked_run(row) for row in connection.execute(query)]


def open_run_in(connection: Connection, run: str, generation: int | None = None) -> Run:
    """A run that is open and, if a generation is given, was not taken over since."""
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


def taken_over(run: Run) -> UsageError:
    """The error for a process whose run was taken over by another."""
    opened = run.opened
    return UsageError(
        f"Run {run.id} now belongs to another process (process {opened['pid']} on host "
        f"{opened['host']}). Nothing was charged. Resume the run there; if that process is dead, "
        f"end the run with `diminuendo ledger reclaim {run.id}`."
    )


def confirmed_of(run: Run, confirmed: int | None) -> int:
    """The number of confirmed steps from now on, checked."""
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
