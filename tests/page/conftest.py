"""The page's server in a process of its own, as people start it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where `diminuendo page` serves, on a free port."""
    pytest.importorskip("uvicorn", reason="the serve extra is not installed")
    words = [sys.executable, "-m", "diminuendo", "page", "--no-open", "--port", "0", "--json"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stderr is not None
    said = json.loads(child.stdout.readline())
    yield said["address"]
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=300) == 0
    assert child.stderr.read() == ""
    child.stdout.close()
    child.stderr.close()
