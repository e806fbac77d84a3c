"""Freed memory stays with the process, unless somebody else decides about it."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory"
)

FAULTS = """
import ctypes, resource, sys, torch
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # no huge pages (Linux): one fault would fetch 512
from diminuendo.training.memory import keep_freed
told = keep_freed() if sys.argv[1] == "told" else None
def work():
    blocks = [torch.ones(1_000_000) for _ in range(4)]
for _ in range(5):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    work()
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str, **environment: str) -> tuple[str, int]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    out = subprocess.run(
        [sys.executable, "-c", FAULTS, how],
        env=kept | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    told, number = out.stdout.split()
    return told, int(number)


def test_pages_are_not_fetched_again() -> None:
    told, number = faults("told")
    assert told == "True"
    assert number < 1000  # a thousand pages are one of the eighty blocks
    assert faults("untold", MALLOC_MMAP_THRESHOLD_="131072")[1] > 50_000


def test_the_environment_has_the_last_word() -> None:
    assert faults("told", MALLOC_TRIM_THRESHOLD_="131072")[0] == "False"


def test_an_engine_tells_the_process() -> None:
    from torch import nn

    from diminuendo.training.clipping import Engine
    from diminuendo.training.memory import keep_freed

    keep_freed.cache_clear()
    Engine(nn.Linear(2, 1)).close()
    assert keep_freed.cache_info().currsize == 1
