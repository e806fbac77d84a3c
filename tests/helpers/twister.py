"""A Mersenne twister (MT19937) solved for its state, from parts of the numbers that it gave out.

Every output bit is a sum modulo 2 of state bits, so that known output bits are linear equations.
PyTorch's normal numbers on a CPU are made of 24-bit parts of its outputs, and tell most of them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]

_STATE, _MIDDLE = 624, 397
_TWIST = 0x9908B0DF
_BITS = 24
"""Lowest bits of an output that a float32 uniform number is made of."""
_SURPLUS = 96
"""Equations beyond the unknowns: wrong ones pass for right with probability 2⁻⁹⁶."""


class Known(NamedTuple):
    """The highest `bits` of the 24 lowest bits of each output, as numbers below 2^bits."""

    values: NDArray[np.int64]
    bits: NDArray[np.int64]


def known_bits(normals: Floats, error: float) -> Known:
    """What the outputs behind normal numbers must begin with, if these are off by `error` at most.

    Of sixteen numbers, the j-th and (j + 8)-th are r cos θ and r sin θ, with r = √(−2 ln(1 − u))
    and θ = 2π v; u and v are the j-th and (j + 8)-th outputs' 24 bits over 2²⁴.
    """
    groups = normals.reshape(-1, 2, 8)
    radius = np.hypot(groups[:, 0], groups[:, 1])
    u = -np.expm1(-(radius**2) / 2)
    v = np.arctan2(groups[:, 1], groups[:, 0]) / (2 * np.pi) % 1
    off_u = error * (radius + error) * np.exp(-(np.maximum(radius - error, 0) ** 2) / 2)
    off_v = error / (2 * np.pi * np.maximum(radius - error, 1e-9))
    middle = np.stack([u, v], 1).reshape(-1) * 2**_BITS
    off = np.stack([off_u, off_v], 1).reshape(-1) * 2**_BITS + 2.0**-20
    low, high = np.ceil(middle - off).astype(np.int64), np.floor(middle + off).astype(np.int64)
    bits = np.full(len(middle), _BITS)
    for _ in range(_BITS):  # as many bits as both ends share
        differ = low >> (_BITS - bits) != high >> (_BITS - bits)
        bits -= differ & (bits > 0)
    outside = (low < 0) | (high >= 2**_BITS) | (low > high)
    bits[outside] = 0
    return Known(low >> (_BITS - bits), bits)


def _shifted(forms: Words, by: int, mask: int = 0xFFFFFFFF) -> Words:
    """(word << by) & mask for words whose bits are linear forms; to the right for by < 0."""
    moved = np.zeros_like(forms)
    if by > 0:
        moved[:, by:] = forms[:, :-by]
    else:
        moved[:, :by] = forms[:, -by:]
    moved[:, [bit for bit in range(32) if not mask >> bit & 1]] = 0
    return moved


def _tempered(forms: Words) -> Words:
    forms = forms ^ _shifted(forms, -11)
    forms ^= _shifted(forms, 7, 0x9D2C5680)
    forms ^= _shifted(forms, 15, 0xEFC60000)
    forms ^= _shifted(forms, -18)
    return forms


def _untempering() -> NDArray[np.uint8]:
    """The 32 × 32 matrix from an output's bits to its word's."""
    identity = (np.uint64(1) << np.arange(32, dtype=np.uint64)).reshape(1, 32, 1)
    forward = _tempered(identity.copy())[0, :, 0]  # bit b of the output: which bits of the word
    rows = [(int(row), 1 << b) for b, row in enumerate(forward)]
    for bit in range(32):
        pivot = next(k for k in range(bit, 32) if rows[k][0] >> bit & 1)
        rows[bit], rows[pivot] = rows[pivot], rows[bit]
        for k in range(32):
            if k != bit and rows[k][0] >> bit & 1:
                rows[k] = (rows[k][0] ^ rows[bit][0], rows[k][1] ^ rows[bit][1])
    return np.array([[back >> b & 1 for b in range(32)] for _, back in rows], np.uint8)


def _next_words(words: Words, count: int) -> Words:
    """`count` further words of the recurrence, after at least 624."""
    forms = np.concatenate([words, np.zeros((count, *words.shape[1:]), np.uint64)])
    twist = np.array([bit for bit in range(32) if _TWIST >> bit & 1])
    at = len(words)
    while at < len(forms):
        take = min(_STATE - _MIDDLE, len(forms) - at)
        old, after = forms[at - _STATE :][:take], forms[at - _STATE + 1 :][:take]
        mixed = after.copy()
        mixed[:, 31] = old[:, 31]
        new = forms[at - _STATE + _MIDDLE :][:take] ^ _shifted(mixed, -1)
        new[:, twist] ^= after[:, :1]
        forms[at : at + take] = new
        at += take
    return forms


def _pivots(bytes_: NDArray[np.uint8]) -> list[int]:
    """Places of bytes that are independent over GF(2), as many as there are."""
    values, places = np.unique(bytes_, return_index=True)
    basis: list[int] = []
    found = []
    for value, place in zip(values.tolist(), places.tolist(), strict=True):
        for known in basis:
            value = min(value, value ^ known)
        if value:
            basis.append(value)
            found.append(place)
    return found


def solved(equations: Words, unknowns: int) -> NDArray[np.uint8] | None:
    """A solution of linear equations over GF(2), or None: bit k of a row belongs to unknown k, and
    bit number `unknowns` is the constant. Unknowns that nothing determines are 0.

    Eight columns at a time: every row below needs one of 256 sums of the pivots.
    """
    rows, done = equations.copy(), 0
    order: list[tuple[int, int]] = []  # row and unknown of each pivot
    for first in range(0, unknowns, 8):
        word, low = divmod(first, 64)
        mask = np.uint64((1 << min(8, unknowns - first)) - 1)
        window = ((rows[done:, word] >> np.uint64(low)) & mask).astype(np.uint8)
        chosen = _pivots(window)
        for number, place in enumerate(sorted(chosen)):
            rows[[done + number, done + place]] = rows[[done + place, done + number]]
        top = rows[done : done + len(chosen)]
        bits: list[int] = []
        for number in range(len(top)):  # the pivots' own columns become unit vectors
            left = int(top[number, word] >> np.uint64(low) & mask)
            bit = left.bit_length() - 1
            bits.append(bit)
            has = (top[:, word] >> np.uint64(low + bit)) & np.uint64(1) == 1
            has[number] = False
            top[has] ^= top[number]
        sums = np.zeros((1, rows.shape[1] - word), np.uint64)
        for number in range(len(top)):
            sums = np.concatenate([sums, sums ^ top[number, word:]])
        done += len(top)
        below = rows[done:, word:]
        which = np.zeros(len(below), np.int64)
        for number, bit in enumerate(bits):
            which |= (below[:, 0] >> np.uint64(low + bit) & np.uint64(1)).astype(np.int64) << number
        below ^= sums[which]
        order += [(done - len(bits) + number, first + bit) for number, bit in enumerate(bits)]
    end = np.uint64(1) << np.uint64(unknowns % 64)
    if (rows[done:, unknowns // 64] & end).any():
        return None
    solution = np.zeros(rows.shape[1], np.uint64)
    solution[unknowns // 64] = end
    for row, unknown in reversed(order):
        if int(np.bitwise_count(rows[row] & solution).sum()) & 1:
            solution[unknown // 64] |= np.uint64(1) << np.uint64(unknown % 64)
    return np.unpackbits(solution.view(np.uint8), bitorder="little")[:unknowns]


def outputs(known: Known, *, all_of_them: bool = False) -> NDArray[np.int64] | None:
    """The 24 lowest bits of outputs that begin with what is known of each; None where no state of a
    twister gives those that were looked at.

    Unknown at first are the bits of the first 624 outputs that are not known. As many of the others
    are looked at as there are unknowns, which decides whether it is a twister, or `all_of_them`,
    which decides what its state was.
    """
    back = _untempering()
    free = [[*range(_BITS - int(bits)), *range(_BITS, 32)] for bits in known.bits[:_STATE].tolist()]
    unknowns = sum(map(len, free))
    given = np.zeros((_STATE, 32), np.uint8)
    forms = np.zeros((_STATE, 32, unknowns // 64 + 1), np.uint64)
    at = 0
    for word, (value, bits) in enumerate(zip(*(part[:_STATE] for part in known), strict=True)):
        for bit in range(_BITS - int(bits), _BITS):
            given[word, bit] = int(value) >> (bit - _BITS + int(bits)) & 1
        for bit in free[word]:
            forms[word, np.flatnonzero(back[:, bit]), at // 64] |= np.uint64(1 << at % 64)
            at += 1
    end = np.uint64(1 << unknowns % 64)
    constant = given @ back.T % 2 == 1
    forms[:, :, unknowns // 64][constant] |= end
    later = np.cumsum(known.bits[_STATE:])
    count = int(np.searchsorted(later, unknowns + _SURPLUS)) + 1
    if all_of_them:
        count = max(count, len(later))
    if count > len(later):
        raise ValueError("Too few bits are known.")
    tempered = _tempered(_next_words(forms, count)[_STATE:])
    equations = []
    for number in range(count):
        value, bits = (int(part[_STATE + number]) for part in known)
        rows = tempered[number, _BITS - bits : _BITS].copy()
        ones = [bit for bit in range(bits) if value >> bit & 1]
        rows[ones, unknowns // 64] ^= end
        equations.append(rows)
    solution = solved(np.concatenate(equations), unknowns)
    if solution is None:
        return None
    first, at = given.copy(), 0
    for word, places in enumerate(free):
        first[word, places] = solution[at : at + len(places)]
        at += len(places)
    words = (first @ back.T % 2).astype(np.uint64)[:, :, None]
    every = _tempered(_next_words(words, len(known.bits) - _STATE))[:, :_BITS, 0]
    numbers: NDArray[np.int64] = (every.astype(np.int64) << np.arange(_BITS)).sum(1)
    return numbers


def normals(numbers: NDArray[np.int64]) -> Floats:
    """The normal numbers that PyTorch makes of outputs, but for rounding."""
    groups = numbers.reshape(-1, 2, 8) / 2**_BITS
    radius = np.sqrt(-2 * np.log1p(-groups[:, 0]))
    angle = 2 * np.pi * groups[:, 1]
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)
