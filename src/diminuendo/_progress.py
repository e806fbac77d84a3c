"""Progress for people who watch: one bar and one spinner, both on stderr.

On a terminal and in notebooks they move; elsewhere a bar leaves its last state as one line. A
caller that was told to be silent passes `shown=False`. Rich is imported when something is shown.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress


_BETWEEN = 0.2
"""Seconds between two states of a line at the same per cent."""


class Bar(Protocol):
    """What `bar` yields."""

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        """Say how much is done, out of `total` if that has changed, and a few words beside it."""

    def advance(self, amount: float = 1) -> None:
        """Say that this much more is done."""


@contextmanager
def bar(title: str, *, total: float | None = None, shown: bool = True) -> Iterator[Bar]:
    """A bar with a title, the share done, a note and the time left."""
    if not shown:
        yield _Silent()
    elif _plain_notebook():
        line = _Line(title, total)
        yield line
        line.flush()
        print(file=sys.stderr)
    else:
        with _rich_bar(title) as progress:
            yield _Rich(progress, total)


def working(title: str) -> AbstractContextManager[object]:
    """A spinner while something takes its time; nothing where nobody watches."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        return _said(f"{title} …")
    return console.status(f"{title} …") if console.is_terminal else nullcontext()


@contextmanager
def _said(text: str) -> Iterator[None]:
    """A line in a notebook, wiped at the end: a spinner there would need widgets."""
    print(f"\r{text}", end="", file=sys.stderr, flush=True)
    try:
        yield
    finally:
        print(f"\r{' ' * len(text)}\r", end="", file=sys.stderr, flush=True)


def watched() -> bool:
    """Whether stderr is a terminal or a notebook, so that somebody may be watching."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.is_terminal or console.is_jupyter


def _plain_notebook() -> bool:
    """A notebook without ipywidgets, where rich cannot redraw."""
    from rich.console import Console

    return Console().is_jupyter and importlib.util.find_spec("ipywidgets") is None


def _rich_bar(title: str) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft

    note = TextColumn("{task.fields[note]}")
    columns = (TextColumn(title), BarColumn(), TaskProgressColumn(), note, TimeLeft())
    return Progress(*columns, console=Console(stderr=True))


class _Silent:
    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        pass

    def advance(self, amount: float = 1) -> None:
        pass


class _Rich:
    def __init__(self, progress: Progress, total: float | None) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, note="")

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        self._progress.update(self._task, completed=done, total=total, note=note)

    def advance(self, amount: float = 1) -> None:
        self._progress.advance(self._task, amount)


class _Line:
    """One line that is written over: at each per cent, and a few times a second between."""

    def __init__(self, title: str, total: float | None) -> None:
        self._title, self._total, self._done, self._text = title, total, 0.0, ""
        self._waiting, self._share, self._last = "", "", 0.0

    def update(self, done: float, *, total: float | None = None, note: str = "") -> None:
        self._done, self._total = done, total or self._total
        share = f"{100 * done / self._total:.0f}%" if self._total else f"{done:g}"
        self._waiting = f"{self._title} {share} {note}".rstrip()
        now = time.monotonic()
        if (self._total and share != self._share) or now - self._last > _BETWEEN:
            self._share = share
            self.flush()

    def advance(self, amount: float = 1) -> None:
        self.update(self._done + amount)

    def flush(self) -> None:
        """Write what waits, if it is not there already."""
        if self._waiting != self._text:
            blank = " " * max(0, len(self._text) - len(self._waiting))
            print(f"\r{self._waiting}{blank}", end="", file=sys.stderr, flush=True)
            self._text, self._last = self._waiting, time.monotonic()
