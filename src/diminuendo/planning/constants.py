"""Public guesses about the loss that scale a plan's bound, and what is worked out from them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypedDict

from diminuendo import _validate
from diminuendo.bounds import noise_level
from diminuendo.bounds.landscape import Landscape, Quadratic
from diminuendo.budget import Budget
from diminuendo.errors import InputError


class Guesses(TypedDict, total=False):
    """Further keywords of `plan`, each with a default; see `Constants` for what they mean."""

    smoothness: float | None
    gap: float
    alpha: float | None
    step_size: float
    max_lr: float | None
    gradient_norm: float


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What `plan` takes for public constants of the loss and of training.

    smoothness      M > 0; one unless stated, or the largest eigenvalue of a spectrum
    gap             f(θ₁) − f* > 0, the initial excess loss
    alpha           α > 0 itself, in place of parameters, smoothness and gap
    step_size       a constant learning rate in units of 1/M, in (0, 1]
    max_lr          the longest step, in the unit of lr
    gradient_norm   root mean square of the clipped gradients' norms as a share of clip, in [0, 1]
    """

    smoothness: float | None = None
    gap: float = 1.0
    alpha: float | None = None
    step_size: float = 1.0
    max_lr: float | None = None
    gradient_norm: float = 1.0

    def __post_init__(self) -> None:
        _validate.positive("gap", self.gap)
        for name in ("smoothness", "alpha", "max_lr"):
            if getattr(self, name) is not None:
                _validate.positive(name, getattr(self, name))
        _validate.real("gradient_norm", self.gradient_norm, at_least=0, at_most=1)

    @classmethod
    def of(cls, guesses: Guesses) -> Constants:
        """The constants from keywords; an unknown one is a TypeError, as in any call."""
        for name in guesses:
            if name not in {field.name for field in fields(cls)}:
                raise TypeError(f"plan() got an unexpected keyword argument {name!r}")
        return cls(**guesses)

    def noise_level(
        self,
        budget: Budget,
        loss: Landscape,
        *,
        examples: int,
        parameters: int | None,
        clip: float,
    ) -> tuple[float, str]:
        """α, and a sentence about what had to be assumed for it."""
        if self.alpha is not None:
            return self.alpha, "alpha was stated directly."
        if parameters is None:
            raise InputError(
                "given, unless alpha is",
                name="parameters",
                value=None,
                remedy="It is the number of trained parameters.",
            )
        largest = float(loss.eigenvalues.max()) if isinstance(loss, Quadratic) else None
        M, source = self.smoothness or largest or 1.0, "given"
        if self.smoothness is None:
            source = "a public guess" if largest is None else "from the spectrum"
        if largest is not None and largest > M:
            raise InputError(f"at least max(spectrum) = {largest:g}", name="smoothness", value=M)
        level = noise_level(
            parameters=parameters,
            clip=clip,
            smoothness=M,
            examples=examples,
            R=budget.R,
            gap=self.gap,
        )
        return level, (
            f"alpha = {level:.3g} from its parts: smoothness M = {M:g} ({source}), "
            f"gap f(θ₁) − f* = {self.gap:g} (a public guess unless you know it)."
        )

    def sampling_noise(self, rate: float, *, examples: int, parameters: int | None) -> float:
        """The variance that sampling adds to each coordinate of the sum, in units of clip²."""
        if rate == 1:
            return 0.0
        if parameters is None:
            raise InputError(
                'given where lr="joint" and batches are sampled',
                name="parameters",
                value=None,
                remedy="The noise of sampling is divided among them.",
            )
        return (1 - rate) * rate * examples * self.gradient_norm**2 / parameters
