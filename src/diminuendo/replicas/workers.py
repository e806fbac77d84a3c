"""Independent pieces of work side by side, each on one core.

Two products on a core each take less time than one product on two: nothing waits in the middle of
a piece, and each stays in its core's own cache. For work that torch does without holding the
interpreter.
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
    """[call(0), …, call(count − 1)], by as many threads as torch has.

    A single piece of work is done where it is asked for, with all of torch's threads.
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
    """Threads in which torch uses one core; the process is named since a fork has no threads."""
    del process
    ready = threading.Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()  # a thread's first use of it would forget what is set before
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(threads, "diminuendo", initializer=begin)
    for _ in range(threads):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(threads)  # the workers' number had become that of threads to come
    return pool
