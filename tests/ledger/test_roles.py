"""Officer, spender, reader: each attacks with everything that its database user can send."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from ledgers import new_database, step
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from diminuendo import Budget, InputError, Ledger, LedgerError
from diminuendo.ledger import LedgerSpending, LedgerWarning, roles, verify
from diminuendo.ledger.records import Record, canonical
from diminuendo.ledger.store import PermissionRefused

BUDGET = Budget(epsilon=4, delta=1e-8)


@pytest.fixture
def urls(server: Any) -> dict[str, str]:
    """A ledger with roles, and a URL for a user of each; "owner" created the tables."""
    owner = new_database(server.get_uri())
    names = {role: f"{role}_{uuid.uuid4().hex[:8]}" for role in roles.ROLES}
    engine = create_engine(make_url(owner).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        for name in names.values():
            connection.execute(text(f"CREATE ROLE {name} LOGIN"))
    engine.dispose()
    with Ledger(owner) as ledger:
        ledger.create("b", BUDGET)
        ledger.charge("b", [step(20.0)])
        for _ in range(2):
            roles.install(ledger, {role: [name] for role, name in names.items()})
    found = {
        role: make_url(owner).set(username=name).render_as_string(hide_password=False)
        for role, name in names.items()
    }
    return {**found, "owner": owner}


def attack(url: str, statement: str, **values: Any) -> None:
    engine = create_engine(make_url(url).set(drivername="postgresql+psycopg"))
    try:
        with engine.begin() as connection:
            connection.execute(text(statement), values)
    finally:
        engine.dispose()


ATTACKS = [
    "UPDATE diminuendo_budgets SET spent = '0'",
    "UPDATE diminuendo_budgets SET spent = '1' || spent || '000'",
    "UPDATE diminuendo_budgets SET terms = replace(terms, '4.0', '9.0')",
    "INSERT INTO diminuendo_budgets SELECT 'more', terms, '0', data FROM diminuendo_budgets",
    "DELETE FROM diminuendo_budgets",
    "UPDATE diminuendo_runs SET started = 0",
    "UPDATE diminuendo_runs SET status = 'open'",
    "UPDATE diminuendo_runs SET spent = '0'",
    "DELETE FROM diminuendo_runs",
    "UPDATE diminuendo_records SET body = '{}'",
    "UPDATE diminuendo_records SET signature = 'x'",
    "DELETE FROM diminuendo_records WHERE seq = 4",
    "TRUNCATE diminuendo_records",
    "UPDATE diminuendo_head SET seq = seq - 1",
    "UPDATE diminuendo_head SET seq = seq + 1",
    "UPDATE diminuendo_head SET ledger = 'x'",
    "UPDATE diminuendo_head SET version = 1",
    "DELETE FROM diminuendo_head",
    "ALTER TABLE diminuendo_records DISABLE TRIGGER ALL",
    "DROP TABLE diminuendo_records",
    "INSERT INTO diminuendo_records SELECT seq + 1, at, kind, budget, run, 'x', body, digest, "
    "digest, '' FROM diminuendo_records ORDER BY seq DESC LIMIT 1",
]


@pytest.mark.parametrize("role", ["spender", "reader"])
def test_no_statement_changes_what_was_spent(urls: dict[str, str], role: str) -> None:
    for statement in ATTACKS:
        with pytest.raises(DBAPIError, match=r"InsufficientPrivilege"):
            attack(urls[role], statement)
    with Ledger(urls["owner"]) as ledger:
        assert verify(ledger).steps == 1


def test_an_officer_changes_no_record_either(urls: dict[str, str]) -> None:
    for statement in ATTACKS[9:]:
        with pytest.raises(DBAPIError, match=r"InsufficientPrivilege"):
            attack(urls["officer"], statement)


def append(url: str, kind: str, run: str, body: dict[str, Any]) -> None:
    """A well-formed record, written by hand."""
    with Ledger(url) as ledger:
        head = ledger.head
    user = make_url(url).username
    full = {"db_user": user, **body}
    record = Record.link(seq=head.seq + 1, at="now", kind=kind, budget="b", run=run,
                         token=uuid.uuid4().hex, body=full, previous=head.digest)  # fmt: skip
    row = {**record.to_dict(), "body": canonical(full), "signature": ""}
    names = ", ".join(row)
    values = ", ".join(f":{name}" for name in row)
    attack(url, f"INSERT INTO diminuendo_records ({names}) VALUES ({values})", **row)


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("create", {}, "needs an officer"),
        ("import", {}, "needs an officer"),
        ("reclaim", {}, "needs an officer"),
        ("upgrade", {}, "needs an officer"),
        ("start", {"db_user": "postgres"}, "another database user"),
        ("start", {"after": {"spent": "0"}}, "another sum"),
        ("grant", {"cost": "1", "events": [[20.0, 1.0, 1]]}, "costs less"),
    ],
)
def test_no_record_that_a_spender_makes_up(
    urls: dict[str, str], kind: str, body: dict[str, Any], words: str
) -> None:
    with Ledger(urls["spender"]) as ledger:
        run, spent = ledger.open_run("b").id, ledger.status("b").spent_units
    full = {"after": {"spent": str(spent)}, **body}
    with pytest.raises(DBAPIError, match=words):
        append(urls["spender"], kind, run, full)


def test_each_role_does_its_work(urls: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(urls["spender"]) as ledger:
        run = ledger.open_run("b").id
        ledger.grant(run, [step(20.0, count=10)], start=False)
        ledger.start(run, 4)
        with pytest.raises(PermissionRefused, match="needs an officer"):
            ledger.close_run(run, used=4)
        with pytest.raises(PermissionRefused):
            ledger.create("mine", BUDGET)
        whole = ledger.open_run("b").id
        ledger.grant(whole, [step(20.0)])
        assert ledger.close_run(whole, used=1).status == "closed"
        by = {record.body["db_user"] for record in ledger.records(run=run)}
        assert by == {make_url(urls["spender"]).username}
    with Ledger(urls["officer"]) as officer:
        officer.create("other", BUDGET)
        monkeypatch.setattr("diminuendo.ledger.process.start_time", lambda pid: "it is dead")
        officer.reclaim(run)
        assert verify(officer).steps == 6
    with Ledger(urls["reader"], readonly=True) as reader:
        assert verify(reader).steps == 6
    with Ledger(urls["reader"]) as reader, pytest.raises(LedgerError):
        reader.open_run("b")


def test_a_run_that_cannot_give_back_stays_open(urls: dict[str, str], some_plan: Any) -> None:
    with Ledger(urls["owner"]) as ledger:
        ledger.create("plan", some_plan.budget)
    with Ledger(urls["spender"]) as ledger:
        spending = LedgerSpending(ledger, "plan", some_plan, block=8)
        spending.resume()
        spending.request(step(float(some_plan.sigmas[0])))
        with pytest.warns(LedgerWarning, match="stays open"):
            spending.close()
        assert ledger.run(spending.run).status == "open"


def test_roles_are_postgresqls(tmp_path: Any) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger, pytest.raises(InputError, match="on PostgreSQL"):
        roles.install(ledger)
    with pytest.raises(InputError, match="the role"):
        roles.statements({"admin": ["x"]})
    assert roles.statements({"reader": ['a"b']})[-1] == 'GRANT diminuendo_reader TO "a""b"'
