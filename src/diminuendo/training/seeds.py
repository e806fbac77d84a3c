"""PyTorch's own generators, for what need not be exact: experiments' noise, and loading.

Every generator is a pure function of (keys, purpose, step), so that a resumed run or a prefetching
loader draws the same. Samples and exact noise come from a cipher instead: `mechanism.keys`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from diminuendo.errors import DiminuendoError
from diminuendo.training.mechanism.keys import Keys


@dataclass(frozen=True)
class Seeds:
    """PyTorch's generators of a run, one for each purpose, made from its keys."""

    keys: Keys
    _made: dict[tuple[str, torch.device], torch.Generator] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def make(cls, seed: int | None = None) -> Seeds:
        """Of fresh keys, or of those that a `seed` (a whole number from 0) gives."""
        return cls(Keys.make(seed))

    @property
    def fixed(self) -> int | None:
        """The seed of an experiment, or None for keys that the operating system gave."""
        return self.keys.fixed

    @property
    def private(self) -> bool:
        """False where a fixed seed makes the noise predictable."""
        return self.keys.private

    def number(self, purpose: str, step: int) -> int:
        """The seed for one purpose in one step."""
        label = f"{purpose} {step}".encode()
        digest = hashlib.blake2b(label, key=self.keys.generators, digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def generator(
        self, purpose: str, step: int, device: torch.device | str = "cpu"
    ) -> torch.Generator:
        """The generator for one purpose ("sampling", "noise") in one step, as if freshly made.

        One object for each purpose and device is set anew: making one takes longer. On a CPU
        `manual_seed` keeps 32 bits of a seed: few enough to try them all, and to meet one twice
        in a long run. So there the whole state is filled.
        """
        key = (purpose, torch.device(device))
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = torch.Generator(device)
        if made.device.type == "cpu":
            label = f"{purpose} {step}".encode()
            made.set_state(
                _filled(hashlib.shake_256(self.keys.generators + label).digest(4 * _WORDS))
            )
            return made
        return made.manual_seed(self.number(purpose, step))


_WORDS, _BEFORE = 624, 24
"""A Mersenne twister's words, and where PyTorch's saved state of a CPU generator begins them."""


@cache
def _template() -> torch.Tensor:
    """The saved state of a CPU generator that was just seeded, checked to be laid out as known."""
    seed = 0x5EED
    state = torch.Generator().manual_seed(seed).get_state()
    words = state.numpy()[_BEFORE : _BEFORE + 8 * _WORDS].view(np.uint64)
    second = (1812433253 * (seed ^ (seed >> 30)) + 1) % 2**32
    if words.size != _WORDS or words[0] != seed or words[1] != second:
        raise DiminuendoError(
            f"PyTorch {torch.__version__} saves its CPU generator in a way that is not known "
            "here, so that it cannot be given more than 32 bits of entropy."
        )
    return state


def _filled(entropy: bytes) -> torch.Tensor:
    state = _template().clone()
    words = state.numpy()[_BEFORE : _BEFORE + 8 * _WORDS].view(np.uint64)
    words[:] = np.frombuffer(entropy, dtype="<u4")
    return state
