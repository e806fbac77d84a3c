"""A release in other coordinates: gradients are shifted and scaled before they are clipped."""

from __future__ import annotations

import torch
from torch import Tensor

from diminuendo.compare.models import Layer, shared
from diminuendo.compare.private import Private


def scaled_gradient(
    private: Private, theta: Tensor, shift: Tensor, scale: Tensor, sigma: float
) -> Tensor:
    """shift + scale × the noisy mean of clip((g − shift)/scale, 1), (R, parameters).

    The norm of an outer product in these coordinates is a sum of three bilinear forms, so that no
    per-example gradient is held. They may cancel nearly wholly, so they are taken in double
    precision: in single precision a vector of norm 1.05 could pass for one of norm 1.
    """
    private.pay(sigma)
    layers = private.layers(theta)
    squares: Tensor | float = 0.0
    at = 0
    parts = []
    for layer in layers:
        inputs, deltas = layer.inputs, layer.deltas.double()
        inputs = inputs[:1].double().expand_as(inputs) if shared(inputs) else inputs.double()
        size = inputs.shape[2] * deltas.shape[2]
        shape = (-1, inputs.shape[2], deltas.shape[2])
        own_shift = shift[:, at : at + size].double().view(shape)
        inverse = scale[:, at : at + size].double().view(shape) ** -2
        squares = (
            squares
            + ((inputs**2 @ inverse) * deltas**2).sum(2)
            - 2 * ((inputs @ (own_shift * inverse)) * deltas).sum(2)
            + (own_shift**2 * inverse).sum((1, 2)).unsqueeze(1)
        )
        at += size
        parts.append(Layer(inputs, deltas))
    assert isinstance(squares, Tensor)
    norms = squares.clamp(min=0).sqrt() * (1 + 1e-6) + 1e-6  # above what rounding may take away
    factors = (1 / norms).clamp(max=1.0)
    sums = torch.cat([part.sums(factors) for part in parts], dim=1)
    moved = (sums - factors.sum(1, keepdim=True) * shift) / scale
    noisy = private.noised(moved.to(theta.dtype), 1.0, sigma)
    return shift + scale * noisy / private.facts.examples
