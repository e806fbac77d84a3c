"""Independent pieces of work in threads, each on one CPU core.

Two matrix products on a core each take less time than one product on two: no core waits for
another in the middle of a piece, and each piece stays in its core's own cache. For work during
which torch releases Python's global lock, in calls that are not short: threads that take turns at
the lock after every few microseconds hinder each other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import pairwise
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import torch

Result = TypeVar("Result")
FEW = 2**17
"""Numbers for which a second core comes too late to a single operation."""
_Tasks = SimpleQueue[Callable[[], None]]


class Beside(NamedTuple):
    """Work for one core while the others are busy with something else.

    ``cost`` says how long it takes one core: as long as so many multiplications in float64.
    """

    call: Callable[[], None]
    cost: float


def side_by_side(call: Callable[[int], Result], count: int) -> list[Result]:
    """[call(0), …, call(count − 1)], computed by as many threads as torch has, this one included.

    A single piece has all of torch's threads. Gradients are recorded as in the calling thread.
    """
    threads = min(torch.get_num_threads(), count)
    if threads < 2:
        return [call(i) for i in range(count)]
    results: list[Result | None] = [None] * count
    numbers = iter(range(count))
    recording = torch.is_grad_enabled()
    errors: list[BaseException] = []
    done: SimpleQueue[None] = SimpleQueue()

    def some() -> None:
        try:
            with torch.set_grad_enabled(recording):
                for i in numbers:
                    results[i] = call(i)
        except BaseException as error:  # raised again below, in the calling thread
            errors.append(error)

    def some_elsewhere() -> None:
        some()
        done.put(None)

    helpers = _helpers(torch.get_num_threads() - 1, os.getpid())[: threads - 1]
    for tasks in helpers:
        tasks.put(some_elsewhere)
    with one_core():
        some()
    for _ in helpers:
        done.get()
    if errors:
        raise errors[0]
    return results  # type: ignore[return-value]


class one_core:
    """Within, torch uses one core in this thread: better for short operations, to which a second
    core would come too late. (A thread that begins meanwhile takes this for its own number.)
    """

    __slots__ = ("_threads",)

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)


def few(entries: int) -> AbstractContextManager[None]:
    """`one_core` where an operation on each of so many numbers is too short for two cores."""
    return one_core() if entries <= FEW else nullcontext()


def pieces(length: int, most: int) -> list[slice]:
    """`length` rows as equal pieces, one for each of torch's threads, and no more than `most`."""
    count = max(1, min(torch.get_num_threads(), most, length))
    ends = [length * i // count for i in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


@cache
def _helpers(count: int, process: int) -> list[_Tasks]:
    """Where threads wait for work, in each of which torch uses one core. `process` keeps a forked
    process from waiting for threads that it does not have.
    """
    del process
    helpers: list[_Tasks] = [SimpleQueue() for _ in range(count)]
    ready = threading.Barrier(count + 1)

    def serve(tasks: _Tasks) -> None:
        torch.get_num_threads()  # a thread's first call overwrites an earlier setting
        torch.set_num_threads(1)
        ready.wait()
        while True:
            tasks.get()()

    for tasks in helpers:
        threading.Thread(target=serve, args=[tasks], name="diminuendo", daemon=True).start()
    ready.wait()
    torch.set_num_threads(count + 1)  # a new thread takes the last number set in any thread
    return helpers
