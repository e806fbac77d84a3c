"""Features by patches of drawn leaves: of one image each, decided by no data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from diminuendo.compare import cifar, data, patches
from diminuendo.compare.data import TASKS
from diminuendo.compare.leaves import leaves


def random_images(count: int, colours: int = 3, size: int = 32) -> NDArray[np.uint8]:
    shape = (count, colours, size, size)
    return np.random.default_rng(3).integers(0, 256, size=shape).astype(np.uint8)


@pytest.fixture(autouse=True)
def few_patches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (
        ("FILTERS", 6),
        ("CHANNELS", 12),
        ("WIDTH", 12 * 9),
        ("_LEAVES", 50),
        ("_PATCHES", 1000),
        ("_SCALED", 40),
        ("DIRECTIONS", 5),
    ):
        monkeypatch.setattr(patches, name, value)
    monkeypatch.setattr(data, "_LEAVES_EVENING", 60)
    patches.bank.cache_clear()
    yield
    patches.bank.cache_clear()


def test_features_are_of_one_image_and_its_mirror_image_alike(tmp_path: Path) -> None:
    images = random_images(45)
    found = patches.features(images, tmp_path, shown=False)
    assert found.shape == (45, patches.WIDTH)
    alone = patches.features(images[41:42], tmp_path, shown=False)
    torch.testing.assert_close(alone, found[41:42], rtol=0.01, atol=1e-4)
    mirrored = patches.features(images[..., ::-1], tmp_path, shown=False)
    torch.testing.assert_close(mirrored, found, rtol=0.01, atol=1e-4)


def test_features_are_kept_for_the_same_images_and_patches_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = random_images(2)
    first = patches.features(images, tmp_path, shown=False)
    monkeypatch.setattr(patches, "THRESHOLD", 0.5)
    patches.bank.cache_clear()
    assert not torch.equal(patches.features(images, tmp_path, shown=False), first)
    monkeypatch.setattr(patches, "THRESHOLD", 0.25)
    monkeypatch.delattr(patches, "_computed")
    assert torch.equal(patches.features(images, tmp_path, shown=False), first)


def test_grey_images_are_those_of_three_equal_colours(tmp_path: Path) -> None:
    grey = random_images(3, colours=1, size=28)
    found = patches.features(grey, tmp_path, shown=False)
    assert torch.equal(found, patches.features(grey.repeat(3, axis=1), tmp_path, shown=False))


def test_leaves_alone_decide_the_patches_and_the_scale_of_each_channel() -> None:
    one = patches.bank()
    patches.bank.cache_clear()
    two = patches.bank()
    for name in ("filters", "offsets", "centre", "spread"):
        assert torch.equal(getattr(one, name), getattr(two, name))
    own = leaves(patches._LEAVES)[: patches._SCALED]
    scaled = patches._computed(own, shown=False).float() * patches.WIDTH**0.5
    channels = scaled.view(len(own), patches.CHANNELS, -1)
    torch.testing.assert_close(channels.mean((0, 2)), torch.zeros(12), rtol=0, atol=2e-3)
    torch.testing.assert_close(channels.std((0, 2)), torch.ones(12), rtol=0, atol=2e-2)


def test_responses_are_those_of_each_patch_averaged_over_its_area() -> None:
    image = random_images(1)
    own = patches.bank()
    found = patches._pooled(image, own.filters, own.offsets)[0]
    sums, counts = torch.zeros(12, 3, 3), torch.zeros(3, 3)
    areas = [0] * 5 + [1] * 4 + [2] * 5
    for i, up in enumerate(range(0, 27, patches.STRIDE)):
        for j, left in enumerate(range(0, 27, patches.STRIDE)):
            patch = torch.from_numpy(image[0, :, up : up + 6, left : left + 6] / np.float32(255))
            patch = patch.flatten()
            patch = (patch - patch.mean()) / (patch.var() + (10 / 255) ** 2).sqrt()
            above = (patch @ own.filters + own.offsets).clamp(min=0)
            sums[:, areas[i], areas[j]] += above
            counts[areas[i], areas[j]] += 1
    torch.testing.assert_close(found, (sums / counts).flatten(1), rtol=1e-4, atol=1e-5)


def test_tuning_never_reads_the_private_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def images(folder: Path | None, key: str) -> tuple[Path, cifar.Cifar]:
        del folder
        read.append(key)
        few = random_images(4) if key == "cifar10" else random_images(4, colours=1, size=28)
        labels = np.array([0, 1, 2, 3], dtype=np.uint8)
        return tmp_path, cifar.Cifar(few, labels, few[:2], labels[:2])

    monkeypatch.setattr(data, "_images", images)
    task = TASKS["cifar10-patches"]
    assert task.auxiliary(0, tmp_path).source.startswith("fashion")
    assert read == ["fashion"]
    pool = task.load(tmp_path)
    assert read == ["fashion", "cifar10"]
    assert pool.features == patches.WIDTH + 1
    assert float(pool.x.norm(dim=1).max()) <= 1
    assert pool.image is None, "channels of three areas a side are no image"
