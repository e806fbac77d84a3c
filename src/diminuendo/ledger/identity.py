"""The identity of data: a digest of files or arrays, which are read in pieces of 16 MiB.

The same numbers in another file, type or order have another digest. That is on purpose: a digest
identifies bytes, and a person decides what else is the same data.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from diminuendo.errors import InputError

_PIECE = 1 << 24
Progress = Callable[[int, int], None]
"""Called after every piece with the number of bytes read and of bytes in all."""


def silent(done: int, total: int) -> None:
    """Report no progress."""
    del done, total


def identify(data: Any, *, progress: Progress = silent) -> str:
    """SHA-256 of a path (or several), an array (or a tuple of them), or a map-style dataset.

    Returns "sha256:" and 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    done = 0
    for total, piece in _pieces(data):
        digest.update(piece)
        done += len(piece)
        progress(done, max(total, done))
    return "sha256:" + digest.hexdigest()


def _pieces(data: Any) -> Iterator[tuple[int, bytes | memoryview]]:
    if isinstance(data, (str, os.PathLike)):
        yield from _file_pieces([Path(data)])
    elif isinstance(data, (list, tuple)) and data and isinstance(data[0], (str, os.PathLike)):
        yield from _file_pieces([Path(path) for path in data])
    elif (arrays := _arrays(data)) is not None:
        yield from _array_pieces(arrays)
    else:
        yield from _item_pieces(data)


def _file_pieces(paths: list[Path]) -> Iterator[tuple[int, bytes]]:
    files = list(_files(paths))
    total = sum(path.stat().st_size for _, path in files)
    for name, path in files:
        yield total, f"file {len(name.encode())} {name} {path.stat().st_size}\n".encode()
        with path.open("rb") as handle:
            while piece := handle.read(_PIECE):
                yield total, piece


def _files(paths: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """Files as they are named; a folder's files in the order of their names in it."""
    for path in paths:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file())
            yield from ((p.relative_to(path).as_posix(), p) for p in inside)
        elif path.is_file():
            yield "", path
        else:
            raise InputError("a file or a folder", name="the data", value=str(path))


def _arrays(data: Any) -> list[Any] | None:
    """The arrays (NumPy's or tensors) of a tuple or of a dataset that is made of them."""
    parts = getattr(data, "tensors", data)
    parts = list(parts) if isinstance(parts, (tuple, list)) else [parts]
    good = all(hasattr(part, "shape") and hasattr(part, "dtype") for part in parts)
    return parts if parts and good else None


def _numpy(part: Any) -> np.ndarray:
    return np.asarray(part.detach().cpu().numpy() if hasattr(part, "detach") else part)


def _array_pieces(arrays: list[Any]) -> Iterator[tuple[int, bytes | memoryview]]:
    total = sum(int(np.prod(a.shape)) * getattr(a, "itemsize", 8) for a in arrays)
    for part in arrays:
        kind = str(part.dtype).removeprefix("torch.")
        yield total, f"array {kind} {tuple(part.shape)}\n".encode()
        if len(part.shape) == 0:
            yield total, _numpy(part).tobytes()
            continue
        row = max(int(np.prod(part.shape[1:])) * getattr(part, "itemsize", 8), 1)
        step = max(_PIECE // row, 1)
        for start in range(0, part.shape[0], step):
            piece = _numpy(part[start : start + step])
            if piece.dtype.hasobject:
                raise InputError("numbers", name="the data", value=f"an array of {piece.dtype}")
            little = piece.astype(piece.dtype.newbyteorder("<"), order="C", copy=False)
            yield total, little.tobytes()


def _item_pieces(data: Any) -> Iterator[tuple[int, bytes]]:
    """A dataset's items, one after the other; each an array, a number, or a tuple of these."""
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise InputError(
            "a path, arrays, or a map-style dataset", name="the data", value=type(data).__name__
        )
    for i in range(len(data)):
        item = data[i]
        for part in item if isinstance(item, (tuple, list)) else (item,):
            array = _numpy(part)
            if array.dtype.kind not in "biufc":
                raise InputError(
                    "numbers, for its identity to be computed",
                    name=f"item {i} of the data",
                    value=type(part).__name__,
                    remedy="Give `identify` the files it was read from.",
                )
            yield 0, f"item {array.dtype} {array.shape}\n".encode() + array.tobytes()
