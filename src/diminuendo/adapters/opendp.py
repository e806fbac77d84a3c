"""Plans as OpenDP measurements and privacy profiles, and OpenDP's losses as charges of a ledger.

    from diminuendo.adapters.opendp import as_mechanism, to_measurement, to_privacy_profile

OpenDP has Gaussian measurements and composes them, by zero-concentrated divergence. It has no
Poisson sample: a plan that samples becomes a privacy profile, the curve δ(ε), and no measurement.
In the other direction a measurement or an odometer says what it costs, not what it released, so
that it becomes a charge and not a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from diminuendo import _extras, _validate, accounting
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger.mechanisms import Mechanism, PureEpsilon, ZeroConcentrated
from diminuendo.planning import Plan

with _extras.needed("opendp", extra=None, purpose="Exchanging with OpenDP"):
    import opendp.prelude as dp
    from opendp.measures import new_privacy_profile


def to_measurement(plan: Plan) -> Any:
    """The plan's releases as one OpenDP `Measurement`, from a vector of sums to T noisy ones.

    Its input is a vector under the L2 distance; `measurement.map(plan.clip)` is its ρ for data that
    differ by one example more or less (2 × clip for one that is replaced). Needs OpenDP's feature
    "contrib". Full batches only.
    """
    if (plan.rates != 1).any():
        raise InputError(
            "1, the full batch",
            name="the plan's sampling_rate",
            value=plan.sampling_rate,
            remedy="OpenDP has no Poisson sampling: export to_privacy_profile(plan).",
        )
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.l2_distance(T=float)
    scales = (plan.sigmas * plan.clip).tolist()
    return dp.c.make_composition([dp.m.make_gaussian(*space, scale=scale) for scale in scales])


def to_privacy_profile(releases: Plan | Iterable[GaussianStep]) -> Any:
    """The certified upper bound on δ at each ε ≥ 0 as an OpenDP `PrivacyProfile`.

    For add-remove neighbours; a plan's own relation where a plan is given. Needs OpenDP's features
    "contrib" and "honest-but-curious": it takes this library's word.
    """
    steps = releases.events if isinstance(releases, Plan) else tuple(releases)
    relation = releases.budget.relation if isinstance(releases, Plan) else "add-remove"
    counts = [step.count for step in steps]
    sigmas = np.repeat([step.noise_multiplier for step in steps], counts)
    rates = np.repeat([step.sampling_rate for step in steps], counts)

    def delta(epsilon: float) -> float:
        return accounting.delta(sigmas, epsilon, rates, relation=relation)

    return new_privacy_profile(delta)


def as_mechanism(measured: Any, loss: Any) -> Mechanism:
    """A loss that OpenDP states, as something that a ledger's budget can be charged.

    measured  a measurement or odometer, or its output measure
    loss      what it states: `measurement.map(d_in)`, or `queryable.privacy_loss(d_in)` of an
              odometer; ε by max divergence, ρ by zero-concentrated divergence

    Returns a mechanism for `Ledger.charge`. Approximate measures, with a δ of their own, are
    refused: a ledger's budget has one δ, and it is not for sale in parts.
    """
    measure = str(getattr(measured, "output_measure", measured))
    if measure == "MaxDivergence":
        return PureEpsilon(epsilon=_validate.positive("loss", loss))
    if measure == "ZeroConcentratedDivergence":
        return ZeroConcentrated(rho=_validate.positive("loss", loss))
    raise InputError(
        "MaxDivergence or ZeroConcentratedDivergence",
        name="the output measure",
        value=measure,
        remedy="Take the loss before it is converted to an approximate one.",
    )
