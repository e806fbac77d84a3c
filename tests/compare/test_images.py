"""Scattering features and CIFAR-10: what is checked, kept and refused; rows that replicas share."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import diminuendo as dim
from diminuendo.budget import Budget
from diminuendo.compare import cifar, data, scattering
from diminuendo.compare.clips import Flat
from diminuendo.compare.data import TASKS, Pool
from diminuendo.compare.leaves import leaves
from diminuendo.compare.models import Linear, Model, Network, shared
from diminuendo.compare.private import Private

pytest.importorskip("kymatio")
pytest.importorskip("PIL")


def random_images(count: int, colours: int = 1, size: int = 28) -> NDArray[np.uint8]:
    shape = (count, colours, size, size)
    return np.random.default_rng(3).integers(0, 256, size=shape).astype(np.uint8)


def test_features_are_of_one_image_each_and_have_norm_at_most_one(tmp_path: Path) -> None:
    images = random_images(3)
    found = scattering.features(images, tmp_path, shown=False)
    assert found.shape == (3, 81 * 7 * 7)
    assert float(found.float().norm(dim=1).max()) <= 1 + 1e-3
    alone = scattering.features(images[1:2], tmp_path, shown=False)
    torch.testing.assert_close(alone, found[1:2])
    colours = scattering.features(random_images(2, 3, 32), tmp_path, shown=False)
    assert colours.shape == (2, 3 * 81 * 8 * 8)
    rows = data._with_intercept(colours)
    assert float(rows.norm(dim=1).max()) <= 1
    assert set(rows[:, -1].tolist()) == {rows[0, -1].item()}


def test_features_are_kept_for_the_same_images_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = random_images(2)
    first = scattering.features(images, tmp_path, shown=False)
    other = images.copy()
    other[0, 0, 0, 0] ^= 255
    assert not torch.equal(scattering.features(other, tmp_path, shown=False), first)
    monkeypatch.delattr(scattering, "_computed")
    assert torch.equal(scattering.features(images, tmp_path, shown=False), first)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(dim.InputError, match="Remove the file"):
        scattering.features(images, tmp_path, shown=False)


def test_whitening_is_a_map_of_one_image_that_public_images_decide(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    scales = torch.linspace(1, 9, 12)
    own, other = ((torch.randn(40, 12, generator=generator) * scales).half() for _ in range(2))
    found = scattering.whitened([own], other, tmp_path)[0].float()
    assert found.shape == (40, 12)
    alone = scattering.whitened([own[3:4]], other, tmp_path)[0].float()
    torch.testing.assert_close(alone, found[3:4])
    moved = scattering.whitened([own], other + 1, tmp_path)[0].float()
    assert not torch.equal(moved, found)
    spread = found.std(0)
    before = own.float().std(0)
    assert float(spread.max() / spread.min()) < float(before.max() / before.min()) / 2
    assert len(list(tmp_path.iterdir())) == 5, "two maps and three results"


def test_wide_features_are_whitened_by_the_smaller_matrix() -> None:
    """With fewer public images than features: the same directions and lengths, up to signs."""
    other = torch.randn(8, 12, generator=torch.Generator().manual_seed(6))
    moments = (other.T @ other / other.square().sum()).double()
    values, directions = torch.linalg.eigh(moments)
    scales = (values.flip(0)[:5] + scattering.FLOOR) ** (-scattering.POWER / 2)
    expected = directions.flip(1)[:, :5] * scales / scales.max()
    found = scattering._map(other, 5).double()
    torch.testing.assert_close(found.abs(), expected.abs(), rtol=1e-3, atol=1e-4)


def test_drawn_leaves_are_public_pictures_of_one_seed() -> None:
    one = leaves(3, seed=1)
    assert one.shape == (3, 3, 32, 32)
    assert np.array_equal(one, leaves(3, seed=1))
    assert not np.array_equal(one, leaves(3, seed=2))
    many = leaves(200).astype(np.float64)
    greys = many.mean(axis=1)
    assert many.min() < 5 < 250 < many.max()
    flat = np.abs(np.diff(greys, axis=2)) < 2
    assert 0.3 < flat.mean() < 0.95, "areas, and edges between them"
    spread = (many - greys[:, None]).std() / greys.std()
    assert 0.1 < spread < 0.8, "colours, but more light and shade"


def test_parts_that_are_kept_are_never_in_other_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eigenvectors have any sign: a part that is computed later must use the map of the first."""
    own = torch.randn(6, 12, generator=torch.Generator().manual_seed(5)).half()
    both = scattering.whitened([own[:4], own[4:]], own, tmp_path)
    kept = sorted(tmp_path.glob("*.npy"), key=lambda path: path.stat().st_size)
    kept[0].unlink()  # the smaller part
    made = scattering._map
    monkeypatch.setattr(scattering, "_map", lambda other, size: -made(other, size))
    again = scattering.whitened([own[:4], own[4:]], own, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(both, again, strict=True))
    for path in tmp_path.glob("*-map-*.npy"):
        path.unlink()
    turned = scattering.whitened([own[:4], own[4:]], own, tmp_path)
    torch.testing.assert_close(turned[0], -both[0])
    torch.testing.assert_close(turned[1], -both[1])


