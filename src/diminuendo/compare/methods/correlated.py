"""Noise that is correlated over steps: matrix factorisation for full batches.

Released are g_t + C·σ·(M⁻¹z)_t for a lower triangular matrix M with entries ≥ 0: a post-processing
of M·g + C·σ·z. An example's gradients of norm at most C, one in each step, move M·g by at most
C·‖M·1‖, because ‖M·g‖² = Σ_{s,t} (MᵀM)_{st}⟨g_s, g_t⟩ and no entry of MᵀM is negative. That holds
for gradients chosen by what was released (Denisov, McMahan, Rush, Smith and Thakurta 2022).

For one influence curve q, independent noise of the lemma's shape is as good as any M: the final
noise is ‖wᵀM⁻¹‖·‖M·1‖ with w_t = √q_t, and that is at least wᵀ1 (Cauchy and Schwarz), which
σ_t ∝ q_t^{−1/4} reaches. Correlation can only help where several curves matter at once.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import toeplitz
from torch import Tensor

from diminuendo._validate import Vector
from diminuendo.compare import mixed
from diminuendo.compare.clips import Flat
from diminuendo.compare.method import COMMON, Method, Range, Settings
from diminuendo.compare.private import Private

_CLAIM = "One Gaussian release of M·g, of sensitivity C·‖M·1‖: paid as a whole before the first."


def _descend(private: Private, settings: Settings, matrix: Vector) -> Tensor:
    noise = mixed.everybody(private, matrix, mixed.whole_budget(private, matrix))
    theta, rule = private.start(), Flat(settings["clip"])
    for t in range(len(matrix)):
        theta = theta - settings["lr"] * noise.gradient(t, theta, rule)
    return theta


def banded_square_root(steps: int, band: int) -> Vector:
    """The lower triangular square root of the matrix of prefix sums, cut to a band."""
    first = np.cumprod([1.0, *((2 * k - 1) / (2 * k) for k in range(1, steps))])
    first[band:] = 0
    return np.asarray(toeplitz(first, np.eye(1, steps)[0]))


def _prefix(private: Private, settings: Settings) -> Tensor:
    matrix = banded_square_root(int(settings["steps"]), int(settings["band"]))
    return _descend(private, settings, matrix)


def _one_pole(private: Private, settings: Settings) -> Tensor:
    """M_{ts} = λ^{t−s}: each noise takes back the share λ of the one before."""
    steps = int(settings["steps"])
    first = settings["taken_back"] ** np.arange(steps)
    return _descend(private, settings, toeplitz(first, np.eye(1, steps)[0]))


def _for_influence(private: Private, settings: Settings) -> Tensor:
    """The lemma's diagonal for the mean influence, times one pole for what it cannot weigh."""
    steps = int(settings["steps"])
    q = settings["gamma"] ** np.arange(steps - 1, -1, -1.0)
    pole = toeplitz(settings["taken_back"] ** np.arange(steps), np.eye(1, steps)[0])
    return _descend(private, settings, pole * (q**0.25)[None, :])


METHODS = (
    Method(
        key="correlated-prefix",
        title="banded Toeplitz noise",
        family="correlated noise",
        paper="Fichtenberger, Henzinger and Upadhyay 2023; Choquette-Choo et al. 2023 (banded)",
        claim=_CLAIM,
        run=_prefix,
        space={**COMMON, "band": Range(choices=(4, 16, 64))},
        differs="Full batches in every step, in place of few participations.",
        checked="the square root of the prefix sums, in the tests",
    ),
    Method(
        key="correlated-pole",
        title="noise takes back some of the last",
        family="correlated noise",
        paper="Dvijotham, McMahan, Pillutla, Steinke and Thakurta 2024 (BLT with one buffer)",
        claim=_CLAIM,
        run=_one_pole,
        space={**COMMON, "taken_back": Range(0.05, 0.95, "linear")},
        differs="Full batches; the pole is tuned on auxiliary data.",
    ),
    Method(
        key="correlated-influence",
        title="correlated, for the final loss",
        family="correlated noise",
        paper="this library: the lemma's shape times one pole",
        claim=_CLAIM,
        run=_for_influence,
        space={
            **COMMON,
            "taken_back": Range(0.0, 0.8, "linear"),
            "gamma": Range(0.7, 0.99, "linear"),
        },
    ),
)
