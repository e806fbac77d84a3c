"""Hypothesis without deadlines, since timings are never asserted; torch on one thread; seeds."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings

settings.register_profile("diminuendo", deadline=None, derandomize=True)
settings.load_profile("diminuendo")

HELPERS = str(Path(__file__).parent / "helpers")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HELPERS, os.environ.get("PYTHONPATH")]))
"""Processes that tests start find the helpers, too."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """For matrices of toy size, several threads wait for each other longer than they compute."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """What a test draws from the shared generators is the same alone, in any order and anywhere.

    The library's own noise and samples come from the operating system all the same.
    """
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  scikit-learn draws from it
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def fixed_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise, samples and canaries that the operating system would choose are always the same.

    For tests whose outcome depends on them: a run goes all the ways of a private one, and what
    one in a thousand runs would bring (a sample like the last one, an audit's false alarm) does
    not come by accident.
    """
    from diminuendo.training.mechanism import keys

    chance, generator = random.Random(0), np.random.default_rng
    system = SimpleNamespace(token_bytes=chance.randbytes, randbits=chance.getrandbits)
    monkeypatch.setattr(keys, "secrets", system)
    monkeypatch.setattr(
        np.random,
        "default_rng",
        lambda seed=None: generator(chance.getrandbits(64) if seed is None else seed),
    )
    if estimators := sys.modules.get("diminuendo.adapters.sklearn.estimators"):
        monkeypatch.setattr(estimators, "secrets", system)


@pytest.fixture(autouse=True, scope="session")
def _state_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs of tests, and settings that they choose, are not kept among the user's own."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
