"""The rounded Gaussian is the one that its bits define: no error, at ties and in tails either."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diminuendo.errors import DiminuendoError, InputError
from diminuendo.training.mechanism import cipher, cpu, exact, normal, table
from diminuendo.training.mechanism import grid as grids
from diminuendo.training.mechanism.exact import add_rounded_gaussian, settle
from diminuendo.training.mechanism.grid import Grid

KEYS = (bytes(range(32)), bytes(range(1, 33)))


def uniform(place: int) -> mpmath.mpf:
    """A coordinate's U to 128 bits and more."""
    first = int(cipher.keystream(KEYS[0], place + 1)[place])
    more = int(cipher.keystream(KEYS[1], 8, nonce=place)[0])
    return (mpmath.mpf(first) + (mpmath.mpf(more) + mpmath.mpf(1) / 2) / 2**64) / 2**64


def quantile(u: mpmath.mpf) -> mpmath.mpf:
    tail = u if u < 0.5 else 1 - u
    z = mpmath.findroot(
        lambda z: mpmath.log(mpmath.ncdf(z) / tail), mpmath.mpf(float(_guess(float(tail))))
    )
    return z if u < 0.5 else -z


def _guess(tail: float) -> float:
    from scipy.special import ndtri

    return float(ndtri(tail))


def by_definition(x: float, grid: Grid, place: int) -> float:
    """⌊x/g + s·Z + ½⌋ · g in 60 digits."""
    with mpmath.workdps(60):
        y = mpmath.mpf(x) / grid.spacing + grid.deviation * quantile(uniform(place))
        return float(int(mpmath.floor(y + 0.5))) * grid.spacing


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def deviations(signed: torch.Tensor) -> torch.Tensor:
    """What the fast path takes for Z."""
    return cpu.deviations(signed)[0]


@pytest.mark.parametrize("octave", range(table.FIRST_OCTAVE, table.LAST_OCTAVE + 1))
def test_every_polynomial_is_as_near_as_the_proof_needs(octave: int) -> None:
    powers = table.coefficients()
    start = (octave - table.FIRST_OCTAVE) * table.CELLS
    for index in range(table.CELLS):
        bound = table.error_bound(octave, index, powers[:, start + index].tolist())
        assert bound <= Fraction(table.ERROR) * Fraction(11, 20)


def test_the_table_is_the_one_that_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "FIRST_OCTAVE", 62)
    assert np.array_equal(table.build(), table.coefficients()[:, -table.CELLS :])


def test_a_damaged_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_DIGEST", "0" * 64)
    with pytest.raises(DiminuendoError, match="damaged"):
        table.coefficients.__wrapped__()


def test_computed_deviations_at_cell_edges_and_at_random() -> None:
    """As the machine computes them, with all that rounding does, for any further bits."""
    random = np.random.default_rng(5)
    edges = [
        sign * (((table.CELLS + index) << (octave - table.CELL_BITS)) + shift)
        for octave in (38, 39, 50, 61, 62)
        for index in (0, 1, 63, 127)
        for shift in (0, 1, -1)
        for sign in (1, -1)
        if octave > 38 or shift >= 0 or index > 0
    ]
    edges += [2**63 - 1, -(2**63), -(2**63) + 1, 2**63 - 512, 2**63 - 513]
    edges += (random.integers(-(2**63), 2**63 - 1, 100)).tolist()
    computed = deviations(words(*edges))
    with mpmath.workdps(50):
        for word, z in zip(edges, computed.tolist(), strict=True):
            for more in (0, 1):  # both ends of what further bits may do
                u = mpmath.mpf(word % 2**64 + more) / 2**64
                if 0 < u < 1:
                    assert abs(z - quantile(u)) < table.ERROR, (word, more)


def test_beyond_the_table_nothing_is_decided() -> None:
    far = deviations(words(0, 1, -1, 2**37, -(2**37), 2**38 - 1, 1 - 2**38))
    assert torch.isnan(far).all()
    assert not torch.isnan(deviations(words(2**38, -(2**38), 2**62, -(2**63), 2**63 - 1))).any()


