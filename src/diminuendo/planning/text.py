"""A plan in words, with its noise as a small drawing."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from diminuendo._validate import Vector
from diminuendo.budget import Budget
from diminuendo.planning.gain import SMALLEST_NOTICED

if TYPE_CHECKING:
    from diminuendo.planning.value import Plan

_BARS = "▁▂▃▄▅▆▇█"


def drawing(values: ArrayLike, *, width: int = 48) -> str:
    """A curve as a line of at most `width` bars, from zero to its largest value."""
    curve: Vector = np.asarray(values, dtype=np.float64)
    if curve.size > width:
        curve = curve[np.linspace(0, curve.size - 1, width).round().astype(int)]
    heights = np.ceil(curve / curve.max() * len(_BARS)).astype(int) - 1
    return "".join(_BARS[max(h, 0)] for h in heights)


def number(value: float) -> str:
    """Four significant digits, without an exponent between 0.0001 and 10 million."""
    if 1e4 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e+0", "e").replace("e+", "e")


def rounded_up(value: float) -> str:
    """Six digits, never below the value: a claim must not shrink in print."""
    return _six_digits(value, ROUND_CEILING)


def rounded_down(value: float) -> str:
    """Six digits, never above the value: for what is left, and for lower bounds."""
    return _six_digits(value, ROUND_FLOOR)


def _six_digits(value: float, rounding: str) -> str:
    if value == 0:
        return "0"
    digits = Context(prec=6, rounding=rounding).create_decimal(Decimal(value)).normalize()
    return f"{digits:f}" if 1e-4 < value < 1e9 else f"{digits:e}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: "1 step", "2,000 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def whole(value: float) -> str:
    """All digits of a number that somebody stated, and no more."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def summary(plan: Plan) -> str:
    """What the plan does, what it costs, what it is expected to give and what it assumes."""
    budget, sigmas = plan.budget, plan.sigmas
    least, most = plan.rates.min(), plan.rates.max()
    rate = f"{least:g}" if least == most else f"{least:g} to {most:g}, step by step"
    batch = "full batch" if least == 1 else f"Poisson rate {rate}"
    rates = [] if plan.lr is None else [f"  learning rate {_line(plan.lr)}"]
    lines = [
        f"Plan: {_steps(plan.steps)}, {plan.schedule} schedule, {batch}, clip {plan.clip:g}",
        f"  noise σ      {_line(sigmas)}",
        *rates,
        f"  privacy      ε = {rounded_up(plan.epsilon)} of {whole(budget.epsilon)} at δ = "
        f"{whole(budget.delta)} ({budget.relation}, {budget.conversion} conversion)",
        f"  worst case   ERUB, the bound on the final excess risk over the initial one: "
        f"{number(plan.erub)}; with uniform noise in {_steps(plan.uniform_steps)} "
        f"{number(plan.erub_uniform)}",
        f"  noise        {number(plan.noise_ratio)} × what uniform noise of the same length "
        f"leaves in the final loss{' at these learning rates' if _together(plan) else ''}",
        *_gain_line(plan),
        f"  digest       {plan.digest[:23]}…",
        "Assumptions:",
    ]
    return "\n".join(lines + [f"  - {assumption}" for assumption in plan.assumptions])


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def _line(values: Vector) -> str:
    return f"{drawing(values)}  {number(values[0])} → {number(values[-1])}"


def percent(share: float) -> str:
    """A share as percent: two digits, all of those before the point, and no exponent."""
    value = 100 * share
    if abs(value) >= 10:
        return f"{value:,.0f}%"
    if 0 < abs(value) < 1e-3:
        return "less than 0.001%"
    return f"{value:.2g}%"


def gain_sentence(plan: Plan) -> str:
    """What is expected of the schedule beside uniform noise, and why where that is little.

    Empty where the plan does not know its gain. ERUB may be a fraction of uniform noise's where
    the gain is too small to be seen: the gain is counted in parts of the initial excess risk, to
    which all the noise may add next to nothing.
    """
    if plan.gain is None or plan.gain_error is None:
        return ""
    together = _together(plan)
    of_initial = plan.erub_uniform <= 1 or together  # planned for it, none leaves more
    whose = "the initial excess risk" if of_initial else "uniform noise's excess risk"
    own = ", with learning rates planned for it" if together else ""
    if not plan.gain_is_negligible:
        less = (
            f"The final excess risk is lower by {percent(plan.gain)} of the initial one"
            if of_initial
            else f"{percent(plan.gain)} less excess risk"
        )
        error = percent(plan.gain_error)
        rates = "and learning rates planned for it" if together else "at the same learning rates"
        return f"{less} than with uniform noise {rates} (± {error})."
    if plan.gain_error > SMALLEST_NOTICED:
        return (
            f"Not certain: {percent(plan.gain)} of {whose}, and as much would be lost again if the "
            "run converges at two thirds or one and a half times the planned speed. Uniform noise "
            f"may do as well{own}."
        )
    if plan.gain <= 0 or plan.noise_ratio >= 1:
        return f"None to expect: uniform noise does as well{own}."
    small = (
        f"Too small to be seen: {percent(plan.gain)} of {whose}, where two runs that differ only "
        f"in their random numbers differ by about {percent(SMALLEST_NOTICED)}."
    )
    if together:
        return f"{small} Uniform noise does as well{own}."
    added = percent(plan.gain / (1 - plan.noise_ratio))
    return (
        f"{small} Noise matters little here, however it is spread: uniform noise would add {added} "
        "in all."
    )


def _gain_line(plan: Plan) -> list[str]:
    said = gain_sentence(plan)
    return [f"  gain         {said[0].lower()}{said[1:]}"] if said else []


def relation_sentence(budget: Budget) -> str:
    """Which two datasets count as neighbours."""
    words = {
        "add-remove": "one example is in the data or zeroed out, and the divisor stays as it is",
        "replace-one": "one example is replaced by any other",
    }
    return f"Neighbouring data: {words[budget.relation]} ({budget.relation})."


_TOGETHER = "The learning rates were planned together with the noise"


def _together(plan: Plan) -> bool:
    return any(sentence.startswith(_TOGETHER) for sentence in plan.assumptions)


def joint_sentence(sampling_noise: float) -> str:
    """How learning rates were planned together with the noise."""
    also = (
        f", with the noise of sampled gradients (variance {sampling_noise:.3g} clip² a coordinate)"
        if sampling_noise
        else ""
    )
    return (
        f"{_TOGETHER}, for an initial distance spread evenly "
        f"over all directions{also}; a schedule of your own needs a plan of its own."
    )


def sampling_sentences(rate: float | Vector) -> list[str]:
    """How batches are drawn; nothing for the full batch."""
    left_out = "the bound leaves out the sampling noise of the gradients themselves."
    if not isinstance(rate, float):
        return [
            f"Every step draws a Poisson sample at its own rate, {rate.min():g} to "
            f"{rate.max():g}, and divides by its own expected size; {left_out}"
        ]
    if rate == 1:
        return []
    return [f"Every step draws a Poisson sample at rate {rate:g}; {left_out}"]
