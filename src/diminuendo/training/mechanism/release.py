"""From a clipped sum to a release: noise once among all ranks, then division by a public number.

Formal guarantee: what `NoisySum.release` returns is (Σ + noise) / divisor, with Σ the sum of what
was added on all ranks, and noise of standard deviation `noise_std` on every coordinate, drawn once,
for this step alone. With `ExactNoise` it is a post-processing of Σ plus an ideal Gaussian, to the
last bit; with `FastNoise` this holds in real arithmetic only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from diminuendo.training.cores import FEW, Beside, few
from diminuendo.training.mechanism import device
from diminuendo.training.mechanism.device import DeviceSum
from diminuendo.training.mechanism.kernels import Faults, sent
from diminuendo.training.mechanism.noise import DrawnNoise, ExactNoise
from diminuendo.training.mechanism.settling import OPEN

if TYPE_CHECKING:
    from diminuendo.training.distributed import Group
    from diminuendo.training.seeds import Seeds


Buffers = Sequence[Tensor] | Callable[[], Sequence[Tensor]]

_COST = 110.0
"""Multiplications in float64 that take as long as drawing a number of the noise ahead."""


class NoiseSource(Protocol):
    """Adds the noise of one step to a sum."""

    def add_noise(
        self, total: Tensor, *, noise_std: float, sensitivity: float, step: int
    ) -> Tensor:
        """total + noise of standard deviation `noise_std` on every coordinate.

        total        the clipped sum, flat and not yet divided; may be written on
        sensitivity  how much one example can change the sum, in Euclidean norm
        step         0, 1, …: no two steps of a run share noise
        """

    def add_beside(self, number: float, *, noise_std: float, step: int) -> float:
        """number + noise that is independent of the noise of the step's sum."""


