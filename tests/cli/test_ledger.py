"""diminuendo ledger: from making a budget to checking what a report cites."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diminuendo import Ledger
from diminuendo.cli import main
from diminuendo.ledger import process

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIMINUENDO_LEDGER", str(tmp_path / "ledger.sqlite"))
    monkeypatch.chdir(tmp_path)


def ask(capsys: Capture, *words: str, code: int = 0) -> Any:
    """The JSON that a command prints; its error line where it fails."""
    assert main(["ledger", *words, *(["--json"] if code == 0 else [])]) == code
    captured = capsys.readouterr()
    if code:
        assert captured.out == ""
        return captured.err
    assert captured.err == ""
    return json.loads(captured.out)


def test_a_budget_from_its_making_to_its_end(tmp_path: Path, capsys: Capture) -> None:
    np.savez("train.npz", x=np.zeros(3))
    terms = ("--epsilon", "4", "--delta", "1e-8", "--data", "train.npz", "--unit", "patient")
    made = ask(capsys, "create", "patients", *terms)
    assert made["data"] == ask(capsys, "identify", "train.npz")["data"]
    assert (made["spent"], made["epsilon_left"]) == (0, 4)
    charged = ask(
        capsys, "charge", "patients", "--sigma", "20", "--steps", "100", "--label", "sums"
    )
    assert charged["status"] == "closed"
    assert charged["budget"]["spent"] == pytest.approx(0.25 / 0.51344, rel=1e-4)
    shown = ask(capsys, "show", "patients")
    assert [run["label"] for run in shown["runs"]] == ["sums"]
    assert ask(capsys, "list")["budgets"][0]["name"] == "patients"
    head = shown["head"]["digest"]
    assert ask(capsys, "verify", "--cited", head)["steps"] == 100
    assert ask(capsys, "export", "-o", "out.jsonl")["records"] == 4
    other = str(tmp_path / "other.sqlite")
    imported = ask(capsys, "import", "out.jsonl", "--ledger", other)["imported"]
    assert (imported[0]["budget"], imported[0]["steps"]) == ("patients", 100)
    events = ("export", "-o", "e.json", "--format", "dp-accounting", "--budget", "patients")
    assert ask(capsys, *events)["records"] == 1
    assert json.loads(Path("e.json").read_text())["events"][0]["count"] == 100


def test_tables_for_people(capsys: Capture) -> None:
    assert main(["ledger", "create", "p", "--epsilon", "4", "--delta", "1e-8"]) == 0
    assert main(["ledger", "charge", "p", "--sigma", "20", "--steps", "100"]) == 0
    for words in (["list"], ["show", "p"], ["verify"]):
        assert main(["ledger", *words]) == 0
    out = capsys.readouterr().out
    assert "██████████░░░░░░░░░░ 51.3% left" in out
    assert "is consistent: 4 records, 1 budget, 1 run, 100 steps" in out
    assert "head: sha256:" in out


def test_a_mistyped_path_does_not_become_a_ledger(tmp_path: Path, capsys: Capture) -> None:
    for words in (["list"], ["show", "p"], ["verify"], ["charge", "p", "--sigma", "9"]):
        assert "an existing file" in ask(capsys, *words, "--ledger", "typo.sqlite", code=2)
    assert not (tmp_path / "typo.sqlite").exists()


def test_refusals_and_bad_input(capsys: Capture) -> None:
    ask(capsys, "create", "p", "--epsilon", "4", "--delta", "1e-8")
    words = ask(capsys, "charge", "p", "--sigma", "1", code=3)
    assert "100.000% left" in words
    assert "would fit" in words
    assert "one of the ledger's (p)" in ask(capsys, "show", "q", code=2)
    assert "the terms it has" in ask(
        capsys, "create", "p", "--epsilon", "5", "--delta", "1e-8", code=2
    )
    assert "a run of this ledger" in ask(capsys, "reclaim", "abc", "--yes", code=2)
    assert "above 0" in ask(capsys, "charge", "p", "--sigma", "-1", code=2)
    assert "finite" in ask(capsys, "charge", "p", "--sigma", "nan", code=2)
    assert "--format" in ask(capsys, "export", "-o", "x", "--format", "xml", code=2)
    assert "not in the chain" in ask(capsys, "verify", "--cited", "sha256:00", code=1)
    assert "readable" in ask(capsys, "import", "nothing.jsonl", code=2)
    assert "the ledger's URL" in ask(capsys, "list", "--ledger", "mysql://x:secret@y/z", code=2)
    run = ask(capsys, "charge", "p", "--sigma", "100")["run"]
    assert "closed" in ask(capsys, "reclaim", run, "--yes", code=2)


def test_reclaim_asks_first(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    from diminuendo import GaussianStep

    ask(capsys, "create", "p", "--epsilon", "4", "--delta", "1e-8")
    ledger = Ledger()
    run = ledger.open_run("p").id
    ledger.grant(run, [GaussianStep(noise_multiplier=20.0, count=10)], start=False)
    ledger.start(run, 4)
    monkeypatch.setattr("diminuendo.ledger.process.start_time", lambda pid: "dead")
    monkeypatch.setattr("typer.confirm", _no)
    assert main(["ledger", "reclaim", run]) == 130
    assert "is dead" in capsys.readouterr().err
    assert ledger.run(run).status == "open"
    facts = ask(capsys, "reclaim", run, "--yes", "--by", "Ada")
    assert facts["returned"] == pytest.approx(6 / 400 / 0.51344, rel=1e-4)
    assert (facts["status"], facts["started"]) == ("reclaimed", 4)


def _no(*_: object, **__: object) -> None:
    import typer

    raise typer.Abort


def test_names_are_shown_as_they_are(capsys: Capture) -> None:
    name, label = "[/red] :smile:", "[/x][bold]"
    ask(capsys, "create", name, "--epsilon", "4", "--delta", "1e-8")
    ask(capsys, "charge", name, "--sigma", "20", "--label", label)
    assert main(["ledger", "show", name]) == 0
    out = capsys.readouterr().out
    assert name in out
    assert label in out


def test_amounts_beyond_all_bounds_are_refused(capsys: Capture) -> None:
    for composition in ("gaussian", "renyi"):
        terms = ("--epsilon", "4", "--delta", "1e-8", "--composition", composition)
        ask(capsys, "create", composition, *terms)
        ask(capsys, "charge", composition, "--sigma", "1e200", "--steps", "1000000")
        assert ask(capsys, "list")["budgets"][-1]["spent"] > 0
    words = ask(capsys, "charge", "gaussian", "--sigma", "1e-200", "--steps", "9", code=3)
    assert "times the whole" in words


def test_a_question_is_not_part_of_the_answer(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(capsys, "create", "b", "--epsilon", "4", "--delta", "1e-8")
    run = Ledger().open_run("b").id
    monkeypatch.setattr(process, "is_alive", lambda _: False)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert main(["ledger", "reclaim", run, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == "reclaimed"
    assert "This assumes" in captured.err
