"""The attacks of test_attacks.py, again and again with processes that are killed on the way.

Each has a short version here and one of 300 kills, which is marked slow (`make bench`).
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import json
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from journals import older_copies, spend_with_a_journal
from ledgers import execute, in_child, late_commit, new_database, roll_back, step
from sqlalchemy import Engine, event

import diminuendo as dim
from diminuendo import (
    Budget,
    BudgetRefused,
    Ledger,
    LedgerError,
    PlanWarning,
    UsageError,
)
from diminuendo.ledger import LedgerSpending, Proposed, engine, export, import_file, verify
from diminuendo.ledger.replay import Replay

BUDGET = Budget(epsilon=4, delta=1e-8)
Times = pytest.mark.parametrize("times", [6, pytest.param(300, marks=pytest.mark.slow)])
_NEW_PID_NAMESPACE = 0x20000000


def at_statement(number: int, blow: int, work: Callable[[], None]) -> Callable[[], None]:
    """Work whose process gets a signal just before its statement of this number."""

    def struck() -> None:
        left = [number]

        def strike(*_: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), blow)

        event.listen(Engine, "before_cursor_execute", strike)
        work()

    return struck


def wait(child: int) -> int:
    return os.waitpid(child, 0)[1]


@Times
def test_a_client_that_vanishes_while_it_holds_the_head(url: str, times: int) -> None:
    """Killed at any statement: the others go on at once, and it has charged all or nothing."""
    chance = random.Random(3)
    with Ledger(url) as ledger:
        ledger.create("b", BUDGET)
        run = ledger.open_run("b").id

        def spend() -> None:
            with Ledger(url) as own:
                own.grant(run, [step(1e5, count=2)])
                own.start(run, own.run(run).granted)

        for i in range(times):
            child = in_child(at_statement(chance.randint(1, 24), signal.SIGKILL, spend))
            if i % 2:
                wait(child)
                ledger.grant(run, [step(1e5)])
            else:
                ledger.grant(run, [step(1e5)])
                wait(child)
        granted = ledger.run(run).granted
        assert times <= granted <= 3 * times
        assert verify(ledger).steps == granted


@Times
def test_a_client_that_is_stopped_while_it_holds_the_head(
    url: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL ends its transaction; a file's holder is named, and is killed by a person."""
    monkeypatch.setattr(engine, "IDLE_LIMIT", 0.2)
    chance = random.Random(4)
    with Ledger(url) as first:
        first.create("b", BUDGET)
        run = first.open_run("b").id

    def spend() -> None:
        with Ledger(url) as own:
            own.grant(run, [step(1e5)])

    named, unnamed, patience = 0, 0, 0.1 if url.startswith("sqlite") else 300.0
    with Ledger(url, patience=patience) as ledger:
        for _ in range(times):
            child = in_child(at_statement(chance.randint(4, 16), signal.SIGSTOP, spend))
            _, status = os.waitpid(child, os.WUNTRACED)
            try:
                ledger.grant(run, [step(1e5)])
            except LedgerError as error:
                named += f"Process {child} (" in str(error)
                unnamed += f"Process {child} (" not in str(error)
            if os.WIFSTOPPED(status):
                os.kill(child, signal.SIGKILL)
                wait(child)
            ledger.grant(run, [step(1e5)])
        assert unnamed == 0
        assert named > 0 if url.startswith("sqlite") else named == 0
        assert verify(ledger).steps == ledger.run(run).granted


@pytest.mark.slow
def test_sixty_four_processes_at_default_patience(url: str) -> None:
    with Ledger(url) as ledger:
        ledger.create("b", BUDGET)

    def spend() -> None:
        own = Ledger(url)
        run = own.open_run("b").id
        for _ in range(20):
            own.grant(run, [step(1e5)])

    children = [in_child(spend) for _ in range(64)]
    assert [wait(child) for child in children] == [0] * 64
    with Ledger(url) as ledger:
        assert verify(ledger).steps == 64 * 20


