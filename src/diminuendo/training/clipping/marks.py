"""Marks on tensors and functions that the watch over a forward pass reads and writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from diminuendo.training.clipping.rules import RULES, Rule


class Made:
    """Marks a tensor made of the parameters ``params`` (by ``id``) and of nothing else.

    ``maker`` is the operation that made it: its name and arguments.
    """

    __slots__ = ("maker", "params")

    def __init__(
        self, params: dict[int, nn.Parameter], maker: tuple[str, Sequence[Any]] | None = None
    ) -> None:
        self.params, self.maker = params, maker


@dataclasses.dataclass(frozen=True)
class Operation:
    """What is known of a function: its bare name, whether it writes on its first argument, and
    how it moves examples."""

    name: str
    inplace: bool = False
    rule: Rule | None = None
    ignored: bool = False


_GETTERS = {
    getattr(torch.Tensor, name).__get__: name for name in ("T", "mT", "H", "mH", "data", "real")
}
_IGNORED = {
    "size", "dim", "numel", "item", "stride", "tolist", "is_floating_point", "is_complex",
    "__len__", "__bool__", "__int__", "__float__", "__index__", "is_contiguous", "nelement",
    "ndimension", "__hash__", "element_size", "storage_offset", "data_ptr", "backward",
    "register_hook", "requires_grad_", "retain_grad", "is_same_size", "allclose", "equal",
    "__repr__", "__format__", "get_device", "__contains__", "__reduce_ex__", "__deepcopy__",
}  # fmt: skip
# Of the other arguments only the kind or the shape matters.
TEMPLATES = {"to", "type_as", "view_as", "reshape_as"}
FACTORIES = {
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "randint_like", "new_zeros", "new_ones", "new_full", "new_empty", "new_tensor",
}  # fmt: skip
ELEMENTWISE = {
    "add", "sub", "subtract", "rsub", "__rsub__", "mul", "multiply", "div", "divide",
    "true_divide", "__rdiv__", "__rtruediv__", "pow", "__pow__", "__rpow__", "float_power",
    "where", "lerp", "addcmul", "addcdiv", "maximum", "minimum", "fmax", "fmin", "atan2",
    "hypot", "copysign", "logaddexp", "xlogy", "remainder", "fmod", "__radd__", "__rmul__",
    "__add__", "__sub__", "__mul__", "__truediv__", "copy", "clamp",
}  # fmt: skip
EXPANDING = {"expand", "expand_as", "broadcast_to", "repeat", "tile"}
KNOWN: dict[Any, Operation] = {}


def operation(func: Callable[..., Any]) -> Operation:
    """What is known of ``func``."""
    known = KNOWN.get(func)
    if known is None:
        name = getattr(func, "__name__", type(func).__name__)
        if name == "__get__":
            name = _GETTERS.get(func, "")
        ignored = not name or name in _IGNORED or name in ("__set__", "__delete__")
        inplace = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        bare = name[:-1] if inplace and name != "__setitem__" else name
        known = Operation(bare, inplace, RULES.get(name, RULES.get(bare)), ignored)
        KNOWN[func] = known
    return known


def tensors(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """The tensors in arguments or results, through lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, (int, float, str, bool)):
        return
    elif isinstance(value, (list, tuple, set)):
        for part in value:
            yield from tensors(part, depth - 1)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors(getattr(value, field.name, None), depth - 1)
