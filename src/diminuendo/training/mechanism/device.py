"""A step's release on a GPU: the clipped sums as they come, noise, division, one pass, no waiting.

Formal guarantee: that of `release`. What a step needs is a few numbers and keys, its *order*, that
are sent to the device: so a recorded release serves every step, each with an order of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from diminuendo.training.mechanism import kernels
from diminuendo.training.mechanism.cipher import KEY_BYTES
from diminuendo.training.mechanism.grid import Grid
from diminuendo.training.mechanism.kernels import Faults, Order
from diminuendo.training.mechanism.noise import ExactNoise

if TYPE_CHECKING:
    from diminuendo.training.distributed import Group
    from diminuendo.training.mechanism.release import FastNoise

VECTORS_KEY = Order.BYTES
"""Where in an order the key of the checks' random vectors begins."""
ORDER_BYTES = VECTORS_KEY + KEY_BYTES


def order_of(
    noise: ExactNoise | FastNoise, *, noise_std: float, divisor: float, step: int
) -> bytes:
    """The order of one step, once: its noise is given out by this."""
    if isinstance(noise, ExactNoise):
        keys = noise.keys.noise(step, noise.rank)
        return Order.of(Grid.of(noise_std), keys, divisor) + noise.keys.checks(step)
    content = struct.pack("<2dq", noise_std, divisor, noise.seed(step))
    return content.ljust(ORDER_BYTES, b"\0")


def shaped(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """A flat tensor as one tensor for each parameter, in its shape."""
    sizes = [parameter.numel() for parameter in parameters]
    parts = torch.split(flat, sizes)
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]


class DeviceSum:
    """One step's sum on a GPU; see `release.NoisySum`.

    A step that comes in one part hands its sums on as they are; several parts, or the parts of
    several ranks, are added up first.
    """

    scale = 1.0

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        noise: ExactNoise | FastNoise,
        group: Group,
        faults: Faults,
        order: Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        self._parameters, self._noise, self._group = parameters, noise, group
        self._faults, self._order, self._dtype = faults, order, dtype
        self._flat: Tensor | None = None
        self._out: Tensor | None = None
        self._taken: Sequence[Tensor] = ()

    @property
    def _exact(self) -> bool:
        return isinstance(self._noise, ExactNoise)

    def buffers(self, parts: int) -> list[Tensor] | None:
        """Where the parts of a step are added up; None where there is one part."""
        if parts == 1 and self._group.world == 1:
            return None
        if self._flat is None:
            self._flat = self._new(torch.float64 if self._exact else self._dtype).zero_()
        return shaped(self._flat, self._parameters)

    def places(self, parts: int) -> list[Tensor] | None:
        """Where the sums of a step of one part may be written to, in the type of the result."""
        several = parts > 1 or self._group.world > 1
        if several or not self._exact or self._dtype is not torch.float32:
            return None
        return shaped(self.lie_in(self._out), self._parameters)

    def lie_in(self, out: Tensor | None) -> Tensor:
        """Release into this memory, or into new memory if there is none; which it is."""
        self._out = self._new(self._dtype) if out is None else out
        return self._out

    def take(self, sums: Sequence[Tensor]) -> None:
        """The clipped sums of a part."""
        self._taken = sums

    def clear(self) -> None:
        """Begin another sum of several parts in the same memory."""
        if self._flat is not None:
            self._flat.zero_()

    def beside(self) -> None:
        """Nothing is drawn before the sums are there."""

    def release(self) -> list[Tensor]:
        """The private gradient, one tensor for each parameter: the same on every rank."""
        flat, group = self._flat, self._group
        if flat is not None:
            group.sum(flat)
        if flat is None and not self._exact and self._size > _SMALL:
            return self._released_in_place()
        out = self._new(self._dtype) if self._out is None else self._out
        if group.first:
            assert self._order is not None
            sums = [flat] if flat is not None else _joined(self._taken)
            if self._exact:
                kernels.release(sums, out, self._order, self._faults)
            else:
                outs = torch.split(out, [part.numel() for part in sums])
                kernels.release_fast(sums, outs, self._order)
        return shaped(group.from_first(out), self._parameters)

    def _released_in_place(self) -> list[Tensor]:
        """Noise in real arithmetic, added where the sums are: no memory for another gradient."""
        assert self._order is not None
        sums = [part.to(self._dtype).contiguous() for part in self._taken]
        kernels.release_fast(sums, sums, self._order)
        return sums

    @property
    def _size(self) -> int:
        return sum([p.numel() for p in self._parameters])

    def _new(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._size, dtype=dtype, device=self._parameters[0].device)


# Entries up to which neighbouring sums of one type are joined: a launch costs more than a copy.
_SMALL = 1 << 18


def _joined(sums: Sequence[Tensor]) -> list[Tensor]:
    """The same numbers in fewer tensors."""
    found: list[list[Tensor]] = []
    size = 0
    for part in sums:
        flat = part.reshape(-1)
        room = found and found[-1][0].dtype is flat.dtype and size + flat.numel() <= _SMALL
        if room:
            found[-1].append(flat)
            size += flat.numel()
        else:
            found.append([flat])
            size = flat.numel()
    return [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in found]


def serves(parameters: Sequence[nn.Parameter], noise: Any) -> bool:
    """Whether releases of these parameters are made on their GPU."""
    from diminuendo.training.mechanism.release import FastNoise

    return (
        kernels.available
        and all(parameter.is_cuda for parameter in parameters)
        and isinstance(noise, (ExactNoise, FastNoise))
    )
