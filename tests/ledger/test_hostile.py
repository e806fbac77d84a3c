"""Files and rows that somebody made up: found, refused, and never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ledgers import step

from diminuendo import Budget, InputError, Ledger, LedgerError
from diminuendo.ledger import export, granted_events, import_file, to_dp_accounting, verify
from diminuendo.ledger.records import Record, start_of

BUDGET = Budget(epsilon=4, delta=1e-8)
Entry = tuple[str, str, str, dict[str, Any]]


@pytest.fixture
def book(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path / "ledger.sqlite")
    made.create("b", BUDGET)
    run = made.open_run("b")
    made.grant(run.id, [step(20.0, count=4)], start=False)
    return made


@pytest.mark.parametrize(
    "change",
    [
        "INSERT INTO diminuendo_records SELECT -1, at, kind, budget, run, 'x', body, previous, "
        "digest, '' FROM diminuendo_records WHERE kind = 'grant'",
        "INSERT INTO diminuendo_records SELECT seq + 9, at, kind, budget, run, 'x', body, "
        "previous, digest, '' FROM diminuendo_records WHERE kind = 'grant'",
        "UPDATE diminuendo_runs SET opened = replace(opened, '\"turn\":0', '\"turn\":1')",
    ],
)
def test_rows_beside_the_chain_are_found(book: Ledger, change: str) -> None:
    verify(book)
    book._store.change(lambda change_: _execute(change_, change, book))
    with pytest.raises(LedgerError):
        verify(book)


def _execute(change: Any, statement: str, book: Ledger) -> Record:
    change.connection.exec_driver_sql(statement)
    return next(book.records())


def chain(entries: list[Entry], ledger: str = "other") -> list[str]:
    """An export with every digest right, whatever it says."""
    previous, lines = start_of(ledger), []
    for seq, (kind, budget, run, body) in enumerate(entries, start=1):
        record = Record.link(seq=seq, at="now", kind=kind, budget=budget, run=run, token=str(seq),
                             body=body, previous=previous)  # fmt: skip
        previous = record.digest
        lines.append(json.dumps(record.to_dict()))
    first = {"schema": "diminuendo.ledger", "version": 1, "ledger": ledger, "seq": len(lines),
             "digest": previous}  # fmt: skip
    return [json.dumps(first), *lines]


def entries(book: Ledger) -> list[Entry]:
    return [(r.kind, r.budget, r.run, dict(r.body)) for r in book.records()]


def with_body(**body: Any) -> Callable[[list[Entry]], list[str]]:
    """The last entry's body says something else."""
    return lambda old: chain([*old[:-1], (*old[-1][:3], {**old[-1][3], **body})])


def with_line(old: str, new: str) -> Callable[[list[Entry]], list[str]]:
    return lambda given: [line.replace(old, new) for line in chain(given)]


def ended(**body: Any) -> Callable[[list[Entry]], list[str]]:
    return lambda old: chain([*old, ("close", "b", old[-1][2], {"reason": "done", **body})])


def price(book: Ledger) -> int:
    return int(list(book.records())[-1].body["cost"])


@pytest.mark.parametrize(
    "hostile",
    [
        with_line('"confirmed": 0', '"confirmed": NaN'),
        with_line('"confirmed": 0', '"confirmed": 1e999'),
        with_line('"at": "now"', '"at": "\\ud800"'),
        with_line('"version": 1, "ledger": "other"', '"version": 1'),
        with_line('"ledger": "other"', '"ledger": {"a": 1}'),
        with_line('"ledger": "other"', '"ledger": "\\u0000"'),
        lambda _: ['{"schema": "diminuendo.ledger", "version": 1}'],
        with_body(confirmed=-1),
        with_body(confirmed=1),
        with_body(cost="1"),
        with_body(cost="-1"),
        with_body(events=[[20.0, 1.0, -4]]),
        with_body(events=[[20.0, 1.0, True]]),
        with_body(events=[[20.0, 1.0, 10**40]]),
    ],
)
def test_an_import_that_somebody_made_up(
    book: Ledger, tmp_path: Path, hostile: Callable[[list[Entry]], list[str]]
) -> None:
    file = tmp_path / "hostile.jsonl"
    file.write_text("\n".join(hostile(entries(book))) + "\n")
    other = Ledger(tmp_path / "other.sqlite")
    with pytest.raises(InputError):
        import_file(other, file)
    assert other.budgets() == []


