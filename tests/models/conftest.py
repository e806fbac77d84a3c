"""Tests against models from outside; `make test-models` has the packages they need."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PACKAGES = ("transformers", "timm", "peft", "torchvision")
if any(importlib.util.find_spec(name) is None for name in PACKAGES):
    collect_ignore_glob = ["test_*.py"]
else:
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # built for another torch: its models need none of its own kernels
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")

RESULTS: dict[str, dict[str, str]] = {}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def results() -> dict[str, dict[str, str]]:
    """What each case came to, for the table in the documentation."""
    return RESULTS


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave the results where `tests/models/table.py` finds them."""
    if RESULTS and not hasattr(session.config, "workerinput"):
        path = Path(session.config.rootpath) / "build" / "models.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(RESULTS, indent=1), encoding="utf-8")
