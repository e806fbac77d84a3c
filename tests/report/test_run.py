"""What a run's report says that its claim leaves out."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import diminuendo as dim
from diminuendo.report import run
from diminuendo.training import Progress, fit


@pytest.mark.parametrize(("status", "said"), [("done", False), ("interrupted", True)])
def test_a_stop_that_was_chosen_is_not_covered(status: str, said: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        plan = dim.plan(dim.Budget(epsilon=4, delta=1e-5), examples=30, parameters=15, steps=9)
    result: dict[str, Any] = {"private": True, "status": status, "revealed": False}
    left_out = run.facts(plan, result)["not_covered"]
    assert any("a stop that somebody chose" in words for words in left_out) is said


def test_lost_steps_are_said_where_the_result_is_read(tmp_path: Path) -> None:
    def breaks_off(step: int, _: object) -> None:
        if step == 7:
            raise ConnectionError

    def train(after: Any) -> Any:
        shown = Progress(shown=False, after_step=after)
        loss = torch.nn.CrossEntropyLoss(reduction="none")
        data = torch.ones(30, 4), torch.arange(30) % 3
        model = torch.nn.Linear(4, 3)
        return fit(model, data, plan, loss=loss, lr=1.0, folder=tmp_path, progress=shown)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        plan = dim.plan(dim.Budget(epsilon=4, delta=1e-5), examples=30, parameters=15, steps=9)
    with pytest.raises(ConnectionError):
        train(breaks_off)
    facts = run.facts(plan, {**vars(train(None)), "events": []})
    assert facts["lost"] == 3, "the checkpoint is of step 4"
    for text in (run.page(plan, facts), str(run.document(plan, facts))):
        assert "6 steps of the plan" in text
        assert "3 steps were lost when the run broke off: spent, and not taken" in text
        assert "every step" not in text
