"""What accuracy to expect: more for a larger ε, with an interval, and what it rests on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diminuendo import InputError
from diminuendo.tuning import Preview, Shape, preview
from diminuendo.tuning.preview import _expected

SHAPE = Shape(examples=150, features=4, classes=2, largest_norm=2)


def public(rows: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


@pytest.fixture(scope="module")
def seen() -> Preview:
    return preview(SHAPE, epsilons=(8, 0.1, 8), public=public(), progress=False)


def test_accuracy_grows_with_the_budget(seen: Preview) -> None:
    assert [one.epsilon for one in seen.points] == [0.1, 8]
    little, much = seen.points
    assert little.accuracy + 0.1 < much.accuracy
    assert much.accuracy > 0.85
    assert seen.without.accuracy >= much.accuracy - 0.05
    for one in (*seen.points, seen.without):
        assert 0 <= one.low <= one.accuracy <= one.high <= 1
    assert little.lost == pytest.approx(seen.without.accuracy - little.accuracy)


def test_it_says_what_it_rests_on(seen: Preview) -> None:
    text = " ".join(seen.assumptions)
    assert "200 public rows" in text
    assert "140 to learn from" in text
    assert "Noise is that of 150 examples, learning is from 140" in text


def test_table_picture_and_json(seen: Preview, tmp_path: Path) -> None:
    headers, rows = seen.table()
    assert [row[0] for row in rows] == ["0.1", "8", "no privacy"]
    assert all(len(row) == len(headers) for row in rows)
    assert "<svg" in seen.picture(tmp_path / "p.svg").read_text()
    told = seen.to_dict()
    assert told["points"][0]["epsilon"] == 0.1
    assert told["without"]["epsilon"] is None


def test_the_interval_is_for_one_more_run() -> None:
    """Student's t for a prediction, computed in another way."""
    from scipy import stats

    from diminuendo.replicas.statistics import interval
    from diminuendo.tuning.preview import _REPEATS

    values = torch.linspace(0.4, 0.6, 4 * _REPEATS, dtype=torch.float64).numpy()

    class Best:
        accuracy = interval(values)
        from diminuendo.tuning.space import Candidate

        candidate = Candidate(family="uniform", steps=3, lr=1.0, clip=1.0, momentum=0.0, fall=None)

    one = _expected(1.0, Best(), 0.9, None)  # type: ignore[arg-type]
    wider = _expected(1.0, Best(), 0.9, 100)  # type: ignore[arg-type]
    assert wider.high - 0.5 == pytest.approx(
        np.hypot(one.high - 0.5, stats.t(len(values) - 1).ppf(0.975) * 0.05), rel=1e-6
    )
    n = len(values)
    law = stats.t(n - 1, loc=values.mean(), scale=values.std(ddof=1) * (1 + 1 / n) ** 0.5)
    assert (one.low, one.high) == pytest.approx(law.ppf([0.025, 0.975]))
    assert one.lost == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"epsilons": []}, "epsilons"),
        ({"epsilons": [0.0]}, "epsilons"),
        ({"hidden": -1}, "hidden"),
        ({"delta": 2.0}, "delta"),
        ({"public": (torch.zeros(200, 3), torch.zeros(200).long())}, "4 finite features"),
        ({"public": (torch.zeros(200, 4), torch.full((200,), 2))}, "labels from 0 to 1"),
        ({"public": (torch.full((200, 4), torch.nan), torch.zeros(200).long())}, "finite"),
        ({"public": (torch.zeros(5, 4), torch.zeros(5).long())}, "20 or more rows"),
        ({"public": ()}, "20 or more rows"),
        ({"public": "mnist"}, "20 or more rows"),
    ],
)
def test_what_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        preview(SHAPE, progress=False, **more)
