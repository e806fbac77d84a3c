"""Features made even by public ones: of one example each, and what becomes of their moments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diminuendo.compare import cifar, data, even, scattering
from diminuendo.compare.data import TASKS


def uneven(rows: int, seed: int) -> torch.Tensor:
    """Features of 4 channels of 5 pixels, of unequal scales and with a direction all share."""
    torch.manual_seed(seed)
    x = torch.randn(rows, 4, 5) * torch.tensor([1.0, 0.1, 3.0, 0.01])[:, None] + 2
    return x.flatten(1).half()


def test_channels_are_centred_and_scaled_by_the_public_ones_alone() -> None:
    public, own = uneven(300, 0), uneven(7, 1)
    found = even.scaled(public, public, 4).float().view(300, 4, 5) * 20**0.5
    torch.testing.assert_close(found.mean((0, 2)), torch.zeros(4), rtol=0, atol=2e-3)
    torch.testing.assert_close(found.std((0, 2)), torch.ones(4), rtol=0, atol=2e-2)
    alone = even.scaled(own[3:4], public, 4)
    torch.testing.assert_close(alone, even.scaled(own, public, 4)[3:4], rtol=0, atol=0)


def test_the_directions_in_which_public_features_vary_most_are_made_shorter() -> None:
    public, own = torch.randn(60, 90).cumsum(1), torch.randn(20, 90)
    found = even.evened(own, public, 5).float()
    alone = even.evened(own[7:8], public, 5).float()
    torch.testing.assert_close(alone, found[7:8], rtol=1e-3, atol=1e-5)
    after = even.evened(public, public, 5).double()
    before = torch.nn.functional.normalize(public.double(), dim=1)
    largest, kept = (torch.linalg.eigvalsh(x.T @ x / 60).flip(0)[:12] for x in (before, after))
    torch.testing.assert_close(kept[:6], largest[5].expand(6), rtol=0.01, atol=0)
    torch.testing.assert_close(kept[6:], largest[6:], rtol=0.01, atol=0)


def test_tuning_never_reads_the_private_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def images(folder: Path | None, key: str) -> tuple[Path, cifar.Cifar]:
        del folder
        read.append(key)
        shape = (4, 3, 32, 32) if key == "cifar10" else (4, 1, 28, 28)
        few = np.random.default_rng(3).integers(0, 256, size=shape).astype(np.uint8)
        labels = np.array([0, 1, 2, 3], dtype=np.uint8)
        return tmp_path, cifar.Cifar(few, labels, few[:2], labels[:2])

    def features(images: NDArray[np.uint8], folder: Path, *, shown: bool = True) -> torch.Tensor:
        del folder, shown
        pixels = torch.from_numpy(images.astype(np.float32)).flatten(1)
        width = int(np.prod(scattering.image(images)))
        return pixels.repeat(1, -(-width // pixels.shape[1]))[:, :width].div(255).half()

    monkeypatch.setattr(data, "_images", images)
    monkeypatch.setattr(data, "_LEAVES_EVENING", 30)
    monkeypatch.setattr(scattering, "features", features)
    monkeypatch.setattr(scattering, "EVENED", 5)
    task = TASKS["cifar10-evened"]
    assert task.auxiliary(0, tmp_path).source.startswith("fashion")
    assert read == ["fashion"]
    pool = task.load(tmp_path)
    assert read == ["fashion", "cifar10"]
    assert pool.features == 243 * 64 + 1
    assert float(pool.x.norm(dim=1).max()) <= 1
