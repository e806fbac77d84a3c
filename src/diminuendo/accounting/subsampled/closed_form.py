"""Closed forms for one Gaussian mechanism: hockey-stick curve and its inverse.

``mu`` is sensitivity over noise, so the pair is N(mu, 1) against N(0, 1).  Adding and
removing a record give the same curve.  Every function that returns a pair returns a
rigorous enclosure, wide enough to absorb its own rounding.
"""

from __future__ import annotations

import math

from scipy.special import erfcx, log_ndtr

EPS = 2.0**-52


def gaussian_log_delta(epsilon: float, mu: float) -> tuple[float, float]:
    """Enclose log delta(epsilon) of the Gaussian mechanism, ``epsilon >= 0``, ``mu > 0``.

    With a = epsilon/mu - mu/2 and b = a + mu, both terms of delta share the factor
    exp(-a^2/2); what is left is a difference of scaled complementary error functions.
    """
    a = epsilon / mu - mu / 2.0
    b = epsilon / mu + mu / 2.0
    shift_error = 4.0 * EPS * (1.0 + abs(a) + b) * (1.0 + abs(a))
    if a < -1.0:
        first = math.exp(float(log_ndtr(-a)))
        second = math.exp(epsilon + float(log_ndtr(-b)))
        log_scale = 0.0
        error = 64.0 * EPS * (1.0 + epsilon + b * b) * second + (64.0 * EPS + shift_error) * first
    else:
        first = 0.5 * float(erfcx(a / math.sqrt(2.0)))
        second = 0.5 * float(erfcx(b / math.sqrt(2.0)))
        log_scale = -0.5 * a * a
        error = (16.0 * EPS + shift_error) * (first + second)
    value = first - second
    low = math.log(value - error) + log_scale if value > error else -math.inf
    high = math.log(min(value + error, 1.0 if log_scale == 0.0 else math.inf)) + log_scale
    slack = 8.0 * EPS * (1.0 + abs(log_scale))
    return low - slack, min(high + slack, 0.0)


def gaussian_epsilon(delta: float, mu: float) -> tuple[float, float]:
    """Enclose the smallest epsilon >= 0 with delta_G(epsilon; mu) <= delta."""
    target = math.log(delta)
    if gaussian_log_delta(0.0, mu)[1] <= target:
        return 0.0, 0.0
    top = mu * mu / 2.0 + mu
    while gaussian_log_delta(top, mu)[1] > target:
        top *= 2.0
    ends = []
    for side in (0, 1):
        low, high = 0.0, top
        for _ in range(200):
            middle = 0.5 * (low + high)
            if not low < middle < high:
                break
            if gaussian_log_delta(middle, mu)[side] > target:
                low = middle
            else:
                high = middle
        ends.append(low if side == 0 else high)
    return ends[0], ends[1]
