"""One charge, one release: runs that end, fork, are copied, resumed, or lose an answer."""

from __future__ import annotations

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledgers import in_child, step
from paid_runs import BUDGET, STEPS, plan, train

from diminuendo import Budget, BudgetRefused, InputError, Ledger, LedgerError, UsageError
from diminuendo.ledger import LedgerSpending, verify
from diminuendo.planning import Plan
from diminuendo.spending import PlanSpending
from diminuendo.training import PrivateGradients

FADING = [20.0, 20.0, 20.0, 20.0, 5.0, 5.0]


@pytest.fixture
def b(ledger: Ledger) -> Ledger:
    ledger.create("b", BUDGET)
    return ledger


def cost(ledger: Ledger, sigmas: list[float]) -> int:
    return sum(ledger.status("b").terms.costs([step(sigma) for sigma in sigmas]))


def spent(ledger: Ledger) -> int:
    return ledger.status("b").spent_units


def made(sigmas: list[float] = FADING) -> Plan:
    return replace(plan(steps=len(sigmas)), sigmas=np.array(sigmas))


def take(spending: LedgerSpending, sigmas: list[float]) -> None:
    for sigma in sigmas:
        spending.request(step(sigma))


def test_nothing_is_released_after_the_end(b: Ledger) -> None:
    with LedgerSpending(b, "b", made(), block=4) as spending:
        take(spending, FADING[:2])
    assert not spending.fits(step(20.0))
    with pytest.raises(UsageError, match="ended"):
        spending.request(step(20.0))
    assert spent(b) == cost(b, FADING[:2])
    spending.resume()
    take(spending, FADING[2:])
    spending.close()
    assert spent(b) == cost(b, FADING)


def test_a_fork_neither_spends_nor_ends_its_parents_run(b: Ledger) -> None:
    def child() -> None:
        with pytest.raises(UsageError, match="which began it"):
            spending.request(step(20.0))
        spending.close()

    with LedgerSpending(b, "b", made(), block=4) as spending:
        take(spending, FADING[:2])
        assert os.waitpid(in_child(child), 0)[1] == 0
        assert b.run(spending.run).status == "open"
        take(spending, FADING[2:])
    assert spent(b) == cost(b, FADING)


