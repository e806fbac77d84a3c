"""The reference: gradients of one example at a time by plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from diminuendo.training.clipping import Automatic, Clip, Engine, Flat, PerLayer

Loss = Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


def per_example(model: nn.Module, batch: tuple[Tensor, ...], loss: Loss) -> list[Tensor]:
    """Per-example gradients ``(N, *shape)`` of the trainable parameters."""
    params = [param for param in model.parameters() if param.requires_grad]
    rows: list[list[Tensor]] = []
    for i in range(batch[0].shape[0]):
        value = loss(model, tuple(part[i : i + 1] for part in batch)).sum()
        grads = torch.autograd.grad(value, params, allow_unused=True)
        rows.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]
        )
    return [torch.stack([row[k] for row in rows]) for k in range(len(params))]


def reference(
    grads: Sequence[Tensor], clip: Clip, layers: list[list[int]]
) -> tuple[Tensor, list[Tensor]]:
    """Norms and clipped sums from per-example gradients; written out from the definitions."""
    squares = [g.reshape(len(g), -1).square().sum(1) for g in grads]
    norms = torch.stack(squares).sum(0).sqrt()
    finite = norms.isfinite()
    result: list[Tensor] = [torch.empty(0)] * len(grads)
    groups = layers if isinstance(clip, PerLayer) else [list(range(len(grads)))]
    for position, group in enumerate(groups):
        size = torch.stack([squares[k] for k in group]).sum(0).sqrt()
        if isinstance(clip, Automatic):
            factors = clip.bound / (size + clip.gamma)
        else:
            if isinstance(clip, Flat):
                bound = clip.bound
            elif isinstance(clip.bounds, (int, float)):
                bound = clip.bounds / len(layers) ** 0.5
            else:
                bound = clip.bounds[position]
            factors = torch.where(size > bound, bound / size, torch.ones_like(size))
        for k in group:
            total = torch.zeros_like(grads[k][0])
            for i in range(grads[k].shape[0]):
                if finite[i]:
                    total = total + factors[i] * grads[k][i]
            result[k] = total
    return norms, result


def layer_slots(engine: Engine) -> list[list[int]]:
    """The layers of the engine as positions in its parameters."""
    return [[engine.names.index(name) for name in layer] for layer in engine.layers]


def batch_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """A loss per example that gives every output a different weight."""
    out = model(*batch)
    if isinstance(out, tuple):
        out = out[0]
    flat = out.flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype, device=flat.device)
    losses: Tensor = (flat.sin() * weights).sum(1) + 0.1 * flat.square().sum(1)
    return losses


def close(actual: Tensor, expected: Tensor, tol: float, what: str, floor: float = 1e-30) -> None:
    """Agreement relative to the largest entry expected, or to ``floor`` if that is larger."""
    scale = expected.abs().max().item() if expected.numel() else 0.0
    error = (actual - expected).abs().max().item() if expected.numel() else 0.0
    assert actual.shape == expected.shape, f"{what}: {actual.shape} != {expected.shape}"
    assert error <= tol * max(scale, floor), f"{what}: error {error:.3e} at scale {scale:.3e}"


def compare(
    model: nn.Module,
    batch: tuple[Tensor, ...],
    loss: Loss = batch_loss,
    tol: float = 1e-10,
    clips: Sequence[Clip] | None = None,
) -> None:
    """Engine against reference, for every kind of clipping."""
    grads = per_example(copy.deepcopy(model), batch, loss)
    median = (
        torch.stack([g.reshape(len(g), -1).square().sum(1) for g in grads]).sum(0).sqrt().median()
    )
    bound = max(float(median), 1e-3)
    with Engine(model) as engine:
        slots = layer_slots(engine)
        bounds = [0.3 * bound * (1 + 0.1 * k) for k in range(len(slots))]
        for clip in clips or [Flat(bound), PerLayer(bound), PerLayer(bounds), Automatic(bound)]:
            norms, sums = reference(grads, clip, slots)
            result = engine.clipped_sum(loss(model, batch), clip)
            good = norms.isfinite()
            assert torch.equal(good, result.norms.isfinite())
            close(result.norms[good], norms[good], tol, f"{clip}: norms")
            # A gradient that is zero but for rounding is compared on the scale of the others.
            floor = 1e-3 * max(float(total.abs().max()) for total in sums if total.numel())
            for name, actual, expected in zip(engine.names, result.sums, sums, strict=True):
                close(actual, expected, tol, f"{clip}: {name}", max(floor, 1e-30))
            assert int(result.nonfinite) == int((~norms.isfinite()).sum())
            certified = engine.clipped_sum(loss(model, batch), clip, certify=True)
            for name, actual, expected in zip(engine.names, certified.sums, sums, strict=True):
                assert actual.dtype == torch.float64
                close(actual, expected, tol, f"{clip}: {name}, certified", max(floor, 1e-30))
    assert not any("forward" in module.__dict__ for module in model.modules())
