"""The whole reproduction at toy size: values, files, page, resuming after an interruption."""

from __future__ import annotations

import csv
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from diminuendo.cli import main
from diminuendo.errors import InputError
from diminuendo.paper import data, figure, reproduction
from diminuendo.paper.digits import Digits, embedded
from diminuendo.paper.results import Results, plain
from diminuendo.paper.setting import Run, Setting
from diminuendo.replicas.statistics import Interval
from diminuendo.tuning import tune

TINY = Setting(
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


class Reproduced(NamedTuple):
    folder: Path
    results: Results


@pytest.fixture(scope="module", autouse=True)
def _one_thread_before_other_fixtures() -> Iterator[None]:
    """Runs that are compared add up in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return embedded()


def run_in(path: Path, lines: list[str], setting: Setting = TINY) -> Run:
    return Run.in_folder(path, setting, data="toy", say=lines.append)


@pytest.fixture(scope="module")
def reproduced(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Reproduced:
    folder = tmp_path_factory.mktemp("paper")
    results, page = reproduction.reproduce(digits, run_in(folder, []), ("figure", "tables"))
    assert page == folder / "index.html"
    return Reproduced(folder, results)


def test_every_variant_is_run_where_it_belongs(reproduced: Reproduced) -> None:
    assert reproduced.results.figure is not None
    cells = reproduced.results.figure.cells
    counts = Counter((cell.task, cell.examples) for cell in cells)
    for cell in cells:
        assert cell.epsilon <= 4
        assert cell.failed == 0
        if cell.variant == "uniform":
            assert cell.against_uniform["train_loss"] == (0.0, 0.0)
    fits = Counter(one.task for one in reproduced.results.figure.influence if one.gamma is not None)
    assert counts["MNIST35", 70] == 2
    assert counts["MNIST35", 90] == 5 + fits["MNIST35"]
    assert counts["MNIST", 70] == 5 + fits["MNIST"]


def test_the_page_says_what_is_not_covered(reproduced: Reproduced) -> None:
    page = (reproduced.folder / "index.html").read_text()
    for words in (*data.NOT_COVERED, "were tuned on synthetic data only", "paired"):
        assert words in page
    assert "<script" not in page


def test_numbers_are_there_as_json_and_csv_and_pictures(reproduced: Reproduced) -> None:
    folder, results = reproduced
    assert results.figure is not None
    assert Results.read(folder) == results
    with (folder / "cells.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    for row, cell in zip(rows, results.figure.cells, strict=True):
        assert float(row["test_accuracy"]) == cell.test_accuracy.mean
        assert float(row["train_loss_minus_uniform"]) == cell.against_uniform["train_loss"].mean
    for name in ("figure-mnist35", "figure-mnist", "variants-mnist", "table-true", "excess"):
        for ending in ("svg", "png"):
            assert (folder / f"{name}.{ending}").stat().st_size > 1000


def test_results_keep_their_form_in_json(reproduced: Reproduced) -> None:
    """The form of version 0.1, which readers of results.json rely on."""
    stored = json.loads((reproduced.folder / "results.json").read_text())
    cell = stored["figure"]["cells"][0]
    assert cell["test_accuracy"].keys() == {"mean", "half"}
    assert cell["against_uniform"].keys() == {"train_loss", "test_loss", "test_accuracy"}
    assert stored["figure"]["influence"][0].keys() >= {"task", "momentum", "steps", "gamma"}
    assert stored["tables"]["empirical"][0].keys() == {"algorithm", "formula", "ours", "bounds"}
    assert {"problem", "bound", "measured", "half"} <= stored["tables"]["excess"][0].keys()


def test_numbers_that_are_not_finite_are_read_back_as_nan(reproduced: Reproduced) -> None:
    assert reproduced.results.figure is not None
    broken = replace(reproduced.results.figure.cells[0], train_loss=Interval(math.inf, math.nan))
    stored = json.loads(json.dumps(plain(broken)))
    assert stored["train_loss"] == {"mean": None, "half": None}
    assert math.isnan(type(broken).from_dict(stored).train_loss.mean)


def test_an_interrupted_run_goes_on_and_ends_the_same(
    digits: Digits, reproduced: Reproduced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def dying(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return tune(*arguments, **named)

    monkeypatch.setattr(figure, "tune", dying)
    with pytest.raises(KeyboardInterrupt):
        figure.figure(digits, run_in(tmp_path, []))
    lines: list[str] = []
    again = figure.figure(digits, run_in(tmp_path, lines))
    assert again == reproduced.results.figure
    assert not any(line.startswith("influence") for line in lines), "measured before, not again"
    assert len(calls) == 1 + len(again.cells)


def test_a_folder_of_another_setting_is_refused_and_left_alone(tmp_path: Path) -> None:
    run_in(tmp_path, [])
    before = (tmp_path / "setting.json").read_bytes()
    with pytest.raises(InputError, match="repeats"):
        run_in(tmp_path, [], replace(TINY, repeats=4))
    assert (tmp_path / "setting.json").read_bytes() == before


def test_results_that_cannot_be_read_are_refused_before_anything_runs(
    digits: Digits, tmp_path: Path
) -> None:
    lines: list[str] = []
    run = run_in(tmp_path, lines)
    (tmp_path / "results.json").write_text('{"figure": {"cells": 3}}')
    with pytest.raises(InputError, match="diminuendo reproduce"):
        reproduction.reproduce(digits, run, ["tables"])
    assert lines == []


def test_command_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["reproduce", "tables", "--out", str(tmp_path), "--no-progress", "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert len(printed["tables"]["empirical"]) == 10
    assert Path(printed["page"]).exists()
    assert (tmp_path / "table-empirical.csv").exists()


@pytest.mark.slow
def test_one_part_run_again_leaves_the_other(
    reproduced: Reproduced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ["reproduce", "tables", "--out", str(out), "--no-progress"]
    assert main(command) == 0
    reproduction.write(out, reproduced.results)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert main(command) == 0
    after = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert Results.read(out).figure == reproduced.results.figure
    headings = [re.findall("<h2.*?</h2>", page["index.html"].decode()) for page in (before, after)]
    assert headings[0] == headings[1]
    assert after.keys() == before.keys()
    monkeypatch.setattr(reproduction, "figure", lambda *_: reproduced.results.figure)
    assert main(["reproduce", "figure", "--out", str(out), "--no-progress"]) == 0
    assert set(json.loads((out / "results.json").read_text())) == {"figure", "tables"}


@pytest.mark.parametrize(
    "command",
    [
        ["reproduce", "nothing", "--out", "x"],
        ["reproduce", "tables", "--out", "x", "--data-dir", "/nowhere"],
        ["reproduce", "tables", "--out", "x", "--repeats", "1"],
        ["reproduce", "tables", "--out", "x", "--device", "abacus"],
        ["reproduce", "tables", "--out", "x", "--device", "cuda:99"],
    ],
)
def test_bad_commands(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    assert list(tmp_path.iterdir()) == []
