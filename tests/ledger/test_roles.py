"""Officer, spender, reader: each attacks with everything that its database user can send."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledgers import new_database, step
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from diminuendo import Budget, InputError, Ledger, LedgerError, UsageError
from diminuendo.ledger import (
    LedgerSpending,
    LedgerWarning,
    Proposed,
    mechanisms,
    roles,
    rows,
    verify,
)
from diminuendo.ledger.records import Record, canonical, pack
from diminuendo.ledger.store import Change, PermissionRefused
from diminuendo.ledger.terms import Terms

BUDGET = Budget(epsilon=4, delta=1e-8)


@pytest.fixture
def urls(server: Any) -> dict[str, str]:
    """A ledger with roles, and a URL for a user of each; "owner" created the tables."""
    return with_roles(server)


@pytest.fixture(scope="module")
def attacked(server: Any) -> dict[str, str]:
    """The same, for attacks that must leave it as it is."""
    return with_roles(server)


def with_roles(server: Any) -> dict[str, str]:
    owner = new_database(server.get_uri())
    names = {role: f"{role}_{uuid.uuid4().hex[:8]}" for role in roles.ROLES}
    engine = create_engine(make_url(owner).set(drivername="postgresql+psycopg"))
    with engine.begin() as connection:
        for name in names.values():
            connection.execute(text(f"CREATE ROLE {name} LOGIN"))
    engine.dispose()
    with Ledger(owner) as ledger:
        ledger.create("b", BUDGET)
        ledger.create("people", BUDGET)
        ledger.create("team", BUDGET, parent="people")
        ledger.create("project", BUDGET, parent="team")
        ledger.create("yearly", BUDGET, window="year")
        ledger.create("mini", BUDGET, composition="renyi", order=8)
        ledger.create("staff", BUDGET, members=["diminuendo_officer", "ada"])
        ledger.create("two", BUDGET, data="sha256:" + "ab" * 32, two_persons=True)
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
def test_no_statement_changes_what_was_spent(attacked: dict[str, str], role: str) -> None:
    for statement in ATTACKS:
        with pytest.raises(DBAPIError, match=r"InsufficientPrivilege"):
            attack(attacked[role], statement)
    with Ledger(attacked["owner"]) as ledger:
        assert verify(ledger).steps == 1


def test_an_officer_changes_no_record_either(attacked: dict[str, str]) -> None:
    for statement in ATTACKS[9:]:
        with pytest.raises(DBAPIError, match=r"InsufficientPrivilege"):
            attack(attacked["officer"], statement)


@pytest.mark.parametrize("role", ["spender", "officer"])
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE diminuendo_budgets SET spent = '1' || spent",
        "UPDATE diminuendo_runs SET granted = granted + 1",
        "UPDATE diminuendo_runs SET opened = replace(opened, 'label', 'other')",
        "INSERT INTO diminuendo_runs SELECT 'x', budget, status, granted, started, confirmed, "
        "spent, opened, nonce FROM diminuendo_runs",
    ],
)
def test_a_row_without_its_record(attacked: dict[str, str], role: str, statement: str) -> None:
    """It could not be spent, but everybody after it would be stopped by the inconsistency."""
    with pytest.raises(DBAPIError, match=r"InsufficientPrivilege"):
        attack(attacked[role], statement)
    with Ledger(attacked["owner"]) as ledger:
        verify(ledger)


class Forger:
    """Writes whatever it likes in SQL, with a chain of digests that is right."""

    def __init__(self, url: str, budget: str = "b") -> None:
        self.ledger, self.budget = Ledger(url), budget
        self.run = self.ledger.open_run(budget).id

    def grant(self, change: Change, event: Any = None, **wrong: Any) -> None:
        """A grant of one step as it should be, except for what is said otherwise."""
        events = [event or step(20.0)]
        status = rows.budget_in(change.connection, self.budget).at(change.now)
        before = rows.run_in(change.connection, self.run)
        cost = wrong.pop("cost", sum(status.terms.costs(events)))
        moved = wrong.pop("moved", cost)
        run = replace(before, granted=before.granted + 1, started=before.granted + 1,
                      spent_units=before.spent_units + cost, nonce=change.token)  # fmt: skip
        body = {"events": pack(events), "first": before.granted, "steps": 1, "cost": str(cost),
                "started": True, "confirmed": 0}  # fmt: skip
        now = replace(status, spent_units=status.spent_units + moved)
        if now.window:
            body["windows"] = [now.window]
        rows.write(change, "grant", now, run, {**body, **wrong})

    def share(self, change: Change, parent: str, cost: int, child: str = "team") -> None:
        rows.write_share(change, rows.budget_in(change.connection, parent), child, self.run, cost)

    def write(self, work: Callable[[Change], None]) -> None:
        def both(change: Change) -> Record:
            work(change)
            return Record.link(seq=1, at="", kind="", budget="", run="", token="", body={},
                               previous="")  # fmt: skip

        with self.ledger as ledger:
            ledger.write_transaction(both)


COST = Terms(name="b", budget=BUDGET).costs([step(20.0)])[0]


@pytest.mark.parametrize("role", ["spender", "officer"])
def test_a_forger_who_does_everything_right_is_let_through(urls: dict[str, str], role: str) -> None:
    """Otherwise the attacks below would show nothing."""
    Forger(urls[role]).write(Forger(urls[role]).grant)
    forger = Forger(urls[role], "project")

    def shared(change: Change) -> None:
        forger.grant(change)
        forger.share(change, "team", COST, "project")
        forger.share(change, "people", COST, "project")

    forger.write(shared)
    Forger(urls[role], "yearly").write(Forger(urls[role], "yearly").grant)
    with Ledger(urls["owner"]) as ledger:
        assert verify(ledger).steps == 4


def missing(forger: Forger, change: Change) -> None:
    forger.grant(change)


def half(forger: Forger, change: Change) -> None:
    forger.grant(change)
    forger.share(change, "team", COST, "project")


def too_small(forger: Forger, change: Change) -> None:
    forger.grant(change)
    forger.share(change, "team", COST, "project")
    forger.share(change, "people", 1, "project")


def skipped(forger: Forger, change: Change) -> None:
    forger.grant(change)
    forger.share(change, "people", COST, "project")


def alone(forger: Forger, change: Change) -> None:
    forger.share(change, "people", COST, "project")


def twice(forger: Forger, change: Change) -> None:
    half(forger, change)
    forger.share(change, "people", COST, "project")
    forger.share(change, "people", COST, "project")


@pytest.mark.parametrize("role", ["spender", "officer"])
@pytest.mark.parametrize(
    ("work", "words"),
    [(missing, "share of a parent is missing"), (half, "share of a parent is missing"),
     (too_small, "share of a parent is too small"), (skipped, "share of a parent is missing"),
     (alone, "nothing is to be shared"), (twice, "nothing is to be shared")],
)  # fmt: skip
def test_a_parent_s_share_cannot_be_left_out(
    attacked: dict[str, str], role: str, work: Any, words: str
) -> None:
    forger = Forger(attacked[role], "project")
    with pytest.raises(PermissionRefused, match=words):
        forger.write(lambda change: work(forger, change))
    with Ledger(attacked["owner"]) as ledger:
        assert (verify(ledger).steps, ledger.status("project").spent) == (1, 0)


@pytest.mark.parametrize("role", ["spender", "officer"])
@pytest.mark.parametrize(
    ("budget", "wrong", "words"),
    [
        ("b", {"cost": 1}, "costs less than its events"),
        ("b", {"moved": 1}, "another sum"),
        ("b", {"moved": -1}, "another sum"),
        ("b", {"cost": COST * 1000}, "goes over the budget"),
        ("b", {"steps": 2}, "counts of a run"),
        ("b", {"first": 5}, "counts of a run"),
        ("b", {"user": "somebody"}, "another database user"),
        ("mini", {"cost": 1, "event": step(1.0, rate=0.01)}, "costs less than its events"),
        ("mini", {"cost": 1, "event": mechanisms.Laplace(scale=5.0)}, "costs less"),
        ("mini", {"cost": 1, "event": mechanisms.ZeroConcentrated(rho=0.1)}, "costs less"),
        ("b", {"cost": 1, "event": mechanisms.PureEpsilon(epsilon=0.5)}, "costs less"),
    ],
)
def test_a_grant_that_is_wrong_in_one_thing(
    attacked: dict[str, str], role: str, budget: str, wrong: dict[str, Any], words: str
) -> None:
    forger = Forger(attacked[role], budget)
    with pytest.raises(PermissionRefused, match=words):
        forger.write(lambda change: forger.grant(change, **dict(wrong)))
    with Ledger(attacked["owner"]) as ledger:
        assert verify(ledger).steps == 1


@given(
    st.floats(0.3, 50), st.sampled_from([1.0, 0.5, 0.01, 1e-6]), st.integers(2, 200),
    st.sampled_from(["add-remove", "replace-one"]),
)  # fmt: skip
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_database_s_prices_are_not_above_ours(
    priced: Any, sigma: float, rate: float, order: int, relation: Any
) -> None:
    """Otherwise an honest grant would be refused. Full-batch steps have the same price."""
    budget = Budget(epsilon=40, delta=1e-6, relation=relation)
    events: list[Any] = [step(sigma, count=3, rate=rate), mechanisms.Laplace(scale=sigma),
                         mechanisms.PureEpsilon(epsilon=sigma / 5),
                         mechanisms.DiscreteGaussian(noise_multiplier=sigma, count=2),
                         mechanisms.RenyiCurve(curve={2: 0.1, 250: sigma})]  # fmt: skip
    terms = Terms(name="b", budget=budget, composition="renyi", order=order)
    for event in events:
        ours = terms.costs([event])[0] / 2**200
        assert priced(terms, [event]) <= ours * 1.0000005 + 1e-300
    whole = step(sigma)
    assert priced(terms, [whole]) == pytest.approx(terms.costs([whole])[0] / 2**200, rel=1e-6)
    exact = Terms(name="b", budget=budget)
    for event in (whole, *events[1:3]):
        ours = exact.costs([event])[0] / 2**200
        assert 0.5 * ours <= priced(exact, [event]) <= ours * 1.0000005


@pytest.fixture(scope="module")
def priced(server: Any) -> Iterator[Any]:
    """What the database thinks that events cost at least."""
    owner = new_database(server.get_uri())
    with Ledger(owner) as ledger:
        roles.install(ledger)
    engine = create_engine(make_url(owner).set(drivername="postgresql+psycopg"))
    query = text("SELECT diminuendo_price(CAST(:terms AS json), CAST(:events AS json))")

    def price(terms: Terms, events: list[Any]) -> float:
        values = {"terms": canonical(terms.to_dict()), "events": canonical(pack(events))}
        with engine.connect() as connection:
            return float(connection.execute(query, values).scalar_one())

    yield price
    engine.dispose()


def test_tables_of_the_same_name_fool_nobody(attacked: dict[str, str]) -> None:
    """Temporary tables come first for who does not say otherwise, and anybody can make them."""
    forger = Forger(attacked["spender"])

    def work(change: Change) -> None:
        for table in ("head", "records", "budgets", "runs"):
            make = f"CREATE TEMP TABLE diminuendo_{table} AS TABLE public.diminuendo_{table}"
            change.connection.execute(text(make))
        change.connection.execute(text("SET LOCAL search_path = public, pg_temp"))
        forger.grant(change, cost=1)

    with pytest.raises(PermissionRefused, match="costs less"):
        forger.write(work)
    fake = (
        "CREATE TEMP TABLE diminuendo_records (LIKE public.diminuendo_records); "
        "UPDATE public.diminuendo_budgets SET spent = '0'"
    )
    with pytest.raises(DBAPIError, match="InsufficientPrivilege"):
        attack(attacked["spender"], fake)


def test_a_quota_is_for_its_members(
    attacked: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role can be a member; who is not in it is refused by the program and by the database."""
    with Ledger(attacked["officer"]) as officer:
        officer.open_run("staff")
    with Ledger(attacked["spender"]) as spender:
        with pytest.raises(UsageError, match="none of those"):
            spender.open_run("staff")
        monkeypatch.setattr(rows, "membership", lambda *_: {"member": "ada"})
        with pytest.raises(PermissionRefused, match="no member"):
            spender.open_run("staff")


