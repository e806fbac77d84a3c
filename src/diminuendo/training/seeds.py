"""Where randomness comes from: one seed for each purpose, one generator for each step.

Every generator is a pure function of (seed, purpose, step), so that a resumed run, a second rank or
a prefetching loader draws the same. By default seeds come from the operating system, live in
memory alone and are never written: noise that nobody can replay. A fixed seed is for tests and
experiments, and then the run is not private.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from diminuendo import _validate
from diminuendo.errors import DiminuendoError


@dataclass(frozen=True)
class Seeds:
    """The root of a run's randomness. `fixed` is None for operating-system entropy."""

    fixed: int | None = None
    _root: bytes = field(default=b"", repr=False, compare=False)
    _made: dict[tuple[str, torch.device], torch.Generator] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def make(cls, seed: int | None = None) -> Seeds:
        if seed is None:
            return cls(None, secrets.token_bytes(32))
        seed = _validate.count("seed", seed, at_least=0)
        return cls(seed, hashlib.sha256(f"diminuendo {seed}".encode()).digest())

    @property
    def private(self) -> bool:
        return self.fixed is None

    def number(self, purpose: str, step: int) -> int:
        """The seed for one purpose in one step."""
        label = f"{purpose} {step}".encode()
        digest = hashlib.blake2b(label, key=self._root, digest_size=8).digest()
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
            made.set_state(_filled(hashlib.shake_256(self._root + label).digest(4 * _WORDS)))
            return made
        return made.manual_seed(self.number(purpose, step))

    def shared(self, root: bytes) -> Seeds:
        """The same seeds on another rank."""
        return Seeds(self.fixed, root)

    @property
    def root(self) -> bytes:
        return self._root


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
