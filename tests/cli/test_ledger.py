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


def test_a_living_run_is_refused_before_the_question(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(capsys, "create", "b", "--epsilon", "4", "--delta", "1e-8")
    run = Ledger().open_run("b").id
    monkeypatch.setattr("typer.confirm", lambda *_, **__: pytest.fail("it asked"))
    assert "is alive" in ask(capsys, "reclaim", run, code=2)
    elsewhere = {**process.this_process(), "host": "another"}
    monkeypatch.setattr(process, "this_process", lambda: elsewhere)
    run = Ledger().open_run("b").id
    assert "--yes-it-is-dead" in ask(capsys, "reclaim", run, code=2)


def test_near_the_limit_the_odometer_is_left_out(capsys: Capture) -> None:
    ask(capsys, "create", "b", "--epsilon", "4", "--delta", "1e-8")
    ask(capsys, "charge", "b", "--sigma", "100")
    assert 0 < ask(capsys, "show", "b")["epsilon_odometer"] < 4
    ask(capsys, "charge", "b", "--sigma", "1.45")
    shown = ask(capsys, "show", "b")
    assert (shown["epsilon_odometer"], shown["epsilon_certified"]) == (None, 4)
    assert main(["ledger", "show", "b"]) == 0
    assert "At this very moment" not in capsys.readouterr().out


def test_creation_says_what_the_budget_pays_for(capsys: Capture) -> None:
    words = ["ledger", "create", "full", "--epsilon", "4", "--delta", "1e-8"]
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "mini-batches are refused" in out
    assert "--composition renyi" in out
    assert main(["ledger", "create", "mini", *words[3:], "--typical-rate", "0.02"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "It pays for mini-batches, full batches" in out
    assert ask(capsys, "show", "mini")["composition"] == "renyi"
    ask(capsys, "charge", "mini", "--sigma", "2", "--sampling-rate", "0.02")


def test_one_step_is_one_step(capsys: Capture) -> None:
    ask(capsys, "create", "b", "--epsilon", "4", "--delta", "1e-8")
    assert "1 step was asked for, which costs" in ask(
        capsys, "charge", "b", "--sigma", "0.1", code=3
    )
    ask(capsys, "charge", "b", "--sigma", "100")
    assert main(["ledger", "verify"]) == 0
    assert "1 step." in capsys.readouterr().out
