"""Public pictures for nothing: coloured discs that hide each other, as leaves on the ground do.

Sizes follow the power law with which such pictures have the edges and the spectrum of photographs
(Lee, Mumford and Huang 2001, "Occlusion models for natural images"). No data decide them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_DISCS = 50
_SMALLEST, _WIDER, _LARGEST = 1.5, 2.5, 20.0
"""Pixels: the smallest radius of each picture is up to 2^2.5 times 1.5."""
_COLOURFUL = 0.15
"""Standard deviation of each colour around the grey of a disc."""
_CHUNK = 1000


def leaves(count: int, size: int = 32, *, seed: int = 1) -> NDArray[np.uint8]:
    """Pictures, (count, 3, size, size), values from 0 to 255; the same ones for the same seed."""
    chance = np.random.default_rng(seed)
    starts = range(0, count, _CHUNK)
    return np.concatenate([_drawn(min(_CHUNK, count - k), size, chance) for k in starts])


def _drawn(count: int, size: int, chance: np.random.Generator) -> NDArray[np.uint8]:
    pictures = np.empty((count, 3, size, size), dtype=np.float32)
    pictures[:] = _colours(count, chance)
    up, left = np.mgrid[:size, :size].astype(np.float32)
    smallest = _SMALLEST * 2 ** (_WIDER * chance.random(count))
    for _ in range(_DISCS):
        # A density of radius⁻³ between the smallest and the largest.
        share = chance.random(count)
        radius = (smallest**-2 - share * (smallest**-2 - _LARGEST**-2)) ** -0.5
        y, x = chance.random((2, count, 1, 1)) * (size + 16) - 8
        distance = np.sqrt((up - y) ** 2 + (left - x) ** 2)
        hidden = np.clip(radius[:, None, None] - distance + 0.5, 0, 1)[:, None]
        pictures += (hidden * (_colours(count, chance) - pictures)).astype(np.float32)
    return (255 * pictures + 0.5).astype(np.uint8)


def _colours(count: int, chance: np.random.Generator) -> NDArray[np.float64]:
    grey, colour = chance.random((count, 1)), chance.standard_normal((count, 3))
    return np.clip(grey + _COLOURFUL * colour, 0, 1)[:, :, None, None]
