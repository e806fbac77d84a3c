"""A mean loss is taken apart exactly, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo import InputError
from diminuendo.adapters._mean_losses import losses_of_step
from diminuendo.training.mean_loss import Reductions

ROWS = 5


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(ROWS, 3, generator=generator, requires_grad=True)
    return out, torch.arange(ROWS) % 3, torch.randn(ROWS, 3, generator=generator)


TAKEN: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "cross entropy": lambda out, y, t: F.cross_entropy(out, y),
    "a module": lambda out, y, t: nn.CrossEntropyLoss(label_smoothing=0.1)(out, y),
    "squares": lambda out, y, t: nn.functional.mse_loss(out, t),
    "by position": lambda out, y, t: F.mse_loss(out, t, None, None, "mean"),
    "mean of squares": lambda out, y, t: ((out - t) ** 2).mean(),
    "torch.mean": lambda out, y, t: torch.mean((out - t).abs().sum(1)),
    "in a dict": lambda out, y, t: {"loss": F.cross_entropy(out, y), "rest": out},
    "a sum": lambda out, y, t: F.cross_entropy(out, y) + 0.5 * F.mse_loss(out, t),
    "a sum of a list": lambda out, y, t: sum([F.cross_entropy(out, y), F.l1_loss(out, t)]),
    "a difference": lambda out, y, t: 1 - F.l1_loss(out, t) / 4,
    "huber": lambda out, y, t: F.huber_loss(out, t),
    "twice in place": lambda out, y, t: F.mse_loss(out, t).mul_(2),
    "batchmean": lambda out, y, t: F.kl_div(
        out.log_softmax(1), t.softmax(1), reduction="batchmean"
    ),
    "tokens": lambda out, y, t: F.cross_entropy(
        out.unsqueeze(2).expand(-1, -1, 4), y[:, None].expand(-1, 4)
    ),
    "rows themselves": lambda out, y, t: F.cross_entropy(out, y, reduction="none"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_means_are_taken_apart(name: str) -> None:
    out, y, t = batch()
    plain = TAKEN[name](out, y, t)
    with Reductions():
        returned = TAKEN[name](out, y, t)
    losses = losses_of_step(returned)
    scalar = returned["loss"] if isinstance(returned, dict) else returned
    wanted = plain["loss"] if isinstance(plain, dict) else plain
    assert torch.equal(scalar, wanted)
    assert losses.shape == (ROWS,)
    slopes = [torch.autograd.grad(x.mean(), out, retain_graph=True)[0] for x in (losses, wanted)]
    assert torch.allclose(slopes[0], slopes[1], atol=1e-6)
    for i in range(ROWS):
        (slope,) = torch.autograd.grad(losses[i], out, retain_graph=True)
        assert slope[i].abs().sum() > 0
        assert not slope[torch.arange(ROWS) != i].any()


def test_an_ignored_label_adds_nothing() -> None:
    out, y, _ = batch()
    with Reductions():
        loss = F.cross_entropy(out, y.where(y > 0, -100))
    losses = losses_of_step(loss)
    wanted = F.cross_entropy(out, y, reduction="none") * (y > 0)
    assert torch.allclose(losses, wanted)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Any], str]] = {
    "a sum over the batch": (lambda out, y, t: F.cross_entropy(out, y, reduction="sum"), "shape"),
    "class weights": (lambda out, y, t: F.cross_entropy(out, y, torch.ones(3)), "weights"),
    "a product": (lambda out, y, t: F.mse_loss(out, t) * F.l1_loss(out, t), "shape"),
    "a square": (lambda out, y, t: F.mse_loss(out, t) ** 2, "shape"),
    "a root": (lambda out, y, t: F.mse_loss(out, t).sqrt(), "shape"),
    "one over it": (lambda out, y, t: 1 / F.mse_loss(out, t), "shape"),
    "a parameter's penalty": (lambda out, y, t: F.mse_loss(out, t) + (t[0] ** 2).sum(), "shape"),
    "a penalty in place": (lambda out, y, t: F.mse_loss(out, t).__iadd__(t.sum()), "shape"),
    "in place": (lambda out, y, t: F.mse_loss(out, t).sqrt_(), "shape"),
    "nothing": (lambda out, y, t: None, "NoneType"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_losses_are_refused(name: str) -> None:
    step, words = REFUSED[name]
    with Reductions():
        returned = step(*batch())
    with pytest.raises(InputError, match=words):
        losses_of_step(returned)
