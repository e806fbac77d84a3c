"""The examples of docs/experiments.md run as they stand."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import diminuendo as dim

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"


def test_examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        for text in blocks:
            exec(compile(text, str(PAGE), "exec"), names)
    assert (tmp_path / "out" / "study.jsonl").exists()
