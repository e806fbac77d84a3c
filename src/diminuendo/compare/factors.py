"""Banded factors for examples that take part every b-th step, chosen for what their noise does.

Noise M⁻¹z on the steps becomes A·M⁻¹z in what matters, A with one row for each number that
matters. The factor minimises ‖A·M⁻¹‖ over all lower triangular M of b bands whose columns have
Σ_m d_m² = 1, d_m the norm of all columns of block m: then every example is charged alike.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from diminuendo import _validate
from diminuendo._validate import Vector

_LITTLE = 0.03
"""The weight of the prefix error beside the final loss: iterates must not run away meanwhile."""


def prefix_error(steps: int) -> Vector:
    """Rows whose noise is that of every prefix sum: of all iterates alike."""
    return np.asarray(np.tril(np.ones((steps, steps))) / np.sqrt(steps))


def final_loss(steps: int, gamma: float) -> Vector:
    """Rows whose noise is that of the final loss along directions of several curvatures.

    Noise of step t along curvature λ (in units of 1/η) is worth λ·(1 − λ)^{2(T−1−t)} at the end.
    There are five curvatures, 1 − γ and less, half a decade apart; flat directions are as many more
    as they are flatter. One curvature alone is served best by independent noise (`correlated`).
    """
    curvatures = (1 - gamma) * 10.0 ** (-np.arange(5) / 2)
    ahead = np.arange(steps - 1, -1, -1)
    rows = (1 - curvatures[:, None]) ** ahead[None, :]
    return np.concatenate([rows / np.sqrt(len(rows)), _LITTLE * prefix_error(steps)])


@lru_cache(maxsize=256)
def best_factor(steps: int, band: int, gamma: float | None) -> Vector:
    """The factor (T, T) for the final loss at γ, or for the prefix error where γ is None."""
    _validate.count("steps", steps)
    _validate.count("band", band)
    wanted = torch.from_numpy(prefix_error(steps) if gamma is None else final_loss(steps, gamma))
    start = np.cumprod([1.0, *((2 * k - 1) / (2 * k) for k in range(1, band))])
    bands = torch.from_numpy(np.tile(start, (steps, 1))).requires_grad_()
    sizes = torch.zeros(-(-steps // band), dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS(
        [bands, sizes], max_iter=150, line_search_fn="strong_wolfe", tolerance_change=1e-9
    )

    def loss() -> Tensor:
        solver.zero_grad()
        value = _error(wanted, _factor(bands, sizes)).log()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    with torch.enable_grad():
        solver.step(loss)  # type: ignore[no-untyped-call]
    found = _factor(bands.detach(), sizes.detach()).numpy()
    found.flags.writeable = False
    return np.asarray(found)


def _factor(bands: Tensor, sizes: Tensor) -> Tensor:
    """M from its bands, column by column, and the logarithms of its blocks' column norms."""
    steps, band = bands.shape
    rows = torch.arange(steps)[:, None] + torch.arange(band)[None, :]
    inside = rows < steps
    own = torch.cat([bands[:, :1].abs() + 1e-3, bands[:, 1:]], dim=1) * inside
    own = own / own.norm(dim=1, keepdim=True)
    norms = sizes.softmax(0).sqrt().repeat_interleave(band)[:steps, None]
    columns = torch.arange(steps)[:, None].expand(-1, band)
    matrix = torch.zeros(steps, steps, dtype=bands.dtype)
    return matrix.index_put((rows[inside], columns[inside]), (own * norms)[inside])


def _error(wanted: Tensor, factor: Tensor) -> Tensor:
    mixed = torch.linalg.solve_triangular(factor, wanted, upper=False, left=False)
    return torch.as_tensor(mixed).square().sum()


def final_noise(wanted: Vector, factor: Vector) -> float:
    """‖A·M⁻¹‖: the noise in what matters, for σ = 1."""
    return float(_error(torch.from_numpy(wanted), torch.from_numpy(factor.copy())).sqrt())
