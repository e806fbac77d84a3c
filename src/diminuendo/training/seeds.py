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

import torch

from diminuendo import _validate


@dataclass(frozen=True)
class Seeds:
    """The root of a run's randomness. `fixed` is None for operating-system entropy."""

    fixed: int | None = None
    _root: bytes = field(default=b"", repr=False, compare=False)
    _made: dict[tuple[str, str], torch.Generator] = field(
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

        One object for each purpose and device is seeded anew: making one takes longer.
        """
        key = (purpose, str(device))
        if key not in self._made:
            self._made[key] = torch.Generator(device)
        return self._made[key].manual_seed(self.number(purpose, step))

    def shared(self, root: bytes) -> Seeds:
        """The same seeds on another rank."""
        return Seeds(self.fixed, root)

    @property
    def root(self) -> bytes:
        return self._root
