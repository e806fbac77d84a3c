"""The ledger's tables as Python values: budgets with what is spent, runs, and a run's grants.

Every read compares the row with the last record about it, which says what the sums were after it:
a number that somebody changed by hand is an error, not something to spend.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Select, Table, bindparam, func, select
from sqlalchemy import text as sql_text

from diminuendo import _validate
from diminuendo.errors import InputError, LedgerError, UsageError
from diminuendo.ledger import schema, windows
from diminuendo.ledger.address import display
from diminuendo.ledger.records import Record, canonical
from diminuendo.ledger.state import OPEN, Run, Status, after, terms_digest
from diminuendo.ledger.store import Change, clock, computed_digest, record_of
from diminuendo.ledger.terms import Terms, text


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
    return change.append(
        kind,
        budget=name,
        run=origin if run is None else run.id,
        body={**body, "after": after(status, run)},
        budget_row={"key": name, "spent": str(status.spent_units)},
        run_row=None if run is None else {"key": run.id, **_values(run)},
    )


def write_share(change: Change, status: Status, child: str, run: str, cost: int) -> None:
    """Store what one of its parts was charged, or gave back, in a budget."""
    name = status.terms.name
    now = replace(status, spent_units=status.spent_units + cost)
    body = {"child": child, "run": run, "cost": str(cost), "after": after(now, None)}
    row = {"key": name, "spent": str(now.spent_units)}
    change.append("share", budget=name, body=body, budget_row=row)


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


def add_budget(change: Change, terms: Terms) -> Status:
    """Insert a row for a new budget, of which nothing is spent."""
    change.connection.execute(
        schema.budgets.insert().values(
            name=terms.name,
            terms=canonical(terms.to_dict()),
            spent="0",
            data=data_of(terms.to_dict()),
        )
    )
    label = "" if terms.window is None else windows.label_of(terms.window, change.now)
    return Status(terms, 0, label, label)


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


def budgets_for(connection: Connection, data: str | None) -> list[Status]:
    """The budgets that these data have, by name."""
    if data is None:
        return []
    budgets = schema.budgets.c
    query = select(budgets.name).where(budgets.data == data).order_by(budgets.name)
    return [budget_in(connection, name) for name in connection.execute(query).scalars().all()]


def refuse_second(connection: Connection, terms: Terms, allow_second: bool) -> None:
    """Raise InputError for a second budget for the same data that is not allowed."""
    existing = [] if allow_second else budgets_for(connection, terms.data)
    if existing:
        raise InputError(
            "the first budget for its data",
            name="the budget",
            value=terms.name,
            remedy=f"These data have the budget {existing[0].terms.name!r}: use it, or allow a "
            "second one (allow_second=True, --allow-second). What the two spend adds up.",
        )


def refuse_other_data(terms: Terms, data: str | None) -> None:
    """Raise InputError if a run's data are not those of the budget."""
    if data is not None and terms.data is not None and data != terms.data:
        raise InputError(
            f"the data of the budget {terms.name!r} ({terms.data})",
            name="the data",
            value=data,
            remedy="Use the budget of these data, or create one.",
        )


def membership(change: Change, terms: Terms) -> dict[str, str]:
    """As whom somebody may open a run on a budget; raises UsageError for who may not.

    Where everybody may, nothing is said. On PostgreSQL a member can also be a role that the
    database's user belongs to.
    """
    if not terms.members:
        return {}
    found = change.user if change.user in terms.members else None
    if found is None and change.connection.engine.dialect.name != "sqlite":
        query = sql_text(
            "SELECT min(rolname) FROM pg_roles WHERE rolname = ANY(:names) "
            "AND pg_has_role(session_user, oid, 'MEMBER') AND NOT rolsuper"
        )
        found = change.connection.execute(query, {"names": list(terms.members)}).scalar()
    if found is None:
        raise UsageError(
            f"{change.user} is none of those who may open runs on the budget {terms.name!r} "
            f"({', '.join(terms.members)}). Nothing was charged. Use a budget of your own."
        )
    return {"member": str(found)}


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


def _check(
    what: str, record: Any, expected: Mapping[str, Any], required: bool
) -> Mapping[str, Any]:
    """What the last record states of the sums; the row must agree, and the record be unchanged."""
    stated = None
    if record is not None and computed_digest(record) == record.digest:
        stated = record_of(record).body.get("after", {} if required else expected)
    if stated is None or any(stated.get(name) != value for name, value in expected.items()):
        number = "no record" if record is None else f"its last record (number {record.seq})"
        raise LedgerError(
            f"{what} does not agree with {number}: somebody changed the database by hand. Nothing "
            "was charged. `diminuendo ledger verify` tells more."
        )
    return dict(stated)


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
    expected = {"spent": str(status.spent_units), "terms": terms_digest(status.terms)}
    stated = _check(f"The budget {status.terms.name!r}", record, expected, True)
    if status.terms.window is None:
        return status
    try:
        since, window = stated["window"]
    except (KeyError, TypeError, ValueError):
        raise LedgerError(_damaged(f"the window of the budget {status.terms.name!r}")) from None
    return replace(status, since=str(since), window=str(window))


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


def current(connection: Connection, statuses: Sequence[Status]) -> list[Status]:
    """Budgets as they are now: of a window that has just begun nothing is spent."""
    if all(status.terms.window is None for status in statuses):
        return list(statuses)
    now = clock(connection)
    return [status.at(now) for status in statuses]


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
