"""A progress bar on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(title: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar with the time left; gives a function that advances it by a number of units.

    Where it is not to be shown, the function does nothing.
    """
    if not shown:
        yield lambda _: None
        return
    columns = (TextColumn(title), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=total)
        yield lambda units: progress.advance(task, units)