@pytest.mark.parametrize("key", ["mnist", "cifar10"])
def test_tuning_for_whitened_images_never_reads_them(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []

    def images(folder: Path | None, key: str) -> tuple[Path, cifar.Cifar]:
        del folder
        read.append(key)
        few, labels = random_images(4), np.array([0, 1, 2, 3], dtype=np.uint8)
        return tmp_path, cifar.Cifar(few, labels, few[:2], labels[:2])

    monkeypatch.setattr(data, "_images", images)
    monkeypatch.setattr(scattering, "_map", lambda other, size: torch.eye(other.shape[1], size))
    monkeypatch.setattr(data, "leaves", lambda count: random_images(count))
    monkeypatch.setattr(data, "_LEAVES_DRAWN", 5)
    pool = TASKS[f"{key}-whitened"].auxiliary(0, tmp_path)
    assert set(read) == {"fashion"}
    assert pool.features == scattering.DIRECTIONS + 1
    assert TASKS[f"{key}-whitened"].load(tmp_path).source.startswith(key)
    assert set(read) == {"fashion", key}


@pytest.mark.parametrize("key", ["mnist", "fashion", "cifar10"])
def test_images_that_are_missing_are_asked_for(key: str, tmp_path: Path) -> None:
    task = TASKS[f"{key}-scattering"]
    with pytest.raises(dim.InputError, match="--data-dir"):
        task.load(None)
    with pytest.raises(dim.InputError, match="--data-dir"):
        task.auxiliary(0)
    with pytest.raises(dim.InputError, match="folder"):
        task.load(tmp_path)
    (tmp_path / key).mkdir()
    with pytest.raises(dim.InputError, match="holds"):
        task.load(tmp_path)


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))


def binary(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> dict[str, bytes]:
    rows = np.concatenate([labels[:, None], images.reshape(len(images), -1)], axis=1)
    names = [*cifar._PARTS, "test_batch"]
    return {f"cifar-10-batches-bin/{name}.bin": rows.tobytes() for name in names}


def sprites(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> dict[str, bytes]:
    from PIL import Image

    picture = io.BytesIO()
    rows = images.reshape(len(images), 3, -1).transpose(0, 2, 1)
    Image.fromarray(np.ascontiguousarray(rows)).save(picture, "png")
    names = [*cifar._PARTS, "test_batch"]
    return {
        **{f"package/{name}.png": picture.getvalue() for name in names},
        "package/train_lables.json": json.dumps(labels.tolist() * 5).encode(),
        "package/test_lables.json": json.dumps(labels.tolist()).encode(),
    }


def test_both_archives_of_cifar_give_the_same_and_other_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, labels = random_images(4, 3, 32), np.array([0, 9, 3, 1], dtype=np.uint8)
    folders = {cifar.BINARY: tmp_path / "binary", cifar.SPRITES: tmp_path / "sprites"}
    for (name, folder), make in zip(folders.items(), (binary, sprites), strict=True):
        folder.mkdir()
        write_tar(folder / name, make(images, labels))
        with pytest.raises(dim.InputError, match="SHA-256"):
            cifar.from_folder(folder)
    one = cifar._read(folders[cifar.BINARY] / cifar.BINARY, cifar._binary)
    assert np.array_equal(one.test_images, images)
    assert np.array_equal(one.labels, np.tile(labels, 5))
    monkeypatch.setattr(cifar, "_SHA256", one.sha256)
    for folder in folders.values():
        assert cifar.from_folder(folder).sha256 == one.sha256


@pytest.mark.parametrize("name", [cifar.BINARY, cifar.SPRITES])
def test_a_broken_archive_of_cifar_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"no archive")
    with pytest.raises(dim.InputError, match="whole"):
        cifar.from_folder(tmp_path)
    write_tar(tmp_path / name, {"README": b"nothing"})
    with pytest.raises(dim.InputError, match="whole"):
        cifar.from_folder(tmp_path)


# Rows that replicas share


def pool(examples: int = 30, features: int = 5) -> Pool:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(examples, features, generator=generator)
    return Pool(x, x.argmax(1) % 3, x[:10], x[:10].argmax(1) % 3, "made up")


def test_all_rows_are_held_once_for_every_seed() -> None:
    x, y = pool().draw(30, [1, 2, 3])
    assert shared(x)
    assert x.shape == (3, 30, 5)
    assert y.shape == (3, 30)
    assert not shared(pool().draw(29, [1, 2, 3])[0])


@pytest.mark.parametrize("model", [Linear(5, 3), Network(5, 3, hidden=4)])
def test_shared_rows_give_the_same_gradients_and_answers(model: Model) -> None:
    x, y = pool().draw(30, [1, 2])
    one, other = (
        Private(model, rows, y, Budget(epsilon=3.0, delta=1e-5), seeds=[1, 2])
        for rows in (x, x.contiguous())
    )
    theta = torch.randn(2, model.parameters, generator=torch.Generator().manual_seed(2))
    asks: list[Callable[[Private], torch.Tensor]] = [
        lambda private: private.gradient(theta, Flat(0.3), 5.0),
        lambda private: private.count_below(theta, torch.ones(2), 5.0),
        lambda private: private.mean_gradient(theta.double()),
    ]
    for ask in asks:
        torch.testing.assert_close(ask(one), ask(other))
    torch.testing.assert_close(model.outputs(theta, x), model.outputs(theta, x.contiguous()))
