"""Digits are read whole and sound, or refused with a reason."""

from __future__ import annotations

import gzip
import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from diminuendo.errors import InputError
from diminuendo.paper import data, digits

SMALL = {
    "train_images": (50, 28, 28),
    "train_labels": (50,),
    "test_images": (20, 28, 28),
    "test_labels": (20,),
}


def idx(shape: tuple[int, ...], seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    header = (0x0800 + len(shape)).to_bytes(4, "big")
    header += b"".join(n.to_bytes(4, "big") for n in shape)
    return header + rng.integers(0, 10, shape, dtype=np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four small files that stand for MNIST, half of them gzipped."""
    known = {}
    for i, (name, file) in enumerate(digits._FILES.items()):
        content = idx(SMALL[name], i)
        digest = hashlib.sha256(content).hexdigest()
        known[name] = digits._File(file.stem, digest, SMALL[name])
        if i % 2:
            (tmp_path / file.stem).write_bytes(content)
        else:
            (tmp_path / f"{file.stem}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(digits, "_FILES", known)
    return tmp_path


def parsed(folder: Path) -> list[np.ndarray]:
    return [digits._read(folder, file) for file in digits._FILES.values()]


def test_files_are_read_gzipped_or_not(folder: Path) -> None:
    assert [part.shape for part in parsed(folder)] == list(SMALL.values())


def break_missing(path: Path) -> None:
    path.unlink()


def break_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def break_magic(path: Path) -> None:
    path.write_bytes(b"\x00\x00\x08\x09" + path.read_bytes()[4:])


def break_content(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def break_shape(path: Path) -> None:
    zipped = path.suffix == ".gz"
    content = bytearray(gzip.decompress(path.read_bytes()) if zipped else path.read_bytes())
    content[7] += 1
    path.write_bytes(gzip.compress(bytes(content)) if zipped else bytes(content))


def break_empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    "damage", [break_missing, break_cut, break_magic, break_content, break_shape, break_empty]
)
@pytest.mark.parametrize("zipped", [False, True])
def test_damage_is_told(folder: Path, damage: object, zipped: bool) -> None:
    stem = "train-images-idx3-ubyte.gz" if zipped else "train-labels-idx1-ubyte"
    assert callable(damage)
    damage(folder / stem)
    with pytest.raises(InputError, match=stem.removesuffix(".gz")):
        parsed(folder)


def test_no_folder() -> None:
    with pytest.raises(InputError, match="train-images-idx3-ubyte"):
        data.load("/nowhere/at/all")


@pytest.fixture
def zipped(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The four files as mirrors have them; what was fetched is not read as a whole MNIST."""
    place = tmp_path / "zipped"
    place.mkdir()
    for file in digits._FILES.values():
        held = next(p for p in (folder / file.stem, folder / f"{file.stem}.gz") if p.exists())
        content = held.read_bytes()
        whole = content if held.suffix == ".gz" else gzip.compress(content)
        (place / f"{file.stem}.gz").write_bytes(whole)
    monkeypatch.setattr(digits, "from_folder", lambda place: Path(place))
    return place


class Mirrors(BaseHTTPRequestHandler):
    """/sound/ gives the files; the others answer as bad mirrors do."""

    files: Path
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(self.path)
        kind, name = self.path.strip("/").split("/")
        content = (self.files / name).read_bytes()
        if kind == "missing":
            self.send_error(404)
        elif kind == "garbage":
            self.wfile.write(b"what is HTTP\r\n\r\n")
        elif kind == "page":
            self.answer(b"<html>please log in</html>", 26)
        else:
            self.answer(content[:-9] if kind == "cut" else content, len(content))

    def answer(self, content: bytes, length: int) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Quietly."""


@pytest.fixture
def server(zipped: Path) -> Iterator[str]:
    handler = type("Here", (Mirrors,), {"files": zipped, "asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}"
        made.shutdown()


def test_fetching_takes_the_first_sound_mirror_and_then_none(
    server: str, zipped: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    kinds = ("missing", "garbage", "page", "cut", "sound")
    digits.fetch(cache, mirrors=tuple(f"{server}/{kind}/" for kind in kinds))
    for path in zipped.iterdir():
        assert (cache / path.name).read_bytes() == path.read_bytes()
    assert len(list(cache.iterdir())) == 4
    digits.fetch(cache, mirrors=())


@pytest.mark.parametrize("kind", ["missing", "garbage", "page", "cut"])
def test_a_bad_mirror_leaves_nothing_behind(server: str, tmp_path: Path, kind: str) -> None:
    with pytest.raises(InputError, match=r"127\.0\.0\.1.*Without a network"):
        digits.fetch(tmp_path / "other", mirrors=(f"{server}/{kind}/",))
    assert list((tmp_path / "other").iterdir()) == []


def test_no_network(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Without a network"):
        digits.fetch(tmp_path / "other", mirrors=("http://127.0.0.1:9/",))


@pytest.fixture(scope="module")
def embedded() -> digits.Digits:
    return digits.embedded()


def test_embedded_digits_are_split_evenly(embedded: digits.Digits) -> None:
    assert np.bincount(embedded.labels).tolist() == [300] * 10
    assert np.bincount(embedded.test_labels).tolist() == [200] * 10
    pool = {row.tobytes() for row in embedded.images}
    shared = sum(row.tobytes() in pool for row in embedded.test_images)
    assert shared <= 2, "an image may occur twice in MNIST, but splits do not overlap"


def test_a_sample_is_prepared_as_printed(embedded: digits.Digits) -> None:
    pool = data.pool(embedded, data.MNIST35)
    sample = data.draw(pool, 150, seed=3)
    x, y = sample.train
    assert x.shape == (150, 60)
    assert set(y.tolist()) == {0, 1}
    assert sample.test[0].shape == (400, 60)
    torch.testing.assert_close(x.mean(0), torch.zeros(60), atol=1e-5, rtol=0)
    spread = x.std(0, correction=0)
    torch.testing.assert_close(spread, spread[:1].expand(60), atol=1e-5, rtol=1e-4)
    assert float(x.norm(dim=1).max()) == pytest.approx(10, rel=1e-5)
    again, other = data.draw(pool, 150, seed=3), data.draw(pool, 150, seed=4)
    assert torch.equal(again.train[0], x)
    assert not torch.equal(other.train[0], x)


def test_the_test_set_goes_through_the_sample_s_own_map(embedded: digits.Digits) -> None:
    pool = data.pool(embedded, data.MNIST35)
    same = data.Pool(pool.task, pool.images, pool.labels, pool.images, pool.labels, pool.source)
    sample = data.draw(same, 600, seed=0)
    rows = np.random.default_rng([0, 600]).permutation(600)
    torch.testing.assert_close(sample.test[0][rows], sample.train[0], atol=2e-4, rtol=1e-3)
    assert torch.equal(sample.test[1][rows], sample.train[1])


@pytest.mark.parametrize("count", [400, 10])
def test_components_are_those_of_largest_variance(count: int) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((count, 12)) * np.arange(12, 0, -1)
    found = data.principal_components(rows, 5)
    _, _, right = np.linalg.svd(rows - rows.mean(0), full_matrices=False)
    np.testing.assert_allclose(np.abs(np.sum(found * right[:5].T, axis=0)), 1, atol=1e-8)


@pytest.mark.parametrize("examples", [60, 601, 0])
def test_more_than_there_is_cannot_be_drawn(embedded: digits.Digits, examples: int) -> None:
    with pytest.raises(InputError, match="examples"):
        data.draw(data.pool(embedded, data.MNIST35), examples, seed=0)
