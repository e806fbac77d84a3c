"""Which candidates are tried: a few lengths of the path for each model, then neighbours.

Settings that trade against each other move together: with most gradients clipped only lr × clip
counts, and more steps of less length cover the same path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from diminuendo.tuning.space import LR_SHAPES, Candidate, Space

PATHS = (3.0, 12.0, 48.0, 192.0)
"""First values of lr × clip × T × largest norm / 10."""
_FIRST_STEPS = 24
_MOMENTA = (0.0, 0.3, 0.5, 0.7, 0.9)


def whole(largest_norm: float) -> Space:
    """Everything that is searched unless it is fixed, for features up to this norm.

    A full batch is at least as good as any sample of the same number of steps; a sampling rate is
    searched only where one is asked for.
    """
    return Space(
        steps=(4, 200),
        lr=(1e-4, 1e6),
        clip=(0.01 * largest_norm, largest_norm),
        momentum=(0.0, 0.9),
        fall=(0.25, 1.0),
        lr_shape=LR_SHAPES,
        lr_fall=(0.05, 1.0),
        clipping=("flat", "automatic", "per-layer"),
        sampling_rate=1.0,
    )


class Proposals:
    """Candidates of a space, drawn by one generator."""

    def __init__(self, space: Space, largest_norm: float, seed: int) -> None:
        self.space, self.largest_norm = space, largest_norm
        self.chance = np.random.default_rng([seed, 15])

    def first(self, models: Iterable[str]) -> list[Candidate]:
        """The plain method at several lengths of its path, for each model."""
        return list(
            dict.fromkeys(
                self._plain(model, path * 10 / self.largest_norm)
                for model in models
                for path in PATHS
            )
        )

    def _plain(self, model: str, path: float) -> Candidate:
        space = self.space
        steps = int(_inside(space.steps, _FIRST_STEPS))
        clip = _inside(space.clip, 0.1 * self.largest_norm)
        fall = _inside(space.fall, 1.0)
        shape = _first_name(space.lr_shape)
        return Candidate(
            family="uniform" if fall == 1 else "exponential",
            steps=steps,
            lr=_inside(space.lr, _short(path / (steps * clip))),
            clip=clip,
            momentum=_inside(space.momentum, 0.0),
            fall=None if fall == 1 else fall,
            lr_shape=shape,
            lr_fall=1.0 if shape == "constant" else _inside(space.lr_fall, 0.3),
            clipping=_first_name(space.clipping),  # type: ignore[arg-type]
            sampling_rate=_inside(space.sampling_rate, 1.0),
            model=model,
        )

    def probes(self, candidate: Candidate) -> list[Candidate]:
        """The candidate with one choice more, or two: so that each has been tried at least once."""
        found = []
        faded = self.faded(candidate, 0.6)
        if self._open("fall"):
            found += [faded, self.faded(candidate, 0.8)]
        if self._open("lr_shape"):
            for shape in _names(self.space.lr_shape):
                if shape != "constant":
                    found += [self.fallen(candidate, 0.3, shape), self.fallen(faded, 0.6, shape)]
        if self._open("momentum"):
            found.append(replace(candidate, momentum=_inside(self.space.momentum, 0.5)))
        if self._open("clipping"):
            rules: Any = _names(self.space.clipping)
            found += [replace(candidate, clipping=rule) for rule in rules]
        return found

    def faded(self, c: Candidate, fall: float) -> Candidate:
        """With noise that falls to this share, or as near to it as the space allows."""
        fall = _inside(self.space.fall, fall)
        uniform = fall == 1
        return replace(
            c, fall=None if uniform else fall, family="uniform" if uniform else "exponential"
        )

    def fallen(self, c: Candidate, fall: float, shape: str | None = None) -> Candidate:
        """With a learning rate that falls to this share and covers about the same path."""
        if shape is None:
            shape = next(name for name in _names(self.space.lr_shape) if name != "constant")
        fall = _inside(self.space.lr_fall, fall)
        lr = c.lr
        if c.lr_shape == "constant" and self._open("lr"):
            lr = _inside(self.space.lr, _short(lr * 2 / (1 + fall)))
        return replace(c, lr_shape=shape, lr_fall=fall, lr=lr)

    def near(self, candidate: Candidate, scale: float) -> Candidate:
        """A neighbour: one to three settings moved, by about `scale` in (0, 1]."""
        moves = [name for name in _MOVES if self._open(name)]
        if not moves:
            return candidate
        count = min(len(moves), int(self.chance.choice([1, 2, 3], p=[0.45, 0.35, 0.2])))
        for name in self.chance.choice(moves, count, replace=False):
            candidate = getattr(self, f"_{name}")(candidate, scale)
        return candidate

    def _open(self, name: str) -> bool:
        return isinstance(getattr(self.space, name), tuple)

    def _factor(self, scale: float) -> float:
        return math.exp(scale * self.chance.normal())

    def _lr(self, c: Candidate, scale: float) -> Candidate:
        return replace(c, lr=_inside(self.space.lr, _short(c.lr * self._factor(0.8 * scale))))

    def _steps(self, c: Candidate, scale: float) -> Candidate:
        steps = int(_inside(self.space.steps, round(c.steps * self._factor(scale))))
        lr = c.lr
        if self._open("lr") and self.chance.random() < 0.6:
            lr = _inside(self.space.lr, _short(lr * c.steps / steps))
        return replace(c, steps=steps, lr=lr)

    def _clip(self, c: Candidate, scale: float) -> Candidate:
        clip = _inside(self.space.clip, _short(c.clip * self._factor(1.2 * scale)))
        lr = c.lr
        if self._open("lr") and self.chance.random() < 0.7:
            lr = _inside(self.space.lr, _short(lr * c.clip / clip))
        return replace(c, clip=clip, lr=lr)

    def _fall(self, c: Candidate, scale: float) -> Candidate:
        return self.faded(c, _moved(self.space.fall, c.fall or 1.0, 0.4 * scale, self.chance))

    def _lr_shape(self, c: Candidate, scale: float) -> Candidate:
        del scale
        shape = str(self.chance.choice(_names(self.space.lr_shape)))
        if shape == "constant":
            return replace(c, lr_shape=shape, lr_fall=1.0)
        if c.lr_shape != "constant":
            return replace(c, lr_shape=shape)
        return self.fallen(c, float(self.chance.choice([0.05, 0.2, 0.5])), shape)

    def _lr_fall(self, c: Candidate, scale: float) -> Candidate:
        if c.lr_shape == "constant":
            return self._lr_shape(c, scale) if self._open("lr_shape") else c
        return replace(c, lr_fall=_moved(self.space.lr_fall, c.lr_fall, 0.5 * scale, self.chance))

    def _momentum(self, c: Candidate, scale: float) -> Candidate:
        del scale
        low, high = self.space.momentum  # type: ignore[misc]
        options = [m for m in (low, *_MOMENTA, high) if low <= m <= high and m != c.momentum]
        return replace(c, momentum=float(self.chance.choice(options)))

    def _clipping(self, c: Candidate, scale: float) -> Candidate:
        del scale
        rules: Any = [rule for rule in _names(self.space.clipping) if rule != c.clipping]
        return replace(c, clipping=str(self.chance.choice(rules)))  # type: ignore[arg-type]

    def _sampling_rate(self, c: Candidate, scale: float) -> Candidate:
        del scale
        factor = float(self.chance.choice([0.25, 0.5, 2.0, 4.0]))
        return replace(
            c, sampling_rate=_inside(self.space.sampling_rate, _short(c.sampling_rate * factor))
        )


_MOVES = (
    "lr",
    "steps",
    "clip",
    "momentum",
    "fall",
    "lr_shape",
    "lr_fall",
    "clipping",
    "sampling_rate",
)


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (str(names),)


def _first_name(names: str | tuple[str, ...] | None) -> str:
    return _names(names)[0]


def _inside(numbers: Any, value: float) -> float:
    """The fixed number, or the value moved into the range."""
    if not isinstance(numbers, tuple):
        return float(numbers)
    low, high = numbers
    return float(min(max(value, low), high))


def _moved(numbers: Any, value: float, scale: float, chance: np.random.Generator) -> float:
    """A ratio moved by a factor, in steps of 0.05."""
    value *= math.exp(scale * chance.normal())
    return _inside(numbers, max(round(value / 0.05) * 0.05, 0.05))


def _short(value: float) -> float:
    """Three significant digits: nobody needs more, and equal candidates are trained once."""
    return float(f"{value:.3g}")
