"""From what a training step returns to one loss for each example, exactly, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from diminuendo.errors import InputError
from diminuendo.training.mean_loss import kept_losses


def losses_of_step(returned: Any) -> Tensor:
    """One loss for each example: what was returned, or what is behind its mean.

    `returned` is a tensor, or a dict with one under "loss", that was computed within
    `mean_loss.Reductions`. Raises where it is neither losses nor a known mean of losses.
    """
    loss = returned.get("loss") if isinstance(returned, Mapping) else returned
    reason = ""
    if isinstance(loss, Tensor):
        if loss.dim() == 1:
            return loss.as_subclass(Tensor)
        reduced, reason = kept_losses(loss)
        mean = None if reduced is None else reduced.as_kind("mean")
        if mean is not None:
            return mean.losses
        if reduced is not None:
            reason = "It is a sum over the batch."
    known = (
        'Known are means by reduction="mean" or .mean(), their sums, and multiples by numbers. For '
        "another loss return one loss for each example, of shape (N,)."
    )
    raise InputError(
        "the mean of one loss per example, or these losses themselves",
        name="what training_step returns",
        value=tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__,
        remedy=f"{reason} {known}".strip(),
    )
