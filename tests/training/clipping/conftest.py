"""Tests run in float64 on one thread."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning)
        yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(threads)
