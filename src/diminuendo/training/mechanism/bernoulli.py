"""Independent coins that come up with a probability to the last bit, whatever double it is."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from diminuendo.training.mechanism import cipher

_WORD = 2**64
_BLOCK = 2**20


def chosen(size: int, rate: float, key: bytes) -> NDArray[np.int64]:
    """Which of 0 … `size` − 1 are chosen, in increasing order: each alone with probability `rate`.

    The first 64 bits of a coin's U are compared with those of `rate`; where they are equal, which
    happens to one in 2⁶⁴, as many more as it takes. Every coin has a stream of its own for them.
    """
    bound, rest = divmod(Fraction(rate) * _WORD, 1)
    if bound >= _WORD:
        return np.arange(size)
    parts = []
    for first in range(0, size, _BLOCK):
        words = cipher.keystream(key, min(_BLOCK, size - first), first=first)
        taken = words < np.uint64(bound)
        if rest:
            for place in np.flatnonzero(words == np.uint64(bound)):
                taken[place] = _is_below(rest, key, first + int(place))
        parts.append(first + np.flatnonzero(taken))
    return np.concatenate(parts) if parts else np.arange(0)


def _is_below(rest: Fraction, key: bytes, place: int) -> bool:
    """Whether the bits after the first 64 stay below what is left of the probability."""
    position = 0
    while rest:
        words = cipher.keystream(key, cipher.WORDS_PER_BLOCK, first=position, nonce=place + 1)
        for word in words.tolist():
            bound, rest = divmod(rest * _WORD, 1)
            if word != bound:
                return bool(word < bound)
        position += cipher.WORDS_PER_BLOCK
    return False  # equal to the last bit: not below
