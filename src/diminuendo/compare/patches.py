"""Features of images by their likeness to patches of drawn leaves: one image at a time.

Every patch of an image is whitened and compared with whitened patches of drawn leaves; what exceeds
a threshold is averaged over areas. So do Coates, Ng and Lee 2011 ("An analysis of single-layer
networks in unsupervised feature learning") with patches of the data themselves. Here the patches,
their whitening, the scale of each channel and the directions that are made shorter come from
leaves, which no data decide, so that a claim covers the features and they cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diminuendo._progress import bar
from diminuendo.compare.leaves import leaves
from diminuendo.compare.scattering import digest, kept

FILTERS, SIZE, STRIDE = 1000, 6, 2
"""Patches of leaves, each with both signs; pixels of their sides; pixels between an image's."""
AREAS = 3
"""Areas along each side of an image over which responses are averaged."""
THRESHOLD = 0.25
_CONTRAST = (10 / 255) ** 2
"""Added to each patch's variance, so that noise in flat areas is not enlarged."""
_FLOOR = 0.1
"""Added to each second moment where patches are whitened."""
_LEAVES, _PATCHES = 5000, 50_000
"""Pictures that are drawn, and patches of them from which the whitening is computed."""
_SCALED = 1000
"""Pictures by which channels are centred and scaled."""
DIRECTIONS = 400
"""How many of the leaves' largest second moments are made equal (`even.evened`)."""
_CHUNK = 40
CHANNELS = 2 * FILTERS
WIDTH = CHANNELS * AREAS**2


def features(images: NDArray[np.uint8], folder: Path, *, shown: bool = True) -> Tensor:
    """Features, (N, WIDTH), each of mean 0 and variance 1/WIDTH or so, in half precision.

    images  (N, colours, height, width), values from 0 to 255; grey ones are taken for three colours
    folder  where they are kept; a file that is whole, for the same images, is not computed again
    """
    form = f"patches{SIZE}-{STRIDE}-{FILTERS}-areas{AREAS}-above{THRESHOLD:g}"
    path = folder / f"{form}-{digest(images)}.npy"
    return kept(path, (len(images), WIDTH), lambda: _computed(images, shown=shown))


@dataclass(frozen=True, eq=False)
class Bank:
    """A patch p has the responses pᵀ·filters + offsets, of which what is above 0 counts.

    centre, spread  of each channel, by pictures of leaves; (CHANNELS, 1)
    """

    filters: Tensor
    offsets: Tensor
    centre: Tensor
    spread: Tensor


@torch.no_grad()
def _computed(images: NDArray[np.uint8], *, shown: bool) -> Tensor:
    own = bank()
    found = torch.empty(len(images), WIDTH, dtype=torch.float16)
    with bar("patches", total=len(images), shown=shown) as progress:
        for start in range(0, len(images), _CHUNK):
            pooled = _symmetric(images[start : start + _CHUNK], own.filters, own.offsets)
            scaled = (pooled - own.centre) / (own.spread * WIDTH**0.5)
            found[start : start + len(pooled)] = scaled.flatten(1)
            progress.advance(len(pooled))
    return found


@cache
@torch.no_grad()
def bank() -> Bank:
    """Always the same: leaves are drawn, and patches chosen, with fixed seeds."""
    pictures = leaves(_LEAVES)
    chance = np.random.default_rng(2)
    which = chance.integers(len(pictures), size=_PATCHES)
    up, left = chance.integers(pictures.shape[2] - SIZE + 1, size=(2, _PATCHES))
    windows = np.lib.stride_tricks.sliding_window_view(pictures, (SIZE, SIZE), axis=(2, 3))
    cut = torch.from_numpy(windows[which, :, up, left] / np.float32(255)).flatten(1)
    drawn = _contrasted(cut)
    centre = drawn.mean(0)
    moments, directions = torch.linalg.eigh((drawn - centre).T @ (drawn - centre) / _PATCHES)
    whitening = (directions * (moments + _FLOOR) ** -0.5) @ directions.T
    white = (drawn - centre) @ whitening
    lengths = white.norm(dim=1, keepdim=True)
    # Flat patches are alike once they are whitened: those with more in them than the median stay.
    rich = (lengths[:, 0] > lengths.median()).nonzero()[:FILTERS, 0]
    filters = whitening @ (white[rich] / lengths[rich]).T
    filters = torch.cat([filters, -filters], dim=1)
    offsets = -(centre @ filters) - THRESHOLD
    parts = [
        _symmetric(pictures[k : k + _CHUNK], filters, offsets) for k in range(0, _SCALED, _CHUNK)
    ]
    pooled = torch.cat(parts).transpose(0, 1).flatten(1)
    return Bank(filters, offsets, pooled.mean(1, keepdim=True), pooled.std(1, keepdim=True) + 1e-6)


def _contrasted(patches: Tensor) -> Tensor:
    """Patches, (…, pixels), less their mean, and of about the same contrast."""
    spread, centre = torch.var_mean(patches, dim=-1, keepdim=True)
    return (patches - centre) * (spread + _CONTRAST).rsqrt()


def _symmetric(images: NDArray[np.uint8], filters: Tensor, offsets: Tensor) -> Tensor:
    """The mean of the pooled responses of images and of their mirror images."""
    both = (images, images[..., ::-1])
    one, other = (_pooled(np.ascontiguousarray(part), filters, offsets) for part in both)
    return (one + other) / 2


def _pooled(images: NDArray[np.uint8], filters: Tensor, offsets: Tensor) -> Tensor:
    """Mean responses above 0, (N, CHANNELS, AREAS²)."""
    x = torch.from_numpy(images / np.float32(255)).expand(-1, 3, -1, -1)
    patches = _contrasted(torch.nn.functional.unfold(x, SIZE, stride=STRIDE).transpose(1, 2))
    high, wide = (1 + (side - SIZE) // STRIDE for side in x.shape[2:])
    rows = torch.addmm(offsets, patches.flatten(0, 1), filters).clamp_(min=0)
    means = torch.einsum("ay,bx->abyx", _areas(high), _areas(wide)).reshape(-1, high * wide)
    return (means @ rows.view(len(x), high * wide, -1)).transpose(1, 2)


def _areas(count: int) -> Tensor:
    """The mean over each of AREAS parts of a row, as a matrix (AREAS, count)."""
    edges = [round(k * count / AREAS) for k in range(AREAS + 1)]
    parts = torch.zeros(AREAS, count)
    for k, (start, end) in enumerate(pairwise(edges)):
        parts[k, start:end] = 1 / (end - start)
    return parts
