"""Output whose reader leaves early (`… | head`): the command goes on, and its exit code is its own.

What a command does, charges or writes does not depend on whether anybody reads what it prints.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Forgiving:
    """A text stream that swallows what is written after its reader has gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._gone = stream is None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, or do as if."""
        if not self._gone:
            try:
                return int(self._stream.write(text))
            except BrokenPipeError:
                self._leave()
        return len(text)

    def flush(self) -> None:
        """Flush, or do as if."""
        if not self._gone:
            try:
                self._stream.flush()
            except BrokenPipeError:
                self._leave()

    def _leave(self) -> None:
        """Let the stream end nowhere, so that nothing is raised when the process ends either."""
        self._gone = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)


@contextmanager
def forgiving() -> Iterator[None]:
    """Inside, a closed stdout is no error."""
    stream = sys.stdout
    sys.stdout = _Forgiving(stream)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = stream
