"""A ledger of version 1 is migrated when it is opened, if it verifies."""

from __future__ import annotations

from typing import Any

import pytest
from ledgers import step
from sqlalchemy import create_engine, text

from diminuendo import Budget, Ledger, LedgerError, SchemaError
from diminuendo.ledger import address, schema, verify
from diminuendo.ledger.records import START, Record, canonical, pack
from diminuendo.ledger.terms import Terms

TERMS = Terms(name="b", budget=Budget(epsilon=4, delta=1e-8), data="sha256:" + "ab" * 32)
OPENED = {"by": "Ada", "host": "h", "pid": 1, "born": "", "label": "", "plan": "", "turn": 0}


def version_1(url: str, spent: int | None = None) -> None:
    """A ledger as version 1 wrote it: one closed run, one that is open, ten steps each."""
    cost = sum(TERMS.costs([step(20.0, count=10)]))
    grant = {"events": pack([step(20.0, count=10)]), "first": 0, "steps": 10, "cost": str(cost),
             "started": True, "confirmed": 0}  # fmt: skip
    entries: list[tuple[str, str, dict[str, Any]]] = [
        ("create", "", {"terms": TERMS.to_dict(), "by": "Ada"}),
        *(("open", run, OPENED) for run in ("r1", "r2")),
        *(("grant", run, grant) for run in ("r1", "r2")),
        ("release", "r1", {"used": 10, "returned": "0", "by": "Ada", "assumed": "it is dead"}),
    ]
    previous = START
    engine = create_engine(address.parse(url))
    with engine.begin() as connection:
        schema._first(connection)
        for seq, (kind, run, body) in enumerate(entries, start=1):
            record = Record.link(seq=seq, at="then", kind=kind, budget="b", run=run,
                                 token=f"t{seq}", body=body, previous=previous)  # fmt: skip
            previous = record.digest
            names = "seq, at, kind, budget, run, token, body, previous, digest"
            row = {**record.to_dict(), "body": canonical(body)}
            values = ", ".join(f":{name}" for name in names.split(", "))
            insert = f"INSERT INTO diminuendo_records ({names}) VALUES ({values})"
            connection.execute(text(insert), row)
        total = 2 * cost if spent is None else spent
        head = "INSERT INTO diminuendo_head VALUES (1, 1, 'old', 6, :digest)"
        connection.execute(text(head), {"digest": previous})
        budget = "INSERT INTO diminuendo_budgets VALUES ('b', :terms, :spent)"
        terms = canonical(TERMS.to_dict())
        connection.execute(text(budget), {"terms": terms, "spent": str(total)})
        runs = "INSERT INTO diminuendo_runs VALUES (:id, 'b', :status, 10, 10, 0, :spent, :opened)"
        for name, status in (("r1", "released"), ("r2", "open")):
            values_of = {"id": name, "status": status, "spent": str(cost)}
            connection.execute(text(runs), {**values_of, "opened": canonical(OPENED)})
    engine.dispose()


def test_an_older_ledger_goes_on(url: str) -> None:
    version_1(url)
    with pytest.raises(SchemaError, match="migrated when somebody opens it who may write"):
        Ledger(url, readonly=True)
    with Ledger(url) as ledger:
        before = verify(ledger)
        assert (before.records, before.steps) == (8, 20)
        assert ledger.run("r2").nonce == "t5"
        ledger.grant("r2", [step(20.0)], first=10)
        ledger.resume_run("r2")
        ledger.close_run("r2", used=11)
        assert [run.status for run in ledger.runs("b")] == ["released", "closed"]
        verify(ledger)
    with Ledger(url) as again:
        assert again.head.seq == 11, "migrated once"


def test_an_older_ledger_that_does_not_verify_is_left_alone(url: str) -> None:
    version_1(url, spent=0)
    with pytest.raises(LedgerError, match="was not migrated: the sum of the budget 'b'"):
        Ledger(url)


def test_an_older_empty_ledger(url: str) -> None:
    engine = create_engine(address.parse(url))
    with engine.begin() as connection:
        schema._first(connection)
        head = "INSERT INTO diminuendo_head VALUES (1, 1, 'old', 0, :digest)"
        connection.execute(text(head), {"digest": START})
    engine.dispose()
    with Ledger(url) as ledger:
        ledger.create("b", TERMS.budget)
        verify(ledger)
