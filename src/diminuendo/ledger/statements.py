"""The statements that write a record with the sums after it.

On PostgreSQL they are one statement, since everybody else waits while they travel; on SQLite, where
nothing travels, they are one each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, bindparam, text

from diminuendo.ledger import schema

_RUN_COLUMNS = ("status", "granted", "started", "confirmed", "spent", "opened", "nonce")
_ADD_RECORD, _MOVE_HEAD = schema.records.insert(), schema.head.update()
_SET_BUDGET = schema.budgets.update().where(schema.budgets.c.name == bindparam("key"))
_SET_RUN = schema.runs.update().where(schema.runs.c.id == bindparam("key"))


def _at_once(*, budget: bool, run: bool) -> Any:
    """A record, the head, and the rows of its budget and its run, in one statement."""
    parts = ["h AS (UPDATE diminuendo_head SET seq = :seq, digest = :digest)"]
    if budget:
        parts.append(
            "b AS (UPDATE diminuendo_budgets SET spent = :budget_spent WHERE name = :budget_key)"
        )
    if run:
        values = ", ".join(f"{name} = :run_{name}" for name in _RUN_COLUMNS)
        parts.append(f"r AS (UPDATE diminuendo_runs SET {values} WHERE id = :run_key)")
    names = schema.records.columns.keys()
    values = ", ".join(f":{name}" for name in names)
    return text(
        f"WITH {', '.join(parts)} INSERT INTO diminuendo_records ({', '.join(names)}) "
        f"VALUES ({values})"
    )


_AT_ONCE = {
    (budget, run): _at_once(budget=budget, run=run)
    for budget in (False, True)
    for run in (False, True)
}


def write_record(
    connection: Connection,
    record: Mapping[str, Any],
    budget: Mapping[str, Any] | None,
    run: Mapping[str, Any] | None,
) -> None:
    """Add a record, move the head to it, and set the sums that it states.

    budget, run  the columns to set, and the row as `key`
    """
    if connection.engine.dialect.name != "sqlite":
        values = dict(record)
        for prefix, row in (("budget", budget), ("run", run)):
            values |= {f"{prefix}_{name}": value for name, value in (row or {}).items()}
        connection.execute(_AT_ONCE[budget is not None, run is not None], values)
        return
    if budget is not None:
        connection.execute(_SET_BUDGET, dict(budget))
    if run is not None:
        connection.execute(_SET_RUN, dict(run))
    connection.execute(_ADD_RECORD, dict(record))
    connection.execute(_MOVE_HEAD, {"seq": record["seq"], "digest": record["digest"]})
