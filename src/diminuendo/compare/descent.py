"""What most methods share: private gradients one after the other, and what is done with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diminuendo.compare.clips import Flat, Rule
from diminuendo.compare.private import Private

Update = Callable[[int, Tensor], Tensor]
"""From the step 0, 1, … and its noisy gradient to what is subtracted from the parameters."""


def plain(lr: float | Sequence[float]) -> Update:
    """η·g."""
    return lambda t, g: g * (lr[t] if isinstance(lr, Sequence) else lr)


def falling(lr: float, steps: int, start: float = 1.0) -> list[float]:
    """A cosine from `lr` down to nearly nothing."""
    return [start * lr * (1 + math.cos(math.pi * t / steps)) / 2 for t in range(steps)]


def heavy_ball(lr: float | Sequence[float], beta: float = 0.9) -> Update:
    """The bias-corrected average of the gradients (`training.PrivateDescent`)."""
    average: list[Tensor] = []

    def update(t: int, gradient: Tensor) -> Tensor:
        if not average:
            average.append(torch.zeros_like(gradient))
        average[0] = beta * average[0] + (1 - beta) * gradient
        rate = lr[t] if isinstance(lr, Sequence) else lr
        return average[0] * (rate / (1 - beta ** (t + 1)))

    return update


def adam(
    lr: float,
    *,
    noise_variance: Callable[[int], float | Tensor] | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    floor: float = 1e-8,
) -> Update:
    """Adam on noisy gradients; with `noise_variance`, that much is taken from the second moment."""
    moments: list[Tensor] = []
    known = 0.0

    def update(t: int, gradient: Tensor) -> Tensor:
        nonlocal known
        if not moments:
            moments.extend([torch.zeros_like(gradient), torch.zeros_like(gradient)])
        one, two = betas
        moments[0] = one * moments[0] + (1 - one) * gradient
        moments[1] = two * moments[1] + (1 - two) * gradient**2
        second = moments[1] / (1 - two ** (t + 1))
        if noise_variance is not None:
            known = two * known + (1 - two) * float(noise_variance(t))
            second = (second - known / (1 - two ** (t + 1))).clamp(min=floor**2)
        return lr * moments[0] / (1 - one ** (t + 1)) / (second.sqrt() + floor)

    return update


def adagrad(lr: float, floor: float = 1e-8) -> Update:
    """AdaGrad on noisy gradients."""
    total: list[Tensor] = []

    def update(t: int, gradient: Tensor) -> Tensor:
        del t
        if not total:
            total.append(torch.zeros_like(gradient))
        total[0] = total[0] + gradient**2
        return lr * gradient / (total[0].sqrt() + floor)

    return update


def descend(
    private: Private,
    sigmas: Sequence[float],
    clip: Rule | float | Callable[[int], Rule],
    update: Update,
    *,
    rates: Sequence[float] | None = None,
) -> Tensor:
    """Trained parameters, (R, parameters), after one noisy gradient for each σ."""
    if rates is not None:
        private.declare(sigmas, rates)
    theta = private.start()
    for t, sigma in enumerate(sigmas):
        rule = Flat(clip) if isinstance(clip, float) else clip(t) if callable(clip) else clip
        rate = 1.0 if rates is None else rates[t]
        theta = theta - update(t, private.gradient(theta, rule, sigma, rate=rate))
    return theta
