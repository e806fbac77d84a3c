"""Tests of adapters; `make test-adapters` has the packages that `make setup` leaves out."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ELSEWHERE = {
    "sklearn": ["sklearn"],
    "opacus": ["test_opacus.py", "test_opacus_inside.py"],
}
"""Tests that `make test` runs, with packages of its own."""
collect_ignore = [
    test
    for package, tests in ELSEWHERE.items()
    if importlib.util.find_spec(package) is None
    for test in tests
]


@pytest.fixture(autouse=True)
def _one_thread(fixed_keys: None) -> Iterator[None]:
    """Small models on several threads wait for each other. What is drawn is always the same."""
    del fixed_keys
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)
