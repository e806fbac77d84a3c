"""What needs two people: a proposal by one, the same request by another."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ledgers import execute, new_database, step
from sqlalchemy.engine import make_url

from diminuendo import Budget, InputError, Ledger, LedgerError
from diminuendo.cli import main
from diminuendo.ledger import Proposed, export, import_file, roles, verify
from diminuendo.ledger.records import Record, start_of

BUDGET, DATA = Budget(epsilon=4, delta=1e-6), "sha256:" + "ab" * 32


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A budget that needs two persons, and a run of a process that is dead."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.create("b", BUDGET, data=DATA, two_persons=True)
    run = ledger.open_run("b").id
    ledger.grant(run, [step(20.0, count=10)], start=False)
    ledger.start(run, 6)
    monkeypatch.setattr("diminuendo.ledger.process.start_time", lambda pid: "dead")
    return ledger


def as_user(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("diminuendo.ledger.store.user_name", lambda: name)


def test_one_proposes_and_another_acts(book: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    run, before = book.runs("b")[0].id, book.status("b").spent_units
    as_user(monkeypatch, "ada")
    for _ in range(2):
        with pytest.raises(Proposed, match="proposed by ada"):
            book.reclaim(run)
    assert (book.run(run).status, book.status("b").spent_units) == ("open", before)
    as_user(monkeypatch, "bob")
    with pytest.raises(Proposed, match="proposed by bob"):
        book.reclaim(run, unreleased=True)
    as_user(monkeypatch, "ada")
    with pytest.raises(Proposed):
        book.reclaim(run)
    as_user(monkeypatch, "bob")
    assert book.reclaim(run).status == "reclaimed"
    assert verify(book).steps == 6


def test_a_proposal_lapses_when_the_run_goes_on(
    book: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = book.runs("b")[0].id
    as_user(monkeypatch, "ada")
    with pytest.raises(Proposed):
        book.reclaim(run)
    book.start(run, 8)
    as_user(monkeypatch, "bob")
    with pytest.raises(Proposed):
        book.reclaim(run)
    verify(book)


def test_a_second_budget_for_the_same_data(book: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    as_user(monkeypatch, "ada")
    more = Budget(epsilon=1, delta=1e-6)
    with pytest.raises(InputError, match="first budget"):
        book.create("more", more, data=DATA)
    with pytest.raises(Proposed):
        book.create("more", more, data=DATA, allow_second=True)
    as_user(monkeypatch, "bob")
    with pytest.raises(Proposed):
        book.create("more", BUDGET, data=DATA, allow_second=True)
    as_user(monkeypatch, "ada")
    book.create("more", BUDGET, data=DATA, allow_second=True)
    verify(book)


def test_a_part_of_it_raises_what_somebody_can_spend(
    book: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_user(monkeypatch, "ada")
    for _ in range(2):
        with pytest.raises(Proposed):
            book.create("team", BUDGET, parent="b")
    as_user(monkeypatch, "bob")
    assert book.create("team", BUDGET, parent="b").spent == 0
    book.charge("team", [step(20.0)])
    verify(book)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """Another ledger's export, which has spent on "b" and on a budget that is new here."""
    with Ledger(tmp_path / "other.sqlite") as other:
        other.create("b", BUDGET, data=DATA, two_persons=True)
        other.create("free", BUDGET)
        for name in ("b", "free"):
            other.charge(name, [step(20.0)])
        export(other, tmp_path / "other.jsonl")
    return tmp_path / "other.jsonl"


