"""Coordinates whose rounding 64 bits do not decide, settled on a GPU: the host need not wait.

`exact.settle` decides with as many bits as it takes. Here a coordinate has 256 bits of U and
arithmetic in pairs of doubles, about 32 digits. What even they leave open, at most a part `OPEN` of
every value's probability, is counted, and part of δ (docs/noise.md).

    K = ⌊x/g + s·Z + ½⌋ is b + ½ if Z ≥ ζ and b − ½ if not, where b is the half-way point next to
    x/g + s·Z and ζ = (b − x/g) / s; and Z ≥ ζ means that U is not below Φ(ζ).

Φ(−|ζ|) comes from a Taylor series around the next multiple of 1/16, where Φ and φ are known to 40
digits more than are used. Every operation of a pair is a sum or a product without rounding errors
(Dekker, Knuth), followed by one of rounding size 2⁻¹⁰⁴.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

from diminuendo.training.mechanism import kernels, normal

OPEN = 2.0**-81
"""The part of a value's probability that stays open, from above."""
STEPS = 16
"""Knots of the table in one standard deviation."""
KNOTS = 13 * STEPS + 1
_TERMS = 30
_DIGITS = 80
_LANES, _PROGRAMS = 64, 8

if kernels.available:
    import triton
    import triton.language as tl

    from diminuendo.training.mechanism.kernels import _block, _cell, _deviation, _in_the_tail

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _sum(a, b):  # type: ignore[no-untyped-def]
        """a + b and what rounding took, for any doubles."""
        total = a + b
        back = total - a
        return total, (a - (total - back)) + (b - back)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _split(a):  # type: ignore[no-untyped-def]
        """Two halves of a double, of 26 bits each."""
        wide = a * 134217729.0
        high = wide - (wide - a)
        return high, a - high

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _product(a, b):  # type: ignore[no-untyped-def]
        """a·b and what rounding took."""
        whole = a * b
        a1, a0 = _split(a)
        b1, b0 = _split(b)
        return whole, ((a1 * b1 - whole) + a1 * b0 + a0 * b1) + a0 * b0

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _plus(ah, al, bh, bl):  # type: ignore[no-untyped-def]
        high, low = _sum(ah, bh)
        more, rest = _sum(al, bl)
        high, low = _sum(high, low + more)
        return _sum(high, low + rest)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _times(ah, al, bh, bl):  # type: ignore[no-untyped-def]
        high, low = _product(ah, bh)
        return _sum(high, low + (ah * bl + al * bh))

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _over(ah, al, b):  # type: ignore[no-untyped-def]
        """A pair divided by a double."""
        first = ah / b
        high, low = _product(first, b)
        high, low = _plus(ah, al, -high, -low)
        second = high / b
        more, less = _product(second, b)
        high, low = _plus(high, low, -more, -less)
        first, second = _sum(first, second)
        return _sum(first, second + high / b)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _below(zh, zl, knots, STEPS: tl.constexpr, KNOTS: tl.constexpr, TERMS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Φ(−z) of a pair z ≥ 0, by Taylor's series around the next knot."""
        at = tl.floor(zh * STEPS + 0.5)
        at = tl.where(at < KNOTS - 1, at, KNOTS - 1)
        hh, hl = _plus(zh, zl, -at / STEPS, 0.0 * zh)
        row = knots + at.to(tl.int64) * 4
        totalh, totall = tl.load(row), tl.load(row + 1)
        knot = at / STEPS
        # Derivatives of φ, times hⁿ/n!: d(n+1) = −h (z d(n) + h d(n−1)) / (n+1).
        dh, dl = tl.load(row + 2), tl.load(row + 3)
        beforeh, beforel = dh * 0.0, dh * 0.0
        for n in range(TERMS):
            # Φ(−z − h) = Φ(−z) − Σ d(n) h / (n+1)
            termh, terml = _times(dh, dl, hh, hl)
            termh, terml = _over(termh, terml, n + 1.0)
            totalh, totall = _plus(totalh, totall, -termh, -terml)
            ah, al = _times(dh, dl, knot, 0.0 * knot)
            bh, bl = _times(beforeh, beforel, hh, hl)
            ah, al = _plus(ah, al, bh, bl)
            ah, al = _times(ah, al, -hh, -hl)
            beforeh, beforel = dh, dl
            dh, dl = _over(ah, al, n + 1.0)
        return totalh, totall

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _tail(first, second, third, fourth, upper):  # type: ignore[no-untyped-def]
        """The distance of U from its nearer end as a pair, from four words of its bits."""
        high, low = upper * 0.0, upper * 0.0
        for k in tl.static_range(8):
            word = first if k < 2 else (second if k < 4 else (third if k < 6 else fourth))
            half = (word >> (32 - 32 * (k % 2))) & 0xFFFFFFFF
            half = tl.where(upper > 0, 0xFFFFFFFF - half, half)
            # no name for the power: Triton would keep it in float32, where the fifth is zero
            part = half.to(tl.float64) * 2.0 ** (-32 * (k + 1))
            high, low = _plus(high, low, part, 0.0 * high)
        return high, low

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _word_at(key, place):  # type: ignore[no-untyped-def]
        """The first word of each coordinate."""
        counter = (place // 8).to(tl.uint32)
        words = _block(key, counter, counter * 0, counter * 0)
        word = words[0]
        for k in tl.static_range(1, 8):
            word = tl.where(place % 8 == k, words[k], word)
        return word

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def _near(  # type: ignore[no-untyped-def]
        tailh, word, powers, CELLS: tl.constexpr, FIRST: tl.constexpr, FRACTION_BITS: tl.constexpr
    ):
        """Z to ten digits: the table's, and in the tails by Newton's steps."""
        cell = _cell(word, FIRST, FRACTION_BITS)
        inner = (cell >= 0) & (cell < CELLS)
        z = _deviation(word, powers, inner, cell, CELLS, FRACTION_BITS)
        q = _in_the_tail(tl.log(tl.where(inner, 1e-9, tailh)))
        return tl.where(inner | (cell >= CELLS), z, tl.where(word < 0, q, -q))

    @triton.jit(do_not_specialize=["room"])  # type: ignore[untyped-decorator, unused-ignore]
    def _settle(  # type: ignore[no-untyped-def]
        out,
        order,
        keys,
        powers,
        knots,
        found,
        places,
        missed,
        faults,
        room,
        KEY: tl.constexpr,
        MORE: tl.constexpr,
        CELLS: tl.constexpr,
        FIRST: tl.constexpr,
        FRACTION_BITS: tl.constexpr,
        STEPS: tl.constexpr,
        KNOTS: tl.constexpr,
        TERMS: tl.constexpr,
        LANES: tl.constexpr,
        PROGRAMS: tl.constexpr,
    ):
        number = tl.load(found)
        spacing, per_spacing = tl.load(order), tl.load(order + 1)
        deviation, divisor = tl.load(order + 2), tl.load(order + 4)
        if (number > room) & (tl.program_id(0) == 0):
            tl.atomic_add(faults, 1, sem="relaxed")
        last = tl.minimum(number, room)
        for start in range(tl.program_id(0) * LANES, last, LANES * PROGRAMS):
            slot = start + tl.arange(0, LANES)
            live = slot < last
            place = tl.load(places + slot, live, 0)
            x = tl.load(missed + slot, live, 0.0)
            word = _word_at(keys + KEY, place)
            low = (place & 0xFFFFFFFF).to(tl.uint32)
            high = (place >> 32).to(tl.uint32)
            more = _block(keys + MORE, low * 0, low, high)
            upper = tl.where(word < 0, 1.0, 0.0)
            tailh, taill = _tail(word, more[0], more[1], more[2], upper)
            z = _near(tailh, word, powers, CELLS, FIRST, FRACTION_BITS)
            shifted = x * per_spacing
            whole = tl.floor(shifted + 0.5)
            rest = shifted - whole
            half = tl.floor(rest + z * deviation) + 0.5  # between the two candidates
            zh, zl = _sum(half, -rest)
            zh, zl = _over(zh, zl, deviation)
            flip = tl.where(zh < 0, -1.0, 1.0)
            below, less = _below(zh * flip, zl * flip, knots, STEPS, KNOTS, TERMS)
            gap, _ = _plus(tailh, taill, -below, -less)
            # U on the other side of ½ than Φ(ζ), or on the same one and nearer to the middle?
            same = (upper > 0) == (zh >= 0)
            above = tl.where(same, tl.where(upper > 0, gap < 0, gap > 0), upper > 0)
            sure = (same == 0) | (tl.abs(gap) > below * 2.0**-94 + 2.0**-250)
            near = tl.where(above, half + 0.5, half - 0.5)
            finite = tl.abs(x) < float("inf")
            value = tl.where(finite, (whole + near) * spacing / divisor, float("nan"))
            tl.store(out + place, value.to(out.dtype.element_ty), live)
            open_ = live & finite & (sure == 0)
            tl.atomic_add(faults + slot * 0, 1, live & (finite == 0), sem="relaxed")
            tl.atomic_add(faults + 1 + slot * 0, 1, open_, sem="relaxed")


def settle(
    out: Tensor, order: Tensor, found: Tensor, places: Tensor, missed: Tensor, faults: Tensor
) -> None:
    """Write the coordinates that were not decided: `found` of `places`, with their sums."""
    keys = order.view(torch.int32)
    with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]
        _settle[(_PROGRAMS,)](
            out,
            order.view(torch.float64),
            keys,
            kernels._powers(out.device),
            _knots(out.device),
            found,
            places,
            missed,
            faults,
            places.numel(),
            KEY=kernels.Order.KEY // 4,
            MORE=kernels.Order.MORE // 4,
            STEPS=STEPS,
            KNOTS=KNOTS,
            TERMS=_TERMS,
            LANES=_LANES,
            PROGRAMS=_PROGRAMS,
            num_warps=2,
            enable_fp_fusion=False,
            **kernels._CELLS,
        )


@cache
def _knots(device: torch.device) -> Tensor:
    """Φ(−z) and φ(z) at the knots, each as a pair of doubles: four numbers for a knot."""
    rows = []
    for knot in range(KNOTS):
        z = Fraction(knot, STEPS)
        rows.append([*_pair(normal.below(-z, _DIGITS)[0]), *_pair(normal.density(z, _DIGITS)[0])])
    return torch.tensor(rows, dtype=torch.float64).to(device)


def _pair(value: Fraction) -> tuple[float, float]:
    high = float(value)
    return high, float(value - Fraction(high))
