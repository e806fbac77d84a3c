"""The cipher and the rounded Gaussian on a GPU, in one kernel: the numbers that a CPU makes.

Needs Triton, which comes with PyTorch's CUDA builds; `available` says whether it is there. The
sum is read and written once. Coordinates that double precision cannot decide, about one in twenty
million, are handed back: the host waits for their number.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from diminuendo.errors import DiminuendoError
from diminuendo.training.mechanism import cipher, table

if TYPE_CHECKING:
    from diminuendo.training.mechanism.grid import Grid

available = importlib.util.find_spec("triton") is not None
_BLOCKS = 128
"""Blocks of the cipher in one program."""

if available:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _quarter_round(a, b, c, d):  # type: ignore[no-untyped-def]
        a += b
        d ^= a
        d = (d << 16) | (d >> 16)
        c += d
        b ^= c
        b = (b << 12) | (b >> 20)
        a += b
        d ^= a
        d = (d << 8) | (d >> 24)
        c += d
        b ^= c
        b = (b << 7) | (b >> 25)
        return a, b, c, d

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _key_word(key, i, like):  # type: ignore[no-untyped-def]
        return like * 0 + tl.load(key + i).to(tl.uint32, bitcast=True)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _block(key, counter):  # type: ignore[no-untyped-def]
        """One block of ChaCha20 for each counter; the nonce is zero."""
        nothing = counter * 0
        k0, k1 = _key_word(key, 0, counter), _key_word(key, 1, counter)
        k2, k3 = _key_word(key, 2, counter), _key_word(key, 3, counter)
        k4, k5 = _key_word(key, 4, counter), _key_word(key, 5, counter)
        k6, k7 = _key_word(key, 6, counter), _key_word(key, 7, counter)
        c0 = tl.full(counter.shape, 0x61707865, tl.uint32)
        c1 = tl.full(counter.shape, 0x3320646E, tl.uint32)
        c2 = tl.full(counter.shape, 0x79622D32, tl.uint32)
        c3 = tl.full(counter.shape, 0x6B206574, tl.uint32)
        a0, a1, a2, a3 = c0, c1, c2, c3
        b0, b1, b2, b3, b4, b5, b6, b7 = k0, k1, k2, k3, k4, k5, k6, k7
        d0, d1, d2, d3 = counter, nothing, nothing, nothing
        for _ in range(10):
            a0, b0, b4, d0 = _quarter_round(a0, b0, b4, d0)
            a1, b1, b5, d1 = _quarter_round(a1, b1, b5, d1)
            a2, b2, b6, d2 = _quarter_round(a2, b2, b6, d2)
            a3, b3, b7, d3 = _quarter_round(a3, b3, b7, d3)
            a0, b1, b6, d3 = _quarter_round(a0, b1, b6, d3)
            a1, b2, b7, d0 = _quarter_round(a1, b2, b7, d0)
            a2, b3, b4, d1 = _quarter_round(a2, b3, b4, d1)
            a3, b0, b5, d2 = _quarter_round(a3, b0, b5, d2)
        return (
            _joined(a0 + c0, a1 + c1),
            _joined(a2 + c2, a3 + c3),
            _joined(b0 + k0, b1 + k1),
            _joined(b2 + k2, b3 + k3),
            _joined(b4 + k4, b5 + k5),
            _joined(b6 + k6, b7 + k7),
            _joined(d0 + counter, d1),
            _joined(d2, d3),
        )

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _joined(low, high):  # type: ignore[no-untyped-def]
        """The 64-bit word, read with a sign."""
        word = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
        return word.to(tl.int64, bitcast=True)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _add_one(  # type: ignore[no-untyped-def]
        word,
        place,
        total,
        size,
        spacing,
        per_spacing,
        deviation,
        limit,
        powers,
        missed,
        missed_sums,
        count,
        room,
        CELLS: tl.constexpr,
        FIRST: tl.constexpr,
        FRACTION_BITS: tl.constexpr,
    ):
        """The noise of one word for each lane, added to the lane's coordinate."""
        inside = place < size
        sums = tl.load(total + place, inside, 0.0)
        bits = word.to(tl.float64).to(tl.int64, bitcast=True)
        cell = ((bits >> FRACTION_BITS) & ((1 << (63 - FRACTION_BITS)) - 1)) - FIRST
        position = (bits & ((1 << FRACTION_BITS) - 1)).to(tl.float64)
        there = inside & (cell >= 0) & (cell < CELLS)  # cell == CELLS: p is a half, and z zero
        z = tl.load(powers + 3 * CELLS + cell, there, 0.0)
        z = z * position + tl.load(powers + 2 * CELLS + cell, there, 0.0)
        z = z * position + tl.load(powers + CELLS + cell, there, 0.0)
        z = z * position + tl.load(powers + cell, there, 0.0)
        z = tl.where(word < 0, -z, z)
        shifted = sums * per_spacing
        whole = tl.floor(shifted + 0.5)
        shifted = shifted - whole + z * deviation
        near = tl.floor(shifted + 0.5)
        sure = (tl.abs(shifted - near) <= limit) & (cell >= 0)
        tl.store(total + place, (whole + near) * spacing, inside)
        miss = inside & (sure == 0)
        slot = tl.atomic_add(count + place * 0, 1, miss)
        kept = miss & (slot < room)
        tl.store(missed + slot, place, kept)
        tl.store(missed_sums + slot, sums, kept)

    @triton.jit(do_not_specialize=["size", "room"])  # type: ignore[untyped-decorator, unused-ignore]
    def _add(  # type: ignore[no-untyped-def]
        total,
        size,
        numbers,
        key,
        powers,
        missed,
        missed_sums,
        count,
        room,
        CELLS: tl.constexpr,
        FIRST: tl.constexpr,
        FRACTION_BITS: tl.constexpr,
        BLOCKS: tl.constexpr,
    ):
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        spacing, per_spacing = tl.load(numbers), tl.load(numbers + 1)
        deviation, limit = tl.load(numbers + 2), tl.load(numbers + 3)
        words = _block(key, block.to(tl.uint32))
        for k in tl.static_range(8):
            _add_one(
                words[k],
                block * 8 + k,
                total,
                size,
                spacing,
                per_spacing,
                deviation,
                limit,
                powers,
                missed,
                missed_sums,
                count,
                room,
                CELLS,
                FIRST,
                FRACTION_BITS,
            )

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _store_words(out, key, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
        block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        words = _block(key, block.to(tl.uint32))
        for k in tl.static_range(8):
            tl.store(out + block * 8 + k, words[k])


def add_rounded_gaussian(total: Tensor, grid: Grid, key: bytes) -> tuple[list[int], list[float]]:
    """Coordinates that could not be decided, and what the sum was there; the others are done."""
    size = total.numel()
    if size > cipher.LARGEST:
        raise DiminuendoError(f"A step has {cipher.LARGEST} random words, and {size} are needed.")
    room = 1024 + size // 2**16
    # One buffer to clear, for a count, places and sums; one to send, for numbers and the key.
    handed_back = torch.zeros(1 + 2 * room, dtype=torch.int64, device=total.device)
    sums = handed_back[1 + room :].view(torch.float64)
    numbers = np.array([grid.spacing, 1 / grid.spacing, grid.deviation, grid.limit]).tobytes()
    sent = _sent(numbers + key, total.device)
    with torch.cuda.device_of(total):  # type: ignore[no-untyped-call]
        _add[(triton.cdiv(size, cipher.WORDS_PER_BLOCK * _BLOCKS),)](
            total,
            size,
            sent.view(torch.float64),
            sent.view(torch.int32)[8:],
            _powers(total.device),
            handed_back[1:],
            sums,
            handed_back,
            room,
            CELLS=table.coefficients().shape[1],
            FIRST=(1023 + table.FIRST_OCTAVE) * table.CELLS,
            FRACTION_BITS=52 - table.CELL_BITS,
            BLOCKS=_BLOCKS,
        )
    found = int(handed_back[0].item())
    if found > room:
        raise DiminuendoError(
            "The sum of clipped gradients is not finite, or the GPU's arithmetic is not to be "
            "relied on: nothing is released."
        )
    places = handed_back[1 : 1 + found]
    order = places.argsort()
    return places[order].tolist(), sums[:found][order].tolist()


def keystream(key: bytes, size: int, device: torch.device | str) -> Tensor:
    """`size` words, a multiple of 1024, of the stream that `cipher.keystream` makes, as int64."""
    out = torch.empty(size, dtype=torch.int64, device=device)
    programs = size // (cipher.WORDS_PER_BLOCK * _BLOCKS)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        _store_words[(programs,)](out, _sent(key, out.device).view(torch.int32), BLOCKS=_BLOCKS)
    return out


def _sent(content: bytes, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.int64).to(device, non_blocking=True)


@cache
def _powers(device: torch.device) -> Tensor:
    """The table with positions as whole numbers below 2⁴⁵."""
    scale = 2.0 ** (-(52 - table.CELL_BITS) * np.arange(table.DEGREE + 1))
    return torch.from_numpy(table.coefficients() * scale[:, None]).to(device)
