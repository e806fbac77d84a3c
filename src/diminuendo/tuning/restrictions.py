"""What is taken away to see what it gives: noise that fades, momentum, a model, and so on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diminuendo.tuning.proposals import Proposals
from diminuendo.tuning.space import Candidate, Space

_UNIFORM = {"family": "uniform", "fall": None}
_CONSTANT = {"lr_shape": "constant", "lr_fall": 1.0}
_NOISE = {False: "uniform noise", True: "fading noise"}
_RATE = {False: "constant rate", True: "falling rate"}
_FADED, _FALLEN = 0.7, 0.3
"""Where noise and learning rate fall to, before that is tuned."""


@dataclass(frozen=True)
class Restriction:
    """Some settings of a candidate held fixed, and noise or learning rate made to fall.

    fixed     settings by their names
    fading    σ_t falls
    falling   η_t falls
    """

    name: str
    fixed: Mapping[str, Any]
    fading: bool = False
    falling: bool = False

    def holds(self, candidate: Candidate) -> bool:
        """Whether a candidate keeps to it."""
        return (
            all(getattr(candidate, name) == value for name, value in self.fixed.items())
            and not (self.fading and (candidate.fall or 1.0) >= 1)
            and not (self.falling and (candidate.lr_shape == "constant" or candidate.lr_fall >= 1))
        )

    def imposed(self, candidate: Candidate, proposals: Proposals) -> Candidate:
        """The candidate with the restriction's settings in place of its own."""
        candidate = replace(candidate, **self.fixed)
        if self.fading and (candidate.fall or 1.0) >= 1:
            candidate = proposals.faded(candidate, _FADED)
        if self.falling and (candidate.lr_shape == "constant" or candidate.lr_fall >= 1):
            candidate = proposals.fallen(candidate, _FALLEN)
        return candidate


def restrictions(space: Space, models: Iterable[str]) -> list[Restriction]:
    """Every choice that the space leaves open, one by one; and none of them, the model apart."""
    uniform = isinstance(space.fall, tuple) and _reaches(space.fall, 1.0)
    shapes = _several(space.lr_shape)
    constant = "constant" in shapes and len(shapes) > 1
    still = isinstance(space.momentum, tuple) and _reaches(space.momentum, 0.0)
    rules = _several(space.clipping)
    found = []
    for fading in (False, True) if uniform else (None,):
        for falling in (False, True) if constant else (None,):
            if fading is None and falling is None:
                continue
            words = [_NOISE[fading]] if fading is not None else []
            words += [_RATE[falling]] if falling is not None else []
            fixed = {
                **(_UNIFORM if fading is False else {}),
                **(_CONSTANT if falling is False else {}),
            }
            found.append(Restriction(", ".join(words), fixed, bool(fading), bool(falling)))
    if still:
        found.append(Restriction("no momentum", {"momentum": 0.0}))
    if len(rules) > 1:
        found += [Restriction(f"{rule} clipping", {"clipping": rule}) for rule in rules]
    if isinstance(space.sampling_rate, tuple) and _reaches(space.sampling_rate, 1.0):
        found.append(Restriction("full batch", {"sampling_rate": 1.0}))
    plain: dict[str, Any] = {
        **(_UNIFORM if uniform else {}),
        **(_CONSTANT if constant else {}),
        **({"momentum": 0.0} if still else {}),
        **({"clipping": "flat"} if len(rules) > 1 and "flat" in rules else {}),
    }
    if len(found) > 1 and all(one.fixed != plain for one in found):
        found.append(Restriction("none of these", plain))
    names = list(models)
    if len(names) > 1:
        found += [Restriction(f"{name} alone", {"model": name}) for name in names]
    return found


def _several(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (str(names),)


def _reaches(numbers: Any, value: float) -> bool:
    return value in numbers if isinstance(numbers, tuple) else numbers == value
