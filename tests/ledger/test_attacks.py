"""Attacks that overspend while the records look right: refused before anything is charged."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
from ledgers import execute, in_child, late_commit, new_database, roll_back, step
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from diminuendo import Budget, InputError, Ledger, LedgerError, UsageError
from diminuendo.ledger import Head, LedgerWarning, engine, process, rows, verify
from diminuendo.ledger.terms import Terms

BUDGET = Budget(epsilon=4, delta=1e-8)


@pytest.fixture
def run(ledger: Ledger) -> str:
    """An open run on the budget "b", with ten steps granted and four started."""
    ledger.create("b", BUDGET)
    opened = ledger.open_run("b").id
    ledger.grant(opened, [step(20.0, count=10)], start=False)
    ledger.start(opened, 4)
    return opened


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE diminuendo_budgets SET spent = '0'",
        "UPDATE diminuendo_budgets SET terms = replace(terms, '4.0', '9.0')",
        "UPDATE diminuendo_runs SET granted = 99",
        "UPDATE diminuendo_runs SET started = 0",
        "UPDATE diminuendo_runs SET nonce = 'x'",
        'UPDATE diminuendo_runs SET opened = replace(opened, \'"turn"\', \'"turn"\\:7,"x"\')',
        "UPDATE diminuendo_records SET body = replace(body, '4', '0') WHERE seq = 4",
        "UPDATE diminuendo_head SET seq = 3",
        "UPDATE diminuendo_head SET digest = 'sha256:00'",
        "DELETE FROM diminuendo_records WHERE seq = 4",
    ],
)
def test_a_sum_changed_by_hand_is_not_spent(ledger: Ledger, run: str, statement: str) -> None:
    execute(ledger, statement)
    with pytest.raises(LedgerError, match="changed the database by hand"):
        ledger.grant(run, [step(20.0)])
    with pytest.raises(LedgerError):
        verify(ledger)


@pytest.mark.parametrize(
    ("statement", "what"),
    [
        ("UPDATE diminuendo_budgets SET spent = 'many'", "budget 'b'"),
        ("UPDATE diminuendo_budgets SET terms = '{'", "budget 'b'"),
        ("UPDATE diminuendo_runs SET spent = ''", "run "),
        ("UPDATE diminuendo_runs SET opened = '[]'", "run "),
    ],
)
def test_a_damaged_cell_is_a_clear_error(
    ledger: Ledger, run: str, statement: str, what: str
) -> None:
    execute(ledger, statement)
    with pytest.raises(LedgerError, match=f"a value of the {what}"):
        ledger.grant(run, [step(20.0)])
    with pytest.raises(LedgerError, match="does not agree"):
        verify(ledger)


def test_a_start_names_the_one_before_it(ledger: Ledger, run: str) -> None:
    first = ledger.run(run).nonce
    second = ledger.start(run, 6, previous=first)
    assert ledger.run(run).nonce == second != first
    with pytest.raises(UsageError, match="started since"):
        ledger.start(run, 8, previous=first)
    assert ledger.run(run).started == 6
    granted = ledger.grant(run, [step(20.0)])
    assert ledger.run(run).nonce == granted.nonce
    verify(ledger)


def test_a_grant_names_its_first_step(ledger: Ledger, run: str) -> None:
    with pytest.raises(UsageError, match="was granted 10 steps, and not the 8"):
        ledger.grant(run, [step(20.0)], first=8)
    assert ledger.grant(run, [step(20.0)], first=10, token="t").first == 10
    assert ledger.grant(run, [step(20.0)], first=10, token="t").first == 10
    with pytest.raises(InputError, match="token"):
        ledger.grant(run, [step(20.0)], first=11, token="t")


@pytest.fixture
def postgres(server: Any) -> str:
    """The URL of a new PostgreSQL database."""
    return new_database(server.get_uri())


def test_a_commit_that_lands_after_the_client_gave_up(postgres: str) -> None:
    """The client asks for the same steps again: they must not be granted twice for other steps."""
    with Ledger(postgres) as patient, Ledger(postgres, patience=1.0) as ledger:
        patient.create("b", BUDGET)
        run = patient.open_run("b").id
        with late_commit(ledger) as go_on:
            with pytest.raises(LedgerError, match="could not be used"):
                ledger.grant(run, [step(100.0, count=4)], first=0, token="first")
            assert patient.run(run).granted == 0, "not yet"
            threading.Timer(0.3, go_on).start()
            with pytest.raises(UsageError, match="was granted 4 steps, and not the 0"):
                patient.grant(run, [step(100.0, count=4)], first=0)
        assert patient.grant(run, [step(100.0, count=4)], first=0, token="first").first == 0
        assert patient.run(run).granted == 4
        assert verify(patient).steps == 4


def test_a_ledger_that_is_behind_what_was_seen(ledger: Ledger, url: str, run: str) -> None:
    """A standby that lost acknowledged grants, promoted under a program that goes on."""
    roll_back(ledger, url, lambda: ledger.grant(run, [step(20.0, count=5)]))
    seen = ledger.seen
    assert seen is not None
    verify(ledger)
    with pytest.raises(LedgerError, match="behind what was seen"):
        ledger.grant(run, [step(20.0)])
    with Ledger(url) as other:
        other.grant(run, [step(20.0)])
        other.grant(run, [step(20.0)])
        with pytest.raises(LedgerError, match=f"record {seen.seq} .* is missing or another one"):
            other.expect(seen)
        other.expect(other.head)
        other.grant(run, [step(20.0)])


def test_another_ledger_in_its_place(ledger: Ledger, run: str, tmp_path: Path) -> None:
    del run
    with Ledger(tmp_path / "other.sqlite") as other, pytest.raises(LedgerError, match="This is"):
        other.expect(ledger.head)


def test_a_file_without_its_log(tmp_path: Path) -> None:
    """Grants of a process that was killed are in the -wal file only; somebody deletes it."""
    path, note = tmp_path / "ledger.sqlite", tmp_path / "head"
    with Ledger(path) as ledger:
        ledger.create("b", BUDGET)

    def spend() -> None:
        own = Ledger(path)
        own.charge("b", [step(20.0, count=60)])
        head = own.head
        note.write_text(f"{head.ledger} {head.seq} {head.digest}")
        os.kill(os.getpid(), signal.SIGKILL)

    os.waitpid(in_child(spend), 0)
    Path(f"{path}-wal").unlink()
    name, number, digest = note.read_text().split()
    with Ledger(path) as ledger:
        assert verify(ledger).steps == 0
        with pytest.raises(LedgerError, match="behind what was seen"):
            ledger.expect(Head(name, int(number), digest))


def test_a_client_that_stops_inside_a_transaction(
    postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL ends its transaction; the others go on; it finds out and asks again."""
    monkeypatch.setattr(engine, "IDLE_LIMIT", 1.0)
    with Ledger(postgres) as ledger:
        ledger.create("b", BUDGET)
        run = ledger.open_run("b").id

        def hold() -> None:
            own = Ledger(postgres)
            before = rows.open_run_in

            def stop(*arguments: Any) -> Any:
                monkeypatch.setattr(rows, "open_run_in", before)
                os.kill(os.getpid(), signal.SIGSTOP)
                return before(*arguments)

            monkeypatch.setattr(rows, "open_run_in", stop)
            own.grant(run, [step(20.0)])

        child = in_child(hold)
        os.waitpid(child, os.WUNTRACED)
        try:
            ledger.grant(run, [step(20.0)])
        finally:
            os.kill(child, signal.SIGCONT)
        assert os.waitpid(child, 0)[1] == 0
        assert ledger.run(run).granted == 2
        verify(ledger)


