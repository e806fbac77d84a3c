"""From version 1 to version 2: an older ledger is verified, and its sums go into its records."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Connection, select, text

from diminuendo.errors import LedgerError
from diminuendo.ledger import rows, schema
from diminuendo.ledger.records import START, start_of
from diminuendo.ledger.replay import Replay
from diminuendo.ledger.state import OPEN, after
from diminuendo.ledger.store import Change

_VERSION_1_COLUMNS = "seq, at, kind, budget, run, token, body, previous, digest"


def add_sums(connection: Connection) -> None:
    """Replay the records, refuse tables that differ, and append what each sum is now."""
    head = connection.execute(select(schema.head)).one_or_none()
    if head is None:
        return
    replay = Replay(head.ledger)
    query = text(f"SELECT {_VERSION_1_COLUMNS} FROM {schema.records.name} ORDER BY seq")
    for row in connection.execute(query):
        replay.feed(dict(row._mapping))
    last = replay.digest if replay.seq else START
    if (replay.seq, last) != (head.seq, head.digest):
        raise LedgerError(_inconsistent("its head is not its last record"))
    for row in connection.execute(select(schema.budgets)).all():
        if row.name not in replay.terms or int(row.spent) != replay.spent[row.name]:
            raise LedgerError(_inconsistent(f"the sum of the budget {row.name!r} is wrong"))
        _set(connection, schema.budgets, "name", row.name, data=rows.data_of(json.loads(row.terms)))
    for row in connection.execute(select(schema.runs)).all():
        account = replay.runs.get(row.id)
        if account is None or (row.started, row.granted) != (account.started, account.granted):
            raise LedgerError(_inconsistent(f"the run {row.id} is not what its records say"))
        _set(connection, schema.runs, "id", row.id, nonce=account.nonce)
    _append_sums(connection, head.ledger, replay)


def _append_sums(connection: Connection, ledger: str, replay: Replay) -> None:
    values: dict[str, Any] = {"version": schema.version()}
    if replay.seq == 0:
        values["digest"] = start_of(ledger)
    connection.execute(schema.head.update().values(values))
    change = Change(connection, f"upgrade-{ledger}")
    for name in replay.terms:
        row = connection.execute(select(schema.budgets).where(schema.budgets.c.name == name)).one()
        body = {"ledger": ledger, "after": after(rows.status_of(row), None)}
        change.append("upgrade", budget=name, body=body)
    for row in connection.execute(select(schema.runs).where(schema.runs.c.status == OPEN)):
        run = rows.run_of(row)
        body = {"ledger": ledger, "after": after(None, run)}
        change.append("upgrade", budget="", run=run.id, body=body)


def _set(connection: Connection, table: Any, key: str, value: str, **values: str) -> None:
    connection.execute(table.update().where(table.c[key] == value).values(**values))


def _inconsistent(why: str) -> str:
    return (
        f"The ledger is of an older version and does not verify, so that it was not migrated: {why}"
        ". Restore it from a backup."
    )
