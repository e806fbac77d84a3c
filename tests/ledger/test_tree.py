"""Budgets that are parts of another: all parts together stay within it."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import pytest
from ledgers import in_child, step

import diminuendo as dim
from diminuendo import Budget, BudgetRefused, InputError, Ledger, LedgerError, UsageError
from diminuendo.ledger import export, import_file, verify
from diminuendo.ledger.records import Record, start_of

PEOPLE = Budget(epsilon=4, delta=1e-6)


@pytest.fixture
def tree(ledger: Ledger) -> Ledger:
    """people (all) → extract-a, extract-b; extract-b → team (subsampled steps)."""
    ledger.create("people", PEOPLE)
    ledger.create("extract-a", PEOPLE, parent="people")
    ledger.create("extract-b", Budget(epsilon=2, delta=1e-6), parent="people")
    ledger.create("team", Budget(epsilon=1.5, delta=1e-6), parent="extract-b")
    return ledger


def spent(ledger: Ledger) -> dict[str, int]:
    return {status.terms.name: status.spent_units for status in ledger.budgets()}


def test_a_charge_counts_in_all_it_is_a_part_of(tree: Ledger) -> None:
    tree.charge("team", [step(20.0, count=5)])
    tree.charge("extract-a", [step(20.0, count=7)])
    cost = tree.status("people").terms.costs([step(20.0)])[0]
    assert spent(tree) == {
        "people": 12 * cost, "extract-a": 7 * cost, "extract-b": 5 * cost, "team": 5 * cost,
    }  # fmt: skip
    assert verify(tree).steps == 12


def test_copies_of_the_data_do_not_each_get_a_fresh_budget(tree: Ledger) -> None:
    """Each extract has as much as the people; together they do not."""
    tree.charge("extract-a", [step(20.0, count=10**6)], partial=True)
    assert tree.status("people").spent > 0.99
    assert tree.status("extract-b").spent == 0
    assert not tree.fits("extract-b", [step(5.0)])
    before = spent(tree)
    with pytest.raises(BudgetRefused, match="The budget 'people' has"):
        tree.charge("extract-b", [step(5.0)])
    assert spent(tree) == before
    with pytest.raises(BudgetRefused):
        tree.charge("team", [step(5.0)], partial=True)
    verify(tree)


def test_a_partial_grant_fits_into_all(tree: Ledger) -> None:
    tree.charge("extract-a", [step(20.0, count=10**6)], partial=True)
    left = tree.status("people")
    room = (left.terms.limit - left.spent_units) // left.terms.costs([step(200.0)])[0]
    assert room > 3
    run = tree.charge("team", [step(200.0, count=10**6)], partial=True)
    assert run.granted == room
    verify(tree)


def test_what_is_not_used_goes_back_to_all(tree: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("team", "extract-a"):
        run = tree.open_run(name).id
        tree.grant(run, [step(20.0, count=10), step(15.0, count=5)], start=False)
        tree.start(run, 8)
        if name == "team":
            tree.close_run(run, used=5)
        else:
            monkeypatch.setattr("diminuendo.ledger.process.start_time", lambda pid: "dead")
            tree.reclaim(run)
    cost = tree.status("people").terms.costs([step(20.0)])[0]
    assert spent(tree) == {
        "people": 13 * cost, "extract-a": 8 * cost, "extract-b": 5 * cost, "team": 5 * cost,
    }  # fmt: skip
    verify(tree)


def test_each_budget_has_its_own_price(ledger: Ledger) -> None:
    ledger.create("people", PEOPLE, composition="renyi", order=10)
    ledger.create("part", Budget(epsilon=3, delta=1e-6), composition="renyi", order=20,
                  parent="people")  # fmt: skip
    event = step(2.0, rate=0.1, count=4)
    run = ledger.open_run("part").id
    ledger.grant(run, [event], start=False)
    for name in ("people", "part"):
        status = ledger.status(name)
        assert status.spent_units == status.terms.costs([event])[0]
    ledger.close_run(run, used=0)
    assert ledger.status("part").spent_units == 0
    assert 0 <= ledger.status("people").spent < 1e-9, "a billionth of a Rényi price is kept"
    verify(ledger)


def test_what_is_left_is_what_all_have_left(tree: Ledger) -> None:
    assert tree.remaining("extract-a").epsilon == 4
    assert tree.remaining("team").epsilon == 1.5
    tree.charge("extract-a", [step(20.0, count=10**6)], partial=True)
    assert tree.remaining("team").epsilon < 0.3
    plan = dim.plan(Budget(epsilon=1.5, delta=1e-6), examples=100, alpha=1e-4, steps=9, gamma=0.9)
    scaled = tree.scaled_to_fit("team", plan)
    tree.charge("team", scaled.events)
    verify(tree)


def test_bad_trees(tree: Ledger) -> None:
    for parent, words in (("nobody", "one of the ledger's"), ("new", "another budget")):
        with pytest.raises(InputError, match=words):
            tree.create("new", PEOPLE, parent=parent)
    other = Budget(epsilon=1, delta=1e-6, relation="replace-one")
    with pytest.raises(InputError, match="the relation"):
        tree.create("new", other, parent="people")
    with pytest.raises(InputError, match="the terms it has"):
        tree.create("team", Budget(epsilon=1.5, delta=1e-6), parent="people")


def test_a_share_that_was_left_out_is_found(tree: Ledger, tmp_path: Any) -> None:
    """Somebody who writes a chain by hand charges a part and not the whole."""
    tree.charge("extract-a", [step(20.0)])
    shares = [record.budget for record in tree.records() if record.kind == "share"]
    assert shares == ["people", "people"], "the charge and the close"
    previous, lines = start_of("other"), list[str]()
    for record in tree.records():
        if record.kind != "share":
            new = Record.link(seq=len(lines) + 1, at=record.at, kind=record.kind,
                              budget=record.budget, run=record.run, token=record.token,
                              body=record.body, previous=previous)  # fmt: skip
            previous = new.digest
            lines.append(json.dumps(new.to_dict()))
    header = {"schema": "diminuendo.ledger", "version": 1, "ledger": "other",
              "seq": len(lines), "digest": previous}  # fmt: skip
    file = tmp_path / "hostile.jsonl"
    file.write_text("\n".join([json.dumps(header), *lines]) + "\n")
    with (
        Ledger(tmp_path / "other.sqlite") as other,
        pytest.raises(InputError, match="what the last record cost is not shared"),
    ):
        import_file(other, file)


def test_a_tree_out_and_in_again(tree: Ledger, tmp_path: Any) -> None:
    tree.charge("team", [step(20.0, count=5)])
    export(tree, tmp_path / "out.jsonl")
    with Ledger(tmp_path / "other.sqlite") as other:
        import_file(other, tmp_path / "out.jsonl")
        assert spent(other) == spent(tree)
        assert other.status("team").terms.parent == "extract-b"
        other.charge("team", [step(20.0)])
        verify(other)


def test_what_a_copy_of_a_tree_spent_is_charged_to_all(tmp_path: Any) -> None:
    path, copied, file = (tmp_path / name for name in ("l.sqlite", "copy.sqlite", "copy.jsonl"))
    with Ledger(path) as original:
        original.create("people", PEOPLE)
        original.create("part", PEOPLE, parent="people")
        run = original.open_run("part").id
        original.grant(run, [step(20.0, count=10)], start=False)
    shutil.copy(path, copied)
    with Ledger(path) as original, Ledger(copied) as copy:
        original.close_run(run, used=0)
        copy.start(run, 6)
        copy.close_run(run, used=6)
        export(copy, file)
        import_file(original, file)
        assert spent(original) == spent(copy)
        verify(original)


def test_many_processes_and_one_parent(tree: Ledger, url: str) -> None:
    def spend(name: str) -> None:
        with Ledger(url, patience=120) as own:
            run = own.open_run(name).id
            try:
                while True:
                    own.grant(run, [step(4.0)])
            except BudgetRefused:
                pass

    names = ("extract-a", "extract-b", "team") * 2
    children = [in_child(lambda name=name: spend(name)) for name in names]  # type: ignore[misc]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    assert 0.95 < tree.status("people").spent <= 1
    verify(tree)


def test_a_quota_for_a_team_or_a_user(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its members open runs on it; all of it counts for the people."""
    monkeypatch.setattr("diminuendo.ledger.store.user_name", lambda: "ada")
    me = "postgres" if ledger.url.get_backend_name() != "sqlite" else "ada"
    ledger.create("people", Budget(epsilon=4, delta=1e-6), members=["nobody"])
    ledger.create("mine", Budget(epsilon=1, delta=1e-6), parent="people", members=[me, "bob"])
    run = ledger.charge("mine", [step(20.0)])
    assert run.opened["member"] == me
    with pytest.raises(UsageError, match=r"none of those who may .* \(nobody\)"):
        ledger.charge("people", [step(20.0)])
    assert ledger.status("people").spent_units > 0
    assert ledger.runs("people") == []
    for wrong in ("ada", [""], [3]):
        with pytest.raises(InputError, match="member"):
            ledger.create("x", Budget(epsilon=1, delta=1e-6), members=wrong)  # type: ignore[arg-type]
    verify(ledger)
    monkeypatch.setattr("diminuendo.ledger.rows.membership", lambda *_: {})
    ledger.open_run("people")
    with pytest.raises(LedgerError, match="no member"):
        verify(ledger)
