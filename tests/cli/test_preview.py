"""diminuendo preview."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from diminuendo.cli import main

FACTS = ["preview", "--examples", "60", "--features", "3", "--classes", "2"]


def test_a_table_a_picture_and_what_they_rest_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "preview.svg"
    assert main([*FACTS, "--epsilons", "1,4", "-o", str(picture)]) == 0
    shown = capsys.readouterr().out
    assert "no privacy" in shown
    assert "- Synthetic tables" in shown
    assert "<svg" in picture.read_text()


def test_json_of_a_public_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).standard_normal((90, 3))
    np.savez(tmp_path / "public.npz", x=x, y=(x[:, 0] > 0).astype(int))
    public = str(tmp_path / "public.npz")
    assert main([*FACTS, "--epsilons", "4", "--auxiliary", public, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["epsilon"] for one in told["points"]] == [4.0]
    assert "90 public rows" in told["assumptions"][0]


@pytest.mark.parametrize(
    "wrong",
    [["--epsilons", "much"], ["--epsilons", "-1"], ["--auxiliary", "nowhere.npz"], ["-o", "x.gif"]],
)
def test_wrong_use(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*FACTS, *wrong]) == 2
    assert "error:" in capsys.readouterr().err
