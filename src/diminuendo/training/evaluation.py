"""How good a trained model is on rows that it was not trained on.

What is computed here is computed from the test rows, and no privacy claim of the training covers
them: a score of public rows may be published, a score of private ones is a release of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from diminuendo.errors import InputError
from diminuendo.training.probe import Loss
from diminuendo.training.sampling import Source, precision_of

_BATCH = 1024


class Evaluation(NamedTuple):
    """Means over the test rows.

    examples   how many rows
    loss       the mean loss of a row
    accuracy   the share of rows whose largest output is at their class, in [0, 1]; None where the
               outputs are no scores of classes
    """

    examples: int
    loss: float
    accuracy: float | None


def evaluate(
    model: nn.Module,
    data: Any,
    loss: Loss,
    *,
    device: torch.device | str | None = None,
    at_most: int | None = None,
) -> Evaluation:
    """Mean loss and accuracy on `data`, in evaluation mode and without gradients.

    data      (x, y), or a map-style dataset of such pairs
    loss      one loss for each example
    device    where to compute; where the model's parameters are unless given
    at_most   only the first so many rows

    The model, its mode and PyTorch's generators are left as they were.
    """
    source = Source(data, precision_of(model))
    where = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    rows = min(len(source), at_most or len(source))
    if rows == 0:
        raise InputError("at least one row", name="the test set", value=0)
    total, right, counted = 0.0, 0, 0
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng():
            for x, y in _pairs(source, rows):
                outputs = model(x.to(where))
                target = y.to(where)
                losses = loss(outputs, target)
                if losses.shape != (len(x),):
                    raise InputError(
                        f"one for each of the {len(x)} rows",
                        name="the losses of the test set",
                        value=tuple(losses.shape),
                    )
                total += float(losses.double().sum())
                if is_class_score(outputs, target):
                    right += int((outputs.argmax(dim=1) == target).sum())
                    counted += len(x)
    finally:
        for part, mode in modes:  # parts may be in another mode than the whole
            part.training = mode
    return Evaluation(rows, total / rows, right / rows if counted == rows else None)


def _pairs(source: Source, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    starts = range(0, rows, _BATCH)
    chosen = (torch.arange(start, min(start + _BATCH, rows)) for start in starts)
    for batch in source.batches(chosen):
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise InputError("pairs (x, y)", name="the test set", value=type(batch).__name__)
        yield batch[0], batch[1]


def is_class_score(outputs: Tensor, target: Tensor) -> bool:
    """Whether outputs are a score for each class, and targets the numbers of classes."""
    return outputs.dim() == 2 and outputs.shape[1] > 1 and target.dtype == torch.int64