@pytest.mark.parametrize("days", [-400, 400])
def test_a_window_of_another_time(attacked: dict[str, str], days: int) -> None:
    forger = Forger(attacked["spender"], "yearly")

    def work(change: Change) -> None:
        change.now += datetime.timedelta(days=days)
        forger.grant(change)

    with pytest.raises(PermissionRefused, match="of another time"):
        forger.write(work)


def test_a_window_renewed_without_its_time(attacked: dict[str, str]) -> None:
    forger = Forger(attacked["spender"], "yearly")

    def work(change: Change) -> None:
        now = change.now
        change.now += datetime.timedelta(days=400)
        before = change.append

        def append(*arguments: Any, **named: Any) -> Record:
            change.now = now
            return before(*arguments, **named)

        change.append = append  # type: ignore[method-assign]
        forger.grant(change)

    with pytest.raises(PermissionRefused, match="another window"):
        forger.write(work)


@pytest.mark.parametrize("kind", ["create", "import", "reclaim", "upgrade", "propose"])
def test_kinds_that_need_an_officer(attacked: dict[str, str], kind: str) -> None:
    forger = Forger(attacked["spender"])

    def work(change: Change) -> None:
        status = rows.budget_in(change.connection, "b")
        run = rows.run_in(change.connection, forger.run)
        rows.write(change, kind, status, run, {})

    with pytest.raises(PermissionRefused, match=f"{kind} needs an officer"):
        forger.write(work)


