"""Training that a ledger pays for."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ledgers import execute, in_child
from paid_runs import BUDGET, STEPS, data, plan, train
from sqlalchemy import text
from torch import nn

import diminuendo as dim
from diminuendo import Budget, BudgetRefused, InputError, Ledger, LedgerError
from diminuendo.ledger import identify, verify
from diminuendo.training import Checkpoints, PrivateGradients, Released


def test_a_run_is_charged_and_cites_the_chain(ledger: Ledger, url: str) -> None:
    ledger.create("b", BUDGET, data=identify(data()))
    result = train(url, plan())
    assert (result.status, result.steps) == ("done", STEPS)
    run = ledger.run(result.ledger["run"])
    assert (run.status, run.granted, run.confirmed) == ("closed", STEPS, STEPS)
    assert run.opened["plan"] == plan().digest
    assert result.ledger["head"] == ledger.head.digest
    verify(ledger, cited=[result.ledger["head"]])
    with pytest.raises(BudgetRefused, match="left"):
        train(url, plan())


def test_the_next_model_gets_what_is_left(ledger: Ledger, url: str) -> None:
    ledger.create("b", BUDGET)

    def stop(step: int, private: PrivateGradients) -> None:
        del private
        if step == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    first = train(url, plan(), after_step=stop)
    assert (first.status, first.steps) == ("interrupted", 10)
    second = train(url, plan(ledger.remaining("b")))
    assert second.status == "done"
    assert second.ledger["runs"] == [second.ledger["run"]] != first.ledger["runs"]
    assert 1 - 1e-6 < ledger.status("b").spent <= 1
    both = [*first.events, *second.events]
    sigmas = [event.noise_multiplier for event in both for _ in range(event.count)]
    assert dim.epsilon(sigmas, 1e-5) <= 4


def test_an_interrupted_run_goes_on_in_another_and_cites_both(
    ledger: Ledger, url: str, tmp_path: Path
) -> None:
    ledger.create("b", BUDGET)

    def stop(step: int, private: PrivateGradients) -> None:
        del private
        if step == 10:
            os.kill(os.getpid(), signal.SIGTERM)

    train(url, plan(), folder=tmp_path / "run", after_step=stop)
    result = train(url, plan(), folder=tmp_path / "run")
    assert (result.status, result.steps) == ("done", STEPS)
    assert result.ledger["runs"] == [run.id for run in ledger.runs("b")]
    assert [run.started for run in ledger.runs("b")] == [10, STEPS - 10]


def test_refused(ledger: Ledger, url: str, tmp_path: Path) -> None:
    ledger.create("b", BUDGET, data="sha256:" + "00" * 32)
    with pytest.raises(InputError, match="the data of the budget"):
        train(url, plan())
    with pytest.raises(InputError, match="ledger's"):
        train(url, plan(), budget="nobody")
    with pytest.raises(InputError, match="budget"):
        train(url, plan(), budget=None)
    with pytest.raises(InputError, match="seed"):
        train(url, plan(), seed=1)
    with pytest.raises(InputError, match="relation"):
        train(url, plan(Budget(epsilon=4, delta=1e-5, relation="replace-one")))
    assert ledger.status("b").spent == 0
    assert not list(tmp_path.glob("checkpoint*"))


def test_an_error_in_the_middle_returns_the_rest(ledger: Ledger, url: str) -> None:
    ledger.create("b", BUDGET)

    def fail(step: int, private: PrivateGradients) -> None:
        del private
        if step == 5:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        train(url, plan(), after_step=fail)
    run = ledger.runs("b")[0]
    assert (run.status, run.confirmed) == ("closed", 5)


def test_a_policy_asks_step_by_step(ledger: Ledger, url: str) -> None:
    ledger.create("b", BUDGET)

    def policy(released: Released) -> float:
        return 10.0 / (1 + 0.1 * released.step)

    result = train(url, plan(), policy=policy)
    assert result.status == "refused"
    assert result.epsilon == 4
    run = ledger.run(result.ledger["run"])
    assert run.granted == run.confirmed == result.steps > 5
    assert 0.9 < ledger.status("b").spent <= 1


def test_your_own_loop(ledger: Ledger) -> None:
    ledger.create("b", BUDGET)
    model, made = nn.Linear(4, 3), plan()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = nn.CrossEntropyLoss(reduction="none")
    with ledger.pay("b", made, data=data()) as spending:
        private = PrivateGradients(model, made, spending=spending)
        for x, y in private.batches(data()):
            private.backward(loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if private.step == 7:
                break
    assert ledger.run(spending.run).confirmed == 7


SCRIPT = """
    import sys, time, warnings
    warnings.simplefilter("ignore")
    from paid_runs import plan, train
    result = train({url!r}, plan(), folder={folder!r}, every=5,
                   after_step=lambda step, private: time.sleep(0.02))
    print(result.status, result.steps)
