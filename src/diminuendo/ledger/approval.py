"""What needs two people: the first request is recorded as a proposal, the same one by another acts.

A budget with `two_persons` wants two for giving back what a dead run held, for a second budget for
its data, for a part of it, and for an import: whatever raises what somebody can spend, or changes
what is left without a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, and_, or_, select

from diminuendo.errors import UsageError
from diminuendo.ledger import rows, schema
from diminuendo.ledger.records import Record, canonical
from diminuendo.ledger.state import Run, Status
from diminuendo.ledger.store import Change, record_of
from diminuendo.ledger.terms import Terms


class Proposed(UsageError):
    """The request is on record and waits for a second person."""


def raise_proposed(record: Record) -> None:
    """Raise Proposed if the record is a proposal."""
    if record.kind == "propose":
        raise Proposed(
            "This needs two people. It is on record as proposed by "
            f"{record.body['user']} (record {record.seq}); it takes effect when somebody else asks "
            "for the same."
        )


def guardian(connection: Connection, terms: Terms) -> Status | None:
    """The budget that wants two people before one with these terms is created, if any."""
    for status in rows.budgets_for(connection, terms.data):
        if status.terms.two_persons:
            return status
    parent = None if terms.parent is None else rows.existing_budget(connection, terms.parent)
    return parent if parent is not None and parent.terms.two_persons else None


def guardian_among(known: Mapping[str, Terms], terms: Terms) -> str | None:
    """The same for budgets that records describe: its name."""
    same = [t.name for t in known.values() if terms.data and t.data == terms.data]
    over = [] if terms.parent is None else [terms.parent]
    asked = (name for name in [*sorted(same), *over] if name in known)
    return next((name for name in asked if known[name].two_persons), None)


def proposal(
    change: Change, request: Mapping[str, Any], status: Status, run: Run | None = None
) -> Record | None:
    """None if somebody else has proposed this; otherwise the proposal, recorded now.

    The last record about the run, or the last proposal to the budget that nothing has followed up,
    must be the same request.
    """
    if _is_seconded(change, request, status, run):
        return None
    return rows.write(change, "propose", status, run, {**request, "user": change.user})


def _is_seconded(
    change: Change, request: Mapping[str, Any], status: Status, run: Run | None
) -> bool:
    columns = schema.records.c
    query = select(schema.records).order_by(columns.seq.desc()).limit(1)
    if run is not None:
        query = query.where(columns.run == run.id)
    else:
        proposed = and_(columns.kind == "propose", columns.run == "")
        kinds = or_(columns.kind == "import", proposed)
        query = query.where(columns.budget == status.terms.name, kinds)
    row = change.connection.execute(query).one_or_none()
    if row is None or row.kind != "propose":
        return False
    body = record_of(row).body
    expected = json.loads(canonical(request))
    return body["user"] != change.user and all(body.get(k) == v for k, v in expected.items())


def is_approved(
    first: Mapping[str, Any], action: str, body: Mapping[str, Any], names: Sequence[str]
) -> bool:
    """Whether a proposal was made by somebody else, and is the same in what is named here."""
    return (
        first.get("action") == action
        and first["user"] != body["user"]
        and all(name in first and first[name] == body[name] for name in names)
    )
