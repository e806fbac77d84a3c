"""What a run's report says that its claim leaves out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import diminuendo as dim
from diminuendo.report import run


@pytest.mark.parametrize(("status", "said"), [("done", False), ("interrupted", True)])
def test_a_stop_that_was_chosen_is_not_covered(status: str, said: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        plan = dim.plan(dim.Budget(epsilon=4, delta=1e-5), examples=30, parameters=15, steps=9)
    result: dict[str, Any] = {"private": True, "status": status, "revealed": False}
    left_out = run.facts(plan, result)["not_covered"]
    assert any("a stop that somebody chose" in words for words in left_out) is said