def test_one_officer_cannot_be_two_people(
    urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand: a proposal in another's name, and each act without any proposal."""
    forger = Forger(urls["officer"], "two")
    monkeypatch.setattr("diminuendo.ledger.process.start_time", lambda pid: "it is dead")

    def in_another_name(change: Change) -> None:
        status = rows.budget_in(change.connection, "two")
        run = rows.run_in(change.connection, forger.run)
        body = {"action": "reclaim", "unreleased": False, "user": "postgres"}
        rows.write(change, "propose", status, run, body)

    with pytest.raises(PermissionRefused, match="another database user"):
        forger.write(in_another_name)
    monkeypatch.setattr("diminuendo.ledger.approval.proposal", lambda *_: None)
    with Ledger(urls["officer"]) as officer:
        with pytest.raises(PermissionRefused, match="two people"):
            officer.reclaim(forger.run)
        with pytest.raises(PermissionRefused, match="two people"):
            officer.create("more", BUDGET, data="sha256:" + "ab" * 32, allow_second=True)
        with pytest.raises(PermissionRefused, match="two people"):
            officer.create("part", BUDGET, parent="two")
        monkeypatch.undo()
        with pytest.raises(Proposed):
            officer.create("part", BUDGET, parent="two")
    with Ledger(urls["owner"]) as owner:
        owner.create("part", BUDGET, parent="two")
        verify(owner)


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


def test_an_honest_spender_on_every_budget(urls: dict[str, str], some_plan: Any) -> None:
    """What the rules let through: parts, windows, mini-batches, other mechanisms, tiny prices."""
    with Ledger(urls["owner"]) as owner:
        owner.create("statistics", BUDGET, composition="renyi", order=16, parent="mini")
        owner.create("swapped", Budget(epsilon=4, delta=1e-8, relation="replace-one"),
                     composition="renyi", order=8, window="day")  # fmt: skip
    others: list[Any] = [
        mechanisms.Laplace(scale=40.0), mechanisms.PureEpsilon(epsilon=0.01, count=3),
        mechanisms.DiscreteGaussian(noise_multiplier=60.0), mechanisms.ZeroConcentrated(rho=1e-4),
        mechanisms.RenyiCurve(curve={2: 1e-4, 64: 1e-3}), mechanisms.Laplace(scale=1e200),
        mechanisms.PureEpsilon(epsilon=1e-200), step(1e200),
        mechanisms.DiscreteGaussian(noise_multiplier=1e200),
    ]  # fmt: skip
    with Ledger(urls["spender"]) as spender:
        for name in ("b", "project", "yearly"):
            spender.charge(name, [step(50.0, count=3), step(1e200), mechanisms.Laplace(scale=99.0)])
        for name in ("mini", "statistics", "swapped"):
            steps = [step(5.0, rate=0.01, count=7), step(40.0), step(2.0, rate=1e-6)]
            spender.charge(name, [*steps, *others])
        with LedgerSpending(spender, "project", some_plan, ahead=10) as spending:
            for sigma in some_plan.sigmas[:10]:
                spending.request(step(float(sigma)))
        assert verify(spender).runs == 8


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
