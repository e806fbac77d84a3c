"""Features made even by those of public pictures: channels of one scale, and no direction in which
pictures vary far more than in others.

Both are maps of one example, which public features decide, so that they cost no privacy.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ROWS = 5000


@torch.no_grad()
def scaled(own: Tensor, public: Tensor, channels: int) -> Tensor:
    """Features, (N, channels · pixels), of mean 0 and variance 1/width or so in each channel where
    they are the public ones; in half precision."""
    known = public.float().unflatten(1, (channels, -1))  # type: ignore[no-untyped-call]
    spread, centre = torch.std_mean(known, dim=(0, 2), keepdim=True)
    spread = (spread + 1e-6) * own.shape[1] ** 0.5
    found = torch.empty(own.shape, dtype=torch.float16)
    for start in range(0, len(own), _ROWS):
        rows = own[start : start + _ROWS].float().view(-1, *known.shape[1:])
        found[start : start + len(rows)] = ((rows - centre) / spread).flatten(1)
    return found


@torch.no_grad()
def evened(own: Tensor, public: Tensor, directions: int) -> Tensor:
    """Features, (N, width), of norm 1, less the share 1 − √(m/M) of each direction in which public
    ones have one of the largest second moments M, m being the first that is not among these; in
    half precision.

    Most of an image's norm lies in directions that all images share; clipping and noise are in
    units of the norm, and descent is slow where moments are unequal.
    """
    known, shares = _largest(public, directions)
    found = torch.empty(own.shape, dtype=torch.float16)
    for start in range(0, len(own), _ROWS):
        rows = _of_norm_one(own[start : start + _ROWS])
        found[start : start + len(rows)] = rows - ((rows @ known) * shares) @ known.T
    return found


def _largest(public: Tensor, directions: int) -> tuple[Tensor, Tensor]:
    """The directions of the largest second moments, (width, directions), and the shares that are
    taken away; from the matrix of products of rows, which is the smaller one."""
    rows = _of_norm_one(public)
    moments, mixtures = torch.linalg.eigh(rows @ rows.T / len(rows))
    moments, mixtures = moments.flip(0), mixtures.flip(1)[:, :directions]
    known = rows.T @ mixtures
    shares = 1 - (moments[directions] / moments[:directions]).sqrt()
    return known / known.norm(dim=0), shares


def _of_norm_one(part: Tensor) -> Tensor:
    return torch.nn.functional.normalize(part.float(), dim=1)
