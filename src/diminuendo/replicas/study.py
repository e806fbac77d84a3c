"""What all replicas share: model, data, loss and evaluation sets, checked before anything runs."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from diminuendo import _validate
from diminuendo.errors import InputError
from diminuendo.replicas.batch import Loss, Update, cross_entropy
from diminuendo.replicas.checks import Pair, as_pair, check_pair
from diminuendo.replicas.fingerprint import fingerprint
from diminuendo.replicas.general import OneByOne, Vmapped
from diminuendo.replicas.initial import flat_parameters, initialise
from diminuendo.replicas.layers import layers_of
from diminuendo.replicas.perceptrons import Perceptrons
from diminuendo.replicas.replica import Model, Replica
from diminuendo.training.sampling import precision_of

CPU_ENTRIES = 1 << 21
"""Entries of one layer's activations held at a time on a CPU: about what its caches hold."""
GPU_ENTRIES = 1 << 28
"""The same on a GPU: a gibibyte of float32."""
ENTRIES_FOR_THREADS = 1 << 17
"""Entries of one layer's activations in a step from which on all cores take part."""
STATE_BYTES = 1 << 31
"""Most memory for the parameters, sums, averages and noise of replicas that train together."""


@dataclass(frozen=True)
class Study:
    """What all replicas share, checked.

    x, y      training sets, stacked (sets, examples, …)
    evaluate  evaluation sets by name, stacked in the same way
    record    the steps after which losses are kept
    digest    16 hexadecimal digits that differ where data, model, loss or replicas do
    """

    model: Model
    template: nn.Module
    x: Tensor
    y: Tensor
    loss: Loss
    evaluate: dict[str, Pair]
    record: tuple[int, ...]
    digest: str

    @classmethod
    def of(
        cls,
        model: Model,
        data: Pair | Sequence[Pair],
        replicas: Sequence[Replica],
        loss: str | Loss,
        evaluate: Mapping[str, Pair | Sequence[Pair]],
        record: Sequence[int] | None,
        device: torch.device | str | None,
    ) -> Study:
        """The study of these arguments of `train`, or an `InputError` for those that do not fit."""
        if not replicas:
            raise InputError("at least one replica", name="replicas", value=list(replicas))
        template = initialise(model, replicas[0].seed)
        where = _device_of(template) if device is None else torch.device(device)
        precision = precision_of(template)
        sets = _pairs(data, "data", precision)
        highest = max(replica.data for replica in replicas)
        if highest >= len(sets):
            raise InputError(
                f"below the number of training sets ({len(sets)})",
                name="Replica.data",
                value=highest,
            )
        if isinstance(loss, str):
            _validate.choice("loss", loss, ["cross-entropy"], remedy="Or give a function.")
        steps = sorted({_validate.count("record", t, at_least=0) for t in record or ()})
        _check_trainable(template)
        tests = {
            name: _pairs(pairs, f"evaluate[{name!r}]", precision)
            for name, pairs in evaluate.items()
        }
        for name, pairs in tests.items():
            _check_against(sets, pairs, f"evaluate[{name!r}]")
        function = cross_entropy if isinstance(loss, str) else loss
        named = {"data": sets, **{f"evaluate[{n!r}]": pairs for n, pairs in tests.items()}}
        for name, pairs in named.items():
            for pair in pairs:
                check_pair(pair, template, function, name)
        parts = [
            loss if isinstance(loss, str) else fingerprint(loss),
            fingerprint(template),
            str([(n, tuple(p.shape)) for n, p in template.named_parameters()]),
            *(_tensors_digest(x, y) for x, y in sets),
            *(f"{name} {_tensors_digest(*pair)}" for name in sorted(tests) for pair in tests[name]),
            str(steps),
            *(replica.digest for replica in replicas),
        ]
        return cls(
            model,
            template,
            *_stacked(sets, where),
            function,
            {name: _stacked(pairs, where) for name, pairs in tests.items()},
            tuple(steps),
            hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16],
        )

    @property
    def device(self) -> torch.device:
        """Where data and replicas are."""
        return self.x.device

    @property
    def like(self) -> Tensor:
        """An empty tensor of the model's precision, on the device."""
        first = next(self.template.parameters())
        return torch.empty(0, dtype=first.dtype, device=self.device)

    @property
    def parameters(self) -> int:
        """How many trainable parameters one replica has."""
        return sum(p.numel() for p in self.template.parameters() if p.requires_grad)

    @cached_property
    def width(self) -> int:
        """Entries held for each example of each replica."""
        layers = layers_of(self.template)
        if layers is None:
            return self.parameters
        return max(layers[0].fan_in + 1, *(layer.fan_out for layer in layers))

    def group_size(self, replicas: int) -> int:
        """How many of so many replicas train together, within `STATE_BYTES`, in equal groups."""
        together, _ = self.piece(replicas)
        state = STATE_BYTES // (5 * self.parameters * self.like.element_size())
        split = self.device.type == "cpu" and layers_of(self.template) is not None
        pieces = 2 * torch.get_num_threads() if split else 1
        most = max(1, min(pieces * together, state))
        return math.ceil(max(1, replicas) / math.ceil(max(1, replicas) / most))

    def piece(self, replicas: int) -> tuple[int, int]:
        """How many replicas and how many examples are computed at a time."""
        entries = CPU_ENTRIES if self.device.type == "cpu" else GPU_ENTRIES
        available = self.x.shape[1]
        examples = min(available, 256 if layers_of(self.template) is not None else 1)
        together = max(1, min(replicas, entries // (examples * self.width)))
        if self.device.type == "cpu" and replicas * available * self.width >= ENTRIES_FOR_THREADS:
            together = min(together, -(-replicas // torch.get_num_threads()))
        return together, max(1, min(available, entries // (together * self.width)))

    @cached_property
    def kind(self) -> type[Perceptrons | Vmapped | OneByOne]:
        """The fastest kind of batch that can hold this model, tried on one example."""
        layers = layers_of(self.template)
        if layers is not None and layers[0].fan_in == self.x[0, 0].numel():
            return Perceptrons
        rows, clip = slice(0, 1), self.like.new_ones(1)
        try:
            batch = Vmapped(self.template, 1, self.loss, 1, self.like)
            batch.write(flat_parameters(self.template).to(self.device).unsqueeze(0))
            one = batch.data(self.x[:, :1], self.y[:, :1], [0])
            batch.clipped_sum(one, rows, Update(clip, clip))
            batch.outputs(one.inputs(rows, rows), rows)
        except (RuntimeError, NotImplementedError, ValueError):
            return OneByOne
        return Vmapped

    def batch(self, replicas: int, group_size: int) -> Perceptrons | Vmapped | OneByOne:
        """A batch of this many replicas, of which `group_size` take their steps together."""
        piece = self.piece(group_size)
        if self.kind is Perceptrons:
            layers = layers_of(self.template) or []
            return Perceptrons(layers, replicas, self.loss, piece, self.like)
        if self.kind is Vmapped:
            return Vmapped(self.template, replicas, self.loss, piece[1], self.like)
        return OneByOne(self.template, replicas, self.loss, self.x.shape[1], self.like)


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    if first is None:
        raise InputError("a model with parameters", name="model", value=model)
    return first.device


def _check_trainable(model: nn.Module) -> None:
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    if frozen:
        raise InputError(
            "trainable in all its parameters",
            name="model",
            value=frozen,
            remedy="Pass the data through the frozen layers once, and train the rest on that.",
        )


def _check_against(sets: Sequence[Pair], tests: Sequence[Pair], name: str) -> None:
    """Evaluation sets have the training inputs' shape, and are one or one for each training set."""
    if len(tests) not in (1, len(sets)):
        raise InputError(
            f"one test set, or one for each training set ({len(sets)})", name=name, value=len(tests)
        )
    shape, own = sets[0][0].shape[1:], tests[0][0].shape[1:]
    if own != shape:
        raise InputError(
            f"of the training inputs' shape {tuple(shape)}",
            name=f"the inputs of {name}",
            value=tuple(own),
        )


def _pairs(data: Any, name: str, precision: torch.dtype) -> list[Pair]:
    """One data set or several, all of one shape, as tensors."""
    if not isinstance(data, (tuple, list)) or not data:
        raise InputError(
            "a pair (inputs, targets), or several", name=name, value=type(data).__name__
        )
    sets = [data] if hasattr(data[0], "__array__") else list(data)
    pairs = [as_pair(pair, precision, f"{name}[{i}]") for i, pair in enumerate(sets)]
    shapes = {(tuple(x.shape), tuple(y.shape)) for x, y in pairs}
    if len(shapes) > 1:
        raise InputError("sets of one shape", name=name, value=sorted(shapes))
    kinds = {(str(x.dtype), str(y.dtype)) for x, y in pairs}
    if len(kinds) > 1:
        raise InputError("sets of one type", name=name, value=sorted(kinds))
    return pairs


def _stacked(pairs: Sequence[Pair], where: torch.device) -> Pair:
    inputs, targets = zip(*pairs, strict=True)
    return torch.stack(inputs).to(where), torch.stack(targets).to(where)


def _tensors_digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
