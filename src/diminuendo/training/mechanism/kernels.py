"""The cipher and the rounded Gaussian on a GPU, in one kernel: the numbers that a CPU makes.

Needs Triton, which comes with PyTorch's CUDA builds; `available` says whether it is there. The
sum is read once and the gradient written once. Coordinates that double precision cannot decide,
about one in twenty million, are listed, and `settling` decides them on the GPU: the host waits for
nothing. What a step needs (`Order`) is read from the device's memory, so that the same launches
serve every step.
"""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Sequence
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
_FAST = 256

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
    def _block(key, counter, nonce_low, nonce_high):  # type: ignore[no-untyped-def]
        """One block of ChaCha20 for each counter and nonce."""
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
        d0, d1, d2, d3 = counter, nonce_low, nonce_high, nothing
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
            _joined(d0 + counter, d1 + nonce_low),
            _joined(d2 + nonce_high, d3),
        )

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _joined(low, high):  # type: ignore[no-untyped-def]
        """The 64-bit word, read with a sign."""
        word = (high.to(tl.uint64) << 32) | low.to(tl.uint64)
        return word.to(tl.int64, bitcast=True)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _in_order(words, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
        """The eight words of each block, one block after the other."""
        a = tl.permute(tl.join(tl.join(words[0], words[1]), tl.join(words[2], words[3])), (0, 2, 1))
        b = tl.permute(tl.join(tl.join(words[4], words[5]), tl.join(words[6], words[7])), (0, 2, 1))
        pair = tl.join(tl.reshape(a, (BLOCKS, 4)), tl.reshape(b, (BLOCKS, 4)))
        return tl.reshape(tl.permute(pair, (0, 2, 1)), (BLOCKS * 8,))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _words(key, first, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Words of consecutive blocks of the stream with nonce zero."""
        counter = (first + tl.arange(0, BLOCKS)).to(tl.uint32)
        return _in_order(_block(key, counter, counter * 0, counter * 0), BLOCKS)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _deviation(word, powers, there, cell, CELLS: tl.constexpr, FRACTION_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
        """The cubic of a word's cell."""
        bits = word.to(tl.float64).to(tl.int64, bitcast=True)
        position = (bits & ((1 << FRACTION_BITS) - 1)).to(tl.float64)
        z = tl.load(powers + 3 * CELLS + cell, there, 0.0)
        z = z * position + tl.load(powers + 2 * CELLS + cell, there, 0.0)
        z = z * position + tl.load(powers + CELLS + cell, there, 0.0)
        z = z * position + tl.load(powers + cell, there, 0.0)
        return tl.where(word < 0, -z, z)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _cell(word, FIRST: tl.constexpr, FRACTION_BITS: tl.constexpr):  # type: ignore[no-untyped-def]
        """The cell of |word|: negative in the tails, 3,200 where it is 2⁶³ and z is zero."""
        bits = word.to(tl.float64).to(tl.int64, bitcast=True)
        return ((bits >> FRACTION_BITS) & ((1 << (63 - FRACTION_BITS)) - 1)) - FIRST

    @triton.jit(do_not_specialize=["size", "offset", "room"])  # type: ignore[untyped-decorator, unused-ignore]
    def _release(  # type: ignore[no-untyped-def]
        sums,
        out,
        size,
        offset,
        order,
        key,
        powers,
        found,
        places,
        missed,
        room,
        CELLS: tl.constexpr,
        FIRST: tl.constexpr,
        FRACTION_BITS: tl.constexpr,
        BLOCKS: tl.constexpr,
    ):
        """`out` = (rounded noisy `sums`) / divisor, for the coordinates from `offset` on."""
        block = offset // 8 + tl.program_id(0).to(tl.int64) * BLOCKS
        word = _words(key, block, BLOCKS)
        place = block * 8 + tl.arange(0, BLOCKS * 8) - offset
        inside = (place >= 0) & (place < size)
        spacing, per_spacing = tl.load(order), tl.load(order + 1)
        deviation, limit, divisor = tl.load(order + 2), tl.load(order + 3), tl.load(order + 4)
        total = tl.load(sums + place, inside, 0.0).to(tl.float64)
        cell = _cell(word, FIRST, FRACTION_BITS)
        z = _deviation(word, powers, (cell >= 0) & (cell < CELLS), cell, CELLS, FRACTION_BITS)
        shifted = total * per_spacing
        whole = tl.floor(shifted + 0.5)
        shifted = shifted - whole + z * deviation
        near = tl.floor(shifted + 0.5)
        sure = (tl.abs(shifted - near) <= limit) & (cell >= 0)
        value = (whole + near) * spacing / divisor
        tl.store(out + place, value.to(out.dtype.element_ty), inside)
        miss = inside & (sure == 0)
        if tl.max(miss.to(tl.int32), 0) > 0:
            slot = tl.atomic_add(found + place * 0, 1, miss, sem="relaxed")
            kept = miss & (slot < room)
            tl.store(places + slot, offset + place, kept)
            tl.store(missed + slot, total, kept)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _in_the_tail(logarithm):  # type: ignore[no-untyped-def]
        """The z ≥ 0 for which log Φ(−z) is this, to ten digits, for Φ(−z) below 1e-3."""
        # log Φ(−z) = log φ(z) − log(z + 1/(z + 2/(z + …))), by Newton's steps
        z = tl.sqrt(-2.0 * logarithm)
        for _ in range(8):
            rest = z * 0.0
            for k in tl.static_range(60):
                rest = (60 - k) / (z + rest)
            mills = 1.0 / (z + rest)
            value = -0.5 * z * z - 0.91893853320467274178 + tl.log(mills)
            z = z + (value - logarithm) * mills
        return z

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _normal(  # type: ignore[no-untyped-def]
        out,
        size,
        key,
        powers,
        CELLS: tl.constexpr,
        FIRST: tl.constexpr,
        FRACTION_BITS: tl.constexpr,
        BLOCKS: tl.constexpr,
    ):
        """Standard normal numbers of 64 bits each."""
        block = tl.program_id(0).to(tl.int64) * BLOCKS
        word = _words(key, block, BLOCKS)
        place = block * 8 + tl.arange(0, BLOCKS * 8)
        cell = _cell(word, FIRST, FRACTION_BITS)
        z = _deviation(word, powers, (cell >= 0) & (cell < CELLS), cell, CELLS, FRACTION_BITS)
        tail = cell < 0
        if tl.max(tail.to(tl.int32), 0) > 0:
            size_of = tl.abs(word.to(tl.float64)) + 0.5
            far = _in_the_tail(tl.log(tl.where(tail, size_of, 1.0)) - 44.361419555836499802)
            z = tl.where(tail, tl.where(word < 0, far, -far), z)
        tl.store(out + place, z, place < size)

    @triton.jit(do_not_specialize=["size", "offset"])  # type: ignore[untyped-decorator, unused-ignore]
    def _release_fast(sums, out, size, offset, order, seed, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """`out` = (`sums` + Triton's normal numbers in float32) / divisor."""
        program = tl.program_id(0)
        place = program.to(tl.int64) * (BLOCK * 4) + tl.arange(0, BLOCK * 4)
        # another first number of a block for each part of the sums: parts begin anywhere
        block = offset // 4 + program * BLOCK + tl.arange(0, BLOCK)
        a, b, c, d = tl.randn4x(tl.load(seed) + offset % 4, block.to(tl.int32))
        noise = tl.reshape(tl.join(tl.join(a, b), tl.join(c, d)), (BLOCK * 4,))
        total = tl.load(sums + place, place < size, 0.0)
        value = total + noise * tl.load(order).to(tl.float32)
        value = value / tl.load(order + 1).to(tl.float32)
        tl.store(out + place, value.to(out.dtype.element_ty), place < size)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _store_words(out, key, BLOCKS: tl.constexpr):  # type: ignore[no-untyped-def]
        block = tl.program_id(0).to(tl.int64) * BLOCKS
        tl.store(out + block * 8 + tl.arange(0, BLOCKS * 8), _words(key, block, BLOCKS))


class Faults:
    """Two counters in a device's memory: sums that were not finite, and coordinates left open."""

    def __init__(self, device: torch.device) -> None:
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)

    def check(self) -> None:
        """Raise where a sum was not finite, which clipped gradients never are; the host waits."""
        if int(self.counts[0]):
            raise DiminuendoError(
                "The sum of clipped gradients was not finite, or the GPU's arithmetic is not to be "
                "relied on. The gradient of that step is no number: nothing was released by it."
            )


class Order:
    """What the noise of a step needs, as bytes to send to a device: five doubles, two keys."""

    DOUBLES = 5
    KEY, MORE = 8 * DOUBLES, 8 * DOUBLES + 32
    BYTES = MORE + 32

    @staticmethod
    def of(grid: Grid, keys: tuple[bytes, bytes], divisor: float) -> bytes:
        """The numbers of the grid, what everything is divided by, and the keys."""
        numbers = grid.spacing, 1 / grid.spacing, grid.deviation, grid.limit, divisor
        return struct.pack("<5d", *numbers) + keys[0] + keys[1]


def release(sums: Sequence[Tensor], out: Tensor, order: Tensor, faults: Faults) -> None:
    """Write the noisy sums over the divisor into `out`; the host waits for nothing.

    sums    contiguous, float32 or float64, one after the other the coordinates of `out`; may be
            parts of `out` itself
    out     flat, float32 or float64
    order   the bytes of an `Order`, on the device
    """
    from diminuendo.training.mechanism import settling

    size, device = out.numel(), out.device
    if size > cipher.LARGEST:
        raise DiminuendoError(f"A step has {cipher.LARGEST} random words, and {size} are needed.")
    room = 1024 + size // 2**16
    found = torch.zeros(1, dtype=torch.int64, device=device)
    places = torch.empty(room, dtype=torch.int64, device=device)
    missed = torch.empty(room, dtype=torch.float64, device=device)
    keys = order.view(torch.int32)
    offset = 0
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        for part in sums:
            blocks = triton.cdiv(offset % 8 + part.numel(), cipher.WORDS_PER_BLOCK)
            _release[(triton.cdiv(blocks, _BLOCKS),)](
                part,
                out[offset:],
                part.numel(),
                offset,
                order.view(torch.float64),
                keys[Order.KEY // 4 :],
                _powers(device),
                found,
                places,
                missed,
                room,
                BLOCKS=_BLOCKS,
                **_CELLS,
            )
            offset += part.numel()
    settling.settle(out, order, found, places, missed, faults.counts)


def release_fast(sums: Sequence[Tensor], outs: Sequence[Tensor], order: Tensor) -> None:
    """The same, part by part, with noise that is private in real arithmetic only; `order` is a
    deviation, a divisor and a seed."""
    offset = 0
    for part, out in zip(sums, outs, strict=True):
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
            _release_fast[(triton.cdiv(part.numel(), 4 * _FAST),)](
                part,
                out,
                part.numel(),
                offset,
                order.view(torch.float64),
                order[2:],
                BLOCK=_FAST,
            )
        offset += part.numel()


def normal(size: int, key: Tensor) -> Tensor:
    """Standard normal numbers in float64 from a key on the device, for `clipping.certificate`."""
    out = torch.empty(size, dtype=torch.float64, device=key.device)
    programs = triton.cdiv(size, cipher.WORDS_PER_BLOCK * _BLOCKS)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        _normal[(programs,)](
            out, size, key.view(torch.int32), _powers(key.device), BLOCKS=_BLOCKS, **_CELLS
        )
    return out


def keystream(key: bytes, size: int, device: torch.device | str) -> Tensor:
    """`size` words, a multiple of 1024, of the stream that `cipher.keystream` makes, as int64."""
    out = torch.empty(size, dtype=torch.int64, device=device)
    programs = size // (cipher.WORDS_PER_BLOCK * _BLOCKS)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        _store_words[(programs,)](out, sent(key, out.device).view(torch.int32), BLOCKS=_BLOCKS)
    return out


def sent(content: bytes, device: torch.device) -> Tensor:
    """Bytes, as many as whole words of 64 bits, on a device."""
    words = torch.frombuffer(bytearray(content), dtype=torch.int64)
    return pinned(words).to(device, non_blocking=True)


def pinned(content: Tensor) -> Tensor:
    """The same in page-locked memory of PyTorch's, which is not used again before copies that
    nobody waits for have been made: of other memory that cannot be said of every machine."""
    return content if content.is_pinned() else content.pin_memory()


_CELLS = {
    "CELLS": table.coefficients().shape[1],
    "FIRST": (1023 + table.FIRST_OCTAVE) * table.CELLS,
    "FRACTION_BITS": 52 - table.CELL_BITS,
}


@cache
def _powers(device: torch.device) -> Tensor:
    """The table with positions as whole numbers below 2⁴⁵."""
    scale = 2.0 ** (-(52 - table.CELL_BITS) * np.arange(table.DEGREE + 1))
    return torch.from_numpy(table.coefficients() * scale[:, None]).to(device)