@Times
def test_a_sum_changed_by_hand_after_a_crash(url: str, times: int) -> None:
    chance = random.Random(5)
    with Ledger(url) as ledger:
        ledger.create("b", BUDGET)
        run = ledger.open_run("b").id
        ledger.grant(run, [step(1e5)])

        def spend() -> None:
            own = Ledger(url)
            while True:
                own.grant(run, [step(1e5)])

        def change(i: int) -> tuple[str, dict[str, Any], dict[str, Any]]:
            """A statement, what a forger sets by it, and what was right."""
            status, now = ledger.status("b"), ledger.run(run)
            choices: list[tuple[str, Any, Any]] = [
                ("budgets SET spent", "0", str(status.spent_units)),
                ("runs SET granted", 0, now.granted),
                ("runs SET spent", "0", str(now.spent_units)),
                ("head SET seq", 2, ledger.head.seq),
            ]
            words, forged, right = choices[i % 4]
            return f"UPDATE diminuendo_{words} = :x", {"x": forged}, {"x": right}

        for i in range(times):
            child = in_child(spend)
            time.sleep(chance.uniform(0, 0.08))
            os.kill(child, signal.SIGKILL)
            wait(child)
            ledger.grant(run, [step(1e5)])  # after a commit that a server still carries out
            statement, forged, right = change(i)
            execute(ledger, statement, **forged)
            with Ledger(url) as own, pytest.raises(LedgerError, match=r"by hand|behind"):
                own.grant(run, [step(1e5)])
            execute(ledger, statement, **right)
            ledger.grant(run, [step(1e5)])
        assert verify(ledger).steps == ledger.run(run).granted


@Times
def test_late_commits_of_a_run_that_asks_in_blocks(
    server: Any, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every answer is lost, and its commit lands later: as many steps are charged as released."""
    url = new_database(server.get_uri())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        plan = dim.plan(BUDGET, examples=30, parameters=15, steps=4 * times)
    released = 0
    with Ledger(url) as watching, Ledger(url) as ledger:
        watching.create("b", plan.budget)
        spending = LedgerSpending(ledger, "b", plan, ahead=4, block=4)
        spending.resume()
        for number, sigma in enumerate(plan.sigmas):
            if number % 4 == 0:
                with monkeypatch.context() as patch, late_commit(ledger) as go_on:
                    patch.setattr(ledger._store, "patience", 0.1)
                    with suppress(LedgerError):
                        spending.request(step(float(sigma)))
                    go_on()
            if spending.steps == number:
                spending.request(step(float(sigma)))
            released += 1
            assert watching.run(spending.run).started >= released
        assert watching.run(spending.run).granted == plan.steps == released
        spending.close()
        assert watching.status("b").spent <= 1
        assert verify(watching).steps == plan.steps


def released_twice(log: Path) -> bool:
    steps = log.read_text().split()
    return len(steps) != len(set(steps))


@Times
def test_a_ledger_that_lost_what_was_released(url: str, tmp_path: Path, times: int) -> None:
    """A file without its -wal, a standby that was behind: the killed run is not resumed there."""
    chance, log, refused = random.Random(6), tmp_path / "log", 0
    with Ledger(url) as ledger:
        ledger.create("b", BUDGET)

        def spend(folder: Path) -> None:
            log.write_text("")
            child = in_child(lambda: spend_with_a_journal(url, folder, log))
            end = time.monotonic() + 300
            while not (folder / "journal").exists() and time.monotonic() < end:
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.08))
            os.kill(child, signal.SIGKILL)
            wait(child)

        for i in range(times):
            folder = tmp_path / str(i)
            folder.mkdir()
            roll_back(ledger, url, functools.partial(spend, folder))
            status = wait(in_child(functools.partial(spend_with_a_journal, url, folder, log)))
            refused += status != 0
            assert not released_twice(log), i
            verify(ledger)
            shutil.rmtree(folder)
        assert refused == times


@Times
def test_a_file_without_its_log(tmp_path: Path, times: int) -> None:
    chance, log, path = random.Random(7), tmp_path / "log", tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.create("b", BUDGET)
    shutil.copy(path, tmp_path / "clean")
    for i in range(times):
        folder = tmp_path / str(i)
        folder.mkdir()
        log.write_text("")
        child = in_child(lambda folder=folder: spend_with_a_journal(str(path), folder, log))  # type: ignore[misc]
        end = time.monotonic() + 300
        while not (folder / "journal").exists() and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        wait(child)
        Path(f"{path}-wal").unlink()
        with suppress(FileNotFoundError):
            Path(f"{path}-shm").unlink()
        again = in_child(lambda folder=folder: spend_with_a_journal(str(path), folder, log))  # type: ignore[misc]
        assert wait(again) != 0, "it went on with a ledger that forgot"
        assert not released_twice(log), i
        shutil.rmtree(folder)
        for name in (f"{path}-wal", f"{path}-shm"):
            Path(name).unlink(missing_ok=True)
        shutil.copy(tmp_path / "clean", path)


@Times
def test_an_older_copy_beside_an_original_that_lives(url: str, tmp_path: Path, times: int) -> None:
    """On another host, which cannot see that the original is alive."""
    with Ledger(url) as ledger:
        ledger.create("b", BUDGET)
    older_copies(url, tmp_path, times, elsewhere=True)


def in_namespace(work: Callable[[], None]) -> int:
    """Fork into a PID namespace of its own, like a container's."""

    def outer() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEW_PID_NAMESPACE):
            os._exit(77)
        inner = in_child(work)
        os._exit(os.waitstatus_to_exitcode(wait(inner)))

    return in_child(outer)