class FastNoise:
    """PyTorch's own normal numbers, in the parameters' precision: private in real arithmetic only.

    Fast, and for experiments: what is released are floating-point numbers, and an adversary who
    looks at their last bits can learn more than the claim allows.
    """

    def __init__(self, seeds: Seeds) -> None:
        self._seeds = seeds

    def add_noise(
        self, total: Tensor, *, noise_std: float, sensitivity: float, step: int
    ) -> Tensor:
        """total + noise of standard deviation `noise_std` on every coordinate."""
        del sensitivity
        return total.add_(
            self.draw(total.numel(), noise_std, step, total.dtype, total.device).view_as(total)
        )

    def add_beside(self, number: float, *, noise_std: float, step: int) -> float:
        """A number that is released beside the step's gradient, with noise of its own."""
        generator = self._seeds.generator("noise beside a gradient", step)
        drawn = torch.normal(0.0, noise_std, (1,), generator=generator, dtype=torch.float64)
        return number + float(drawn)

    def seed(self, step: int) -> int:
        """The seed of a step's noise on a GPU, where Triton draws it."""
        return self._seeds.number("noise", step)

    def draw(
        self, size: int, noise_std: float, step: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The noise itself: a sum that starts from it saves passes over the gradient."""
        generator = self._seeds.generator("noise", step, device)
        return torch.normal(
            0.0, noise_std, (size,), generator=generator, dtype=dtype, device=device
        )


class Mechanism:
    """Where a model's noisy sums come from: its parameters, a source of noise, and the ranks."""

    def __init__(self, parameters: Sequence[nn.Parameter], noise: NoiseSource, group: Group):
        self.parameters, self.noise, self.group = parameters, noise, group
        self.order: Tensor | None = None
        """While steps are recorded, the memory on the device that holds each step's order."""
        self.leaves_open = False
        """Whether some step was released on a GPU, and not only if the next one would be."""
        self._faults: Faults | None = None

    def begin(
        self, *, noise_std: float, sensitivity: float, divisor: float, step: int
    ) -> NoisySum | DeviceSum:
        """A sum for one step that has been paid for."""
        if not device.serves(self.parameters, self.noise):
            return NoisySum(self, noise_std, sensitivity, divisor, step)
        order = self.order
        if order is None and self.group.first:
            content = self.order_of(noise_std=noise_std, divisor=divisor, step=step)
            order = sent(content, self.parameters[0].device)
        return self.recorded_sum(order)

    def recorded_sum(self, order: Tensor | None) -> DeviceSum:
        """A sum on a GPU that is released as the order says, whatever it says then."""
        assert isinstance(self.noise, (ExactNoise, FastNoise))
        self.leaves_open = True
        if self._faults is None:
            self._faults = Faults(self.parameters[0].device)
        return DeviceSum(self.parameters, self.noise, self.group, self._faults, order, self.dtype)

    def order_of(self, *, noise_std: float, divisor: float, step: int) -> bytes:
        """What a step's release on a GPU needs: once for each step, in their order."""
        assert isinstance(self.noise, (ExactNoise, FastNoise))
        return device.order_of(self.noise, noise_std=noise_std, divisor=divisor, step=step)

    @property
    def delta_of_a_step(self) -> float:
        """What is to be added to δ for each step if any is released on a GPU: coordinates that stay
        open there (docs/noise.md); else nothing."""
        there = self.leaves_open or device.serves(self.parameters, self.noise)
        if not there or not isinstance(self.noise, ExactNoise):
            return 0.0
        return 4 * OPEN * sum(parameter.numel() for parameter in self.parameters)

    def verify(self) -> None:
        """Raise where a release on a GPU turned out to be of no number."""
        if self._faults is not None:
            self._faults.check()

    @property
    def dtype(self) -> torch.dtype:
        """The widest type among the parameters', and float32 at least."""
        dtypes = {parameter.dtype for parameter in self.parameters}
        return reduce(torch.promote_types, dtypes, torch.float32)


class NoisySum:
    """One step's sum: clipped gradients × `scale` are added to what `start` gives; then `release`.

    Where the source can hand out its noise alone, the sum starts from the noise and everything is
    divided as it comes: two passes over the gradient fewer.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        noise_std: float,
        sensitivity: float,
        divisor: float,
        step: int,
    ) -> None:
        self.noise_std, self.sensitivity = noise_std, sensitivity
        self.divisor, self.step = divisor, step
        self._mechanism = mechanism
        self._starts_noisy = isinstance(mechanism.noise, FastNoise)
        self.scale = 1 / divisor if self._starts_noisy else 1.0
        self._flat: Tensor | None = None
        self._drawn: DrawnNoise | None = None
        self.sums: list[Tensor] | None = None
        """One tensor for each parameter, in its shape, to add to; None before `start`."""

    def buffers(self, parts: int) -> Buffers:  # noqa: ARG002
        """Where the parts of a step are added up: what was begun, or `start`."""
        return self.start if self.sums is None else self.sums

    def places(self, parts: int) -> None:
        """Sums are added to `buffers`."""

    def take(self, sums: Sequence[Tensor]) -> None:
        """The sums of a part are in `buffers` already."""

    def start(self) -> list[Tensor]:
        """New `sums` to add to, which replace those before."""
        mechanism, parameters = self._mechanism, self._mechanism.parameters
        device = parameters[0].device
        size = sum([p.numel() for p in parameters])
        if isinstance(mechanism.noise, FastNoise) and mechanism.group.first:
            std = self.noise_std / self.divisor
            self._flat = mechanism.noise.draw(size, std, self.step, mechanism.dtype, device)
        else:
            dtype = mechanism.dtype if self._starts_noisy else torch.float64
            with few(size):
                self._flat = torch.zeros(size, dtype=dtype, device=device)
        self.sums = self._shaped(self._flat)
        return self.sums

    def beside(self) -> Beside | None:
        """Drawing the noise before the sum is known, where one core is enough for it."""
        noise, parameters = self._mechanism.noise, self._mechanism.parameters
        size = sum([p.numel() for p in parameters])
        if not isinstance(noise, ExactNoise) or not self._mechanism.group.first:
            return None
        if not 0 < size <= FEW or parameters[0].device.type != "cpu":
            return None

        def draw() -> None:
            self._drawn = noise.ahead(size, self.step)

        return Beside(draw, size * _COST)

    def release(self) -> list[Tensor]:
        """The private gradient, one tensor for each parameter: the same on every rank."""
        flat, group = self._flat, self._mechanism.group
        assert flat is not None
        assert self.sums is not None
        group.sum(flat)
        if self._starts_noisy:
            return self.sums
        if group.first:
            flat = (self._drawn or self._mechanism.noise).add_noise(
                flat, noise_std=self.noise_std, sensitivity=self.sensitivity, step=self.step
            )
        with few(flat.numel()):
            gradient = flat.div_(self.divisor).to(self._mechanism.dtype)
        return self._shaped(group.from_first(gradient))

    def _shaped(self, flat: Tensor) -> list[Tensor]:
        parameters = self._mechanism.parameters
        return list(_unflatten_dense_tensors(flat, parameters))  # type: ignore[no-untyped-call]
