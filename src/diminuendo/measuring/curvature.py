"""A Hessian's spectrum by Lanczos iterations, and the influence curve of the quadratic model.

From a random unit vector v, k iterations with Hessian-vector products give a tridiagonal matrix.
Its eigenvalues, weighted by the squared first entries of its eigenvectors, are Gauss quadrature for
the spectral density as seen from v. The mean over several v estimates the density itself
(stochastic Lanczos quadrature). The largest eigenvalue is accurate to many digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp

from diminuendo import _progress, _validate, influence
from diminuendo._validate import Vector
from diminuendo.errors import InputError
from diminuendo.influence.learning_rates import LearningRates
from diminuendo.influence.measured import mark
from diminuendo.measuring.source import NOT_PRIVATE, Source, check_source
from diminuendo.replicas.batch import Loss, cross_entropy
from diminuendo.replicas.checks import Pair
from diminuendo.replicas.initial import flat_parameters

SMALLEST = 1e-5
"""Length of a new vector, relative to the matrix, below which it is rounding error only."""


@dataclass(frozen=True, eq=False)
class HessianSpectrum:
    """Eigenvalues of a Hessian, ascending, and how much of the space each stands for.

    weights  shares of directions, positive, with sum one
    source   "auxiliary" or "private" data; from private data, nothing here is private
    """

    eigenvalues: Vector
    weights: Vector
    source: Source

    @property
    def private(self) -> bool:
        """False if it was measured on private data, for which no budget was charged."""
        return self.source == "auxiliary"

    @property
    def largest(self) -> float:
        """The largest eigenvalue: M, the smoothness of the loss."""
        return float(self.eigenvalues.max())

    @property
    def negative(self) -> float:
        """The share of directions with negative curvature, which a quadratic model leaves out."""
        return float(self.weights[self.eigenvalues < -1e-3 * self.largest].sum())

    def influence(self, steps: int, *, lr: LearningRates) -> Vector:
        """q_1…q_T of gradient descent on the quadratic with this spectrum.

        steps  T
        lr     the learning rate, in (0, 2/M), or η_1…η_T as `influence.learning_rates` takes them

        Directions with negative curvature count as flat.
        """
        options: dict[str, Any] = {"lr": lr}
        if not callable(lr) and np.ndim(lr) == 0:
            size = _validate.real(
                "lr", lr, above=0, below=2 / self.largest, remedy="From 2/M on, descent diverges."
            )
            options = {"step_size": size * self.largest}
        values = influence.spectrum(
            np.maximum(self.eigenvalues, 0.0), weights=self.weights, steps=steps, **options
        )
        return mark(values, None if self.private else NOT_PRIVATE)


def spectrum_of(
    model: nn.Module,
    data: Pair,
    *,
    source: Source,
    loss: Literal["cross-entropy"] | Loss = "cross-entropy",
    iterations: int = 40,
    starts: int = 4,
    seed: int = 0,
    not_private: bool = False,
    progress: bool = True,
) -> HessianSpectrum:
    """The spectrum of the mean loss's Hessian at the model's parameters.

    data        (x, y), tensors or arrays
    source      "auxiliary", or "private": then only with not_private=True, and marked as such
    loss        a function of (outputs, targets) that returns one loss per example
    iterations  Lanczos iterations from each random vector
    starts      how many random vectors
    seed        of the random vectors
    """
    check_source(source, not_private)
    steps = _validate.count("iterations", iterations)
    times = _validate.count("starts", starts)
    product, size, like = _products(model, data, cross_entropy if isinstance(loss, str) else loss)
    generator = torch.Generator().manual_seed(_validate.count("seed", seed, at_least=0))
    values, weights = [], []
    with _progress.bar("spectrum", total=times * min(steps, size), shown=progress) as bar:
        for _ in range(times):
            start = torch.randn(size, generator=generator, dtype=torch.float64).to(like)
            nodes, shares = lanczos(product, start, steps, bar.advance)
            values.append(nodes)
            weights.append(shares / times)
    eigenvalues, mass = np.concatenate(values), np.concatenate(weights)
    if not np.isfinite(eigenvalues).all() or eigenvalues.max() <= 0:
        raise InputError(
            "finite, with a positive eigenvalue", name="the Hessian", value=eigenvalues.tolist()
        )
    order = np.argsort(eigenvalues)
    order = order[mass[order] > 0]
    return HessianSpectrum(eigenvalues[order], mass[order], source)


def _products(
    model: nn.Module, data: Pair, loss: Loss
) -> tuple[Callable[[Tensor], Tensor], int, Tensor]:
    """v ↦ Hv for the mean loss, the number of parameters, and the flat parameters."""
    where = next(model.parameters()).device
    x, y = (torch.as_tensor(part).to(where) for part in data)
    named = [(name, p.detach()) for name, p in model.named_parameters() if p.requires_grad]
    theta = flat_parameters(model)
    sizes = [p.numel() for _, p in named]

    def mean_loss(flat: Tensor) -> Tensor:
        parts = torch.split(flat, sizes)
        parameters: dict[str, Any] = {
            name: part.view_as(p) for (name, p), part in zip(named, parts, strict=True)
        }
        return loss(functional_call(model, parameters, (x,)), y).mean()

    pull_back = vjp(grad(mean_loss), theta)[1]

    def product(v: Tensor) -> Tensor:
        image: Tensor = pull_back(v)[0]
        return image

    return product, theta.numel(), theta


def lanczos(
    product: Callable[[Tensor], Tensor],
    start: Tensor,
    iterations: int,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[Vector, Vector]:
    """Nodes and weights of the quadrature; every new vector is made orthogonal to all earlier ones
    twice, which is enough in floating point.
    """
    iterations = min(iterations, start.numel())
    basis = start.new_zeros(iterations, start.numel())
    basis[0] = start / torch.linalg.vector_norm(start)
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    for i in range(iterations):
        image = product(basis[i])
        diagonal.append(float(image @ basis[i]))
        for _ in range(2):
            image = image - basis[: i + 1].mT @ (basis[: i + 1] @ image)
        length = float(torch.linalg.vector_norm(image))
        advance(1)
        scale = max([*map(abs, diagonal), *off_diagonal])
        if i + 1 == iterations or not math.isfinite(length) or length <= SMALLEST * scale:
            break
        off_diagonal.append(length)
        basis[i + 1] = image / length
    matrix = np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
    if not np.isfinite(matrix).all():
        return np.full(1, np.nan), np.ones(1)
    values, vectors = np.linalg.eigh(matrix)
    return values, vectors[0] ** 2
