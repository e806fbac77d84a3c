"""Noise multipliers and learning rates together: the least expected loss of both.

With learning rates s_1…s_T (units of 1/M) the noise of step t arrives with q_t, and after the best
noise for these q the loss is, as a share of the initial one,

    Σ_i share_i Π_t f_i(s_t)  +  α (Σ_t q_t^r)^{1/r}  +  g Σ_t q_t,
    q_t = s_t² Σ_i weight_i Π_{u>t} f_i(s_u).

f_i(s) is what a step leaves of the squared distance along direction i: (1 − sλ_i/M)² on a
quadratic, 1 − (1−γ)s(2−s) under the PL condition. r = 1/2 for full batches (the lemma); under
Poisson sampling, where a step's price falls like σ^{−2k} around the noise in use, r = k/(k+1). g is
noise that no plan lowers: that of sampling the gradients.

For one curvature every choice of learning rates that reaches the same bias has the same noise term
at g = 0: Σ s_tλ Π_{u>t}(1−s_uλ) telescopes. So it is, to first order in sλ, for every spectrum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from diminuendo import _validate
from diminuendo._validate import Vector

MOST_BLOCKS = 200
_LEAST = 1e-7
_ITERATIONS = 200
_FEW = 30
_DIVERGED = 1e300
"""What a loss counts as that overflows: more than any other, and nowhere to go from."""


@dataclass(frozen=True, eq=False)
class JointProblem:
    """What the learning rates are chosen for; all numbers without unit, learning rates in 1/M.

    curvatures   λ_i/M in [0, 1], or None under the PL condition with rate `gamma`
    weights      what a unit of noise along direction i costs in loss; λ_i/M over their number
    shares       how the initial loss is divided among the directions, summing to one
    alpha        α, the noise level of the bound
    sampling     g, the noise of sampled gradients, in units of α·R·σ²
    power        r in [1/2, 1)
    limit        the longest step, in units of 1/M
    """

    curvatures: Vector | None
    weights: Vector
    shares: Vector
    alpha: float
    gamma: float = 0.0
    sampling: float = 0.0
    power: float = 0.5
    limit: float = 2.0

    def loss(self, lr: Vector) -> float:
        """The expected loss of T steps with these learning rates, as a share of the initial one."""
        log_left = self._left(lr)[0]
        with np.errstate(over="ignore", invalid="ignore"):
            after = np.cumsum(log_left[::-1], axis=0)[::-1]
            final = float(self.shares @ np.exp(after[0]))
            reached = np.append(np.exp(after[1:]) @ self.weights, self.weights.sum())
            q = np.maximum(lr**2 * reached, 1e-290)
            planned = float((q**self.power).sum()) ** (1 / self.power)
            loss = final + self.alpha * planned + self.sampling * float(q.sum())
        return loss if math.isfinite(loss) else _DIVERGED

    def bias(self, lr: Vector) -> float:
        """What these learning rates leave of the start, as a share of the initial loss."""
        return float(self.shares @ np.exp(self._left(lr)[0].sum(axis=0)))

    def solve(self, steps: int, *, blocks: int = MOST_BLOCKS) -> Vector:
        """s_1…s_T in units of 1/M, each in [1e-7, 1]·limit: a local minimum of `loss`.

        Up to `blocks` steps are unknowns of their own; longer runs are solved in so many blocks of
        equal learning rates, single steps at the end and longer ones before it; the common factor
        is then found once more on all steps.
        """
        steps = _validate.count("steps", steps)
        blocks = min(steps, blocks)
        sizes = _block_sizes(steps, blocks)
        least = _LEAST * self.limit
        bounds = [(math.log(least), math.log(self.limit))] * blocks
        best: tuple[float, Vector] | None = None
        for start in self._starts(sizes):
            found = minimize(
                self._log_objective,
                np.log(np.clip(start, least, self.limit)),
                args=(sizes,),
                jac=True,
                bounds=bounds,
                method="L-BFGS-B",
                options={"maxiter": _ITERATIONS, "maxcor": 20, "ftol": 1e-12, "gtol": 1e-8},
            )
            if best is None or found.fun < best[0]:
                best = float(found.fun), np.exp(found.x)
        assert best is not None  # there are starts
        lr = np.repeat(best[1], sizes.astype(int))
        if blocks == steps:
            return lr
        scale = minimize_scalar(
            lambda factor: self.loss(np.minimum(math.exp(factor) * lr, self.limit)),
            bounds=(-0.2, 0.2),
            method="bounded",
            options={"xatol": 1e-3},
        )
        return np.asarray(np.minimum(math.exp(float(scale.x)) * lr, self.limit))

    def _starts(self, sizes: Vector) -> list[Vector]:
        """The best constant learning rate, and the best of those that change with the steps left.

        Few steps that may be long have many local minima, and the last digits of a sum decide in
        which one a search ends; so they start from several shapes, rising ones too, and where
        steps may be longer than stable from one that ends a slow direction at once, before short
        ones undo what it did to the others. Long runs start from the better of two: there all
        schedules are nearly equal.
        """
        left = np.cumsum(sizes[::-1])[::-1] - sizes / 2
        bends = np.array([0.0, 10, 1, 3, 30] if sizes.size <= _FEW else [0.0, 10])
        shapes = list(1 / (1 + bends[:, None] * left / left[0]))
        if sizes.size <= _FEW:
            shapes += [shape[::-1] for shape in shapes[1:]]
        starts = [self._best_multiple(shape, sizes) for shape in shapes]
        if sizes.size <= _FEW and self.limit > 2 and self.curvatures is not None:
            moving = self.curvatures[self.curvatures > 0]
            after = 1 / np.arange(1.0, sizes.size)
            starts += [np.append(1 / slow, after) for slow in (moving.min(), np.median(moving))]
        if sizes.max() == 1:
            return starts
        return [min(starts, key=lambda start: self._evaluate(start, sizes)[0])]

    def _best_multiple(self, shape: Vector, sizes: Vector) -> Vector:
        def loss(factor: float) -> float:
            return self._evaluate(np.minimum(math.exp(factor) * shape, self.limit), sizes)[0]

        grid = math.log(self.limit) + np.log(np.geomspace(1e-5, 10, 19))
        best = grid[int(np.argmin([loss(factor) for factor in grid]))]
        near = (best - (grid[1] - grid[0]), best + (grid[1] - grid[0]))
        found = minimize_scalar(loss, bounds=near, method="bounded", options={"xatol": 1e-3})
        factor = min(float(found.x), float(best), key=loss)
        return np.asarray(np.minimum(math.exp(factor) * shape, self.limit))

    def _log_objective(self, x: Vector, sizes: Vector) -> tuple[float, Vector]:
        lr = np.exp(x)
        loss, gradient = self._evaluate(lr, sizes)
        return math.log(loss), gradient * lr / loss

    def _left(self, lr: Vector) -> tuple[Vector, Vector]:
        """ln f_i(s) and its derivative in s, for each block and direction."""
        s = lr[:, None]
        if self.curvatures is None:
            left = 1 - (1 - self.gamma) * s * (2 - s)
            left = np.maximum(left, 1e-300)
            return np.log(left), -2 * (1 - self.gamma) * (1 - s) / left
        factor = 1 - s * self.curvatures
        factor = np.where(np.abs(factor) < 1e-8, np.copysign(1e-8, factor), factor)
        return 2 * np.log(np.abs(factor)), -2 * self.curvatures / factor

    @np.errstate(over="ignore", invalid="ignore")
    def _evaluate(self, lr: Vector, sizes: Vector) -> tuple[float, Vector]:
        """The loss and its gradient in the blocks' learning rates.

        A block of m equal steps leaves f^m. Its noise is that of the mean influence in it, which
        is exact for the sampling term and not below the truth for the planned one.
        """
        log_left, slope = self._left(lr)
        m = sizes[:, None]
        mean, bend = _mean_power(log_left, m)
        after = np.cumsum((m * log_left)[::-1], axis=0)[::-1]
        log_final = after[0]
        after = np.vstack([after[1:], np.zeros(log_final.size)])
        reached = self.weights * np.exp(after) * mean
        q = np.maximum(lr**2 * reached.sum(axis=1), 1e-290)
        powers = sizes * q**self.power
        total = float(powers.sum())
        final = self.shares * np.exp(log_final)
        noise = self.alpha * total ** (1 / self.power)
        loss = float(final.sum()) + noise + self.sampling * float(sizes @ q)
        price = self.alpha * total ** (1 / self.power - 1) * powers / q + self.sampling * sizes
        mass = (price * lr**2)[:, None] * reached
        before = np.vstack([np.zeros(log_final.size), np.cumsum(mass, axis=0)[:-1]]) + final
        gradient = 2 * price * q / lr + np.sum(slope * (m * before + bend * mass), axis=1)
        if not (math.isfinite(loss) and np.isfinite(gradient).all()):
            return _DIVERGED, np.zeros_like(lr)
        return loss, gradient


def _block_sizes(steps: int, blocks: int) -> Vector:
    """Numbers of steps in each block, in the order of the run; single ones at the end."""
    if blocks == steps:
        return np.ones(steps)
    single = blocks // 2
    far = np.geomspace(single, steps, blocks - single + 1)
    edges = np.unique(np.round(np.concatenate([np.arange(single), far])))
    return np.asarray(np.diff(edges)[::-1])


def _mean_power(log_f: Vector, m: Vector) -> tuple[Vector, Vector]:
    """(1 + f + … + f^{m−1})/m and its derivative in ln f over itself; 1 and 0 for single steps."""
    mean, bend = np.ones_like(log_f), np.zeros_like(log_f)
    several = m[:, 0] > 1
    log_f, m = log_f[several], m[several]
    small = np.abs(m * log_f) < 1e-4
    safe = np.where(small, -1.0, log_f)
    over, one = np.expm1(m * safe), np.expm1(safe)
    mean[several] = np.where(small, 1 + 0.5 * (m - 1) * log_f, over / (m * one))
    bend[several] = np.where(small, 0.5 * (m - 1), m - 1 + m / over - 1 / one)
    return mean, bend
