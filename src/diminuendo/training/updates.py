"""An optimizer's step as part of a recording, with learning rates that lie in a GPU's memory.

PyTorch's optimizers can read a learning rate from a tensor if they are told to; they are told while
they are recorded and not otherwise, so that schedulers and checkpoints see the numbers they know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from diminuendo.training.optim import PrivateDescent

_CAPTURABLE = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)


class Update:
    """What a recording does with a private gradient; see the module's text."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._fixed = self._others()
        self.recordable = self._may_be_recorded()
        """Whether the step of this optimizer can be a part of a recording."""

    def rates(self) -> list[float]:
        """The learning rates of the next step, one for each group."""
        if isinstance(self._optimizer, PrivateDescent):
            return self._optimizer.rates()
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def sent_rates(self, device: torch.device) -> list[Tensor]:
        """The same in a device's memory, for `apply`."""
        sent = torch.tensor(self.rates(), dtype=torch.float32).to(device, non_blocking=True)
        return list(sent.unbind())

    def apply(self, rates: Sequence[Tensor]) -> None:
        """One step, with learning rates from these tensors."""
        if isinstance(self._optimizer, PrivateDescent):
            self._optimizer.apply(rates)
            return
        with self._reading(rates):
            step: Any = type(self._optimizer).step
            getattr(step, "__wrapped__", step)(self._optimizer)

    def count(self) -> None:
        """A step was taken by `apply`, or by a replay of it."""
        vars(self._optimizer)["_opt_called"] = True  # what PyTorch's schedulers look for
        if isinstance(self._optimizer, PrivateDescent):
            self._optimizer.count()

    @property
    def unchanged(self) -> bool:
        """Whether everything but the learning rates is as it was at first."""
        return self._others() == self._fixed

    def _others(self) -> list[dict[str, Any]]:
        return [
            {name: value for name, value in group.items() if name not in _VARYING}
            for group in self._optimizer.param_groups
        ]

    def _may_be_recorded(self) -> bool:
        optimizer = self._optimizer
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        kind = type(optimizer)
        if hooks or not (kind in _CAPTURABLE or kind in (torch.optim.SGD, PrivateDescent)):
            return False
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        given = any(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)
        # learning rates in memory are float32, and so are the sums of fused kernels
        return not given and all(p.is_cuda and p.dtype is not torch.float64 for p in parameters)

    @contextmanager
    def _reading(self, rates: Sequence[Tensor]) -> Iterator[None]:
        optimizer = self._optimizer
        kept = [dict(group) for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
            else:
                group["fused"], group["foreach"] = True, False
        try:
            yield
        finally:
            for group, before in zip(optimizer.param_groups, kept, strict=True):
                group.update({name: before[name] for name in _VARYING if name in before})

    def prepare(self) -> None:
        """Bring counts of steps to the device of their parameters, where a recording counts."""
        for parameter, state in self._optimizer.state.items():
            count = state.get("step")
            if isinstance(count, Tensor) and isinstance(parameter, Tensor):
                state["step"] = count.to(parameter.device)


_VARYING = ("params", "lr", "initial_lr", "capturable", "fused", "foreach")