def test_an_import_needs_two(
    book: Ledger, exported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All of it waits for the second person, and it happens once."""
    before = book.status("b").spent_units
    as_user(monkeypatch, "ada")
    for _ in range(2):
        with pytest.raises(Proposed, match="proposed by ada"):
            import_file(book, exported)
    assert [status.terms.name for status in book.budgets()] == ["b"]
    as_user(monkeypatch, "bob")
    with pytest.raises(Proposed, match="proposed by bob"):
        import_file(book, exported, overspend=True)
    as_user(monkeypatch, "ada")
    assert [one.budget for one in import_file(book, exported, overspend=True)] == ["b", "free"]
    assert book.status("b").spent_units > before
    assert verify(book, state=tmp_path / "state").budgets == 2
    for user in ("ada", "bob"):  # the same again charges nothing, and needs two again
        as_user(monkeypatch, user)
        if user == "ada":
            with pytest.raises(Proposed):
                import_file(book, exported)
        else:
            assert [one.spent for one in import_file(book, exported)] == [0, 0]
    verify(book)
    assert verify(book, state=tmp_path / "state").budgets == 2


def test_an_import_that_makes_a_second_budget(
    book: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two new budgets of one file, both guarded by the same one here, and a tree of its own."""
    with Ledger(tmp_path / "other.sqlite") as other:
        other.create("more", BUDGET, data=DATA, two_persons=True)
        as_user(monkeypatch, "ada")
        with pytest.raises(Proposed):
            other.create("part", BUDGET, data=DATA, parent="more", allow_second=True)
        as_user(monkeypatch, "bob")
        other.create("part", BUDGET, data=DATA, parent="more", allow_second=True)
        other.charge("part", [step(20.0)])
        export(other, tmp_path / "out.jsonl")
    with pytest.raises(InputError, match="first budget"):
        import_file(book, tmp_path / "out.jsonl")
    as_user(monkeypatch, "ada")
    with pytest.raises(Proposed):
        import_file(book, tmp_path / "out.jsonl", allow_second=True)
    as_user(monkeypatch, "bob")
    made = import_file(book, tmp_path / "out.jsonl", allow_second=True)
    assert [(one.budget, one.created) for one in made] == [("more", True), ("part", True)]
    assert book.status("more").spent_units == book.status("part").spent_units > 0
    verify(book)
    export(book, tmp_path / "again.jsonl")
    with Ledger(tmp_path / "third.sqlite") as third:
        assert len(import_file(third, tmp_path / "again.jsonl")) == 3
        verify(third)


def test_an_import_by_one_person_is_found(
    book: Ledger, exported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diminuendo.ledger.approval.proposal", lambda *_: None)
    import_file(book, exported)
    with pytest.raises(LedgerError, match="two people"):
        verify(book)


def test_a_chain_in_which_one_person_acted_alone(
    book: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = book.runs("b")[0].id
    for name in ("ada", "bob"):
        as_user(monkeypatch, name)
        with suppress(Proposed):
            book.reclaim(run)
    file = tmp_path / "out.jsonl"
    export(book, file)
    with Ledger(tmp_path / "honest.sqlite") as other:
        assert import_file(other, file)[0].steps == 6
    previous, lines = start_of("other"), list[str]()
    for record in book.records():
        body = {**record.body, **({"user": "bob"} if record.kind == "propose" else {})}
        new = Record.link(seq=record.seq, at=record.at, kind=record.kind, budget=record.budget,
                          run=record.run, token=record.token, body=body,
                          previous=previous)  # fmt: skip
        previous = new.digest
        lines.append(json.dumps(new.to_dict()))
    header = {"schema": "diminuendo.ledger", "version": 1, "ledger": "other",
              "seq": len(lines), "digest": previous}  # fmt: skip
    file.write_text("\n".join([json.dumps(header), *lines]) + "\n")
    with (
        Ledger(tmp_path / "other.sqlite") as other,
        pytest.raises(InputError, match="needs two people"),
    ):
        import_file(other, file)


def test_the_database_says_who_they_are(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = new_database(server.get_uri())
    with Ledger(owner) as ledger:
        ledger.create("b", BUDGET, two_persons=True)
        run = ledger.open_run("b").id
        officers = [f"officer_{run}_{i}" for i in range(2)]
        for officer in officers:
            execute(ledger, f"CREATE ROLE {officer} LOGIN")
        roles.install(ledger, {"officer": officers})
        monkeypatch.setattr("diminuendo.ledger.process.start_time", lambda pid: "dead")
        as_user(monkeypatch, "whoever")
        url = make_url(owner)
        for name in (officers[0], officers[0]):
            own = url.set(username=name).render_as_string(hide_password=False)
            with Ledger(own) as one, pytest.raises(Proposed, match=officers[0]):
                one.reclaim(run)
        own = url.set(username=officers[1]).render_as_string(hide_password=False)
        with Ledger(own) as two:
            assert two.reclaim(run).status == "reclaimed"
            verify(two)


def test_on_the_command_line(
    book: Ledger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIMINUENDO_LEDGER", book.address)
    as_user(monkeypatch, "ada")
    run = book.runs("b")[0].id
    assert main(["ledger", "reclaim", run, "--yes"]) == 2
    assert "proposed by ada" in capsys.readouterr().err
    as_user(monkeypatch, "bob")
    assert main(["ledger", "reclaim", run, "--yes"]) == 0
