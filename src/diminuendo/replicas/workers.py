"""Independent pieces of work in threads, each on one CPU core.

Two matrix products on a core each take less time than one product on two: no core waits for
another in the middle of a piece, and each piece stays in its core's own cache. For work during
which torch releases Python's global lock.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


def side_by_side(call: Callable[[int], Result], count: int) -> list[Result]:
    """[call(0), …, call(count − 1)], computed by as many threads as torch has.

    A single piece runs in the calling thread, with all of torch's threads.
    """
    threads = min(torch.get_num_threads(), count)
    if threads < 2:
        return [call(i) for i in range(count)]
    results: list[Result | None] = [None] * count
    numbers = iter(range(count))

    def some(_: int) -> None:
        for i in numbers:
            results[i] = call(i)

    list(_pool(torch.get_num_threads(), os.getpid()).map(some, range(threads)))
    return results  # type: ignore[return-value]


@cache
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads in which torch uses one core. `process` keeps a forked process from using a pool
    whose threads it does not have.
    """
    del process
    ready = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread's first call overwrites an earlier setting
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(threads, "diminuendo", initializer=begin)
    for _ in range(threads):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(threads)  # a new thread takes the last number set in any thread
    return pool
