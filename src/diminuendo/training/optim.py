"""The paper's two projections φ as an optimiser: plain descent, and the bias-corrected average."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
        for group in self.param_groups:
            beta = group["beta"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                direction = parameter.grad
                if beta > 0:
                    state = self.state[parameter]
                    t = state["step"] = state.get("step", 0) + 1
                    if t == 1:
                        state["sum"] = torch.zeros_like(parameter)
                    state["sum"].mul_(beta).add_(parameter.grad, alpha=1 - beta)
                    direction = state["sum"] / (1 - beta**t)
                parameter.add_(direction, alpha=-group["lr"])
