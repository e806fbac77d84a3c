"""What is taken away to see what it gives: noise that fades, momentum, a model, and so on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from diminuendo.tuning.space import Candidate, Space

_UNIFORM = {"family": "uniform", "fall": None}
_CONSTANT = {"lr_shape": "constant", "lr_fall": 1.0}


@dataclass(frozen=True)
class Restriction:
    """Some settings of a candidate held fixed."""

    name: str
    fixed: Mapping[str, Any]

    def holds(self, candidate: Candidate) -> bool:
        """Whether a candidate keeps to it."""
        return all(getattr(candidate, name) == value for name, value in self.fixed.items())

    def imposed(self, candidate: Candidate) -> Candidate:
        """The candidate with the fixed settings in place of its own."""
        return replace(candidate, **self.fixed)


def restrictions(space: Space, models: Iterable[str]) -> list[Restriction]:
    """Every choice that the space leaves open, taken away; and all of them but the model's."""
    uniform = _reaches(space.fall, 1.0) and isinstance(space.fall, tuple)
    shapes = _several(space.lr_shape)
    constant = "constant" in shapes and len(shapes) > 1
    still = isinstance(space.momentum, tuple) and _reaches(space.momentum, 0.0)
    rules = _several(space.clipping)
    found = []
    if uniform:
        found.append(Restriction("uniform noise", _UNIFORM))
    if constant:
        found.append(Restriction("constant learning rate", _CONSTANT))
    if uniform and constant:
        found.append(Restriction("uniform noise, constant rate", {**_UNIFORM, **_CONSTANT}))
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
