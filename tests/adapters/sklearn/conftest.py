"""Most of these tests take the labels from `y`; that this is said has a test of its own."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which labels occur is not what they are about."""
    for item in items:
        if "adapters/sklearn" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore:classes is not given"), append=False)
