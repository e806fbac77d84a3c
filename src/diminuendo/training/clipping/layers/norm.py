"""Normalisation layers: their affine parameters have small per-example gradients.

* GroupNorm and InstanceNorm: the batch ``(N, C, *)`` is seen as one example of ``N C`` channels
  whose scale and shift are the parameters repeated N times. The usual backward kernel then
  returns the gradient of every example separately, at no extra cost.
* LayerNorm and RMSNorm: ``dgamma_i = sum_t B_it * xhat_it`` and ``dbeta_i = sum_t B_it``, with
  the normalised input ``xhat`` recomputed in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo.training.clipping.contract import upcast, weighted
from diminuendo.training.clipping.errors import EngineError, place
from diminuendo.training.clipping.rounding import row_norm
from diminuendo.training.clipping.sums import Rows, Term
from diminuendo.training.clipping.tape import (
    WHOLE,
    Kind,
    Piece,
    Report,
    Tape,
    kept_rows,
    trained,
)


class DirectPiece(Piece):
    """Parameters whose per-example gradients are at hand, ``(N, *shape)`` each."""

    def __init__(self, path: str, params: Sequence[nn.Parameter | None], examples: int) -> None:
        super().__init__(path, params, examples)
        self.values: dict[int, Tensor] = {}

    def measure(self, wanted: set[int]) -> list[Report]:
        return [
            Report(id(param), Kind.ROWS, self.values[id(param)])
            for param in self.params
            if id(param) in self.values and id(param) in wanted
        ]

    def weighted_sum(self, param: nn.Parameter, factors: Tensor) -> Tensor:
        return weighted(factors, self._rows(param))

    def terms(self, param: nn.Parameter, factors: Tensor) -> list[tuple[slice, Term]]:
        return [(WHOLE, Rows(self._rows(param), factors))]

    def instantiate(self, param: nn.Parameter) -> Tensor:
        return self._rows(param).double()

    def bulk(self, param: nn.Parameter) -> Tensor:
        return row_norm(self._rows(param))

    def _rows(self, param: nn.Parameter) -> Tensor:
        value = self.values.get(id(param))
        if value is None:
            value = torch.zeros((self.examples, *param.shape), device=param.device)
            self.values[id(param)] = value = value.to(upcast(param.detach()).dtype)
        return value

    def purge(self, keep: Tensor) -> None:
        self.values = {key: kept_rows(value, keep) for key, value in self.values.items()}

    def release(self) -> None:
        self.values = {}


class RepeatedPiece(DirectPiece):
    """Affine parameters that were repeated once for each example before use."""

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        for param, grad in zip(self.params, grads, strict=True):
            if grad is not None:
                self.values[id(param)] = upcast(grad).view(self.examples, *param.shape)
        return bool(self.values)


class AffinePiece(DirectPiece):
    """Scale and shift over the last dimensions, after a normalisation of the input."""

    def __init__(
        self,
        path: str,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        inputs: Tensor,
        normalise: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__(path, (weight, bias), inputs.shape[0])
        self.weight, self.bias, self.normalise = weight, bias, normalise
        self.inputs = self.save(inputs) if weight is not None else None

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        grad = grads[0]
        if grad is None:
            return False
        grad = upcast(grad)
        for param, product in ((self.bias, False), (self.weight, True)):
            if param is None:
                continue
            value = grad
            if product and self.inputs is not None:
                value = self.normalise(upcast(self.inputs)).mul_(grad)
            tokens = value.dim() - param.dim()
            if tokens > 1:
                value = value.flatten(1, tokens - 1).sum(1)
            self.values[id(param)] = value
        self.inputs = None
        return True


def group_norm_forward(
    module: nn.GroupNorm | nn.modules.instancenorm._InstanceNorm, tape: Tape, path: str
) -> Callable[..., Tensor]:
    """Forward of GroupNorm, and of InstanceNorm as GroupNorm with one channel per group."""
    original = type(module).forward

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        if self is not module or not tape.recording() or input.shape[0] == 0:
            out: Tensor = original(self, input)  # type: ignore[arg-type]
            return out
        examples, channels = input.shape[0], module.weight.shape[0]
        least = 2 if isinstance(module, nn.GroupNorm) else 3
        if input.dim() < least or input.shape[1] != channels:
            raise EngineError(
                f"{place(path)} got an input of shape {tuple(input.shape)}; expected (examples, "
                f"{channels}, ...): put the examples first and the channels second"
            )
        groups = module.num_groups if isinstance(module, nn.GroupNorm) else channels
        affine: list[Tensor | None] = []
        watched, positions = [], []
        for position, param in enumerate((module.weight, module.bias), 1):
            if param is None:
                affine.append(None)  # type: ignore[unreachable]
                continue
            repeated = param.detach().expand(examples, channels).reshape(-1)
            if examples == 1:
                repeated = repeated.clone()
            if param.requires_grad:
                repeated.requires_grad_()
                watched.append(param)
                positions.append(position)
            affine.append(repeated)
        flat = input.reshape(1, examples * channels, -1)
        out = torch.group_norm(flat, examples * groups, affine[0], affine[1], module.eps)
        if watched:  # the node of a group norm sends gradients to (input, weight, bias)
            tape.watch_inputs(RepeatedPiece(path, watched, examples), out, tuple(positions))
        shaped: Tensor = torch.ops.aten._unsafe_view.default(out, input.shape)
        return shaped

    return forward


def layer_norm_forward(
    module: nn.LayerNorm | nn.RMSNorm, tape: Tape, path: str
) -> Callable[..., Tensor]:
    """Forward of LayerNorm and RMSNorm."""
    original = type(module).forward
    shape = list(module.normalized_shape)

    def normalise(x: Tensor) -> Tensor:
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, shape, None, None, module.eps)
        return F.rms_norm(x, shape, None, module.eps)

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        if self is not module or not tape.recording() or input.shape[0] == 0:
            out: Tensor = original(self, input)  # type: ignore[arg-type]
            return out
        if input.dim() <= len(shape):
            raise EngineError(
                f"{place(path)} got an input of shape {tuple(input.shape)}; expected (examples, "
                f"..., {', '.join(map(str, shape))}): add the example dimension in front"
            )
        scale, rooted = module.weight.detach(), not input.requires_grad
        if rooted:
            scale.requires_grad_()
        if isinstance(module, nn.LayerNorm):
            shift = None if module.bias is None else module.bias.detach()
            out = F.layer_norm(input, shape, scale, shift, module.eps)
        else:
            out = F.rms_norm(input, shape, scale, module.eps)
        weight, bias = trained(module.weight), trained(getattr(module, "bias", None))
        return tape.watch_op(AffinePiece(path, weight, bias, input, normalise), out, rooted)

    return forward
