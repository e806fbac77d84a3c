"""Many processes at once, and processes that die anywhere: nothing overspent, nothing lost."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from journals import older_copies, wait_for_a_release
from ledgers import in_child, step
from sqlalchemy import text

from diminuendo import Budget, BudgetRefused, Ledger
from diminuendo.ledger import schema, verify

PROCESSES = 16


def spend_all(url: str, sigma: float, count: Path) -> None:
    """Ask for small grants until there is no room, and leave how many were given."""
    ledger, given = Ledger(url, patience=120), 0
    run = ledger.open_run("b")
    try:
        while True:
            ledger.grant(run.id, [step(sigma)])
            given += 1
    except BudgetRefused:
        count.write_text(f"{run.id} {given}")


def race(url: str, folder: Path, grants: int) -> float:
    """Sixteen processes spend one budget of about so many grants. Returns grants per second."""
    ledger = Ledger(url)
    ledger.create("b", Budget(epsilon=4, delta=1e-8))
    terms = ledger.status("b").terms
    sigmas = [(grants / terms.budget.R) ** 0.5 * (1 + 0.01 * i) for i in range(PROCESSES)]
    begun = time.perf_counter()
    children = [
        in_child(lambda s=s, i=i: spend_all(url, s, folder / str(i)))  # type: ignore[misc]
        for i, s in enumerate(sigmas)
    ]
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    took = time.perf_counter() - begun
    asked = dict((folder / str(i)).read_text().split() for i in range(PROCESSES))
    status = ledger.status("b")
    assert {run.id: str(run.granted) for run in ledger.runs("b")} == asked
    total = sum(
        int(given) * terms.costs([step(s)])[0]
        for given, s in zip(asked.values(), sigmas, strict=True)
    )
    assert total == status.spent_units <= terms.limit
    assert total >= 0.999 * terms.limit
    assert verify(ledger).steps == sum(int(given) for given in asked.values())
    return sum(int(given) for given in asked.values()) / took


def test_sixteen_processes_race_for_one_budget(url: str, tmp_path: Path) -> None:
    rate = race(url, tmp_path, 1200)
    print(f"{rate:.0f} grants per second among {PROCESSES} processes")


@pytest.mark.slow
def test_sixteen_processes_race_for_thousands_of_grants(url: str, tmp_path: Path) -> None:
    rate = race(url, tmp_path, 20_000)
    print(f"{rate:.0f} grants per second among {PROCESSES} processes")


def work_until_killed(url: str, log: Path, ready: int) -> None:
    """Runs one after the other; every step that may be released is logged once it may be."""
    handle = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    with Ledger(url) as ledger:
        os.write(ready, b".")
        while True:
            run = ledger.open_run("b").id
            ledger.grant(run, [step(1e5, count=20)], start=False)
            for upto in (5, 10, 15):
                ledger.start(run, upto, confirmed=max(upto - 5, 0))
                os.write(handle, f"{run} {upto}\n".encode())
            ledger.grant(run, [step(2e5), step(3e5)], confirmed=15)
            os.write(handle, f"{run} 22\n".encode())
            ledger.close_run(run, used=22)


def _one_round(url: str) -> float:
    """How long a run takes here and now: what kills should fall into."""
    begun = time.monotonic()
    with Ledger(url) as ledger:
        for _ in range(6):
            ledger.close_run(ledger.open_run("b").id, used=0)
    return time.monotonic() - begun


def kill_often(url: str, folder: Path, times: int) -> None:
    ledger, log = Ledger(url), folder / "released"
    ledger.create("b", Budget(epsilon=4, delta=1e-8))
    longest = max(_one_round(url), 0.05)
    log.touch()
    chance = random.Random(0)
    for i in range(times):
        waiting, ready = os.pipe()
        child = in_child(lambda ready=ready: work_until_killed(url, log, ready))  # type: ignore[misc]
        if i % 4:
            os.read(waiting, 1)
        if i % 4 == 3:
            wait_for_a_release(log, log.stat().st_size)
        time.sleep(chance.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(waiting)
        os.close(ready)
    verify(ledger)
    runs = {run.id: run for run in ledger.runs("b")}
    released: dict[str, int] = {}
    for line in log.read_text().splitlines():
        run, reached = line.split()
        released[run] = max(released.get(run, 0), int(reached))
    assert len(released) > times / 10
    terms = ledger.status("b").terms
    for run, upto in released.items():
        assert runs[run].started >= upto
        least = terms.costs([step(1e5, count=min(upto, 20))])[0]
        assert runs[run].spent_units >= least
    ledger.open_run("b")


def test_killed_at_random_moments(url: str, tmp_path: Path) -> None:
    kill_often(url, tmp_path, 60)


@pytest.mark.slow
def test_killed_a_thousand_times(url: str, tmp_path: Path) -> None:
    kill_often(url, tmp_path, 1000)


def slow_migration(connection: Any) -> None:
    for i in range(20):
        connection.execute(text(f"ALTER TABLE diminuendo_runs ADD COLUMN extra{i} TEXT"))
        time.sleep(0.001)


def migrate(url: str) -> None:
    schema.MIGRATIONS.append(slow_migration)
    Ledger(url).close()


def test_killed_while_migrating(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Ledger(url) as ledger:
        ledger.create("b", Budget(epsilon=4, delta=1e-8))
        chance = random.Random(1)
        for _ in range(15):
            child = in_child(lambda: migrate(url))
            time.sleep(chance.uniform(0, 0.06))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, slow_migration])
    with Ledger(url) as newer:
        newer.open_run("b")
        assert verify(newer).records == 2


def test_two_programs_create_the_ledger_at_once(url: str) -> None:
    children = [in_child(lambda: Ledger(url).close()) for _ in range(8)]
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with Ledger(url) as ledger:
        assert verify(ledger).records == 0


def test_older_copies_of_a_journal(url: str, tmp_path: Path) -> None:
    with Ledger(url) as ledger:
        ledger.create("b", Budget(epsilon=4, delta=1e-8))
    older_copies(url, tmp_path, 4)


@pytest.mark.slow
def test_older_copies_of_a_journal_300_times(url: str, tmp_path: Path) -> None:
    with Ledger(url) as ledger:
        ledger.create("b", Budget(epsilon=4, delta=1e-8))
    older_copies(url, tmp_path, 300)
