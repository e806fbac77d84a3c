"""Both backends behind one fixture: SQLite files, and a real PostgreSQL server from a wheel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledgers import new_database, running_server

import diminuendo as dim
from diminuendo import Budget, Ledger

BACKENDS = ("sqlite", "postgresql")


@pytest.fixture(scope="session")
def server() -> Iterator[Any]:
    with running_server() as made:
        yield made


@pytest.fixture(params=BACKENDS)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a new ledger can be made."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    return new_database(request.getfixturevalue("server").get_uri())


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    made = Ledger(url)
    yield made
    made.close()


@pytest.fixture
def budget() -> Budget:
    return Budget(epsilon=4, delta=1e-8)


@pytest.fixture
def some_plan(budget: Budget) -> dim.Plan:
    return dim.plan(budget, examples=100, alpha=1e-4, steps=40, gamma=0.9)
