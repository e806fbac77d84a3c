"""Where a run computes, and how much it holds in memory at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from diminuendo import _validate
from diminuendo.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Compute:
    """What `fit` takes for `device` where a device alone does not say enough.

    device       where to train; the model is moved there. Where it is unless given
    workers      processes that load examples of a map-style dataset; at least 0
    micro_batch  largest number of examples held in memory at once (customary name: physical batch
                 size); the whole batch unless given
    pad          fill sampled batches up with rows of zeros, which count for nothing, to one of a
                 few sizes: shapes then say next to nothing about how many examples were drawn, and
                 a step takes longer (docs/how-to/static-shapes.md). Done where steps are recorded
                 unless given
    record       on a GPU, record a step once and replay it, where that is possible: the same
                 results in less time (docs/how-to/recorded-steps.md). Data in tensors then go to
                 the GPU as a whole if they take at most a quarter of what is free there
    """

    device: torch.device | str | None = None
    workers: int = 0
    micro_batch: int | None = None
    pad: bool | None = None
    record: bool = True

    def __post_init__(self) -> None:
        _validate.count("workers", self.workers, at_least=0)
        if self.micro_batch is not None:
            _validate.count("micro_batch", self.micro_batch)
        if self.pad is not None:
            _validate.flag("pad", self.pad)
        _validate.flag("record", self.record)

    @classmethod
    def of(cls, device: Compute | torch.device | str | None) -> Compute:
        """A `Compute` as it is; a device as one."""
        return device if isinstance(device, Compute) else cls(device=device)

    def move(self, model: nn.Module) -> None:
        """Bring the model to the device, or raise an `InputError` if there is no such device."""
        check_device(self.device)
        if self.device is not None:
            model.to(self.device)


def check_device(device: Any) -> None:
    """Raise an `InputError` where there is no such device; None is whichever there is."""
    if device is None:
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise InputError(
            "a device that is there", name="device", value=str(device), remedy=f"({error})"
        ) from None
