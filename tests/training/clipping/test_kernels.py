"""Norms and roundings on a GPU: the CPU's, or above the true value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from diminuendo.training.clipping import contract, kernels, rounding

pytestmark = pytest.mark.skipif(
    not (kernels.available and torch.cuda.is_available()), reason="no CUDA device with Triton"
)


def entries(shape: tuple[int, ...], scale: float, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32) * scale


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1.0, 1e18, 1e30])
def test_to_tf32_is_that_of_the_cpu(scale: float) -> None:
    x = entries((1000, 77), scale)
    x[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    expected = rounding.to_tf32(x)
    assert torch.equal(rounding.to_tf32(x.cuda()).cpu(), expected)
    assert torch.equal(rounding.to_tf32(x.cuda().t()).cpu(), expected.t())


@pytest.mark.parametrize("shape", [(5, 1), (1000, 60), (7, 16384), (3, 100_003), (70_000, 9)])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_row_norms_are_never_too_small(shape: tuple[int, ...], scale: float) -> None:
    x = entries(shape, scale)
    x[1] = 0.0
    norms = rounding.row_norm(x.cuda()).cpu()
    exact = torch.linalg.vector_norm(x.double(), dim=1)
    assert (norms >= exact).all()
    assert (norms <= exact * (1 + 1e-9)).all()


@pytest.mark.parametrize("tokens", [2, 5, 33, 128, 200])
@pytest.mark.parametrize("kind", ["random", "constant", "cancelling", "tiny", "zero"])
@pytest.mark.parametrize("tf32", [False, True])
def test_gram_norms_are_never_too_small(tokens: int, kind: str, tf32: bool) -> None:
    u, v = entries((6, tokens, 40), 1.0, 1), entries((6, tokens, 130), 1.0, 2)
    if kind == "constant":
        u, v = torch.full_like(u, 0.1), torch.full_like(v, 0.3)
    elif kind == "cancelling":
        u[:, 1::2], v[:, 1::2] = -u[:, : u[:, 1::2].shape[1]], v[:, : v[:, 1::2].shape[1]]
    elif kind != "random":
        u *= {"tiny": 1e-25, "zero": 0.0}[kind]
    if tf32:
        u, v = rounding.to_tf32(u), rounding.to_tf32(v)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        size = contract.gram_size(u.cuda(), v.cuda())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    exact = torch.bmm(u.double().mT, v.double()).flatten(1).norm(dim=1)
    bulk = (u.double().norm(dim=2) * v.double().norm(dim=2)).sum(1)
    assert (size.norm.cpu() >= exact).all()
    assert (size.terms.cpu() >= bulk).all()
    assert (size.norm.cpu() <= exact * 1.01 + bulk * 0.05 + 1e-14).all()


def test_what_is_not_finite_is_infinite() -> None:
    u, v = entries((3, 4, 8), 1.0, 1), entries((3, 4, 8), 1.0, 2)
    u[0, 0, 0], v[1, 2, 3] = float("nan"), float("inf")
    norm = contract.gram_size(u.cuda(), v.cuda()).norm.cpu()
    assert norm.isinf().tolist() == [True, True, False]
