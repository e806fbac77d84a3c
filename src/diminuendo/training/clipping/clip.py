"""Clipping rules: how an example's gradient norm becomes the factor it is multiplied by.

Every rule is a frozen dataclass with

* ``sensitivity``: the largest Euclidean norm one example's contribution can have, and
* ``factors(norms)``: the factors of the examples, in the shape of ``norms``: ``(N,)`` for the
  rules that clip the whole gradient, ``(layers, N)`` for the one that clips layer by layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor

from diminuendo.training.clipping.errors import EngineError

# Squares of smaller numbers underflow, and norms of several parameters would come out too small.
_LEAST = 2.0**-400
# A factor is a float32 number that is not infinite, whose product with zero is zero.
_LARGEST_FACTOR = 2.0**120


def _positive(owner: str, field: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
        raise EngineError(f"{owner}: {field} must be a finite number above 0, got {value!r}")
    if value < _LEAST:
        raise EngineError(
            f"{owner}: {field} must be at least {_LEAST:.1e}, got {value!r}; float64 cannot bound "
            "rounding errors below that: scale the loss instead"
        )


# Outweighs the roundings of a bound, a quotient and a product in float64.
_DOWN = 1.0 - 2.0**-50


def _over(bound: float, norms: Tensor) -> Tensor:
    """``bound / norms``, rounded down so that its product with the norm is never above the bound.

    One kernel: a number over a tensor would take two.
    """
    return torch.div(_number(bound * _DOWN, norms.dtype), norms)


@lru_cache(maxsize=64)
def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.scalar_tensor(value, dtype=dtype)


@cache
def _column(bounds: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The bounds, rounded down, one below the other: copied to a device once, and never let go of,
    since a recorded step reads them there."""
    return torch.tensor([bound * _DOWN for bound in bounds], dtype=dtype, device=device)[:, None]


@dataclass(frozen=True)
class Flat:
    """Scale example i by ``min(1, C / ||g_i||)``."""

    bound: float

    def __post_init__(self) -> None:
        _positive("Flat", "bound", self.bound)

    @property
    def sensitivity(self) -> float:
        """Largest norm of one example's contribution."""
        return float(self.bound)

    @property
    def per_layer(self) -> bool:
        """Whether groups of parameters are clipped on their own."""
        return False

    def factors(self, norms: Tensor) -> Tensor:
        """Factors for the norms ``(N,)``; a zero gradient gets the factor 1."""
        return _over(self.bound, norms).clamp_(max=1.0)

    @property
    def numbers(self) -> tuple[float, float, float]:
        """(bound, shift, most): the factor is bound / (norm + shift), at most the last."""
        return self.bound * _DOWN, 0.0, 1.0


@dataclass(frozen=True)
class Automatic:
    """Scale example i by ``C / (||g_i|| + gamma)``: nearly normalised, never above C."""

    bound: float
    gamma: float = 0.01

    def __post_init__(self) -> None:
        _positive("Automatic", "bound", self.bound)
        _positive("Automatic", "gamma", self.gamma)
        if not self.bound / self.gamma <= _LARGEST_FACTOR:
            raise EngineError(
                "Automatic: bound / gamma must be at most 2^120, got "
                f"{self.bound!r} / {self.gamma!r}; float32 has no room for larger factors"
            )

    @property
    def sensitivity(self) -> float:
        """Largest norm of one example's contribution (approached, never reached)."""
        return float(self.bound)

    @property
    def per_layer(self) -> bool:
        """Whether groups of parameters are clipped on their own."""
        return False

    def factors(self, norms: Tensor) -> Tensor:
        """Factors for the norms ``(N,)``; a zero gradient gets ``C / gamma`` times 0."""
        return _over(self.bound, norms + self.gamma)

    @property
    def numbers(self) -> tuple[float, float, float]:
        """(bound, shift, most): the factor is bound / (norm + shift), at most the last."""
        return self.bound * _DOWN, self.gamma, math.inf


@dataclass(frozen=True)
class PerLayer:
    """Clip each layer l on its own: ``min(1, C_l / ||g_i^(l)||)``.

    A layer is the set of trainable parameters owned by one module; a parameter shared by
    several modules belongs to the first of them. ``bounds`` is either the list of the C_l in
    the order of ``Engine.layers``, with sensitivity ``sqrt(sum_l C_l^2)``, or one number C,
    which is the total: each of the L layers then gets ``C / sqrt(L)``.
    """

    bounds: float | Sequence[float]

    def __post_init__(self) -> None:
        if isinstance(self.bounds, (int, float)):
            _positive("PerLayer", "bounds", self.bounds)
            return
        if len(self.bounds) == 0:
            raise EngineError("PerLayer: bounds must be a number or a non-empty list of numbers")
        for position, value in enumerate(self.bounds):
            _positive("PerLayer", f"bounds[{position}]", value)
        object.__setattr__(self, "bounds", tuple(float(value) for value in self.bounds))

    @property
    def sensitivity(self) -> float:
        """Largest norm of one example's contribution over all layers together."""
        if isinstance(self.bounds, (int, float)):
            return float(self.bounds)
        return math.sqrt(math.fsum(value * value for value in self.bounds))

    @property
    def per_layer(self) -> bool:
        """Whether groups of parameters are clipped on their own."""
        return True

    def check(self, layers: int) -> None:
        """Raise unless there is a bound for each of so many layers."""
        if not isinstance(self.bounds, (int, float)) and len(self.bounds) != layers:
            raise EngineError(
                f"PerLayer: {len(self.bounds)} bounds were given for {layers} layers; give one "
                "bound for each entry of Engine.layers, or a single number for the total"
            )

    def factors(self, norms: Tensor) -> Tensor:
        """Factors for norms of shape ``(layers, N)``."""
        layers = norms.shape[0]
        if isinstance(self.bounds, (int, float)):
            return _over(self.bounds / math.sqrt(layers), norms).clamp_(max=1.0)
        self.check(layers)
        column = _column(tuple(self.bounds), norms.dtype, norms.device)
        return (column / norms).clamp_(max=1.0)


Clip = Flat | Automatic | PerLayer
