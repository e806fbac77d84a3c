"""The paper's two projections φ as an optimiser: plain descent, and the bias-corrected average."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from diminuendo import _validate


class PrivateDescent(torch.optim.Optimizer):
    """θ ← θ − η·m with m = g, or m_t = (β(1−β^{t−1})m_{t−1} + (1−β)g_t)/(1−β^t).

    Algorithm 1's utility projection. It sees only the private gradient, so it costs no privacy.
    """

    def __init__(
        self, params: Iterable[Tensor] | Iterable[dict[str, Any]], lr: float, beta: float = 0.0
    ) -> None:
        _validate.positive("lr", lr)
        _validate.real("beta", beta, at_least=0, below=1)
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step along the averaged private gradients; a closure is not called."""
        del closure
        for group, rate in zip(self.param_groups, self.rates(), strict=True):
            parameters = _with_gradient(group)
            if parameters:
                torch._foreach_add_(parameters, self._directions(group, parameters), alpha=-rate)
        self.count()

    def rates(self) -> list[float]:
        """What the next step multiplies the sums of gradients by: η, over 1 − β^t if averaged."""
        return [
            group["lr"] / (1 - group["beta"] ** (self._taken(group) + 1))
            if group["beta"] > 0
            else group["lr"]
            for group in self.param_groups
        ]

    @torch.no_grad()
    def apply(self, rates: Sequence[Tensor]) -> None:
        """One step on a GPU with `rates` that lie in its memory; `count` is called for each."""
        for group, rate in zip(self.param_groups, rates, strict=True):
            parameters = _with_gradient(group)
            if parameters:
                torch._fused_sgd_(
                    parameters,
                    self._directions(group, parameters),
                    [],
                    weight_decay=0.0,
                    momentum=0.0,
                    lr=rate,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,
                )

    def count(self) -> None:
        """One more step was taken."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self.state:
                    self.state[parameter]["step"] += 1

    def _taken(self, group: dict[str, Any]) -> int:
        steps = [self.state[p]["step"] for p in group["params"] if p in self.state]
        return max(steps, default=0)

    def _directions(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        """The gradients, or their decaying sums."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if group["beta"] == 0:
            return gradients
        sums = []
        for parameter in parameters:
            if parameter not in self.state:
                self.state[parameter] = {"step": 0, "sum": torch.zeros_like(parameter)}
            sums.append(self.state[parameter]["sum"])
        torch._foreach_mul_(sums, group["beta"])
        torch._foreach_add_(sums, gradients, alpha=1 - group["beta"])
        return sums


def _with_gradient(group: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]
