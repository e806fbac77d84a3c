"""The paper's own preparation: what it is, that samples share none of it, and that it is said."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

import diminuendo as dim
from diminuendo.cli import main
from diminuendo.compare import data, prepared
from diminuendo.compare.data import TASKS
from diminuendo.paper import data as paper
from diminuendo.paper import digits
from diminuendo.paper.data import NOT_COVERED

N = 90


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few embedded digits in place of those drawn from fonts."""
    found = digits.embedded()
    monkeypatch.setattr(
        data,
        "drawn",
        lambda: digits.Digits(
            found.images[:200],
            found.labels[:200],
            found.test_images[:50],
            found.test_labels[:50],
            "a few",
        ),
    )


def test_a_sample_is_prepared_as_the_paper_prepares_it() -> None:
    """The same rows, by the code behind the paper's figure; norms at most 1 with the constant."""
    pool = TASKS["mnist-paper"].load(None)
    drawn = pool.samples(N, [3, 4])
    assert drawn.x.shape == (2, N, 61)
    assert drawn.test_x.shape == (2, len(pool.test_x), 61)
    assert pool.features == 61
    assert 0.999 < float(drawn.x.norm(dim=2).max()) <= 1
    assert set(drawn.x[:, :, -1].flatten().tolist()) == {drawn.x[0, 0, -1].item()}
    images, labels = pool.draw(N, [3])
    assert torch.equal(labels[0], drawn.y[0])
    own = paper.Pool(
        paper.MNIST,
        images[0].numpy(),
        labels[0].numpy(),
        pool.test_x.numpy(),
        pool.test_y.numpy(),
        "",
    )
    theirs = paper.draw(own, N, 0)  # all of them, in another order
    scale = paper.LARGEST_NORM * 2**0.5
    order = np.random.default_rng([0, N]).permutation(N)
    torch.testing.assert_close(
        drawn.x[0, order, :-1] * scale, theirs.train[0], rtol=1e-3, atol=1e-3
    )
    torch.testing.assert_close(
        drawn.test_x[0, :, :-1] * scale, theirs.test[0], rtol=1e-3, atol=1e-3
    )


def test_one_example_changes_how_the_others_are_prepared() -> None:
    """Why no claim for add-remove neighbours covers it."""
    pool = TASKS["mnist-paper"].load(None)
    x = pool.draw(N, [3])[0][0]
    prepare = prepared.Components()
    without, _ = prepare(x[1:], pool.test_x[:3])
    among, _ = prepare(x, pool.test_x[:3])
    assert not torch.allclose(among[1:], without, atol=1e-3)


def test_samples_are_prepared_once_for_all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = TASKS["mnist-paper"].load(None)
    first = pool.samples(N, [3])
    assert not torch.equal(pool.samples(N, [4]).test_x, first.test_x), "each its own test set"
    kept = pool.samples(N, [3])
    torch.testing.assert_close(kept.x, first.x)
    monkeypatch.setattr(paper, "prepared", None)
    assert pool.samples(N, [3]) is kept
    assert not pool.to("cpu")._kept, "what is kept stays where it was computed"


def test_too_few_examples_for_the_components_are_refused() -> None:
    with pytest.raises(dim.InputError, match="examples"):
        TASKS["mnist-paper"].load(None).samples(60, [1])


@pytest.mark.usefixtures("few")
def test_a_table_says_what_its_claims_do_not_cover(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the CSV, in Markdown, on the page and in the terminal; for this task's columns alone."""
    command = ["compare", "--quick", "--trials", "1", "--repeats", "2", "--examples", str(N)]
    command += ["--epsilon", "3", "--method", "uniform", "--out", str(tmp_path), "--no-progress"]
    assert main([*command, "--task", "mnist-paper", "--task", "mnist"]) == 0
    assert capsys.readouterr().out.count(prepared.CAVEAT) == 1
    with (tmp_path / "table.csv").open(encoding="utf-8", newline="") as handle:
        rows = {row["task"]: row["not_covered"] for row in csv.DictReader(handle)}
    assert rows == {"mnist-paper": prepared.CAVEAT, "mnist": ""}
    assert (tmp_path / "table.md").read_text().count(prepared.CAVEAT) == 1
    page = (tmp_path / "index.html").read_text()
    assert prepared.CAVEAT in page
    for words in NOT_COVERED:
        assert page.count(words) == 1
