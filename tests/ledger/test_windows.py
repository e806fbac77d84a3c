"""Budgets that renew with the calendar: what each window may spend, and what may be claimed."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledgers import execute, step

import diminuendo as dim
from diminuendo import Budget, BudgetRefused, InputError, Ledger, LedgerError, UsageError
from diminuendo.accounting.filters import GaussianFilter, RenyiFilter
from diminuendo.cli import main
from diminuendo.ledger import LedgerSpending, export, import_file, page, verify, view, windows
from diminuendo.ledger.terms import Terms

BUDGET = Budget(epsilon=2, delta=1e-6)


def moment(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC)


@pytest.mark.parametrize(
    ("window", "at", "label", "end"),
    [
        ("day", "2024-02-28T23:59:59", "2024-02-28", "2024-02-29"),
        ("week", "2024-12-30", "2025-W01", "2025-01-06"),
        ("week", "2021-01-03", "2020-W53", "2021-01-04"),
        ("month", "2024-12-31", "2024-12", "2025-01-01"),
        ("quarter", "2024-11-01", "2024-Q4", "2025-01-01"),
        ("year", "2024-06-01", "2024", "2025-01-01"),
    ],
)
def test_calendar(window: str, at: str, label: str, end: str) -> None:
    assert windows.label_of(window, moment(at)) == label
    assert windows.end_of(window, label) == moment(end)


@given(
    st.sampled_from(windows.WINDOWS),
    st.datetimes(datetime.datetime(1971, 1, 1), datetime.datetime(2200, 1, 1)),
    st.integers(0, 40),
)
def test_windows_follow_each_other(window: str, at: datetime.datetime, later: int) -> None:
    first = label = windows.label_of(window, at.replace(tzinfo=datetime.UTC))
    for _ in range(later):
        end = windows.end_of(window, label)
        after = windows.label_of(window, end)
        before = windows.label_of(window, end - datetime.timedelta(microseconds=1))
        assert (before, after > label) == (label, True)
        label = after
    assert windows.count(window, first, label) == later + 1


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_the_claim_of_several_windows_is_the_filter_s(relation: Any) -> None:
    """Independently: a filter whose limit is k limits, read as a budget of its own."""
    budget = Budget(epsilon=2, delta=1e-6, relation=relation)
    exact = Terms(name="b", budget=budget, window="year")
    for k in (2, 7):
        mu = np.sqrt(k) * budget.mu
        assert exact.claim_over(k) == pytest.approx(
            budget.epsilon_of((mu / budget.sensitivity) ** 2), rel=1e-9
        )
        assert exact.claim_over(k) >= budget.epsilon_of(k * budget.R * (1 - 1e-12))
        larger = Budget(epsilon=exact.claim_over(k), delta=1e-6, relation=relation)
        assert GaussianFilter(larger).limit >= k * exact.limit * (1 - 1e-9)
    renyi = Terms(name="b", budget=budget, window="year", composition="renyi", order=16)
    larger = Budget(epsilon=renyi.claim_over(3), delta=1e-6, relation=relation)
    assert RenyiFilter(larger, order=16).limit == pytest.approx(3 * renyi.limit, rel=1e-9)
    assert renyi.claim_over(3) < 3 * budget.epsilon
    assert Terms(name="b", budget=budget).claim_over(5) == budget.epsilon


class Clock:
    """What time the ledger thinks it is."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at = moment("2025-06-15")
        patch.setattr("diminuendo.ledger.windows.now", lambda: self.at)

    def set(self, text: str) -> None:
        self.at = moment(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def book(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    del clock
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


WHOLE = (1 / BUDGET.R) ** 0.5 * (1 + 1e-9)
"""σ of one step that costs the whole limit."""


def test_a_window_renews_and_never_comes_back(book: Ledger, clock: Clock) -> None:
    book.create("b", BUDGET, window="year")
    book.charge("b", [step(WHOLE)])
    with pytest.raises(BudgetRefused, match=r"0\.000% of 2025 left"):
        book.charge("b", [step(1e3)])
    clock.set("2026-01-01")
    assert (book.status("b").spent, book.status("b").window) == (0, "2026")
    assert book.remaining("b") == BUDGET
    book.charge("b", [step(WHOLE)])
    assert book.status("b").spent == pytest.approx(1)
    clock.set("2025-06-16")
    assert book.status("b").window == "2026"
    assert not book.fits("b", [step(1e3)])
    with pytest.raises(BudgetRefused):
        book.charge("b", [step(1e3)])
    clock.set("2027-06-15")
    book.charge("b", [step(2 * WHOLE)])
    status = book.status("b")
    assert (status.windows, status.since) == (3, "2025")
    assert verify(book).steps == 3


def test_both_backends_charge_to_the_window_of_their_clock(ledger: Ledger) -> None:
    ledger.create("b", BUDGET, window="month")
    ledger.charge("b", [step(20.0)])
    status = ledger.status("b")
    assert status.window == windows.label_of("month", windows.now()) or status.windows == 1
    assert status.spent > 0
    verify(ledger)


def test_what_is_given_back_goes_to_its_own_window(book: Ledger, clock: Clock) -> None:
    """Unused steps of last year must not make this year's limit larger."""
    book.create("people", BUDGET)
    book.create("b", BUDGET, window="year", parent="people")
    run = book.open_run("b", plan="sha256:1").id
    book.grant(run, [step(20.0, count=10)], start=False)
    before = book.status("people").spent_units
    clock.set("2026-02-01")
    book.grant(run, [step(20.0, count=5)], start=False)
    now = book.status("b").spent_units
    book.start(run, 2)
    book.close_run(run, used=2)
    assert book.status("b").spent_units == 0 < now
    assert book.status("people").spent_units == before // 10 * 2
    verify(book)


def test_a_parent_with_windows(book: Ledger, clock: Clock) -> None:
    book.create("people", BUDGET, window="year")
    book.create("team", BUDGET, parent="people")
    run = book.open_run("team").id
    book.grant(run, [step(40.0, count=10)], start=False)
    spent = book.status("people").spent_units
    clock.set("2026-02-01")
    assert book.status("people").spent_units == 0
    book.close_run(run, used=0)
    assert book.status("team").spent_units == 0
    book.charge("team", [step(40.0)])
    assert book.status("people").spent_units == spent // 10
    verify(book)


def test_a_run_without_a_plan_ends_with_its_window(book: Ledger, clock: Clock) -> None:
    """Its claim is the limit of one window; two of them would have a larger ε."""
    book.create("b", BUDGET, window="year")
    with LedgerSpending(book, "b") as spending:
        spending.request(step(40.0))
        state = spending.state()
        clock.set("2026-01-01")
        with pytest.raises(UsageError, match="began in 2025; now it is 2026"):
            spending.request(step(40.0))
        assert spending.epsilon() == BUDGET.epsilon
    assert book.status("b").spent == 0
    with pytest.raises(UsageError, match="began in 2025"):
        LedgerSpending(book, "b").resume(state)
    assert [run.status for run in book.runs("b")] == ["closed"]
    with LedgerSpending(book, "b") as another:
        another.request(step(40.0))
    verify(book)


def test_a_plan_may_go_on_in_the_next_window(book: Ledger, clock: Clock) -> None:
    """Its claim is the plan's own, wherever it was charged."""
    plan = dim.plan(Budget(epsilon=1, delta=1e-6), examples=100, alpha=1e-4, steps=8, gamma=0.9)
    book.create("b", BUDGET, window="year")
    with LedgerSpending(book, "b", plan, ahead=2, block=2) as spending:
        for i, sigma in enumerate(plan.sigmas):
            if i == 4:
                clock.set("2026-01-01")
            spending.request(step(float(sigma)))
        assert spending.epsilon() <= 1
    assert 0 < book.status("b").spent < 0.3
    verify(book)


def test_renewing_early_is_found(book: Ledger, clock: Clock) -> None:
    """Somebody sets the clock forward to spend next year's budget now."""
    book.create("b", BUDGET, window="year")
    book.charge("b", [step(WHOLE)])
    clock.set("2026-01-01")
    book.charge("b", [step(WHOLE)])
    clock.set("2025-06-15")
    with pytest.raises(LedgerError, match="2026, which has not begun"):
        verify(book)


@pytest.mark.parametrize(
    ("old", "new"),
    [('["2025","2025"]', '["2025","2026"]'), (',"window":["2025","2025"]', "")],
)
def test_a_window_changed_by_hand(book: Ledger, old: str, new: str) -> None:
    book.create("b", BUDGET, window="year")
    book.charge("b", [step(20.0)])
    execute(
        book, "UPDATE diminuendo_records SET body = replace(body, :old, :new)", old=old, new=new
    )
    with pytest.raises(LedgerError):
        book.charge("b", [step(20.0)])
    with pytest.raises(LedgerError):
        verify(book)


def test_an_import_counts_in_the_window_in_which_it_is_made(
    book: Ledger, clock: Clock, tmp_path: Path
) -> None:
    book.create("b", BUDGET, window="year")
    book.charge("b", [step(40.0)])
    clock.set("2026-03-01")
    book.charge("b", [step(40.0)])
    both = 2 * book.status("b").spent_units
    export(book, tmp_path / "out.jsonl")
    with Ledger(tmp_path / "other.sqlite") as other:
        assert import_file(other, tmp_path / "out.jsonl")[0].steps == 2
        assert other.status("b").spent_units == both
        clock.set("2027-03-01")
        assert import_file(other, tmp_path / "out.jsonl")[0].spent == 0
        assert other.status("b").spent_units == 0
        verify(other)


def test_verify_goes_on_from_a_state(book: Ledger, clock: Clock, tmp_path: Path) -> None:
    book.create("b", BUDGET, window="year")
    book.charge("b", [step(40.0)])
    verify(book, state=tmp_path / "state")
    clock.set("2026-03-01")
    book.charge("b", [step(40.0)])
    assert verify(book, state=tmp_path / "state").steps == 2
    assert verify(book, state=tmp_path / "state").steps == 2


def test_the_claim_is_stated_as_what_it_is(
    book: Ledger, clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIMINUENDO_LEDGER", book.address)
    words = ["ledger", "create", "b", "--epsilon", "2", "--delta", "1e-6", "--window", "year"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "for what is charged in each calendar year (UTC), not for all of them" in out
    assert "mini-batches are refused" in out
    book.charge("b", [step(20.0)])
    clock.set("2026-12-31")
    assert main(["ledger", "show", "b", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["window_now"], facts["windows_so_far"]) == ("2026", 2)
    assert facts["window_ends"].startswith("2027-01-01")
    assert facts["epsilon_certified"] == 2
    assert facts["epsilon_over_windows"]["2"] == book.status("b").terms.claim_over(2) > 2
    assert facts["epsilon_odometer"] is None
    text = page.html(view.facts(book))
    assert "in each calendar year (UTC)" in text
    assert "100.0% is left in 2026" in text
    assert main(["ledger", "create", "c", "--epsilon", "2", "--delta", "1e-6",
                 "--window", "decade"]) == 2  # fmt: skip


def test_a_window_is_one_of_the_calendar() -> None:
    with pytest.raises(InputError, match="window"):
        Terms(name="b", budget=BUDGET, window="fortnight")
