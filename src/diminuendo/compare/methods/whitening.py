"""Uniform noise on features whose second moments were bought first.

Most of the norm of raw features lies in a few directions that all examples share. Clipping and
noise are in units of the norm, and descent is slow where moments are unequal, so these directions
cost twice. Here a fifth of the budget buys the noisy second moments, and every direction that
stands out of their noise is shortened. The rest of the budget trains.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import torch
from scipy.sparse.linalg import eigsh
from torch import Tensor

from diminuendo.compare import descent
from diminuendo.compare.method import Method, Settings
from diminuendo.compare.models import turned
from diminuendo.compare.private import Private

SHARE = 0.2
"""What the second moments cost, as a share of Σ 1/σ²."""
_MOST = 100
"""Directions that are shortened at most."""


def _whitened(private: Private, settings: Settings) -> Tensor:
    """Descent with momentum on x − U(1 − s)Uᵀx, whose directions U and lengths s were bought."""
    rate, steps = private.budget.R / (1 + 1e-9), int(settings["steps"])
    look = 1 / math.sqrt(SHARE * rate)
    sigmas = [math.sqrt(steps / ((1 - SHARE) * rate))] * steps
    shortened = [directions(m, look, private) for m in private.second_moments(look)]
    turns = [partial(_shorter, known=u, lengths=s) for u, s in shortened]
    update = descent.heavy_ball(settings["lr"])
    theta = descent.descend(private.turned(turns), sigmas, settings["clip"], update)
    return turned(turns, theta.view(private.replicas, len(shortened[0][0]), -1))


def directions(moments: Tensor, sigma: float, private: Private) -> tuple[Tensor, Tensor]:
    """The directions whose noisy moments stand out of the noise, (features, how many), and how
    much shorter they become.

    The largest eigenvalue of the noise alone is about e = σ·B²·√(2·features)/N (Wigner's edge). A
    direction of moment λ > e is shortened by √(e/4λ), which leaves it the moment e/4.
    """
    facts, size = private.facts, len(moments)
    edge = sigma * facts.largest_norm**2 * math.sqrt(2 * size) / facts.examples
    # eigsh starts from a random vector unless one is given; a run must repeat itself.
    matrix, start = moments.cpu().numpy(), np.ones(size, dtype=np.float32)
    values, vectors = eigsh(matrix, k=min(_MOST, size - 1), which="LA", v0=start)
    above = values > edge
    return (
        torch.from_numpy(vectors[:, above]).float().to(moments.device),
        torch.from_numpy(np.sqrt(edge / (4 * values[above]))).float().to(moments.device),
    )


def _shorter(columns: Tensor, known: Tensor, lengths: Tensor) -> Tensor:
    """columns − U(1 − s)Uᵀ · columns."""
    return columns - (known * (1 - lengths)) @ (known.T @ columns)


METHODS = (
    Method(
        key="uniform-whitened",
        title="uniform, momentum, features whitened",
        family="uniform",
        paper="second moments as in Dwork, Talwar, Thakurta and Zhang 2014 (Analyze Gauss); paid "
        "normalisation of features as in Tramèr and Boneh 2021",
        claim="One Gaussian release of the features' second moments and T full-batch Gaussian "
        "steps of equal noise: together exactly μ-GDP.",
        run=_whitened,
        convex=True,
        differs="Whole second moments in place of means and variances, and only the directions "
        "that stand out of the noise are changed. Full batches, momentum 0.9 with bias correction.",
    ),
)
