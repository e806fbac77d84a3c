"""diminuendo report: a run's claim, checked anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diminuendo import Budget, Ledger
from diminuendo.cli import main
from diminuendo.ledger import identify

Capture = pytest.CaptureFixture[str]
RUN = """
[model]
factory = "report_models:network"
[data]
path = "train.npz"
[plan]
steps = 12
clip = 1.0
gamma = 0.9
[budget]
epsilon = 4
delta = 1e-5
[training]
lr = 0.5
[ledger]
url = "ledger.sqlite"
budget = "{budget}"
[output]
folder = "{folder}"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 4)).astype(np.float32), rng.integers(0, 2, 50)
    np.savez(tmp_path / "train.npz", x=x, y=y)
    (tmp_path / "report_models.py").write_text(
        "import torch\ndef network():\n    return torch.nn.Linear(4, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    with Ledger("ledger.sqlite") as ledger:
        ledger.create("b", Budget(epsilon=4, delta=1e-5), data=identify((x, y)))
    return tmp_path


def train(folder: str = "run", budget: str = "b") -> int:
    Path("run.toml").write_text(RUN.format(folder=folder, budget=budget))
    return main(["train", "run.toml", "--json"])


def report(capsys: Capture, code: int = 0) -> Any:
    capsys.readouterr()
    assert main(["report", "run", "--ledger", "ledger.sqlite", "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_run_on_a_ledger_and_its_report(place: Path, capsys: Capture) -> None:
    assert train() == 0
    facts = json.loads((place / "run" / "result.json").read_text())
    assert facts["ledger"]["budget"] == "b"
    assert facts["ledger"]["head"] in (place / "run" / "report.md").read_text()
    found = report(capsys)
    assert found["holds"]
    assert len(found["checks"]) == 5
    page = (place / "run" / "report.html").read_text()
    assert facts["ledger"]["head"] in page
    assert facts["ledger"]["run"] in page
    assert "<svg" in page
    assert train("again") == 3
    assert "0.000% left" in capsys.readouterr().err
    assert train("again", "nobody") == 2


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("events.json", '"count": 1}]', '"count": 2}]', "as many steps"),
        ("result.json", '"epsilon": 3.9', '"epsilon": 0.9', "ε covers"),
        ("result.json", '"head": "sha256:', '"head": "sha256:0', "cited head"),
        ("result.json", '"runs": [', '"runs": [], "before": [', "are on record"),
        ("result.json", '"plan": "sha256:', '"plan": "sha256:0', "the plan is"),
    ],
)
def test_what_does_not_hold_is_said(
    place: Path, capsys: Capture, file: str, old: str, new: str, words: str
) -> None:
    assert train() == 0
    path = place / "run" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    found = report(capsys, code=1)
    assert not found["holds"]
    assert any(words in check["claim"] for check in found["checks"] if not check["holds"])
    assert "DOES NOT HOLD" in (place / "run" / "report.html").read_text()


def test_folders_that_are_no_runs(place: Path, capsys: Capture) -> None:
    assert main(["report", "nowhere"]) == 2
    assert train() == 0
    (place / "run" / "result.json").write_text("{}")
    assert main(["report", "run"]) == 2
    assert "a result with" in capsys.readouterr().err


def test_paths_are_the_run_files_and_a_finished_run_stays_the_same_run(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train() == 0
    first = json.loads((place / "run" / "result.json").read_text())
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    assert main(["train", "../run.toml", "--json"]) == 0
    again = json.loads((place / "run" / "result.json").read_text())
    assert "nothing was trained now" in again["reason"]
    assert again["ledger"]["run"] == first["ledger"]["run"]
    assert list((place / "elsewhere").iterdir()) == []
    monkeypatch.delenv("DIMINUENDO_LEDGER", raising=False)
    capsys.readouterr()
    assert main(["report", "../run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["holds"]
