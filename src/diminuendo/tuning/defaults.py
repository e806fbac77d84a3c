"""Good settings for whoever gives none: chosen by `tune` on synthetic data, kept on disk.

Only public facts enter: the budget, how many examples, features and classes there are, and what was
fixed. What was chosen is kept in

    $XDG_CACHE_HOME/diminuendo/settings        (~/.cache unless set)

A file there holds settings and no noise: the plan is made, and its ε certified, anew.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diminuendo import __version__, _files
from diminuendo.budget import Budget
from diminuendo.errors import DiminuendoError, InputError
from diminuendo.planning import Plan
from diminuendo.replicas.fingerprint import fingerprint
from diminuendo.replicas.replica import Model
from diminuendo.tuning import regression, tabular
from diminuendo.tuning.auxiliary import Shape
from diminuendo.tuning.choosing import tune
from diminuendo.tuning.networks import Linear, TwoLayers
from diminuendo.tuning.space import Candidate, Space

_VERSION = 1
_ENTRIES = 400_000
"""Numbers in a synthetic training set at most: noise is scaled so that its effect stays."""
_ROUNDS, _REPEATS = 2, 3
_MOST_STEPS = 300
"""Longer runs are stood for by this many steps; the learning rate is scaled to the same path."""
_MOST_R = 1e6
"""Beyond it noise is too little to matter."""


class ChosenSettings(UserWarning):
    """Settings that nobody gave were chosen, and what they are."""


@dataclass(frozen=True)
class Settings:
    """What was chosen, and whether it was known from an earlier time."""

    candidate: Candidate
    from_cache: bool

    def say(self, given: str = "", *, stacklevel: int = 3) -> None:
        """Warn, in one sentence, with what was chosen; `given` says what nobody gave."""
        warnings.warn(
            f"{given or 'Settings'} not given: chosen on synthetic data of the same public shape, "
            f"at no cost in privacy: {self.candidate}.",
            ChosenSettings,
            stacklevel=stacklevel + 1,
        )


def settings_for(
    budget: Budget,
    shape: Shape,
    *,
    hidden: int = 0,
    fixed: Space | None = None,
    progress: bool = False,
) -> Settings:
    """The settings that do best on synthetic tables of this shape, within the budget.

    hidden   units of the hidden layer; 0 for a linear model
    fixed    what is not to be chosen; learning rate, clip norm, steps, momentum, and how noise and
             learning rate fall, where it leaves them out. Clipping is flat unless it says more
    """
    fixed = (fixed or Space()).filled(Space(clipping="flat", sampling_rate=1.0))
    key = {"budget": asdict(budget), "shape": asdict(shape), "hidden": hidden}
    return _kept(
        {**key, "fixed": fixed.to_dict()},
        lambda: _chosen(budget, shape, model_for(shape, hidden), fixed, progress),
    )


def learning_rate_for(model: nn.Module, plan: Plan, features: int) -> float:
    """The learning rate with which a plan does best for a model of classes, and says so.

    The model, as it is now, is trained on synthetic tables of `features` columns, with the plan's
    steps, clip norm, momentum and sampling rate and uniform noise. Where the plan has learning
    rates, what is returned is to be multiplied by them. An InputError where that cannot be done.
    """
    start = copy.deepcopy(model).cpu().float()
    shares = 1.0 if plan.lr is None else float(plan.lr.mean())
    fixed = Space(
        steps=min(plan.steps, _MOST_STEPS),
        clip=plan.clip,
        momentum=plan.momentum or 0.0,
        fall=1.0,
        lr_shape="constant",
        clipping="flat",
        sampling_rate=float(plan.rates.mean()),
    )
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            classes = start(torch.zeros(2, features)).shape[1]
        shape = Shape(
            examples=plan.examples, features=features, classes=classes, largest_norm=features**0.5
        )
        key = {"budget": asdict(plan.budget), "shape": asdict(shape), "fixed": fixed.to_dict()}
        settings = _kept(
            {**key, "model": fingerprint(start)},
            lambda: _chosen(plan.budget, shape, lambda: copy.deepcopy(start), fixed, False),
        )
    except (DiminuendoError, RuntimeError, TypeError, ValueError, IndexError) as error:
        raise InputError(
            "given for this model, which could not be tried on synthetic data",
            name="lr",
            value=None,
            remedy=f"({error})",
        ) from None
    settings.say("lr", stacklevel=4)
    longer = plan.steps / min(plan.steps, _MOST_STEPS)
    return settings.candidate.lr / (shares * longer)


def model_for(shape: Shape, hidden: int) -> Model:
    """Makes the model: linear, or with one hidden layer of so many units."""
    ends = shape.features, shape.classes
    return TwoLayers(ends[0], hidden, ends[1]) if hidden else Linear(*ends)


def settings_for_regression(
    budget: Budget, *, examples: int, features: int, fixed: Space | None = None
) -> Settings:
    """The same for private least squares with a linear model and targets in [−1, 1].

    Learning rate, clip norm and steps are chosen, where `fixed` leaves them out; noise and learning
    rate stay the same in all steps.
    """
    fixed = (fixed or Space()).filled(Space(sampling_rate=1.0))
    key = {"budget": asdict(budget), "examples": examples, "features": features}
    return _kept(
        {**key, "fixed": fixed.to_dict()},
        lambda: regression.choose(budget, examples, features, fixed),
    )


def _kept(facts: dict[str, Any], choose: Callable[[], Candidate]) -> Settings:
    """What was chosen for these facts before, or is now and is kept."""
    key = {"version": [_VERSION, __version__], **facts}
    path = _path(key)
    known = _known(path, key)
    if known is not None:
        return Settings(known, from_cache=True)
    chosen = choose()
    with suppress(DiminuendoError, OSError):  # where a home cannot be written to, say
        _files.make_folder(path.parent)
        _files.write_text(path, json.dumps({"key": key, "candidate": asdict(chosen)}))
    return Settings(chosen, from_cache=False)


def _chosen(budget: Budget, shape: Shape, model: Model, fixed: Space, progress: bool) -> Candidate:
    examples = min(shape.examples, max(_ENTRIES // shape.features, 100), 2000)
    small = replace(shape, examples=max(examples, 2))
    count = (3 + 4) * _REPEATS
    sets = list(tabular.pairs(small, max(200, small.examples), count))
    found = tune(
        equivalent(budget, small.examples / shape.examples),
        small,
        model=model,
        space=fixed,
        auxiliary=[train for train, _ in sets],
        held_out=[test for _, test in sets],
        rounds=_ROUNDS,
        repeats=_REPEATS,
        progress=progress,
    )
    return replace(found.best.candidate, model="")


def equivalent(budget: Budget, share: float) -> Budget:
    """The budget with which a share of the examples suffers as much noise in each step.

    Noise of a step is σ/N: with a share of N it is the same where R = Σ 1/σ_t² is larger by
    1/share². Exact for full batches, a guess for samples.
    """
    if share == 1:
        return budget
    return replace(budget, epsilon=budget.epsilon_of(min(budget.R / share**2, _MOST_R)))


def folder() -> Path:
    """Where settings are kept for this user."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "diminuendo" / "settings"


def _path(key: dict[str, Any]) -> Path:
    text = json.dumps(key, sort_keys=True)
    return folder() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def _known(path: Path, key: dict[str, Any]) -> Candidate | None:
    """What the file says, where it is whole and for this key; otherwise it is made anew."""
    try:
        content = json.loads(path.read_text())
        if content["key"] != json.loads(json.dumps(key)):
            return None
        found = Candidate(**content["candidate"])
        numbers = (found.steps, found.lr, found.clip)
        usable = all(math.isfinite(n) and n > 0 for n in numbers) and 0 <= found.momentum < 1
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if usable else None