def test_several_steps_at_once_are_charged_at_their_own_price(b: Ledger) -> None:
    with LedgerSpending(b, "b", made(), ahead=2) as spending:
        spending.request(step(20.0))
        spending.request(step(20.0, count=3))
        take(spending, FADING[4:])
    assert spent(b) == cost(b, FADING)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_lost_answer_is_never_a_free_step(
    b: Ledger, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    spending = LedgerSpending(b, "b")
    spending.request(step(50.0))
    if when == "before":
        grant = b.grant
        monkeypatch.setattr(b, "grant", lambda *a, **k: (grant(*a, **k), 1 / 0))
    else:
        monkeypatch.setattr(spending, "_record", lambda event: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        spending.request(step(50.0))
    monkeypatch.undo()
    take(spending, [50.0, 5.0])
    spending.close()
    assert spent(b) == cost(b, [50.0, 50.0, 50.0, 5.0])
    verify(b)


def test_a_lost_start_is_looked_up(b: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    spending = LedgerSpending(b, "b", made(), block=3)
    start = b.start
    monkeypatch.setattr(b, "start", lambda *a, **k: (start(*a, **k), 1 / 0))
    with pytest.raises(ZeroDivisionError):
        spending.request(step(20.0))
    monkeypatch.undo()
    spending._block = 1
    take(spending, FADING)
    spending.close()
    assert spent(b) == cost(b, FADING)


def test_threads_share_a_plan_step_by_step(b: Ledger) -> None:
    sigmas = [100.0] * 200
    got: list[int] = []
    with LedgerSpending(b, "b", made(sigmas), block=50) as spending:

        def work() -> None:
            try:
                while True:
                    spending.request(step(100.0))
                    got.append(1)
            except BudgetRefused:
                pass

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(got) == 200
    assert spent(b) == cost(b, sigmas)


def crashed(b: Ledger, steps: int, **options: Any) -> tuple[dict[str, Any], str]:
    """The state that a process left behind that died after so many steps, and its run.

    With it, under "receipt", what its journal held.
    """
    reader, writer = os.pipe()

    def work() -> None:
        spending = LedgerSpending(b, "b", made(), block=4, **options)
        take(spending, FADING[:steps])
        left = {"state": spending.state(), "receipt": spending.receipt(steps)}
        os.write(writer, json.dumps(left).encode())

    os.waitpid(in_child(work), 0)
    left = json.loads(os.read(reader, 10_000))
    os.close(reader)
    os.close(writer)
    return {**left["state"], "receipt": left["receipt"]}, left["state"]["run"]


def taken_up(
    b: Ledger, state: dict[str, Any], seen: int | None = None, *, known: bool = True, **options: Any
) -> LedgerSpending:
    """Resumed from a state, with the journal's word and the events of the steps after it."""
    spending = LedgerSpending(b, "b", made(), block=4, **options)
    taken = sum(event["count"] for event in state["granted"])
    after = [step(sigma) for sigma in FADING[taken:]] if known else []
    receipt = state.get("receipt")
    assert spending.resume(state, seen=seen, receipt=receipt, events=after) == spending.steps
    return spending


def test_two_copies_of_a_state_release_each_step_once(b: Ledger) -> None:
    state, run = crashed(b, 2)
    one = taken_up(b, state, seen=2)
    assert one.steps == 2
    take(one, FADING[2:3])
    two = taken_up(b, state, seen=2, known=False)
    with pytest.raises(UsageError, match=r"Steps 3 to 4 .* may have been released"):
        two.request(step(20.0))
    two = taken_up(b, state, seen=2)
    assert two.steps == 4, "what the first copy started may be out"
    take(one, FADING[3:4])
    with pytest.raises(UsageError, match="now belongs to another process"):
        one.request(step(5.0))
    one.close()
    assert b.run(run).status == "open"
    take(two, FADING[4:])
    two.close()
    assert spent(b) == cost(b, FADING)
    verify(b)


def test_an_older_copy_of_the_journal_is_not_believed(b: Ledger) -> None:
    """The original went on after the copy was made, and died; nobody resumed it in between."""
    reader, writer = os.pipe()

    def work() -> None:
        spending = LedgerSpending(b, "b", made(), block=1)
        take(spending, FADING[:1])
        copy = {**spending.state(), "receipt": spending.receipt(1)}
        take(spending, FADING[1:2])
        spending.receipt(2)
        take(spending, FADING[2:4])
        os.write(writer, json.dumps(copy).encode())

    os.waitpid(in_child(work), 0)
    copy = json.loads(os.read(reader, 10_000))
    os.close(reader)
    os.close(writer)
    spending = taken_up(b, copy, seen=1)
    assert spending.steps == 4, "what the original may have released is not taken again"
    take(spending, FADING[4:])
    spending.close()
    assert spent(b) == cost(b, FADING)
    verify(b)


@pytest.mark.parametrize("ahead", ["plan", 4])
def test_a_request_that_takes_effect_late_is_charged_once(
    b: Ledger, monkeypatch: pytest.MonkeyPatch, ahead: Any
) -> None:
    """The server carries a grant out only after the client has given up and looked at its run."""
    late: list[Any] = []
    change = b._store.change

    def delayed(work: Any, *, token: Any = None, same: Any = None) -> Any:
        if not late and "operations.grant" in repr(work) + repr(getattr(work, "func", "")):
            late.append(lambda: change(work, token=token, same=same))
            raise LedgerError("The ledger could not be used: timeout.")
        return change(work, token=token, same=same)

    sigmas = [100.0] * 4 + [3.0] * 4
    spending = LedgerSpending(b, "b", made(sigmas), ahead=ahead)
    monkeypatch.setattr(b._store, "change", delayed)
    monkeypatch.setattr("diminuendo.ledger.operations.grant.__qualname__", "operations.grant")
    with pytest.raises(LedgerError, match="timeout"):
        spending.request(step(100.0))
    assert b.runs("b")[-1].granted == 0, "not yet"
    late[0]()
    take(spending, sigmas)
    spending.close()
    assert spent(b) == cost(b, sigmas)
    verify(b)


def test_who_lives_keeps_its_run(b: Ledger) -> None:
    state, run = crashed(b, 2)
    taken_up(b, state)
    assert b.run(run).opened["pid"] == os.getpid(), "who has it now is who counts"
    with pytest.raises(UsageError, match="alive"):
        b.reclaim(run)

    def child() -> None:
        with pytest.raises(UsageError, match="alive"):
            b.resume_run(run)

    assert os.waitpid(in_child(child), 0)[1] == 0


def test_a_zombie_is_dead(b: Ledger) -> None:
    def work() -> None:
        b.open_run("b")

    child = in_child(work)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    b.reclaim(b.runs("b")[0].id)
    os.waitpid(child, 0)


def test_a_run_that_was_released_goes_on_in_another(b: Ledger) -> None:
    state, run = crashed(b, 2)
    b.reclaim(run)
    spending = taken_up(b, state, seen=3)
    assert spending.run != run
    assert spending.steps == 4, "started in the first run, and paid there"
    take(spending, FADING[4:])
    spending.close()
    assert spent(b) == cost(b, FADING)
    verify(b)


def test_a_state_that_holds_what_was_given_back_pays_again(b: Ledger) -> None:
    state, run = crashed(b, 3)
    b.reclaim(run, unreleased=True)
    assert spent(b) == 0
    spending = taken_up(b, state)
    assert spent(b) == cost(b, FADING)
    take(spending, FADING[3:])
    spending.close()
    assert spent(b) == cost(b, FADING)


def test_a_state_from_elsewhere(b: Ledger) -> None:
    own = PlanSpending(made())
    for sigma in FADING[:3]:
        own.request(step(sigma))
    spending = taken_up(b, own.state(), ahead=2)
    assert spent(b) == cost(b, FADING[:3])
    spending.close()
    with pytest.raises(InputError, match="the ledger that pays"):
        PlanSpending(made()).resume(spending.state())
    b.create("other", BUDGET)
    other = LedgerSpending(b, "other", made())
    with pytest.raises(InputError, match="the run that is taken up"):
        other.resume(spending.state())


def test_resumed_with_the_whole_plan_ahead(b: Ledger) -> None:
    state, _ = crashed(b, 1, ahead=3)
    spending = taken_up(b, state, seen=1, ahead="plan")
    assert spending.steps == 1
    take(spending, FADING[1:])
    spending.close()
    assert spent(b) == cost(b, FADING)


def test_an_error_and_then_the_rest_of_the_plan(b: Ledger, url: str, tmp_path: Path) -> None:
    """The plan uses the whole budget: nothing may be charged twice."""

    def fail(at: int) -> Any:
        def after(step: int, private: PrivateGradients) -> None:
            del private
            taken.append(step)
            if step == at:
                raise RuntimeError("no more")

        return after

    taken: list[int] = []
    folder = {"folder": tmp_path / "run", "every": 5}
    with pytest.raises(RuntimeError):
        train(url, plan(), after_step=fail(7), **folder)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert taken == list(range(1, 8))
    result = train(url, plan(), after_step=fail(-1), **folder)
    assert (result.status, taken) == ("done", list(range(1, STEPS + 1)))
    assert [run.status for run in b.runs("b")] == ["closed"] * 2
    with pytest.raises(BudgetRefused):
        train(url, plan(), **{**folder, "folder": tmp_path / "copy"})
    with pytest.raises(InputError, match="the ledger that pays"):
        train_alone(tmp_path / "run")
    verify(b)


def train_alone(folder: Path) -> None:
    from paid_runs import data
    from torch import nn

    from diminuendo.training import fit

    loss = nn.CrossEntropyLoss(reduction="none")
    fit(nn.Linear(4, 3), data(), plan(), loss=loss, lr=0.5, progress=False, folder=folder)


def test_a_token_answers_one_request(b: Ledger) -> None:
    one, two = b.open_run("b"), b.open_run("b")
    b.grant(one.id, [step(20.0)], token="step-1")
    before = b.head
    for again in (
        lambda: b.grant(two.id, [step(20.0)], token="step-1"),
        lambda: b.grant(one.id, [step(19.0)], token="step-1"),
        lambda: b.grant(one.id, [step(20.0)], token="step-1", start=False),
        lambda: b.start(one.id, 1, token="step-1"),
        lambda: b.open_run("b", token="step-1"),
        lambda: b.close_run(one.id, used=1, token="step-1"),
    ):
        with pytest.raises(InputError, match="token"):
            again()
    assert b.head == before
    part = b.grant(two.id, [step(50.0, count=10**6)], partial=True, token="most")
    assert b.grant(two.id, [step(50.0, count=10**6)], partial=True, token="most") == part


def test_only_its_own_process_says_what_a_run_has_taken(ledger: Ledger, url: str) -> None:
    """Somebody else's word would give back steps that a living run has released."""
    ledger.create("b", Budget(epsilon=4, delta=1e-8))
    run = ledger.open_run("b").id
    ledger.grant(run, [step(20.0, count=10)])
    spent = ledger.status("b").spent_units

    def close() -> None:
        with Ledger(url) as own, pytest.raises(UsageError, match="only that one knows"):
            own.close_run(run, used=0)

    assert os.waitpid(in_child(close), 0)[1] == 0
    assert ledger.status("b").spent_units == spent
    assert ledger.close_run(run, used=9).status == "closed"


def test_where_two_must_agree_a_process_alone_gives_back_nothing_started(ledger: Ledger) -> None:
    ledger.create("b", Budget(epsilon=4, delta=1e-8), two_persons=True)
    run = ledger.open_run("b").id
    ledger.grant(run, [step(20.0, count=10)], start=False)
    ledger.start(run, 6)
    closed = ledger.close_run(run, used=2, token="t")
    assert (closed.started, verify(ledger).steps) == (6, 6)
    assert ledger.close_run(run, used=2, token="t").status == "closed"
