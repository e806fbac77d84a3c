"""Gradients whose noise is correlated over steps: drawn together, and paid for before the first.

Released are g_t + C·σ·(M⁻¹z)_t, a post-processing of M·g + C·σ·z, for a lower triangular factor M.
What that costs depends on who takes part when:

every example in every step   `everybody`: entries of M are at least 0, and an example moves M·g by
                              at most C·‖M·1‖. One Gaussian release.
every b-th step               `in_turns`: M has at most b bands, so the columns of the steps of one
                              example have no row in common, and the example is met by one Gaussian
                              release after the other, of noise multiplier σ/‖column‖ (below).

In turns, with Poisson samples of rate p within the group whose turn it is: given everything that
was released before step j, the example's gradient g_j is fixed, and the rows j … j + b − 1 of
M·g + C·σ·z hold, besides what other examples add, the coin's outcome times column ⊗ g_j. Their
likelihood ratio is (1 − p) + p·exp(…) with the exponent of a Gaussian shift of length at most
C·‖column‖: that of a Poisson-sampled Gaussian step. The blocks of the example's steps follow one
another, so the account of sampled steps fixed in advance covers them, with amplification
(Choquette-Choo et al. 2023 prove the same).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from scipy.linalg import solve_triangular
from torch import Tensor

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.compare.clips import Rule
from diminuendo.compare.private import Private
from diminuendo.errors import InputError, UsageError


def sensitivity(matrix: Vector) -> float:
    """‖M·1‖, for a lower triangular M with entries ≥ 0 and a positive diagonal."""
    if (matrix < 0).any():
        raise InputError("entries of at least 0", name="the factor", value=matrix.tolist())
    _check_triangular(matrix)
    return float(np.linalg.norm(matrix.sum(axis=1))) * (1 + 1e-12)


def _check_triangular(matrix: Vector) -> None:
    if np.triu(matrix, 1).any() or not (np.diag(matrix) > 0).all():
        raise InputError(
            "lower triangular with a positive diagonal", name="the factor", value=matrix.tolist()
        )


def block_norms(matrix: Vector, groups: int) -> list[float]:
    """The largest norm of a column in each block of as many steps as there are groups: what a
    group's first, second, … turn is charged by. InputError where M has more bands than groups."""
    _check_triangular(matrix)
    if np.tril(matrix, -groups).any():
        raise InputError(f"at most {groups} bands", name="the factor", value=matrix.tolist())
    norms = np.linalg.norm(matrix, axis=0) * (1 + 1e-12)
    return [float(norms[at : at + groups].max()) for at in range(0, len(norms), groups)]


def everybody(private: Private, matrix: Vector, sigma: float) -> MixedGradients:
    """Full batches in every step; charged as one release of noise multiplier σ/‖M·1‖."""
    paid = sigma / sensitivity(matrix)
    private.pay(paid)
    return MixedGradients(private, matrix, sigma, 1, 1.0, [paid])


def in_turns(
    private: Private, matrix: Vector, sigma: float, groups: int, rate: float = 1.0
) -> MixedGradients:
    """Examples 0, b, 2b, … in step 0, 1 more in step 1, and so on, of which a Poisson sample is
    taken; charged as the releases that one example meets."""
    _validate.count("groups", groups, at_least=2)
    paid = [sigma / norm for norm in block_norms(matrix, groups)]
    private.declare(paid, [rate] * len(paid))
    for own in paid:
        private.pay(own, rate)
    return MixedGradients(private, matrix, sigma, groups, rate, paid)


class MixedGradients:
    """T gradients whose noise was drawn together and is paid for; each once."""

    def __init__(
        self,
        private: Private,
        matrix: Vector,
        sigma: float,
        groups: int,
        rate: float,
        paid: Sequence[float],
    ) -> None:
        self._private, self._next = private, 0
        self._matrix = torch.tensor(matrix, device=private.device)
        inverse = solve_triangular(matrix, np.eye(len(matrix)), lower=True)
        self._noise = private.noises(torch.from_numpy(sigma * inverse).float())
        self._groups, self._rate, self._paid = groups, rate, paid
        self._released: list[Tensor] = []
        self._bound: float | None = None
        self._turn = torch.arange(private.facts.examples, device=private.device) % groups

    def gradient(self, step: int, theta: Tensor, rule: Rule) -> Tensor:
        """The noisy mean of clipped gradients of step 0, 1, …, in order."""
        steps = len(self._matrix)
        if step != self._next or step >= steps:
            raise UsageError(f"Step {self._next} is next, and there are {steps}.")
        if not isinstance(rule.bound, float) or rule.bound != (self._bound or rule.bound):
            raise UsageError("Noise that was drawn together needs one clip norm for all steps.")
        self._bound, self._next = rule.bound, step + 1
        drawn = self._private.sample(self._rate)
        if self._groups > 1:
            turn = (self._turn == step % self._groups).float()
            drawn = turn.expand(theta.shape[0], -1) if drawn is None else drawn * turn
        total = self._private.clipped(theta, rule, drawn) + rule.bound * self._noise[:, step]
        if self._private.observed:
            self._released.append(total / rule.bound)
            if self._next == steps:
                self._show()
        return total * (self._groups / (self._private.facts.examples * self._rate))

    def _show(self) -> None:
        """What each release says at best of an example that adds one unit: M·g + σ·z along the
        columns of its own steps."""
        white = torch.einsum("ts,rsp->rtp", self._matrix.float(), torch.stack(self._released, 1))
        if self._groups == 1:
            self._show_along(white, self._matrix.sum(1), self._paid[0], None)
            return
        for step in range(len(self._matrix)):
            block, group = divmod(step, self._groups)
            column = self._matrix[:, step]
            self._show_along(white, column, self._paid[block], self._turn == group)

    def _show_along(self, white: Tensor, column: Tensor, paid: float, rows: Tensor | None) -> None:
        along = torch.einsum("t,rtp->rp", column.float(), white) / float(column @ column)
        self._private.show(along, paid, self._rate, rows)


def whole_budget(private: Private, matrix: Vector) -> float:
    """σ at which `everybody` costs the whole budget."""
    return sensitivity(matrix) / math.sqrt(private.budget.R) * (1 + 1e-9)
