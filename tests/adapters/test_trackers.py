"""Runs as TensorBoard and MLflow show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import diminuendo as dim
from diminuendo import Budget, MissingExtra
from diminuendo.planning import Plan
from diminuendo.training import Logger, Progress, fit


def planned() -> Plan:
    budget = Budget(epsilon=4, delta=1e-5)
    return dim.plan(budget, examples=20, parameters=6, steps=4, gamma=0.9)


def trained(logger: Logger, **more: Any) -> None:
    data = (torch.randn(20, 2), torch.arange(20) % 2)
    loss = nn.CrossEntropyLoss(reduction="none")
    progress = Progress(shown=False, logger=logger, **more)
    fit(nn.Linear(2, 2), data, planned(), loss=loss, lr=0.5, progress=progress)


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="make test-adapters has tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from diminuendo.adapters.tensorboard import TensorBoardLogger

    trained(TensorBoardLogger(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"noise_multiplier", "epsilon", "learning_rate"}
    sigmas = events.Scalars("noise_multiplier")
    assert [event.step for event in sigmas] == [1, 2, 3, 4]
    assert [event.value for event in sigmas] == pytest.approx(planned().sigmas.tolist())
    assert {"plan/text_summary", "result/text_summary"} <= set(events.Tags()["tensors"])


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="make test-adapters has mlflow-skinny")
    from diminuendo.adapters.mlflow import MLflowLogger

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "runs").as_uri()
    logger = MLflowLogger("mortality", run_name="first", tracking_uri=uri)
    trained(logger)
    assert mlflow.active_run() is None
    client = mlflow.MlflowClient(uri)
    run = client.get_run(logger.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["dp.plan"] == planned().digest
    assert run.data.tags["dp.status"] == "done"
    history = client.get_metric_history(logger.run_id, "dp.noise_multiplier")
    assert [point.value for point in history] == planned().sigmas.tolist()
    assert set(run.data.metrics) == {"dp.noise_multiplier", "dp.epsilon", "dp.learning_rate"}
    assert run.data.metrics["dp.epsilon"] == planned().epsilon

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    second = MLflowLogger(tracking_uri=uri)
    with pytest.raises(KeyboardInterrupt):
        trained(second, after_step=stop)
    assert client.get_run(second.run_id).info.status == "KILLED"
    with mlflow.start_run() as active:
        third = MLflowLogger()
        trained(third)
        assert third.run_id == active.info.run_id
        assert mlflow.active_run() is not None  # whoever began it ends it


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    from diminuendo.adapters.tensorboard import TensorBoardLogger

    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(MissingExtra, match=r"diminuendo\[tensorboard\]"):
        TensorBoardLogger(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.delitem(sys.modules, "diminuendo.adapters.mlflow", raising=False)
    with pytest.raises(MissingExtra, match=r"diminuendo\[mlflow\]"):
        __import__("diminuendo.adapters.mlflow")
