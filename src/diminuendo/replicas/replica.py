"""The settings of one training run among many, and its result."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor, nn

from diminuendo import _validate
from diminuendo._validate import Vector

Clipping = Literal["flat", "automatic", "per-layer"]
"""How gradients are clipped: `Flat(C)`, `Automatic(C)` or `PerLayer(C)` of `training.clipping`."""
CLIPPINGS: tuple[Clipping, ...] = ("flat", "automatic", "per-layer")
Model = Callable[[], nn.Module]
"""Makes a new module, initialised from torch's global random generator."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replica:
    """The settings that may differ between replicas.

    sigmas         noise multipliers σ_1…σ_T, at least 0; their number is the number of steps T
    lr             the learning rate, above 0: one number, or one for each step
    clip           C, the clip norm (max grad norm), above 0: the noise added to the sum of
                   gradients has standard deviation C·σ_t
    beta           momentum in [0, 1), of the bias-corrected average (`training.PrivateDescent`)
    seed           a whole number that fixes initialisation, noise and sampling
    data           the index of this replica's training set
    sampling_rate  in (0, 1]; below 1, each step uses the Poisson sample that `training.fit` draws
    clipping       "flat": gradients are scaled to norm C where they are longer; "automatic": to
                   nearly C always (AUTO-S, γ = 0.01); "per-layer": each of L layers to C/√L
    """

    sigmas: ArrayLike
    lr: float | ArrayLike
    clip: float
    beta: float = 0.0
    seed: int = 0
    data: int = 0
    sampling_rate: float = 1.0
    clipping: Clipping = "flat"

    def __post_init__(self) -> None:
        sigmas = _validate.vector("sigmas", self.sigmas, positive=False)
        if np.ndim(self.lr) == 0:
            lr: float | Vector = _validate.positive("lr", self.lr)
        else:
            lr = _validate.vector("lr", self.lr)
            _validate.same_length("lr", lr, "sigmas", sigmas)
        checked = {
            "sigmas": sigmas,
            "lr": lr,
            "clip": _validate.positive("clip", self.clip),
            "beta": _validate.real("beta", self.beta, at_least=0, below=1),
            "seed": _validate.count("seed", self.seed, at_least=0),
            "data": _validate.count("data", self.data, at_least=0),
            "sampling_rate": _validate.real(
                "sampling_rate", self.sampling_rate, above=0, at_most=1
            ),
            "clipping": _validate.choice("clipping", self.clipping, CLIPPINGS),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def steps(self) -> int:
        """T, the number of steps."""
        return int(np.size(self.sigmas))

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that differ where any setting does."""
        digest = hashlib.sha256()
        for entry in fields(self):
            value = np.asarray(getattr(self, entry.name))
            digest.update(f"{entry.name} {value.shape} ".encode() + value.tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Outcome:
    """The result of one replica.

    replica         the replica's digest
    steps           how many steps it took
    status          "done", or "not finite" if its losses overflowed
    train_loss      mean loss on its training set after the last step
    train_accuracy  share of training examples classified correctly, in [0, 1]; None for targets
                    that are not class labels
    evaluations     "loss" and "accuracy" on each evaluation set, by its name
    curve           the same facts after each recorded step and after the last one, by step
    stopped         the step after which its losses were not finite, or None
    parameters      the trained parameters by name, where they were asked for
    """

    replica: str
    steps: int
    status: Literal["done", "not finite"]
    train_loss: float
    train_accuracy: float | None = None
    evaluations: dict[str, dict[str, float | None]] = field(default_factory=dict)
    curve: dict[int, dict[str, Any]] = field(default_factory=dict)
    stopped: int | None = None
    parameters: dict[str, Tensor] | None = field(default=None, repr=False, compare=False)

    def to_entry(self, index: int) -> dict[str, Any]:
        """One line of a results file, for the replica at this index, as JSON values."""
        values = asdict(replace(self, parameters=None))
        del values["parameters"]
        entry: dict[str, Any] = _finite_or_null({"index": index, **values})
        return entry

    @classmethod
    def from_entry(cls, entry: dict[str, Any]) -> Outcome:
        """The outcome that `to_entry` wrote; a loss that was not finite becomes NaN."""
        values = {key: value for key, value in entry.items() if key != "index"}
        if values["train_loss"] is None:
            values["train_loss"] = math.nan
        values["curve"] = {int(step): facts for step, facts in values["curve"].items()}
        return cls(**values)


def _finite_or_null(value: Any) -> Any:
    """JSON has no infinity and no NaN."""
    if isinstance(value, dict):
        return {key: _finite_or_null(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
