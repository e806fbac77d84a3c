"""A GPU records a step once and replays it: launching its operations takes a host longer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diminuendo.replicas.batch import Batch, Data, Start, Update, cross_entropy
from diminuendo.replicas.perceptrons import Perceptrons

WARM = 2
"""Steps that run as usual first, so that whatever is made once has been made."""
WORTHWHILE = 8
"""Steps still to come of the same replicas from which on a recording pays."""


class Replayed:
    """The steps of one run of a batch; where nothing can be replayed, they are taken as usual."""

    def __init__(self, batch: Batch, data: Data) -> None:
        self.batch, self.data = batch, data
        self._taken = 0
        self._rows: slice | None = None
        self._graph: Any = None
        self._held: list[Tensor] = []
        first = batch.state[0]
        can = isinstance(batch, Perceptrons) and first.is_cuda and batch.together >= len(first)
        can = can and batch.loss is cross_entropy  # another one may look at what it is given
        self._scale = first.new_empty(len(first)) if can else None

    def step(self, rows: slice, start: Start, update: Update, to_come: int) -> None:
        """`Batch.step`; `to_come` is for how many steps, this one included, the rows stay."""
        self._taken += 1
        known = self._graph is not None and rows == self._rows
        worthwhile = self._taken > WARM and to_come >= WORTHWHILE
        if self._scale is None or update.taken is not None or not (known or worthwhile):
            self.batch.step(self.data, rows, start, update)
            return
        start(rows, slice(0, rows.stop - rows.start))
        scale = self._scale[rows].copy_(update.scale)
        if not known:
            self._record(rows, Update(update.clip, scale, update.beta))
        self._graph.replay()

    def _record(self, rows: slice, update: Update) -> None:
        """Without what `torch.cuda.graph` does around it: to give up all cached memory."""
        assert isinstance(self.batch, Perceptrons)
        self._graph, self._rows = torch.cuda.CUDAGraph(), rows
        self._held = self.batch.buffers
        device = self.batch.state[0].device
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        before = torch.cuda.current_stream(device)
        stream.wait_stream(before)
        with torch.cuda.stream(stream):
            self._graph.capture_begin()
            try:
                self.batch.advance(self.data, rows, update)
            finally:
                self._graph.capture_end()
        before.wait_stream(stream)
