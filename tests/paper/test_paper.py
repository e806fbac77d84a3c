"""The whole story at toy size: files, page, going on after an interruption, refusals."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from diminuendo.cli import main
from diminuendo.errors import InputError
from diminuendo.paper import data
from diminuendo.paper import figure as reproduction
from diminuendo.paper import page as story
from diminuendo.paper.digits import Digits, embedded

TINY = reproduction.Setting(
    repeats=3,
    trials=2,
    tuning_repeats=1,
    tuning_examples=0,
    influence_steps=12,
    influence_repeats=4,
    influence_points=4,
    hidden=8,
    grids={"MNIST35": ((70, 90), 90), "MNIST": ((70,), 70)},
)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return embedded()


def run_in(path: Path, said: list[str], setting: reproduction.Setting = TINY) -> reproduction.Run:
    folder = reproduction.Folder(path, asdict(setting))
    return reproduction.Run(folder, setting, None, False, said.append)


@pytest.fixture(scope="module")
def made(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("story")
    run = run_in(out, [])
    results = {"figure": reproduction.figure(digits, run), "tables": reproduction.tables(run)}
    story.write(out, results)
    return out, results


def test_every_variant_is_run_where_it_belongs(made: tuple[Path, dict[str, Any]]) -> None:
    cells = made[1]["figure"]["cells"]
    where = {(c["task"], c["examples"]): 0 for c in cells}
    for cell in cells:
        where[cell["task"], cell["examples"]] += 1
        assert cell["epsilon"] <= 4
        assert cell["failed"] == 0
    assert where["MNIST35", 70] == 2
    told = {one["task"]: 0 for one in made[1]["figure"]["influence"]}
    for one in made[1]["figure"]["influence"]:
        told[one["task"]] += one["gamma"] is not None
    assert where["MNIST35", 90] == 5 + told["MNIST35"]
    assert where["MNIST", 70] == 5 + told["MNIST"]
    for cell in cells:
        if cell["variant"] == "uniform":
            assert cell["against_uniform"]["train_loss"] == {"mean": 0.0, "half": 0.0}


def test_the_page_tells_what_is_not_covered(made: tuple[Path, dict[str, Any]]) -> None:
    page = (made[0] / "index.html").read_text()
    for words in (*data.NOT_COVERED, "were tuned on synthetic data only", "paired"):
        assert words in page
    assert "<script" not in page


def test_numbers_are_there_as_json_and_csv_and_pictures(made: tuple[Path, dict[str, Any]]) -> None:
    out, results = made
    stored = json.loads((out / "results.json").read_text())
    assert len(stored["figure"]["cells"]) == len(results["figure"]["cells"])
    with (out / "cells.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    for row, cell in zip(rows, results["figure"]["cells"], strict=True):
        assert float(row["test_accuracy"]) == cell["test_accuracy"]["mean"]
    for name in ("figure-mnist35", "figure-mnist", "variants-mnist", "table-true", "excess"):
        for ending in ("svg", "png"):
            assert (out / f"{name}.{ending}").stat().st_size > 1000


def test_an_interrupted_run_goes_on_and_ends_the_same(
    digits: Digits,
    made: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = reproduction.tune, []

    def dying(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(*arguments, **named)

    monkeypatch.setattr(reproduction, "tune", dying)
    with pytest.raises(KeyboardInterrupt):
        reproduction.figure(digits, run_in(tmp_path, []))
    said: list[str] = []
    again = reproduction.figure(digits, run_in(tmp_path, said))
    assert again == made[1]["figure"]
    assert not any(line.startswith("influence") for line in said), "measured before, not again"
    assert len(calls) == 1 + len(again["cells"])


def test_a_folder_of_another_setting_is_refused_and_left_alone(tmp_path: Path) -> None:
    run_in(tmp_path, [])
    before = (tmp_path / "setting.json").read_bytes()
    with pytest.raises(InputError, match="repeats"):
        run_in(tmp_path, [], replace(TINY, repeats=4))
    assert (tmp_path / "setting.json").read_bytes() == before


def test_command_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["reproduce", "tables", "--out", str(tmp_path), "--no-progress", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    assert len(told["tables"]["empirical"]) == 10
    assert Path(told["page"]).exists()
    assert (tmp_path / "table-empirical.csv").exists()


def test_one_part_made_anew_leaves_the_other(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["reproduce", "tables", "--out", str(out), "--no-progress"]
    assert main(command) == 0
    story.write(out, made[1])
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert main(command) == 0
    after = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert json.loads(after["results.json"])["figure"] == story.plain(made[1]["figure"])
    headings = [re.findall("<h2.*?</h2>", page["index.html"].decode()) for page in (before, after)]
    assert headings[0] == headings[1]
    assert after.keys() == before.keys()
    monkeypatch.setattr(reproduction, "figure", lambda *_: made[1]["figure"])
    assert main(["reproduce", "figure", "--out", str(out), "--no-progress"]) == 0
    assert set(json.loads((out / "results.json").read_text())) == {"figure", "tables"}


@pytest.mark.parametrize(
    "given",
    [
        ["reproduce", "nothing", "--out", "x"],
        ["reproduce", "tables", "--out", "x", "--data-dir", "/nowhere"],
        ["reproduce", "tables", "--out", "x", "--repeats", "1"],
        ["reproduce", "tables", "--out", "x", "--device", "abacus"],
        ["reproduce", "tables", "--out", "x", "--device", "cuda:99"],
        [
            "tune",
            "--epsilon",
            "4",
            "--delta",
            "1e-8",
            "--examples",
            "50",
            "--features",
            "5",
            "--classes",
            "2",
            "--steps",
            "five",
        ],
        [
            "tune",
            "--epsilon",
            "4",
            "--delta",
            "1e-8",
            "--examples",
            "50",
            "--features",
            "5",
            "--classes",
            "2",
            "--auxiliary",
            "/nowhere.npz",
        ],
    ],
)
def test_bad_commands(given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(given) == 2
    assert list(tmp_path.iterdir()) == []


def test_command_tune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "tune",
        "--epsilon",
        "4",
        "--delta",
        "1e-8",
        "--examples",
        "50",
        "--features",
        "5",
        "--classes",
        "2",
        "--hidden",
        "6",
        "--steps",
        "2:6",
        "--trials",
        "3",
        "--repeats",
        "1",
    ]
    assert main([*given, "--json", "-o", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["families"]) == {"uniform", "exponential"}
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {"plan-uniform.json", "plan-exponential.json", "study.json", "landscape.svg"}
    assert main(given) == 0
    assert "exponential" in capsys.readouterr().out
    assert main([*given, "-o", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"plan-{told['best']}.json" in said
    assert "[training] lr = 0.1" in said
    assert main(given) == 0
    assert "--output" in capsys.readouterr().out
