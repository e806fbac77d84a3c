"""Streams beside the current one, for short work on a GPU while a step is recorded.

Kernels of a few microseconds leave most of a GPU idle; beside others they cost next to nothing. In
a recording that takes no time of the host. Whoever uses this keeps what the work reads until
`join`: memory of one stream is not protected from another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_COUNT = 3


class Lanes:
    """Takes work in turns; without a recording it is done at once, where it stands."""

    def __init__(self, device: torch.device) -> None:
        recorded = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._streams = _streams(device) if recorded else []
        self._used: list[Any] = []
        self._next = 0

    def do(self, call: Callable[[], object]) -> None:
        """Do it after everything that the current stream has to do so far."""
        if not self._streams:
            call()
            return
        stream = self._streams[self._next % len(self._streams)]
        self._next += 1
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        if stream not in self._used:
            self._used.append(stream)
        with torch.cuda.stream(stream):
            call()

    def join(self) -> None:
        """Let the current stream wait for all of it."""
        for stream in self._used:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        self._used.clear()


@cache
def _streams(device: torch.device) -> list[Any]:
    return [torch.cuda.Stream(device) for _ in range(_COUNT)]  # type: ignore[no-untyped-call]