def test_a_stopped_holder_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.create("b", BUDGET)

    def hold() -> None:
        own = sqlite3.connect(path, isolation_level=None)
        own.execute("BEGIN IMMEDIATE")
        os.kill(os.getpid(), signal.SIGSTOP)

    child = in_child(hold)
    os.waitpid(child, os.WUNTRACED)
    try:
        with (
            Ledger(path, patience=0.5) as ledger,
            pytest.raises(LedgerError, match=rf"Process {child} \(.*stopped\) holds it"),
        ):
            ledger.open_run("b")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("where", ["host", "boot", "namespace"])
def test_a_process_that_cannot_be_seen_from_here(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Another machine, a reboot, a container: its process id says nothing here."""
    elsewhere = {**process.this_process(), where: "another"}
    ledger.create("b", BUDGET)
    with monkeypatch.context() as patch:
        patch.setattr(process, "this_process", lambda: elsewhere)
        run = ledger.open_run("b").id
    assert process.is_alive(ledger.run(run).opened) is None
    with pytest.raises(UsageError, match="say --yes-it-is-dead"):
        ledger.reclaim(run)
    assert ledger.reclaim(run, dead=True).status == "reclaimed"
    verify(ledger)


def test_a_run_of_an_older_version_cannot_be_told_dead() -> None:
    opened = process.this_process()
    assert process.is_alive(opened) is True
    for name in ("boot", "namespace"):
        del opened[name]
    assert process.is_alive(opened) is None


def test_only_a_ledger_is_verified(tmp_path: Path) -> None:
    """An empty file and another program's database are refused and left as they are."""
    empty, foreign = tmp_path / "empty.sqlite", tmp_path / "foreign.sqlite"
    empty.touch()
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE customers (name TEXT)")
    other.close()
    before = foreign.read_bytes()
    for options in ({"create": False}, {"readonly": True}):
        for path, words in ((empty, "It is empty"), (foreign, "another program")):
            with pytest.raises(InputError, match=words):
                Ledger(path, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="another program"):
        Ledger(foreign)
    assert (empty.read_bytes(), foreign.read_bytes()) == (b"", before)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.sqlite", "foreign.sqlite"]


def test_only_a_database_with_a_ledger_is_verified(postgres: str) -> None:
    for options in ({"create": False}, {"readonly": True}):
        with pytest.raises(InputError, match="none of the tables"):
            Ledger(postgres, **options)  # type: ignore[arg-type]
    made = create_engine(make_url(postgres).set(drivername="postgresql+psycopg"))
    with made.connect() as connection:
        count = text("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
        assert connection.execute(count).scalar() == 0
    made.dispose()


@pytest.mark.parametrize("table", ["head", "records", "budgets", "runs"])
def test_a_dropped_table_is_damage(ledger: Ledger, url: str, run: str, table: str) -> None:
    del run
    execute(ledger, f"DROP TABLE diminuendo_{table}")
    for options in ({"create": False}, {"readonly": True}, {}):
        with pytest.raises(LedgerError, match=f"table diminuendo_{table} is missing"):
            Ledger(url, **options)  # type: ignore[arg-type]


def test_an_emptied_head_is_damage(ledger: Ledger, url: str, run: str) -> None:
    del run
    execute(ledger, "DELETE FROM diminuendo_head")
    with pytest.raises(LedgerError, match="head is missing"):
        Ledger(url)


def test_who_may_only_read_can_verify(tmp_path: Path) -> None:
    """Also where no file can be created beside the ledger, and where a program is writing to it."""
    folder = tmp_path / "shared"
    folder.mkdir()
    path = folder / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.create("b", BUDGET)
        ledger.charge("b", [step(20.0)])
    for parent in (*folder.parents, folder):
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & 0o005:
            parent.chmod(parent.stat().st_mode | 0o055)
    path.chmod(0o444)
    folder.chmod(0o555)

    def read() -> None:
        if os.getuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        with Ledger(path, readonly=True) as own:
            assert verify(own).steps == 1
            with pytest.raises(InputError, match="opened for writing"):
                own.open_run("b")

    assert os.waitpid(in_child(read), 0)[1] == 0
    folder.chmod(0o755)
    path.chmod(0o644)
    with Ledger(path) as ledger:
        ledger.charge("b", [step(20.0)])
        with Ledger(path, readonly=True) as reader:
            assert verify(reader).steps == 2


def test_a_database_user_who_may_only_read_can_verify(ledger: Ledger, url: str, run: str) -> None:
    if url.startswith("sqlite"):
        pytest.skip("database users are PostgreSQL's")
    reader = f"reader_{run}"
    execute(ledger, f"CREATE ROLE {reader} LOGIN")
    execute(ledger, f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {reader}")
    own = make_url(url).set(username=reader).render_as_string(hide_password=False)
    with Ledger(own, readonly=True) as readonly:
        assert verify(readonly).steps == 10


def test_creating_a_budget_reads_no_other_budget(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(30):
        ledger.create(f"b{i}", Budget(epsilon=1 + i, delta=1e-8), data=f"sha256:{i:064x}")
    rows._terms.cache_clear()
    parsed: list[Any] = []
    from_dict = Terms.from_dict

    def counted(data: Any) -> Terms:
        parsed.append(data)
        return from_dict(data)

    monkeypatch.setattr(Terms, "from_dict", counted)
    ledger.create("one more", BUDGET, data=f"sha256:{99:064x}")
    assert len(parsed) <= 1
    with pytest.raises(InputError, match="These data have the budget 'b7'"):
        ledger.create("again", BUDGET, data=f"sha256:{7:064x}")


def test_nobody_starves(tmp_path: Path) -> None:
    """24 processes that write without a pause; each gets its ten grants within its patience."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.create("b", BUDGET)

    def spend() -> None:
        own = Ledger(path)
        run = own.open_run("b").id
        for _ in range(10):
            own.grant(run, [step(1e5)])

    children = [in_child(spend) for _ in range(24)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 24
    with Ledger(path) as ledger:
        assert verify(ledger).steps == 240


def test_the_id_of_the_ledger_is_in_the_chain(ledger: Ledger, url: str, run: str) -> None:
    """A ledger that takes another's id, to be imported or cited as that one, is found."""
    del run
    execute(ledger, "UPDATE diminuendo_head SET ledger = 'another'")
    with Ledger(url) as other, pytest.raises(LedgerError, match="chain breaks"):
        verify(other)


def test_weak_settings_are_said(ledger: Ledger, url: str) -> None:
    assert ledger.weaknesses() == []
    if url.startswith("sqlite"):
        return
    execute(ledger, "CREATE VIEW pg_stat_replication AS SELECT 1 AS pid")
    path = {"options": "-csearch_path=public,pg_catalog"}
    weak = make_url(url).update_query_dict(path).render_as_string(hide_password=False)
    with pytest.warns(LedgerWarning, match="synchronous_standby_names"):
        Ledger(weak).close()
