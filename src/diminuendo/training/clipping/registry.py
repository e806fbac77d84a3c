"""Which module is handled how, and which is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from diminuendo.training.clipping.errors import UnsupportedModule
from diminuendo.training.clipping.layers import attention, conv, embedding, linear, norm, recurrent
from diminuendo.training.clipping.tape import Tape

_HOLDERS = (nn.ParameterList, nn.ParameterDict)
_POWER_ITERATION = (
    "spectral_norm changes its estimate at every forward pass, so that the weight is not a "
    "function of the parameters alone; remove it, or use "
    "torch.nn.utils.parametrizations.weight_norm"
)


def _hooked(module: nn.Module) -> bool:
    """Whether a hook computes the weight before the forward pass."""
    return any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values())


def _plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether the module computes what ``kind`` computes, with unaltered parameters."""
    return (
        isinstance(module, kind)
        and type(module).forward is kind.forward
        and "forward" not in module.__dict__
        and not parametrize.is_parametrized(module)
        and not _hooked(module)
    )


def owned_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters the module uses itself: its own, those of the parameter lists below
    it, and the originals behind its parametrizations (all of them by dotted name)."""
    owned = {
        name: param
        for name, param in module._parameters.items()
        if param is not None and param.requires_grad
    }
    for name, child in module.named_children():
        if isinstance(child, _HOLDERS) or name == "parametrizations":
            for inner, param in child.named_parameters():
                if param.requires_grad:
                    owned[f"{name}.{inner}"] = param
    return owned


def _check_embedding(module: nn.Embedding | nn.EmbeddingBag, path: str) -> None:
    if module.max_norm is not None:
        raise UnsupportedModule(
            path,
            type(module).__name__,
            "never",
            "max_norm rewrites the rows that the batch looks up, without privacy; use "
            "max_norm=None",
        )
    if module.scale_grad_by_freq:
        raise UnsupportedModule(
            path,
            type(module).__name__,
            "never",
            "scale_grad_by_freq divides by counts over the whole batch; use "
            "scale_grad_by_freq=False",
        )


def check_mixing(module: nn.Module, path: str) -> None:
    """Refuse modules that mix examples or are unfinished, trainable or not."""
    if isinstance(module, torch.jit.ScriptModule) and any(
        param.requires_grad for param in module.parameters(recurse=False)
    ):
        raise UnsupportedModule(
            path,
            type(module).__name__,
            "replace",
            "a scripted module cannot be watched; use the module it was scripted from",
        )
    if isinstance(module, LazyModuleMixin):
        raise UnsupportedModule(
            path,
            type(module).__name__,
            "replace",
            "its parameters have no shape yet; run one forward pass before attaching the engine",
        )
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        raise UnsupportedModule(
            path,
            type(module).__name__,
            "never",
            "its statistics mix the examples of a batch, so there is no gradient of one "
            f"example; replace it by nn.GroupNorm(num_groups, {module.num_features}), or "
            "give it running statistics that are public and keep it in eval mode, by its eval() "
            "after each train() of the model",
        )
    if isinstance(module, _InstanceNorm) and module.track_running_stats:
        raise UnsupportedModule(
            path,
            type(module).__name__,
            "replace",
            "track_running_stats=True stores statistics of the data without privacy; use "
            "track_running_stats=False",
        )


def batch_norm_guard(module: nn.Module, path: str) -> Callable[..., Any]:
    """A forward that refuses a BatchNorm put back into training mode; what it does with its
    parameters in evaluation mode is watched."""
    original: Callable[..., Any] = type(module).forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is module:
            check_mixing(module, path)
        return original(self, *args, **kwargs)

    return forward


def _time_first(
    module: nn.Module, tape: Tape, forward: Callable[..., Any], names: tuple[str, ...]
) -> Callable[..., Any]:
    """``forward``, which wants the examples first, for a module that has them second."""
    original: Callable[..., Any] = type(module).forward

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is not module or not tape.recording():
            return original(self, *args, **kwargs)
        inputs = [*args[: len(names)], *(kwargs.pop(name) for name in names[len(args) :])]
        turned = {id(x): x.transpose(0, 1) if isinstance(x, Tensor) else x for x in inputs}
        first = [turned[id(x)] for x in inputs]  # one tensor given three times stays one
        out, rest = forward(self, *first, *args[len(names) :], **kwargs)
        return out.transpose(0, 1), rest

    return call


def forward_for(module: nn.Module, tape: Tape, path: str) -> Callable[..., Any] | None:
    """The forward to install on ``module``, or None where the engine has no code of its own for
    it: it has nothing to train, or its operations are watched one by one."""
    check_mixing(module, path)
    owned = owned_parameters(module)
    if not owned or isinstance(module, _HOLDERS):
        return None
    for param in owned.values():
        if param.is_complex() or not param.is_floating_point():
            raise UnsupportedModule(
                path, type(module).__name__, "not yet", f"its parameters have dtype {param.dtype}"
            )
    if any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values()):
        raise UnsupportedModule(path, type(module).__name__, "not yet", _POWER_ITERATION)
    if parametrize.is_parametrized(module) and any(
        isinstance(part, _SpectralNorm)
        for part in module.parametrizations.modules()  # type: ignore[union-attr]
    ):
        raise UnsupportedModule(path, type(module).__name__, "not yet", _POWER_ITERATION)
    if _plain(module, nn.Linear):
        return linear.forward_of(module, tape, path)  # type: ignore[arg-type]
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d):
        if _plain(module, kind):
            return conv.forward_of(module, tape, path)  # type: ignore[arg-type]
    if _plain(module, nn.GroupNorm) or (
        isinstance(module, _InstanceNorm) and _plain(module, _InstanceNorm)
    ):
        return norm.group_norm_forward(module, tape, path)  # type: ignore[arg-type]
    if _plain(module, nn.LayerNorm) or _plain(module, nn.RMSNorm):
        return norm.layer_norm_forward(module, tape, path)  # type: ignore[arg-type]
    if isinstance(module, nn.Embedding):
        _check_embedding(module, path)
        if _plain(module, nn.Embedding):
            return embedding.forward_of(module, tape, path)
    if (
        isinstance(module, nn.MultiheadAttention)
        and _plain(module, nn.MultiheadAttention)
        and attention.handled(module)
    ):
        forward = attention.forward_of(module, tape, path)
        return (
            forward
            if module.batch_first
            else _time_first(module, tape, forward, ("query", "key", "value"))
        )
    if isinstance(module, nn.RNNBase) and recurrent.handled(module):
        forward = recurrent.forward_of(module, tape, path)
        return forward if module.batch_first else _time_first(module, tape, forward, ("input",))
    if isinstance(module, nn.EmbeddingBag):
        _check_embedding(module, path)
    return None
