"""Finds, on a CPU, what would make the host wait for a GPU in the code that both share."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import diminuendo

_HOME = Path(diminuendo.__file__).parent
# Operations whose result, or its shape, the host must know before it goes on.
_READ = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "nonzero_static",
    "_unique",
    "_unique2",
    "bincount",
    "unique_consecutive",
    "unique_dim",
}
# Calls that read a tensor's data without an operation of PyTorch's, or copy from the host: on a
# CPU nothing is dispatched for them.
_CALLS = {"cpu", "numpy", "tolist", "__array__", "tensor", "as_tensor", "from_numpy"}


class Wait(NamedTuple):
    """One operation that would wait, and the line of the library, or outside, that asked for it."""

    what: str
    where: str


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = func.overloadpacket.__name__
        if name in _READ or _by_mask(name, args):
            self._note(name)
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            self._note(name)
        return func(*args, **(kwargs or {}))


class _Calls(TorchFunctionMode):
    def __init__(self, note: Callable[[str], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        name = getattr(func, "__name__", "")
        if name in _CALLS:
            self._note(name)
        return func(*args, **(kwargs or {}))


def _by_mask(name: str, args: Any) -> bool:
    """Whether rows are picked, or written, by a tensor of truth values: their number is unknown."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    places = [part for part in _pytree.tree_leaves(args[1]) if isinstance(part, Tensor)]
    picked = name == "index" or args[2].dim() > 0  # one value for all needs no number
    return picked and any(part.dtype in (torch.bool, torch.uint8) for part in places)


def _where() -> str:
    """The innermost line of the library; of whoever called, where it has no part in it."""
    frames = traceback.extract_stack()
    for frame in reversed(frames):
        path = Path(frame.filename)
        if path.is_relative_to(_HOME):
            return f"{path.relative_to(_HOME)}:{frame.name}"
    return "outside"


@contextmanager
def recorded() -> Iterator[list[Wait]]:
    """The list of what would have waited within."""
    found: list[Wait] = []

    def note(what: str) -> None:
        found.append(Wait(what, _where()))

    with _Calls(note), _Operations(note):
        yield found
