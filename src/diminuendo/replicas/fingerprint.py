"""A digest that tells one model or loss from another, so that their results are never mixed.

It covers structure, code and the values held. It does not cover the parameters, which follow from
seeds, nor the globals that code refers to. Code is compared as Python compiled it.
"""

from __future__ import annotations

import functools
import hashlib
import re
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_MAX_DEPTH = 8
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def fingerprint(value: Any) -> str:
    """16 hexadecimal digits that differ where the model or the loss does."""
    return hashlib.sha256(_text(value).encode()).hexdigest()[:16]


def _text(value: Any, depth: int = 0) -> str:
    if depth > _MAX_DEPTH:
        return "…"

    def all_of(*parts: Any) -> str:
        return "(" + ", ".join(_text(part, depth + 1) for part in parts) + ")"

    if isinstance(value, (torch.Tensor, np.ndarray)):
        return f"{value.dtype} {tuple(value.shape)} {value.tolist()}"
    if isinstance(value, nn.Module):
        return _module(value, all_of)
    if isinstance(value, functools.partial):
        return "partial" + all_of(value.func, value.args, value.keywords)
    if isinstance(value, types.MethodType):
        return "method" + all_of(value.__func__, value.__self__)
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        named = f"{value.__module__}.{value.__qualname__}"
        return named + all_of(value.__code__, value.__defaults__, value.__kwdefaults__, *cells)
    if isinstance(value, types.CodeType):
        return "code" + all_of(value.co_code, value.co_names, value.co_varnames, value.co_consts)
    if isinstance(value, Mapping):
        return "{" + all_of(*(part for item in value.items() for part in item)) + "}"
    if isinstance(value, (tuple, list)):
        return all_of(*value)
    if isinstance(value, (set, frozenset)):
        return "set(" + ", ".join(sorted(_text(part, depth + 1) for part in value)) + ")"
    return _ADDRESS.sub("", repr(value))


def _module(module: nn.Module, all_of: Any) -> str:
    """The printed structure, the settings of each part, and the code of classes not from torch."""
    parts: list[Any] = [repr(module)]
    for name, part in module.named_modules():
        kind = type(part)
        parts += [name, f"{kind.__module__}.{kind.__qualname__}"]
        settings = {k: v for k, v in vars(part).items() if not k.startswith("_")}
        parts.append({k: v for k, v in settings.items() if k != "training"})
        if not kind.__module__.startswith("torch."):
            parts += [v for v in vars(kind).values() if isinstance(v, types.FunctionType)]
    return "module" + str(all_of(*parts, dict(module.named_buffers())))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None
