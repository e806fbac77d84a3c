"""diminuendo tune: plans, a study and a picture; bad input is told before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from diminuendo.cli import main
from diminuendo.tuning import Choice

TUNE = ["tune", "--epsilon", "4", "--delta", "1e-8"]
SHAPE = ["--examples", "50", "--features", "5", "--classes", "2"]


@pytest.mark.parametrize("options", [["--steps", "five"], ["--auxiliary", "/nowhere.npz"]])
def test_bad_commands(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*TUNE, *SHAPE, *options]) == 2
    assert list(tmp_path.iterdir()) == []


def test_plans_study_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--hidden", "6", "--steps", "2:6", "--trials", "3", "--repeats", "1"]
    command = [*TUNE, *SHAPE, *small]
    assert main([*command, "--json", "-o", str(tmp_path)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["families"]) == {"uniform", "exponential"}
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"plan-uniform.json", "plan-exponential.json", "study.json", "landscape.svg"}
    assert main([*command, "-o", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert f"plan-{printed['best']}.json" in text
    assert "[training] lr = 0.1" in text
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "exponential" in text
    assert "--output" in text


CHOOSE = [*TUNE, *SHAPE, "--rounds", "0", "--repeats", "1"]


def test_a_choice_with_its_ablations_goes_straight_into_train(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fixed = ["--models", "linear,4", "--lr-shape", "constant,linear", "--clipping", "automatic"]
    assert main([*CHOOSE, *fixed, "--steps", "3:6", "-o", "tuned"]) == 0
    text = capsys.readouterr().out
    assert "uniform noise, falling rate" in text
    assert "choice.json" in text
    assert {path.name for path in Path("tuned").iterdir()} == {
        "choice.json",
        "study.json",
        "ablations.svg",
        "landscape.svg",
    }
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 5)).astype(np.float32), rng.integers(0, 2, 50)
    np.savez("train.npz", x=x, y=y)
    run = '[data]\npath = "train.npz"\n[plan]\npath = "{}"\n[training]\n[output]\nfolder = "{}"\n'
    Path("run.toml").write_text(run.format("tuned/choice.json", "out"))
    assert main(["train", "run.toml", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    choice = Choice.from_json(Path("tuned/choice.json").read_text())
    assert facts["status"] == "done"
    assert facts["plan"] == choice.plan.digest
    assert facts["epsilon"] <= 4
    assert choice.candidate.clipping == "automatic"


def test_a_choice_without_its_model_asks_for_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*CHOOSE, "--hidden", "3", "--steps", "4", "-o", "tuned"]) == 0
    told = json.loads(Path("tuned/choice.json").read_text())
    Path("own.json").write_text(json.dumps({**told, "model": None}))
    np.savez("train.npz", x=np.zeros((50, 5), np.float32), y=np.zeros(50, np.int64))
    run = (
        '[data]\npath = "train.npz"\n[plan]\npath = "{}"{}\n[training]\n[output]\nfolder = "out"\n'
    )
    for name, more, words in (
        ("own.json", "", "[model]"),
        ("tuned/choice.json", "\nclip = 1.0", "left out where plan.path is given"),
    ):
        Path("run.toml").write_text(run.format(name, more))
        capsys.readouterr()
        assert main(["train", "run.toml"]) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    assert not Path("out").exists()


def test_a_choice_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main([*CHOOSE, "--models", "linear", "--steps", "3", "--labels", "teacher", "--json"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"]["steps"] == 3
    assert told["settings"]["auxiliary"] == "Synthetic data, labels by teacher."
    assert {"uniform noise, constant rate", "no momentum"} <= {a["name"] for a in told["ablations"]}


@pytest.mark.parametrize(
    "options",
    [
        ["--models", "deep"],
        ["--models", "linear", "--hidden", "3"],
        ["--models", "linear", "--trials", "3"],
        ["--lr-shape", "wavy"],
        ["--clipping", "flat,flat"],
        ["--sampling-rate", "2"],
        ["--labels", "teacher,wishes"],
    ],
)
def test_bad_choices(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*CHOOSE, *options, "-o", "tuned"]) == 2
    assert list(tmp_path.iterdir()) == []