@pytest.mark.parametrize("noise_std", [7.3, 1.0, 1e-12, 3e20])
def test_results_are_those_of_the_definition(noise_std: float) -> None:
    grid = Grid.of(noise_std)
    sums = torch.randn(120, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sums *= 3 * noise_std
    noisy = add_rounded_gaussian(sums.clone(), noise_std, KEYS)
    for place in range(120):
        expected = by_definition(float(sums[place]), grid, place)
        assert float(noisy[place]) == expected
        if place < 20:
            assert settle(float(sums[place]), grid, KEYS, place) == expected


def test_sums_at_the_edge_of_a_cell() -> None:
    """x is put so that x/g + s·Z is within 10⁻¹⁰ of a tie, on either side: all are refined."""
    grid, sums = Grid.of(1.0), []
    with mpmath.workdps(60):
        for place in range(200):
            tie = mpmath.mpf(place % 7) + 0.5 - grid.deviation * quantile(uniform(place))
            near = float(tie * grid.spacing)
            sums.append(math.nextafter(near, math.inf if place % 2 else -math.inf))
    total = torch.tensor(sums, dtype=torch.float64)
    undecided, _ = cpu.add_rounded_gaussian(total.clone(), grid, KEYS[0])
    assert undecided == list(range(200))
    noisy = add_rounded_gaussian(total.clone(), 1.0, KEYS)
    expected = [by_definition(x, grid, place) for place, x in enumerate(sums)]
    assert noisy.tolist() == expected
    sides = {round(y / grid.spacing) - place % 7 for place, y in enumerate(expected)}
    assert sides == {0, 1}


@given(st.integers(-(2**53), 2**53), st.floats(-1, 1))
def test_the_fast_path_and_the_refinement_agree(whole: int, part: float) -> None:
    """For sums of any size: what does not fit into the noise's digits is added exactly."""
    grid = Grid.of(1.0)
    x = (whole + part) * grid.spacing
    noisy = add_rounded_gaussian(torch.full((9,), x, dtype=torch.float64), 1.0, KEYS)
    assert noisy.tolist() == [settle(x, grid, KEYS, place) for place in range(9)]


@pytest.mark.parametrize("size", [2.0**60, -(2.0**80), 1e300, 5e-324, -0.0])
def test_sums_far_from_the_noise(size: float) -> None:
    grid = Grid.of(1.0)
    noisy = add_rounded_gaussian(torch.full((20,), size, dtype=torch.float64), 1.0, KEYS)
    for place in range(20):
        assert float(noisy[place]) == settle(size, grid, KEYS, place)


@pytest.mark.parametrize(
    ("first", "more", "least"),
    [
        (0, 2**64 - 1, 9.0),
        (0, 0, 13.0),
        (2**64 - 1, 2**63, 9.0),
        (2**64 - 1, 2**64 - 1, 13.0),
        (2**37, 5, 5.6),
        (2**20, 5, 7.4),
    ],
)
def test_tails_have_no_end(
    monkeypatch: pytest.MonkeyPatch, first: int, more: int, least: float
) -> None:
    """Bits that lead far out lead there: nothing is cut off or rounded to a largest value."""
    start, then = first, more

    def fixed(key: bytes, size: int, *, first: int = 0, **_: int) -> object:
        if key == KEYS[0]:
            return np.full(size, start, np.uint64)
        return np.array([then, *[2**63 + first] * (size - 1)], np.uint64)

    monkeypatch.setattr(cipher, "keystream", fixed)
    noisy = add_rounded_gaussian(torch.zeros(3, dtype=torch.float64), 1.0, KEYS)
    with mpmath.workdps(60):
        u = (mpmath.mpf(first * 2**64 + more) + 0.5) / 2**128
        expected = float(quantile(u))
    assert noisy == pytest.approx(expected, abs=1 / grids.GRID)
    assert noisy.abs().min() > least


@pytest.mark.parametrize("digits", [20, 60, 200])
def test_the_distribution_function_lies_within_its_bounds(digits: int) -> None:
    with mpmath.workdps(digits + 30):
        for z in (Fraction(0), Fraction(1, 10**9), Fraction(-5, 7), Fraction(4), Fraction(-31, 3)):
            value = mpmath.ncdf(mpmath.mpf(z.numerator) / z.denominator)
            low, high = normal.below(z, digits)
            assert mpmath.mpf(low.numerator) / low.denominator < value
            assert value < mpmath.mpf(high.numerator) / high.denominator
            assert high - low <= Fraction(1, 10**digits)
            low, high = normal.density(z, digits)
            value = mpmath.npdf(mpmath.mpf(z.numerator) / z.denominator)
            assert mpmath.mpf(low.numerator) / low.denominator < value
            assert value < mpmath.mpf(high.numerator) / high.denominator


def test_more_bits_are_taken_until_the_comparison_is_decided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """U agrees with Φ(z) in 700 bits: no fixed number of bits would be enough."""
    z = Fraction(1, 3)
    low, _ = normal.below(z, 400)
    for shift, expected in ((-1, True), (1, False)):
        bits = math.floor(low * 2**1088) + shift * 2**380

        def fixed(key: bytes, size: int, *, first: int = 0, bits: int = bits, **_: int) -> object:
            whole = [(bits >> (1088 - 64 * (i + 1))) % 2**64 for i in range(17)]
            part = whole[:1] * size if key == KEYS[0] else whole[1 + first : 9 + first]
            return np.array(part, np.uint64)

        monkeypatch.setattr(cipher, "keystream", fixed)
        drawn = exact._Uniform(KEYS, 0)
        assert drawn.is_below(z) is expected
        assert drawn._known >= 576


def test_the_grid_is_public_and_fine_and_the_noise_not_below_what_was_asked() -> None:
    for noise_std in (1.0, 0.3, 2**0.5, 1e-30, 123456.789):
        grid = Grid.of(noise_std)
        assert math.frexp(grid.spacing)[0] == 0.5, "a power of two"
        assert Fraction(grid.deviation) * Fraction(grid.spacing) > Fraction(noise_std)
        assert grids.GRID <= grid.deviation <= 2 * grids.GRID
    for bad in (0.0, math.inf, math.nan, -1.0, 1e-300):
        with pytest.raises(InputError):
            Grid.of(bad)


def test_blocks_and_threads_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = torch.randn(5_003, dtype=torch.float64)
    whole = add_rounded_gaussian(sums.clone(), 2.0, KEYS)
    monkeypatch.setattr(cpu, "_BLOCK", 512)
    assert torch.equal(add_rounded_gaussian(sums.clone(), 2.0, KEYS), whole)
    assert torch.equal(add_rounded_gaussian(sums[:77].clone(), 2.0, KEYS), whole[:77])
    assert add_rounded_gaussian(sums[:0].clone(), 2.0, KEYS).numel() == 0


def test_a_sum_that_is_not_finite_is_refused() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(DiminuendoError, match="not finite"):
            add_rounded_gaussian(torch.tensor([0.0, bad], dtype=torch.float64), 1.0, KEYS)


@pytest.mark.parametrize(
    "total", [torch.zeros(3), torch.zeros(2, 2).double(), torch.zeros(6).double()[::2]]
)
def test_what_is_not_flat_and_double_is_refused(total: torch.Tensor) -> None:
    with pytest.raises(InputError):
        add_rounded_gaussian(total, 1.0, KEYS)


def test_polynomials_of_the_word_are_those_of_the_position() -> None:
    """Multiplied out in double precision they move by less than E/500; in exact arithmetic."""
    cells, powers = table.coefficients(), cpu.in_powers_of_the_word()
    moved, size = Fraction(0), Fraction(0)
    for number in range(cells.shape[1]):
        left = table.CELLS + number % table.CELLS
        width = table.FIRST_OCTAVE - table.CELL_BITS + number // table.CELLS
        given = [Fraction(c) for c in cells[:, number].tolist()]
        wanted = [
            sum(math.comb(k, j) * Fraction(-left) ** (k - j) * given[k] for k in range(j, 4))
            for j in range(4)
        ]
        found = [Fraction(float(powers[j, number])) * 2 ** (width * j) for j in range(4)]
        ends = [Fraction(left + 1) ** j for j in range(4)]
        moved = max(moved, sum(abs(a - b) * x for a, b, x in zip(wanted, found, ends, strict=True)))
        size = max(size, sum(abs(b) * x for b, x in zip(found, ends, strict=True)))
    assert moved < Fraction(table.ERROR) / 500
    assert size < 8, "what the rounding of Horner's scheme is relative to"


@pytest.mark.parametrize("cells", [2.0**30, 2.0**30 + 2, 2.0**29, 3e9, 2.0**45])
def test_sums_about_as_large_as_can_be_added_as_they_are(cells: float) -> None:
    grid = Grid.of(1.0)
    sums = (cells + torch.arange(40, dtype=torch.float64) / 3) * grid.spacing
    noisy = add_rounded_gaussian(sums.clone(), 1.0, KEYS)
    expected = [by_definition(x, grid, place) for place, x in enumerate(sums.tolist())]
    assert noisy.tolist() == expected
