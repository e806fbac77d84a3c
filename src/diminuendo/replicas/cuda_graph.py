"""Steps as CUDA graphs: captured once, then launched as a whole.

Launching a step's operations one by one takes the host longer than they take the GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from diminuendo.replicas.batch import AddNoise, Batch, Data, Update, cross_entropy
from diminuendo.replicas.perceptrons import Perceptrons

WARM_UP_STEPS = 2
"""Steps that run as usual first, so that buffers and caches exist before a capture."""
LEAST_REMAINING = 8
"""Steps still to come of the same replicas from which on a capture saves time."""


class CapturedSteps:
    """The steps of one run of a batch; where none can be captured, they run as usual."""

    def __init__(self, batch: Batch, data: Data) -> None:
        self.batch, self.data = batch, data
        self._steps = 0
        self._rows: slice | None = None
        self._graph: Any = None
        self._held: list[Tensor] = []
        first = batch.state[0]
        capturable = (
            isinstance(batch, Perceptrons)
            and first.is_cuda
            and batch.together >= len(first)
            and batch.loss is cross_entropy  # another loss may depend on the values
        )
        self._scale = first.new_empty(len(first)) if capturable else None

    def take(self, rows: slice, add_noise: AddNoise, update: Update, remaining: int) -> None:
        """`Batch.step`; these rows stay the same for `remaining` steps, this one included."""
        self._steps += 1
        captured = self._graph is not None and rows == self._rows
        worthwhile = self._steps > WARM_UP_STEPS and remaining >= LEAST_REMAINING
        if self._scale is None or update.sampled is not None or not (captured or worthwhile):
            self.batch.step(self.data, rows, add_noise, update)
            return
        add_noise(rows, slice(0, rows.stop - rows.start))
        scale = self._scale[rows].copy_(update.scale)
        if not captured:
            self._capture(rows, Update(update.clip, scale, update.beta, rules=update.rules))
        self._graph.replay()

    def _capture(self, rows: slice, update: Update) -> None:
        """By hand, since `torch.cuda.graph` frees all cached memory first."""
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
