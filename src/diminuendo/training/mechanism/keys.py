"""Where randomness comes from: 256 bits of the operating system, and a key for every use.

A key is a pure function of (root, purpose, step, rank), so that a prefetching loader or another
rank draws the same sample. Roots live in memory alone and are never written: noise that nobody can
replay. A fixed seed is for tests and experiments, and then the run is not private.

Noise that is added twice hides nothing: the difference of two releases is a difference of two
sums. So keys refuse to be copied, to be used in a process that was forked, and to give the key
of one step's noise twice.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
from typing import NoReturn

from diminuendo import _validate
from diminuendo.errors import DiminuendoError
from diminuendo.training.mechanism.cipher import KEY_BYTES

_forks = 0


def _forked() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_forked)


class Keys:
    """The keys of one run on one rank; make them with `Keys.make`."""

    def __init__(self, root: bytes, shared: bytes, fixed: int | None) -> None:
        self._root, self._shared = root, shared
        self._process = (os.getpid(), _forks)
        self._used: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()
        self.fixed = fixed
        """The seed of an experiment, or None for keys that the operating system gave."""

    @classmethod
    def make(cls, seed: int | None = None) -> Keys:
        """Fresh keys, or the same ones for the same `seed` (a whole number from 0)."""
        if seed is None:
            root = secrets.token_bytes(KEY_BYTES)
        else:
            seed = _validate.count("seed", seed, at_least=0)
            root = hashlib.sha256(f"diminuendo {seed}".encode()).digest()
        return cls(root, _derive(root, "shared by all ranks"), seed)

    @property
    def private(self) -> bool:
        """False where a fixed seed makes the noise predictable."""
        return self.fixed is None

    @property
    def shared(self) -> bytes:
        """The 32 bytes that all ranks need, to draw one sample. They tell nothing of the noise."""
        self.check_process()
        return self._shared

    def share(self, shared: bytes) -> None:
        """Sample from now on as the rank does whose `shared` this is."""
        self._shared = shared

    @property
    def generators(self) -> bytes:
        """The secret that PyTorch's generators are made of: `seeds.Seeds`."""
        self.check_process()
        return self._root

    def sampling(self, step: int) -> bytes:
        """The key of a step's sample: the same on every rank, as often as it is asked for."""
        self.check_process()
        return _derive(self._shared, f"sampling {step}")

    def noise(self, step: int, rank: int = 0) -> tuple[bytes, bytes]:
        """The two keys of a step's noise (its first bits, and those after them), once.

        A step at or before one whose noise was drawn is refused.
        """
        return (
            self._once("noise", step, rank),
            _derive(self._root, f"noise, more bits, step {step} of rank {rank}"),
        )

    def checks(self, step: int) -> bytes:
        """The key of the random vectors by which a GPU checks a step's sums."""
        self.check_process()
        return _derive(self._root, f"checks of step {step}")

    def noise_beside(self, step: int) -> tuple[bytes, bytes]:
        """The two keys of the noise of a number that is released beside a step's gradient, once."""
        return (
            self._once("noise beside a gradient", step, 0),
            _derive(self._root, f"noise beside a gradient, more bits, step {step}"),
        )

    def _once(self, purpose: str, step: int, rank: int) -> bytes:
        self.check_process()
        with self._lock:
            last = self._used.get((purpose, rank), -1)
            if step <= last:
                raise DiminuendoError(
                    f"The {purpose} of step {step + 1} was drawn before, or a later one's: the "
                    "same numbers are never given out twice. Each step draws its own, in order."
                )
            self._used[purpose, rank] = step
        return _derive(self._root, f"{purpose}, step {step} of rank {rank}")

    def check_process(self) -> None:
        """Raise in a forked process, which would draw the numbers that its parent draws."""
        if self.private and self._process != (os.getpid(), _forks):
            raise DiminuendoError(
                "This process was forked from the one that began the run, and both would add the "
                "same noise. Make PrivateGradients (or call fit) after the fork."
            )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise DiminuendoError(
            "Keys are neither copied nor written: two runs with the same keys would add the same "
            "noise. Make PrivateGradients anew instead of copying or pickling it."
        )

    def __repr__(self) -> str:
        return f"Keys(seed={self.fixed})" if self.fixed is not None else "Keys()"


def _derive(root: bytes, label: str) -> bytes:
    return hashlib.blake2b(
        label.encode(), key=root, digest_size=KEY_BYTES, person=b"diminuendo"
    ).digest()
