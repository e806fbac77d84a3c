"""A study resumes where it stopped; the file of another study is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from toys import logistic, make_data, mlp, replica

import diminuendo as dim
from diminuendo.replicas import Outcome, engine, train


def test_an_interrupted_study_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = [replica(seed) for seed in range(5)] + [replica(9, lr=1e200, clip=1e200)]
    path = tmp_path / "study" / "results.jsonl"
    options: dict[str, Any] = {"at_once": 2, "progress": False, "evaluate": {"test": make_data(3)}}
    whole = train(mlp, make_data(), replicas, **options)
    real = engine.Group.run
    calls: list[int] = []

    def stopping(self: engine.Group, advance: Callable[[int], None]) -> list[Outcome]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, advance)

    monkeypatch.setattr(engine.Group, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(mlp, make_data(), replicas, store=path, **options)
    assert len(path.read_text().splitlines()) == 1 + 4
    with path.open("a") as handle:
        handle.write('{"index": 5, "repl')
    resumed = train(mlp, make_data(), replicas, store=path, **options)
    assert len(calls) == 4
    again = train(mlp, make_data(), replicas, store=path, **options)
    assert len(calls) == 4
    for a, b, c in zip(whole, resumed, again, strict=True):
        assert (a.replica, a.status, a.stopped) == (b.replica, b.status, b.stopped)
        assert (a.replica, a.status, a.stopped) == (c.replica, c.status, c.stopped)
        if a.status == "done":
            assert a == b == c
        else:
            assert math.isnan(c.train_loss)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_a_study_resumed_with_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    train(mlp, make_data(), [replica(1)], store=path, progress=False)
    before = path.read_text()
    for model, data, replicas in (
        (mlp, make_data(), [replica(2)]),
        (mlp, make_data(7), [replica(1)]),
        (logistic, make_data(), [replica(1)]),
    ):
        with pytest.raises(dim.InputError, match="of this study"):
            train(model, data, replicas, store=path, progress=False)
    assert path.read_text() == before
    other = tmp_path / "other.txt"
    other.write_text('{"a": 1}\n')
    with pytest.raises(dim.InputError, match="results of a study"):
        train(mlp, make_data(), [replica(1)], store=other, progress=False)
