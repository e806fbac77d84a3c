"""ChaCha20 against the vectors of RFC 8439, and as a stream that can be entered anywhere."""

from __future__ import annotations

import numpy as np
import pytest

from diminuendo.errors import InputError
from diminuendo.training.mechanism.cipher import LARGEST, keystream

COUNTED = bytes(range(32))


def test_block_function_vector() -> None:
    """RFC 8439, 2.3.2: key 00…1f, nonce 00:00:00:09:00:00:00:4a:00:00:00:00, counter 1."""
    nonce = int.from_bytes(bytes.fromhex("000000090000004a00000000"), "little")
    expected = bytes.fromhex(
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    assert keystream(COUNTED, 8, first=8, nonce=nonce).tobytes() == expected


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        (  # RFC 8439, A.1, vectors 1 to 3
            bytes(32),
            0,
            "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
            "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
        ),
        (
            bytes(32),
            1,
            "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
            "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
        ),
        (
            bytes(31) + b"\x01",
            1,
            "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
            "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
        ),
    ],
)
def test_keystream_vectors(key: bytes, counter: int, expected: str) -> None:
    assert keystream(key, 8, first=8 * counter).tobytes().hex() == expected


def test_a_part_of_a_stream_is_the_part_of_the_stream() -> None:
    whole = keystream(COUNTED, 200_001)
    for first, size in ((0, 3), (8, 77), (65536, 70_001), (131_072, 68_929)):
        assert np.array_equal(keystream(COUNTED, size, first=first), whole[first : first + size])
    assert not np.array_equal(keystream(COUNTED, 8, nonce=1), whole[:8])
    assert keystream(COUNTED, 0).size == 0


@pytest.mark.parametrize(("first", "size"), [(4, 8), (-8, 8), (LARGEST, 1), (LARGEST - 8, 9)])
def test_a_stream_is_never_entered_where_it_would_repeat(first: int, size: int) -> None:
    with pytest.raises(InputError):
        keystream(COUNTED, size, first=first)
