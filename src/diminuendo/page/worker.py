"""Answers from a process of its own, which can be stopped: nobody waits for a question given up.

One process answers one question at a time. A question that takes longer than `LONGEST` seconds, or
whose asker has left, ends the process; the next question starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from diminuendo.errors import DiminuendoError, UsageError
from diminuendo.page import answers
from diminuendo.page.settings import Settings
from diminuendo.planning import Plan

LONGEST = 60.0
MOST_WAITING = 8
MOST_MEMORY = 4 << 30
_KEPT = 8
_LOOK = 0.05
_SPAWN = multiprocessing.get_context("spawn")


class GivenUp(Exception):
    """Whoever asked has left."""


class Answers:
    """What the process does: a plan is made once for all questions about the same settings."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Settings, tuple[Plan, list[str]]] = OrderedDict()

    def __call__(self, kind: str, data: Any) -> Any:
        """The answer to a question of this kind: "plan", "running" or "plan.json"."""
        settings = Settings.read(data)
        made, warned = self._plan(settings)
        if kind == "plan":
            return answers.answer(settings, made, warned)
        if kind == "running":
            return answers.running(settings, made)
        return made.to_json() + "\n"

    def _plan(self, settings: Settings) -> tuple[Plan, list[str]]:
        if settings not in self._kept:
            self._kept[settings] = answers.make_plan(settings)
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(settings)
        return self._kept[settings]


def _serve(questions: Connection) -> None:
    """Answer until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which ends this too
    _limit_memory()
    ask = Answers()
    while True:
        try:
            kind, data = questions.recv()
        except EOFError:
            return
        try:
            reply = ("answer", ask(kind, data))
        except DiminuendoError as error:
            reply = ("error", str(error))
        except MemoryError:
            reply = ("error", "This needs more memory than the page may use: take fewer steps.")
        except Exception as error:  # a mistake in the program must not leave the asker waiting
            reply = ("error", f"The planner failed ({type(error).__name__}: {error}).")
        with contextlib.suppress(OSError):  # nobody is there any more
            questions.send(reply)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """A process that starts inside computes on one thread.

    The planner's products are small: threads that wait for each other made plans three to ten
    times slower on a busy machine. The libraries read these names when they are loaded.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _limit_memory() -> None:
    """On Linux: more than this, beyond what is in use now, is refused before the machine slows."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MOST_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    except (ImportError, OSError, ValueError):
        pass


class Worker:
    """The process as its asker sees it. For one event loop."""

    def __init__(self, *, longest: float = LONGEST) -> None:
        self._longest = longest
        self._process: Any = None
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._waiting = 0

    def start(self) -> None:
        """Start the process, so that the first question need not wait for its imports."""
        if self._process is None:
            mine, theirs = _SPAWN.Pipe()
            self._process = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
            with _one_thread():
                self._process.start()
            theirs.close()
            self._connection = mine

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    async def ask(self, kind: str, data: Any, left: Callable[[], Awaitable[bool]]) -> Any:
        """The answer, or a UsageError with the words of what is wrong.

        `left` says whether the asker has gone; then the question is dropped, GivenUp is raised, and
        a process that was at work on it is ended.
        """
        if self._waiting >= MOST_WAITING:
            raise UsageError("Too many questions are waiting. Try again in a moment.")
        self._waiting += 1
        try:
            async with self._turn:
                if await left():
                    raise GivenUp
                return await self._asked(kind, data, left)
        finally:
            self._waiting -= 1

    async def _asked(self, kind: str, data: Any, left: Callable[[], Awaitable[bool]]) -> Any:
        self.start()
        connection = self._connection
        assert connection is not None
        finished = False
        try:
            connection.send((kind, data))
            spent = 0.0
            while not connection.poll():
                if spent >= self._longest:
                    raise UsageError(
                        f"This took longer than {self._longest:g} seconds and was stopped. Take "
                        "fewer steps or a larger sampling rate; `diminuendo plan` has no limit."
                    )
                if await left():
                    raise GivenUp
                await asyncio.sleep(min(_LOOK, 0.002 + spent / 4))
                spent += min(_LOOK, 0.002 + spent / 4)
            what, reply = connection.recv()
            finished = True
        except (EOFError, OSError):
            raise UsageError("The planner stopped unexpectedly. Ask again.") from None
        finally:
            if not finished:
                self.stop()
        if what == "error":
            raise UsageError(reply)
        return reply
