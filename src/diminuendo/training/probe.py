"""Trying a model out before anything is paid: do its losses belong to one example each?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from diminuendo.errors import DiminuendoError, InputError
from diminuendo.training.sampling import precision_of

Loss = Callable[[Tensor, Tensor], Tensor]
"""From a model's outputs and the targets to one loss for each example."""


@torch.no_grad()
def refuse_mixing(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> None:
    """An example's loss must be the same alone and in company, or clipping bounds nothing.

    Compared in training and in evaluation mode; in a mode in which the model is random (by
    dropout), two passes differ anyway and nothing is concluded. The model is left as it was.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = [x.device] if x.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            _compare(model, loss, x, y)
            model.eval()
            _compare(model, loss, x, y)
    except DiminuendoError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise InputError(
            "what the model and the loss take",
            name="the first examples",
            value=f"x of shape {tuple(x.shape[1:])}, y of shape {tuple(y.shape[1:])}",
            remedy=f"(x {x.dtype}, y {y.dtype}, the model {precision_of(model)}.) {error}",
        ) from error
    finally:
        for module, mode in modes:
            module.training = mode


def _compare(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> None:
    both, again, alone = (loss(model(x[:n]), y[:n]).flatten()[:1] for n in (2, 2, 1))
    certain = torch.equal(both, again) and bool(torch.isfinite(alone).all())
    if certain and not torch.allclose(both, alone, rtol=1e-2, atol=1e-3):
        raise InputError(
            "the same for an example alone and beside another",
            name="the loss",
            value="a loss that differs",
            remedy="The model or the loss mixes examples (by a mean over the batch, say: a "
            'loss needs reduction="none"), so '
            "that clipping would not bound what one of them adds.",
        )
