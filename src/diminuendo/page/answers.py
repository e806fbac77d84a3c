"""From the form to what the page shows: a plan, what it should gain, and what mistakes cost."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diminuendo import accounting
from diminuendo import influence as rates_named
from diminuendo._validate import Vector
from diminuendo.accounting.account import releases
from diminuendo.errors import InputError
from diminuendo.page import exports
from diminuendo.page.settings import Settings
from diminuendo.planning import Plan, PlanWarning, mismatch, plan
from diminuendo.planning.misjudged import influence_of, misjudged
from diminuendo.planning.text import gain_sentence, number, rounded_up

MOST_POINTS = 400
"""How many steps are drawn: more than a screen has room for are left out of the picture."""
_ANCHORS = {"add-remove": 21, "replace-one": 6}
_ROUGHLY = 0.01
_SPEEDS = tuple(float(speed) for speed in np.geomspace(1 / 8, 8, 25))


def make_plan(settings: Settings) -> tuple[Plan, list[str]]:
    """The plan for these settings, and what the planner warned about."""
    settings.check_length()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        made = plan(settings.budget, **settings.plan_arguments())
    return made, [str(one.message) for one in caught if issubclass(one.category, PlanWarning)]


def answer(settings: Settings, made: Plan | None = None, warned: list[str] | None = None) -> Any:
    """Everything but ε by step, as JSON values; `made` is the plan where it is at hand."""
    if made is None:
        made, warned = make_plan(settings)
    shown = drawn_steps(made.steps)
    influence = influence_of(made, **settings.loss, steps_stated=settings.steps != "auto")
    uniform = _uniform_sigma(made, influence)
    return {
        "settings": settings.as_dict(),
        "steps": made.steps,
        "epsilon": made.epsilon,
        "epsilon_words": rounded_up(made.epsilon),
        "drawn": shown.tolist(),
        "sigmas": made.sigmas[shown - 1].tolist(),
        "uniform": uniform,
        "lr": None if made.lr is None else made.lr[shown - 1].tolist(),
        "first": made.sigmas[0].item(),
        "last": made.sigmas[-1].item(),
        "noise_ratio": made.noise_ratio,
        "erub": number(made.erub),
        "erub_uniform": number(made.erub_uniform),
        "uniform_steps": made.uniform_steps,
        "gain": gain_sentence(made),
        "negligible": bool(made.gain_is_negligible),
        "speeds": [one._asdict() for one in misjudged(made, influence, _SPEEDS)],
        "gamma": _gamma(made, settings),
        "mismatches": _mismatches(made, settings),
        "assumptions": list(made.assumptions),
        "warnings": warned or [],
        "digest": made.digest,
        "exports": exports.scripts(settings, made),
    }


def running(settings: Settings, made: Plan) -> Any:
    """ε by step, and the ε that uniform noise would need, as JSON values.

    Both are certified upper bounds, each for steps that were fixed in advance. Full batches have
    one for every drawn step; sampled ones, whose accounting takes longer, for a few.
    """
    influence = influence_of(made, **settings.loss, steps_stated=settings.steps != "auto")
    shown, values = _by_step(made)
    return {
        "steps": shown.tolist(),
        "epsilon": values,
        "epsilon_words": [rounded_up(value) for value in values],
        "uniform_needs": _uniform_needs(made, _uniform_sigma(made, influence)),
    }


def drawn_steps(steps: int, *, at_most: int = MOST_POINTS) -> NDArray[np.int_]:
    """Steps t = 1…T, thinned out evenly where there are many; the first and the last stay."""
    return np.unique(np.linspace(1, steps, min(steps, at_most)).round().astype(np.int_))


def _by_step(made: Plan) -> tuple[NDArray[np.int_], list[float]]:
    """Steps, and a certified ε after each."""
    if made.sampling_rate == 1:
        shown = drawn_steps(made.steps)
        sigmas = made.sigmas / made.budget.sensitivity  # exact: it is 1 or 2
        curve = accounting.running_epsilon(sigmas, made.budget.delta)[shown - 1]
        curve[-1] = min(curve[-1], made.epsilon)
        return shown, [float(value) for value in curve]
    shown = drawn_steps(made.steps, at_most=_ANCHORS[made.budget.relation])
    found = [
        releases(made.sigmas[:step], made.sampling_rate).epsilon(
            made.budget.delta, made.budget.relation, tolerance=_ROUGHLY
        )
        for step in shown[:-1]
    ]
    # ε cannot fall when steps are added, so each bound holds for fewer steps as well
    least = np.minimum.accumulate([made.epsilon, *reversed(found)])[::-1]
    return shown, [float(value) for value in least]


def _uniform_sigma(made: Plan, influence: Vector) -> float:
    """σ of uniform noise in as many steps on the same budget."""
    left = float(np.sum(influence * made.sigmas**2)) / made.noise_ratio
    return math.sqrt(left / float(np.sum(influence)))


def _uniform_needs(made: Plan, uniform: float) -> str | None:
    """The ε at which uniform noise of the same length would leave as little noise; None at none."""
    if made.noise_ratio >= 1:
        return None
    sigma = uniform * math.sqrt(made.noise_ratio)
    try:
        steps = releases(np.full(made.steps, sigma), made.sampling_rate)
        return rounded_up(steps.claim(made.budget))
    except InputError:
        return None


def _gamma(made: Plan, settings: Settings) -> float | None:
    """The convergence rate that the plan assumes, where one number says it."""
    if settings.known == "spectrum" or settings.lr != "constant" or made.forgetting is None:
        return None
    if settings.known == "gamma":
        return settings.gamma
    return 1 - 1 / settings.kappa if settings.known == "kappa" else math.exp(-made.forgetting)


def _mismatches(made: Plan, settings: Settings) -> list[Mapping[str, Any]]:
    """What training with other learning rates than planned would cost, for each named shape."""
    found: list[Mapping[str, Any]] = []
    for name in ("constant", "linear", "cosine"):
        if name == settings.lr or made.steps == 1:
            continue
        used = getattr(rates_named, name)(made.steps)
        cost = mismatch(made, used)
        if cost is not None:
            found.append({"used": name, "uniform": cost.over_uniform, "planned": cost.over_planned})
    return found
