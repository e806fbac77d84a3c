"""Noise, learning rate and model together, at toy size: cells, files, page, resuming."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from diminuendo.cli import main
from diminuendo.errors import InputError
from diminuendo.paper import joint, reproduction
from diminuendo.paper.digits import Digits, embedded, public_images
from diminuendo.paper.results import JointResults, Results
from diminuendo.paper.setting import PAPER, Effort, JointTask, Run, Setting
from diminuendo.paper.sources import breast_cancer, sources
from diminuendo.replicas.statistics import Interval

TINY = Setting(
    repeats=3,
    grids={},
    hidden=4,
    joint=(
        JointTask(
            name="breast cancer",
            cells=((100, 4.0, 1e-5), (500, 4.0, 1e-5)),
            models=("linear", "hidden 3"),
        ),
        JointTask(name="MNIST35", cells=((70, 8.0, 1e-5),), models=("linear",)),
    ),
    joint_effort=(Effort(0, 1), Effort(0, 1)),
)


class Reproduced(NamedTuple):
    folder: Path
    results: JointResults
    lines: list[str]


@pytest.fixture(scope="module", autouse=True)
def _one_thread_before_other_fixtures() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return embedded()


def reproduce(folder: Path, digits: Digits, public: Digits | None) -> Reproduced:
    lines: list[str] = []
    run = Run.in_folder(folder, TINY, data="toy", public="toy", say=lines.append)
    results, page = reproduction.reproduce(digits, run, ("joint",), public=public)
    assert page.exists()
    assert results.joint is not None
    return Reproduced(folder, results.joint, lines)


@pytest.fixture(scope="module")
def reproduced(digits: Digits, tmp_path_factory: pytest.TempPathFactory) -> Reproduced:
    """Tuned on other images: here the embedded digits upside down."""
    turned = Digits(
        digits.images[:, ::-1],
        digits.labels,
        digits.test_images[:, ::-1],
        digits.test_labels,
        "digits upside down",
    )
    return reproduce(tmp_path_factory.mktemp("joint"), digits, turned)


def test_every_cell_has_four_ways_and_one_choice(reproduced: Reproduced) -> None:
    cells = reproduced.results.cells
    for task, examples in (("breast cancer", 100), ("MNIST35", 70)):
        here = [c for c in cells if c.task == task]
        assert {c.examples for c in here} == {examples}
        assert {c.method for c in here if c.model == "linear"} == set(joint.METHODS)
        assert sum(c.chosen for c in here) == 1
    for cell in cells:
        assert cell.spent <= cell.epsilon
        assert cell.failed == 0
        assert 0 < cell.test_accuracy.mean <= 1
        if cell.method == "uniform":
            assert (cell.fall, cell.lr_shape) == (1.0, "constant")
            assert cell.against_uniform == Interval(0.0, 0.0)
        if cell.method == "fading":
            assert cell.fall < 1
            assert cell.lr_shape == "constant"
        if cell.method == "falling":
            assert cell.lr_fall < 1
            assert cell.fall == 1
    assert any("N = 500 is left out" in line for line in reproduced.lines)


def test_files_and_page(reproduced: Reproduced) -> None:
    folder, results, _ = reproduced
    assert Results.read(folder).joint == results
    with (folder / "joint.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    for row, cell in zip(rows, results.cells, strict=True):
        assert float(row["test_accuracy"]) == cell.test_accuracy.mean
        assert float(row["against_uniform_half"]) == cell.against_uniform.half
    page = (folder / "index.html").read_text()
    assert "digits upside down" in page
    assert "(chosen)" in page
    for name in ("joint-mnist35", "joint-breast-cancer"):
        for ending in ("svg", "png"):
            assert (folder / f"{name}.{ending}").stat().st_size > 1000


def test_a_stored_run_is_not_run_again(
    reproduced: Reproduced, digits: Digits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(joint, "train", never)
    monkeypatch.setattr(joint, "tune", never)
    again = reproduce(reproduced.folder, digits, None)
    assert again.results.cells == reproduced.results.cells


def test_samples_of_a_table_are_standardised_by_their_own_rows() -> None:
    (sample,) = breast_cancer().samples(300, [4])
    x, y = sample.train
    assert x.shape == (300, 30)
    assert float(x.norm(dim=1).max()) == pytest.approx(10, rel=1e-5)
    torch.testing.assert_close(x.mean(0), torch.zeros(30), atol=1e-5, rtol=0)
    assert len(sample.test[1]) == 269
    assert set(y.tolist()) == {0, 1}


def test_public_samples_are_others_than_the_private_ones(digits: Digits) -> None:
    source = sources(digits, digits)["MNIST35"]
    one, tests = source.auxiliary(100, 3)
    assert one is not None
    assert tests is not None
    assert {len(x) for x, _ in one} == {100}
    assert {int(y.max()) for _, y in one} == {1}
    assert not torch.equal(one[0][0], one[1][0])


def test_the_paper_s_network_takes_part_where_it_is_asked_for() -> None:
    assert joint.hidden_of(PAPER) == 1000
    assert joint.hidden_of("hidden 32") == 32
    assert joint.hidden_of("linear") == "linear"


def test_public_images_need_mnist_s_form_and_not_its_content(tmp_path: Path) -> None:
    shapes = {"images-idx3": (28, 28), "labels-idx1": ()}
    for part, count in (("train", 60_000), ("t10k", 10_000)):
        for kind, shape in shapes.items():
            sizes = (count, *shape)
            header = (0x0800 + len(sizes)).to_bytes(4, "big")
            header += b"".join(size.to_bytes(4, "big") for size in sizes)
            content = header + bytes(int(np.prod(sizes)))
            path = tmp_path / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(content, compresslevel=1))
    read = public_images(tmp_path)
    assert read.images.shape == (60_000, 784)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"short")
    with pytest.raises(InputError, match="IDX file"):
        public_images(tmp_path)
    with pytest.raises(InputError, match="folder"):
        public_images(tmp_path / "nowhere")


def test_command(tmp_path: Path) -> None:
    command = ["reproduce", "joint", "--out", str(tmp_path / "out"), "--no-progress"]
    assert main([*command, "--public-dir", str(tmp_path / "nowhere")]) == 2
    assert not (tmp_path / "out").exists()