@Times
def test_a_run_in_another_container(tmp_path: Path, times: int) -> None:
    """Its process ids mean nothing here: a living run is not reclaimed unless a person insists."""
    path, go = tmp_path / "ledger.sqlite", tmp_path / "go"
    probe = wait(in_namespace(lambda: None))
    if os.waitstatus_to_exitcode(probe) == 77:
        pytest.skip("this user may not make PID namespaces")
    with Ledger(path) as ledger:
        ledger.create("b", BUDGET)
        outside = ledger.open_run("b").id

        def live() -> None:
            with Ledger(path) as own:
                own.open_run("b", label="inside")
                with pytest.raises(UsageError, match="cannot tell"):
                    own.reclaim(outside)
                go.touch()
                while go.exists():
                    time.sleep(0.002)

        for _ in range(times):
            child = in_namespace(live)
            while not go.exists():
                time.sleep(0.002)
            run = ledger.runs("b")[-1].id
            with pytest.raises(UsageError, match="cannot tell"):
                ledger.reclaim(run)
            assert ledger.run(run).status == "open"
            go.unlink()
            assert wait(child) == 0
            ledger.reclaim(run, dead=True)
        verify(ledger)


@Times
def test_killed_while_two_people_import(url: str, tmp_path: Path, times: int) -> None:
    """All budgets of the file or none, and once, whoever dies when."""
    with Ledger(tmp_path / "other.sqlite") as other:
        other.create("people", BUDGET, two_persons=True)
        other.create("team", BUDGET)
        for name in ("people", "team"):
            other.charge(name, [step(1e4, count=3)])
        export(other, tmp_path / "out.jsonl")
        wanted = {name: other.status(name).spent_units for name in ("people", "team")}
    chance = random.Random(8)

    def import_as(user: str) -> None:
        from diminuendo.ledger import store

        store.user_name = lambda: user  # type: ignore[attr-defined]
        with Ledger(url) as own, suppress(Proposed):
            import_file(own, tmp_path / "out.jsonl")

    with Ledger(url) as ledger:
        ledger.create("people", BUDGET, two_persons=True)
        ledger.create("team", BUDGET)
        if not url.startswith("sqlite"):  # there the database says who they are: one user
            for _ in range(times):
                number = chance.randint(3, 20)
                wait(in_child(at_statement(number, signal.SIGKILL, lambda: import_as("ada"))))
            assert ledger.status("team").spent_units == 0
            verify(ledger)
            return
        for i in range(times):
            user = "ada" if i < times // 2 else "bob"
            wait(in_child(at_statement(chance.randint(3, 20), signal.SIGKILL,
                                       lambda user=user: import_as(user))))  # type: ignore[misc]  # fmt: skip
            spent = {name: ledger.status(name).spent_units for name in wanted}
            assert spent in (dict.fromkeys(wanted, 0), wanted)
            assert user == "bob" or spent != wanted
        for user in ("ada", "bob"):
            wait(in_child(lambda user=user: import_as(user)))  # type: ignore[misc]
        assert {name: ledger.status(name).spent_units for name in wanted} == wanted
        verify(ledger)


