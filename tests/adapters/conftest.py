"""Tests of adapters; `make test-adapters` has the packages that `make setup` leaves out."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
if importlib.util.find_spec("sklearn") is None:
    collect_ignore_glob = ["test_sklearn*.py"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models on several threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
