"""diminuendo tune: plans, a study and a picture; bad input is told before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diminuendo.cli import main

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