@Times
def test_killed_while_windows_renew(
    tmp_path: Path, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No day has more than its limit, and the clock that jumps back renews nothing."""
    path, day, chance = tmp_path / "ledger.sqlite", [0], random.Random(9)
    begin = datetime.datetime(2025, 1, 1, tzinfo=datetime.UTC)
    monkeypatch.setattr("diminuendo.ledger.windows.now",
                        lambda: begin + datetime.timedelta(days=day[0]))  # fmt: skip
    whole = (1 / BUDGET.R) ** 0.5
    with Ledger(path) as ledger:
        ledger.create("b", BUDGET, window="day")

        def spend() -> None:
            own = Ledger(path)
            while True:
                day[0] += chance.choice((0, 0, 0, 1, -1))
                with suppress(BudgetRefused):
                    run = own.open_run("b", plan="sha256:1").id
                    own.grant(run, [step(2 * whole, count=2)], start=False, partial=True)
                    own.start(run, 1)
                    if chance.random() < 0.5:
                        own.close_run(run, used=1)

        for _ in range(times):
            before, end = ledger.head.seq, time.monotonic() + 300
            child = in_child(spend)
            while ledger.head.seq < before + 2 and time.monotonic() < end:
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
            wait(child)
            day[0] += 1
        day[0] += 100_000
        verify(ledger)
        replay, limit, most = Replay(ledger.head.ledger), ledger.status("b").terms.limit, 0
        for row in ledger.raw_records():
            replay.feed(row)
            assert replay.spent["b"] <= limit
            most = max(most, replay.spent["b"])
        assert most > 0.2 * limit
        assert replay.windows["b"][1] > "2025-01-01"


@Times
def test_killed_between_the_commit_and_the_anchor(url: str, tmp_path: Path, times: int) -> None:
    """A published head is always in the chain; a killed client may have published one less."""
    place, chance = f"file:{tmp_path / 'heads.jsonl'}", random.Random(10)
    with Ledger(url, anchors=[place]) as ledger:
        ledger.create("b", BUDGET)
        run = ledger.open_run("b").id

        def spend() -> None:
            own = Ledger(url, anchors=[place])
            while True:
                own.grant(run, [step(1e5)])

        for _ in range(times):
            child = in_child(spend)
            time.sleep(chance.uniform(0, 0.1))
            os.kill(child, signal.SIGKILL)
            wait(child)
        heads = [json.loads(line) for line in (tmp_path / "heads.jsonl").read_text().splitlines()]
        assert verify(ledger, anchors=[place]).anchored == len(heads)
        roll = min(ledger.head.seq, heads[-1]["seq"])
        execute(ledger, "DELETE FROM diminuendo_records WHERE seq >= :last", last=roll)
        with pytest.raises(LedgerError):
            verify(ledger, anchors=[place])