"""


def test_killed_and_resumed_pays_once_for_every_step(
    ledger: Ledger, url: str, tmp_path: Path
) -> None:
    ledger.create("b", BUDGET)
    script = tmp_path / "script.py"
    folder = str(tmp_path / "run")
    script.write_text(textwrap.dedent(SCRIPT.format(url=url, folder=folder)))
    journal = Path(folder) / "journal.json"
    chance = random.Random(0)
    for _ in range(2):
        child = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE)
        reserved = _reserved(journal)
        end = time.monotonic() + 300
        while _reserved(journal) <= reserved and child.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.1))
        child.kill()
        child.communicate()
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == ["done", str(STEPS)], done.stderr
    run = ledger.runs("b")[0]
    assert len(ledger.runs("b")) == 1
    assert (run.status, run.granted, run.confirmed) == ("closed", STEPS, STEPS)
    assert ledger.status("b").spent <= 1
    verify(ledger)


def _reserved(journal: Path) -> int:
    return int(json.loads(journal.read_text())["reserved"]) if journal.exists() else 0


def test_an_older_copy_of_the_folder_releases_no_step_again(
    ledger: Ledger, url: str, tmp_path: Path
) -> None:
    """Copied at step 7, the original killed at 18: the copy goes on after what was started."""
    ledger.create("b", BUDGET)
    run, copy, log = tmp_path / "run", tmp_path / "copy", tmp_path / "log"

    def released(step: int, private: PrivateGradients) -> None:
        del private
        with log.open("a") as handle:
            handle.write(f"{step}\n")
        if step == 7 and not copy.exists():
            shutil.copytree(run, copy)
        if step == 18 and not done:
            os._exit(9)

    done: list[int] = []
    child = in_child(lambda: train(url, plan(), folder=Checkpoints(run, 5), after_step=released))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    done.append(1)
    result = train(url, plan(), folder=Checkpoints(copy, 5), after_step=released)
    steps = [int(line) for line in log.read_text().split()]
    assert len(steps) == len(set(steps)), "each step was released once"
    assert steps[:18] == list(range(1, 19))
    assert result.lost >= 11
    assert result.steps == STEPS
    assert ledger.status("b").spent <= 1
    verify(ledger)


def test_a_run_whose_ledger_lost_what_it_had_seen_is_not_resumed(url: str, tmp_path: Path) -> None:
    """The ledger was put back to an older state between a run's crash and its resumption."""
    with Ledger(url) as ledger:
        ledger.create("b", BUDGET)
        saved = {
            table: _rows(ledger, f"SELECT * FROM diminuendo_{table}")
            for table in ("head", "records", "budgets", "runs")
        }

    def stop(step: int, private: PrivateGradients) -> None:
        del private
        if step == 9:
            os._exit(9)

    folder = Checkpoints(tmp_path / "run", 5)
    child = in_child(lambda: train(url, plan(), folder=folder, after_step=stop))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    with Ledger(url) as ledger:
        for table, rows in saved.items():
            execute(ledger, f"DELETE FROM diminuendo_{table}")
            for row in rows:
                names, values = ", ".join(row), ", ".join(f":{name}" for name in row)
                insert = f"INSERT INTO diminuendo_{table} ({names}) VALUES ({values})"
                execute(ledger, insert, **row)
        assert verify(ledger).steps == 0
    with pytest.raises(LedgerError, match="behind what was seen"):
        train(url, plan(), folder=folder)


def _rows(ledger: Ledger, query: str) -> list[dict[str, Any]]:
    rows = ledger.read_transaction(lambda c: c.execute(text(query)).all())
    return [dict(row._mapping) for row in rows]


@pytest.mark.parametrize("given", [3, "plan.json", (4, 1e-5), [1.0], object()])
def test_what_a_ledger_and_its_spending_take(ledger: Ledger, given: Any) -> None:
    ledger.create("b", BUDGET, data=identify(data()))
    with pytest.raises(InputError, match="plan to be a Plan"):
        ledger.pay("b", given, data=data())
    if not isinstance(given, str):
        with pytest.raises(InputError, match="the ledger"):
            Ledger(given)
