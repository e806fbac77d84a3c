"""What an adversary does with noise that is not what it claims to be.

Each attack succeeds on `FastNoise`, which is PyTorch's own generator, and fails on `ExactNoise`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from scipy import stats
from small_runs import LOSS, PERCEPTRON, gradient, in_a_fork

import diminuendo as dim
from diminuendo.training import PrivateGradients
from diminuendo.training.clipping import Flat
from diminuendo.training.mechanism import ExactNoise, FastNoise, NoiseName, cipher
from diminuendo.training.mechanism.keys import Keys
from diminuendo.training.seeds import Seeds

Noise = Callable[[int], np.ndarray]
SEED = 7


def fast(size: int) -> np.ndarray:
    """A step's noise of deviation 1 as experiments draw it: in float32."""
    zeros = torch.zeros(size)
    source = FastNoise(Seeds.make(SEED))
    return source.add_noise(zeros, noise_std=1.0, sensitivity=1.0, step=0).double().numpy()


def exact(size: int) -> np.ndarray:
    zeros = torch.zeros(size, dtype=torch.float64)
    source = ExactNoise(Keys.make(SEED))
    noisy = source.add_noise(zeros, noise_std=1.0, sensitivity=1.0, step=0)
    return noisy.float().double().numpy()  # what the parameters' type shows of it


def linear_complexity(bits: Iterable[int]) -> int:
    """Length of the shortest linear recurrence over GF(2) that makes them (Berlekamp, Massey)."""
    recurrence, before, length, since, window = 1, 1, 0, 1, 0
    for n, bit in enumerate(bits):
        window = window << 1 | bit
        if (recurrence & window).bit_count() & 1:
            old, recurrence = recurrence, recurrence ^ before << since
            if 2 * length <= n:
                length, before, since = n + 1 - length, old, 0
        since += 1
    return length


@pytest.mark.parametrize(("noise", "predictable"), [(fast, True), (exact, False)])
def test_signs_that_predict_each_other(noise: Noise, predictable: bool) -> None:
    """The signs of coordinates 8, 24, 40, … are bits of a Mersenne twister's words: after 19,937
    of them every further one is a sum of earlier ones, and noise that can be predicted can be
    subtracted. Of n random bits the complexity is within 40 of n / 2, but for one in 2⁷⁰."""
    count = 40_400
    signs = (noise(16 * count)[8::16] < 0).astype(int).tolist()
    complexity = linear_complexity(signs)
    if predictable:
        assert complexity <= 19_937
    else:
        assert abs(complexity - count / 2) < 40


@pytest.mark.parametrize(("noise", "reachable"), [(fast, True), (exact, False)])
def test_pairs_that_cannot_be(noise: Noise, reachable: bool) -> None:
    """Coordinates j and j + 8 come from one pair of 24-bit uniforms, u = exp(−(a² + b²)/2) is one
    of them: far out, where float32 shows it well enough, it is a multiple of 2⁻²⁴. A sum that is
    wrong by any amount leaves no such trace, so that a single step tells which of two sums it was.

    Distances of uniform numbers to the nearest whole one have mean ¼; the mean of 150 is below 0.1
    with probability exp(−2·150·0.15²/0.25) < 10⁻¹¹ (Hoeffding)."""
    groups = noise(2_000_000).reshape(-1, 2, 8)
    squared = (groups**2).sum(1).ravel()
    far = squared[(squared > 16) & (squared < 25)]
    assert len(far) > 150
    u = np.exp(-far / 2) * 2**24
    distance = np.abs(u - np.round(u)).mean()
    assert (distance < 0.1) is np.bool_(reachable)


def test_tails_that_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """24 bits end at √(2·24·ln 2) = 5.77 deviations, where a claimed δ of 10⁻⁸ has not yet begun.
    The exact noise goes where its bits lead: here to more than 9 deviations, on either side."""
    longest = math.sqrt(-2 * math.log(2**-24))
    assert longest < 5.77
    assert stats.norm.sf(longest) * 2 > 7e-9
    assert np.abs(fast(4_000_000)).max() <= longest + 1e-3

    def extreme(_: bytes, size: int, **__: int) -> np.ndarray:
        return np.resize(np.array([0, 2**64 - 1], np.uint64), size)

    monkeypatch.setattr(cipher, "keystream", extreme)
    ends = exact(4)
    assert (np.abs(ends) > 9).all()
    assert set(np.sign(ends)) == {-1.0, 1.0}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["exact", "fast"])
def test_two_processes_with_one_noise(kind: NoiseName) -> None:
    """A run that is forked, and goes on in both processes on data that differ in one example: with
    the same noise the difference of the two gradients is what that example adds, to the last bit.
    The forked process is refused, and the first goes on."""
    model, plan, (x, y) = PERCEPTRON.model(), PERCEPTRON.plan(), PERCEPTRON.data()
    private = PrivateGradients(model, plan, noise=kind)

    def step() -> list[float]:
        private.backward(LOSS(model(x), y))
        return gradient(model).tolist()

    assert in_a_fork(step).startswith("refused: This process was forked")
    assert step()


def _who_took_part(released: np.ndarray, candidates: list[np.ndarray], noise_std: float) -> int:
    """Which of two sums is behind a noisy one, by the trace that pairs of numbers leave."""
    traces = []
    for candidate in candidates:
        groups = ((released - candidate) / noise_std).reshape(-1, 2, 8)
        squared = (groups**2).sum(1).ravel()
        u = np.exp(-squared[(squared > 14) & (squared < 25)] / 2) * 2**24
        traces.append(np.abs(u - np.round(u)).mean())
    return int(np.argmin(traces))


@pytest.mark.parametrize("kind", ["fast", "exact"])
def test_one_released_step_and_two_candidates(kind: NoiseName) -> None:
    """The whole way: an adversary knows all examples but one, sees `p.grad` of one step of noise
    that allows hardly a guess (μ = 0.1: right in 52 of 100), and says whether the example was in.

    40 games. Fast noise: all are won. With exact noise, 36 and more of 40 would be won by chance
    with probability below 10⁻⁶, for 0.52 a game."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1600, 100, bias=False)
    x, y = torch.randn(4, 1600), torch.arange(4)
    without = x.clone()
    without[0] = 0  # its gradient is zero
    plan = dim.plan(
        dim.Budget(epsilon=1, delta=1e-5), examples=4, parameters=160_000, steps=40, clip=1.0
    ).with_noise_scaled(1.6)
    sigmas = plan.sigmas.tolist()
    assert min(sigmas) > 10
    private = PrivateGradients(model, plan, noise=kind)
    factor = private.engine.sensitivity_factor(kind == "exact")
    won = 0
    for game, sigma in enumerate(sigmas):
        took_part = (game * 7 + 3) % 5 < 2
        sums = []
        for rows in (without, x):
            losses = LOSS(model(rows), y)
            (total,) = private.engine.clipped_sum(losses, Flat(1.0)).sums
            sums.append(total.double().flatten().numpy())
        model.zero_grad()
        private.backward(LOSS(model(x if took_part else without), y))
        assert model.weight.grad is not None
        released = model.weight.grad.double().flatten().numpy() * 4
        won += _who_took_part(released, sums, sigma * factor) == took_part
    assert won == 40 if kind == "fast" else won < 36
