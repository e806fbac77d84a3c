"""Scattering features of images: fixed wavelets, no learning, one image at a time.

Two layers of wavelets (Oyallon and Mallat 2015) by kymatio, then group normalisation within each
image (Tramèr and Boneh 2021): public maps of one example each, so that a claim covers them. Values
are kept as half precision in a file beside the data, because they take minutes to compute.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diminuendo import _extras, _files
from diminuendo._progress import bar
from diminuendo.errors import InputError

J, L = 2, 8
"""Scales and angles: 81 channels of a quarter of the height and width for each colour."""
GROUPS = 27
DIRECTIONS, POWER, FLOOR = 1500, 0.75, 1e-5
"""Whitening: how many directions are kept, how far their lengths are made equal (1: wholly), and
the share of all second moments that is added to each so that the smallest stay small."""
EVENED = 150
"""How many of drawn leaves' largest second moments are made equal (`even.evened`)."""
_PUBLIC = 20_000
"""Public images whose second moments are taken."""
_CHUNK = 500
_FORM = f"scattering-J{J}-L{L}-groups{GROUPS}"


def features(images: NDArray[np.uint8], folder: Path, *, shown: bool = True) -> Tensor:
    """Normalised features, (N, channels · height/4 · width/4), of norm about 1, in half precision.

    images  (N, colours, height, width), values from 0 to 255
    folder  where they are kept; a file that is whole, for the same images, is not computed again
    """
    path = folder / f"{_FORM}-{digest(images)}.npy"
    size = math.prod(image(images))
    return kept(path, (len(images), size), lambda: _computed(images, shown=shown))


def image(images: NDArray[np.uint8]) -> tuple[int, int, int]:
    """Channels, height and width of one image's features."""
    colours, height, width = images.shape[1:]
    return colours * (1 + J * L + L * L * J * (J - 1) // 2), height >> J, width >> J


def whitened(own: Sequence[Tensor], other: Tensor, folder: Path) -> list[Tensor]:
    """The features in the directions of another set's second moments, those where that set varies
    much made shorter: each (N, at most DIRECTIONS), in half precision.

    A linear map that public images decide. Without it most of an image's norm lies in directions
    that all images share, and clipping and noise are in units of the norm.

    own     features of private images
    other   features of public images
    folder  where the results are kept
    """
    public = other[:_PUBLIC]
    size = min(DIRECTIONS, public.shape[1])
    form = f"{_FORM}-whitened{size}-{POWER:g}-{FLOOR:g}"
    # The map is kept too: another solver run may turn or flip directions of nearly equal moments,
    # and parts in other directions would look alike and mean nothing together.
    turn = kept(
        folder / f"{form}-map-{digest(public.numpy())}.npy",
        (public.shape[1], size),
        lambda: _map(public.float(), size).half(),
    )
    return [
        kept(
            folder / f"{form}-{digest(turn.numpy())}-{digest(part.numpy())}.npy",
            (len(part), size),
            partial(_turned, part, turn.float()),
        )
        for part in own
    ]


def _map(other: Tensor, size: int) -> Tensor:
    """The directions of the largest second moments, times (moment + FLOOR)^(−POWER/2).

    Computed from the smaller of the two Gram matrices, if that has so many directions.
    """
    wide = size <= len(other) < other.shape[1]
    product = other @ other.T if wide else other.T @ other
    values, directions = torch.linalg.eigh(product / product.trace())
    values, directions = values.flip(0)[:size], directions.flip(1)[:, :size]
    if wide:
        directions = other.T @ directions
        directions /= directions.norm(dim=0)
    scales = (values.clamp(min=0) + FLOOR) ** (-POWER / 2)
    return torch.as_tensor(directions * (scales / scales.max()))


def _turned(own: Tensor, directions: Tensor) -> Tensor:
    starts = range(0, len(own), 10 * _CHUNK)
    return torch.cat([(own[k : k + 10 * _CHUNK].float() @ directions).half() for k in starts])


def digest(content: NDArray[np.uint8] | NDArray[np.float16]) -> str:
    own = hashlib.sha256(np.ascontiguousarray(content).data)
    own.update(str(content.shape).encode())
    return own.hexdigest()[:16]


def kept(path: Path, shape: tuple[int, int], compute: Callable[[], Tensor]) -> Tensor:
    """What the file holds, or what is computed and written there."""
    stored = _stored(path, shape)
    if stored is None:
        stored = compute()
        with _files.writing(path, name="the features") as handle:
            np.save(handle, stored.numpy())
    return stored


def _stored(path: Path, shape: tuple[int, int]) -> Tensor | None:
    """What is in the file, or None where there is none; InputError for anything else."""
    try:
        found = np.load(path, allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError):
        found = np.zeros(0)
    if found.shape != shape or found.dtype != np.float16:
        raise InputError(
            f"{shape} numbers of half precision",
            name="the features",
            value=str(path),
            remedy="Remove the file; the features are then computed again.",
        )
    return torch.from_numpy(found)


@torch.no_grad()
def _computed(images: NDArray[np.uint8], *, shown: bool) -> Tensor:
    with _extras.needed("kymatio", extra="scattering", purpose="Computing scattering features"):
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
    transform = ScatteringTorch2D(J=J, shape=images.shape[2:], L=L)
    parts = []
    with bar("scattering", total=len(images), shown=shown) as progress:
        for start in range(0, len(images), _CHUNK):
            chunk = torch.from_numpy(images[start : start + _CHUNK] / np.float32(255))
            parts.append(normalised(transform(chunk).flatten(1, -3)).half())
            progress.advance(len(chunk))
    return torch.cat(parts)


def normalised(channels: Tensor) -> Tensor:
    """Group normalisation within each image, (N, channels, height, width), flat and of norm ≤ 1."""
    flat = torch.nn.functional.group_norm(channels, GROUPS, eps=1e-5).flatten(1)
    return torch.as_tensor(flat / flat.shape[1] ** 0.5)