def test_a_return_of_more_than_was_charged(book: Ledger, tmp_path: Path) -> None:
    file, other = tmp_path / "hostile.jsonl", Ledger(tmp_path / "other.sqlite")
    for over in (1, 1 << 20):
        hostile = ended(used=0, returned=str(price(book) + over))(entries(book))
        file.write_text("\n".join(hostile) + "\n")
        with pytest.raises(InputError, match="more than is unused"):
            import_file(other, file)


def test_an_import_that_falls_and_rises_is_charged_once(book: Ledger, tmp_path: Path) -> None:
    """What was granted there, returned, and granted again is not more than it was at most."""
    file, other = tmp_path / "out.jsonl", Ledger(tmp_path / "other.sqlite")
    run = book.runs("b")[0].id
    for _ in range(2):
        export(book, file)
        import_file(other, file)
        if book.run(run).status == "open":
            book.close_run(run, used=0)
            export(book, file)
            import_file(other, file)
            run = book.open_run("b").id
            book.grant(run, [step(20.0, count=4)])
    assert other.status("b").spent_units == book.status("b").spent_units
    verify(other)
    with pytest.raises(InputError, match="imported"):
        granted_events(other, "b")


def test_an_export_does_not_replace_its_ledger(book: Ledger, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "ledger.sqlite")
    for path in (tmp_path / "ledger.sqlite", tmp_path / "link"):
        with pytest.raises(InputError, match="another file"):
            export(book, path)
    verify(book)


def test_an_export_is_its_owners_alone_and_follows_no_link(book: Ledger, tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "out.jsonl"
    victim.write_text("mine")
    link.symlink_to(victim)
    before = os.umask(0)
    try:
        export(book, link)
    finally:
        os.umask(before)
    assert victim.read_text() == "mine"
    assert not link.is_symlink()
    assert stat.S_IMODE(link.stat().st_mode) == 0o600
    with pytest.raises(InputError, match="can be written"):
        export(book, tmp_path / "nowhere" / "out.jsonl")


def test_a_file_that_everybody_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger(path).close()
    path.chmod(0o666)
    with pytest.raises(InputError, match="chmod o-w"):
        Ledger(path)
    path.chmod(0o660)
    Ledger(path).close()


def test_an_export_for_other_accountants_has_the_relation(tmp_path: Path) -> None:
    accountant = pytest.importorskip("dp_accounting.pld.pld_privacy_accountant")
    budget = Budget(epsilon=2, delta=1e-5, relation="replace-one")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.create("b", budget)
        ledger.charge("b", [step(40.0, count=300)], partial=True)
        told = ledger.status("b").epsilon
        other = accountant.PLDAccountant()
        other.compose(to_dp_accounting(ledger, "b"))
        assert other.get_epsilon(1e-5) == pytest.approx(told, rel=2e-3)
        assert told > 1.5


def copy_of(book: Ledger, tmp_path: Path) -> Ledger:
    """A copy of the ledger's file that somebody goes on with."""
    book.close()
    shutil.copy(tmp_path / "ledger.sqlite", tmp_path / "copy.sqlite")
    return Ledger(tmp_path / "copy.sqlite")


def test_what_a_copy_spent_is_charged_to_the_original(book: Ledger, tmp_path: Path) -> None:
    """Also the run that was open when they parted, which both went on with."""
    file, run = tmp_path / "copy.jsonl", book.runs("b")[0].id
    export(book, file)
    with pytest.raises(InputError, match="own export"):
        import_file(book, file)
    copy = copy_of(book, tmp_path)
    book.close_run(run, used=0)
    copy.start(run, 3)
    copy.close_run(run, used=3)
    copy.charge("b", [step(20.0, count=5)])
    export(copy, file)
    assert import_file(book, file)[0].steps == 8
    assert book.status("b").spent_units == copy.status("b").spent_units
    assert import_file(book, file)[0].steps == 0, "once"
    copy.charge("b", [step(20.0, count=2)])
    export(copy, file)
    assert import_file(book, file)[0].steps == 2
    assert book.status("b").spent_units == copy.status("b").spent_units
    verify(book)
    copy.close()
