"""Whether tensors still hold what they held: a checksum sees what PyTorch's versions do not.

A write through `.data`, numpy or another library leaves a tensor's version as it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_CHUNK = 1 << 20
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Contents:
    """Tensors with their versions and checksums, as they were when `record` was called."""

    def __init__(self) -> None:
        self._recorded: list[tuple[Tensor, int, int]] = []

    def record(self, parts: Sequence[Tensor]) -> None:
        """Remember these tensors, and no others."""
        sums = checksums(parts)
        self._recorded = [(p, p._version, s) for p, s in zip(parts, sums, strict=True)]

    def forget(self) -> None:
        """Remember none."""
        self._recorded = []

    def overwritten(self) -> bool:
        """Whether a recorded tensor has other contents at the same version."""
        if not self._recorded:
            return False
        same = [(part, sum_) for part, version, sum_ in self._recorded if part._version == version]
        now = checksums([part for part, _ in same])
        return any(before != after for (_, before), after in zip(same, now, strict=True))


def checksums(parts: Iterable[Tensor]) -> list[int]:
    """A 64-bit checksum of each tensor's bits: Σ w_j x_j mod 2⁶⁴ with odd weights w_j.

    A change of one entry is always seen; others are missed with a probability near 2⁻⁶⁴.
    """
    with torch.no_grad():
        sums = [_checksum(part.detach()) for part in parts]
    by_device: dict[torch.device, list[int]] = {}
    for number, each in enumerate(sums):
        by_device.setdefault(each.device, []).append(number)
    result = [0] * len(sums)
    for numbers in by_device.values():  # the host waits once for each device
        for number, value in zip(
            numbers, torch.stack([sums[i] for i in numbers]).tolist(), strict=True
        ):
            result[number] = value
    return result


def _checksum(part: Tensor) -> Tensor:
    if part.layout != torch.strided or part.is_quantized:
        return torch.zeros((), dtype=torch.int64, device=part.device)
    whole = torch.view_as_real(part.resolve_conj()) if part.is_complex() else part
    bits = whole.contiguous().view(-1).view(_WHOLE[whole.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    if not bits.numel():
        return total
    weights = _weights(part.device, min(bits.numel(), _CHUNK))
    for chunk in torch.split(bits, _CHUNK):
        total = total * 1_000_003 + (chunk.to(torch.int64) * weights[: len(chunk)]).sum()
    return total


def _weights(device: torch.device, length: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(0x5EED)
    drawn = torch.randint(
        -(2**62), 2**62, (length,), dtype=torch.int64, device=device, generator=generator
    )
    return drawn * 2 + 1
