"""Random words from ChaCha20 (RFC 8439): uniform to anyone without the key.

Every word is a pure function of (key, nonce, position), so that any part of a stream can be made
alone, by any process, in any order, on a CPU or a GPU.
"""

from __future__ import annotations

import struct

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from diminuendo.errors import InputError

KEY_BYTES = 32
WORDS_PER_BLOCK = 8
"""64-bit words in one block of the cipher."""
LARGEST = WORDS_PER_BLOCK * 2**32
"""Words in one stream: the cipher counts its blocks with 32 bits."""

_ZEROS = bytes(2**19)


def keystream(key: bytes, size: int, *, first: int = 0, nonce: int = 0) -> NDArray[np.uint64]:
    """`size` words of 64 uniform bits, from position `first`, a multiple of 8, of a stream.

    key    32 bytes
    nonce  names one of 2⁹⁶ streams of the key
    """
    if first % WORDS_PER_BLOCK or first < 0 or first + size > LARGEST:
        raise InputError(
            f"a multiple of {WORDS_PER_BLOCK} that leaves room for {size} words below {LARGEST}",
            name="first",
            value=first,
        )
    start = struct.pack("<I", first // WORDS_PER_BLOCK) + nonce.to_bytes(12, "little")
    cipher = Cipher(algorithms.ChaCha20(key, start), mode=None).encryptor()
    words = np.empty(size, "<u8")
    room = words.data.cast("B")
    for at in range(0, len(room), len(_ZEROS)):
        part = room[at : at + len(_ZEROS)]
        cipher.update_into(_ZEROS[: len(part)] if len(part) < len(_ZEROS) else _ZEROS, part)
    return words.astype(np.uint64, copy=False)
