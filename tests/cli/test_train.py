"""diminuendo train: from a TOML file to a model, a result and a report."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import diminuendo as dim
from diminuendo.cli import main

RUN = """
[model]
factory = "tiny_models:network"
[data]
path = "train.npz"
[budget]
epsilon = 4
delta = 1e-5
[plan]
steps = 12
clip = 1.0
gamma = 0.9
[training]
optimizer = "torch.optim:SGD"
lr = 0.5
{extra}
[output]
folder = "{folder}"
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "train.npz",
        x=rng.standard_normal((50, 4)).astype(np.float32),
        y=rng.integers(0, 2, 50),
    )
    (tmp_path / "tiny_models.py").write_text(
        "import torch\ndef network():\n    return torch.nn.Linear(4, 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder="out", extra=""))
    return path


def test_a_run_from_a_file(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(run_file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["status"], facts["steps"], facts["private"]) == ("done", 12, True)
    assert facts["epsilon"] <= 4
    out = run_file.parent / "out"
    assert facts == json.loads((out / "result.json").read_text())
    plan = dim.Plan.from_json((out / "plan.json").read_text())
    assert plan.digest == facts["plan"]
    assert len(json.loads((out / "events.json").read_text())) == 12
    assert set(torch.load(out / "model.pt", weights_only=True)) == {"weight", "bias"}
    report = (out / "report.md").read_text()
    assert "differentially private" in report
    assert "Not covered" in report
    for name in ("result.json", "report.md", "events.json"):
        assert "loss" not in (out / name).read_text().replace("final loss", "").replace(
            "Of the loss is known", ""
        )


def test_a_finished_run_is_not_run_again(run_file: Path) -> None:
    assert main(["train", str(run_file), "--json"]) == 0
    before = torch.load("out/model.pt", weights_only=True)
    assert main(["train", str(run_file), "--json"]) == 0
    after = torch.load("out/model.pt", weights_only=True)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_is_not_private_says_so(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file.write_text(RUN.format(folder="seeded", extra="seed = 3"))
    assert main(["train", str(run_file), "--reveal-training-loss"]) == 0
    out = capsys.readouterr().out
    assert "NOT PRIVATE" in out
    assert "Mean training loss (not covered" in out
    facts = json.loads(Path("seeded/result.json").read_text())
    assert facts["private"] is False
    assert facts["training_loss"] > 0


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tiny_models:network", "no_such:thing", "importable"),
        ("train.npz", "missing.npz", ".npz"),
        ("[budget]\nepsilon = 4\ndelta = 1e-5\n", "", "budget"),
        ("[output]", "[outputs]", "section"),
        ("gamma = 0.9", "gama = 0.9", "gama"),
        ("[model]", "[model", "valid TOML"),
        ("epsilon = 4", "epsilon = -4", "epsilon"),
        ('"out"', "3", "output.folder"),
    ],
)
def test_bad_run_files(
    run_file: Path, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_text(run_file.read_text().replace(old, new))
    assert main(["train", str(run_file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("known_by", ["file", "arrays", "other"])
def test_a_budget_knows_its_data_by_the_file_or_by_the_arrays(
    run_file: Path, known_by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load("train.npz") as arrays:
        given = {
            "file": ["--data", "train.npz"],
            "arrays": ["--digest", dim.ledger.identify((arrays["x"], arrays["y"]))],
            "other": ["--data", "tiny_models.py"],
        }[known_by]
    terms = ["--epsilon", "5", "--delta", "1e-5", "--ledger", "l.sqlite"]
    assert main(["ledger", "create", "b", *terms, *given]) == 0
    paid = '[ledger]\nurl = "l.sqlite"\nbudget = "b"'
    run_file.write_text(RUN.format(folder="out", extra=paid))
    capsys.readouterr()
    assert main(["train", str(run_file), "--json"]) == (2 if known_by == "other" else 0)
    assert ("the data of the budget" in capsys.readouterr().err) == (known_by == "other")
