"""Methods for convex losses that release one model and nothing on the way."""

from __future__ import annotations

from diminuendo.compare import whole
from diminuendo.compare.method import Method, Range, Settings
from diminuendo.compare.private import Private

_RIDGE = Range(1e-4, 1.0)
_FAMILY = "not iterative, for convex losses"


def _batch(private: Private, settings: Settings) -> int:
    return max(private.facts.examples // int(settings["batches"]), 1)


METHODS = (
    Method(
        key="output",
        title="output perturbation",
        family=_FAMILY,
        paper="Chaudhuri, Monteleoni and Sarwate 2011",
        claim="One Gaussian release of the minimiser, of sensitivity (1 + 2·tolerance)·L/(NΛ).",
        run=lambda private, s: whole.output_perturbation(private, s["ridge"]),
        space={"ridge": _RIDGE},
        convex=True,
        releases="noised model",
        differs="Gaussian noise and (ε, δ) in place of pure ε; the solver's error is counted.",
        checked="the sensitivity of the minimiser, in the tests",
    ),
    Method(
        key="objective",
        title="objective perturbation",
        family=_FAMILY,
        paper="Chaudhuri, Monteleoni and Sarwate 2011; Kifer, Smith and Thakurta 2012; Redberg, "
        "Koskela and Wang 2023",
        claim="Privacy loss bounded by a determinant and a χ variable (docs of `whole`), the "
        "solver's error covered by a little more noise.",
        run=lambda private, s: whole.objective_perturbation(private, s["ridge"]),
        space={"ridge": _RIDGE},
        convex=True,
        releases="model",
        differs="The original takes the gradient for independent of the noise and the minimum for "
        "exact; here neither is assumed, and several classes are covered.",
    ),
    Method(
        key="bolt-on",
        title="bolt-on noise",
        family=_FAMILY,
        paper="Wu, Li, Kumar, Chaudhuri, Jha and Naughton 2017",
        claim="One Gaussian release of the last iterate, of the sensitivity that contraction and "
        "the example's own steps leave.",
        run=lambda p, s: whole.bolt_on(p, s["ridge"], int(s["passes"]), _batch(p, s)),
        space={
            "ridge": _RIDGE,
            "passes": Range(choices=(5, 10, 20)),
            "batches": Range(choices=(2, 5, 10)),
        },
        convex=True,
        releases="noised model",
        differs="The sensitivity is added up step by step, and is smaller than their closed form.",
        checked="the bound 2L/(γm), which ours stays below, in the tests",
    ),
    Method(
        key="last-iterate",
        title="noisy descent, last iterate",
        family=_FAMILY,
        paper="Chourasia, Ye and Shokri 2021; Altschuler and Talwar 2022; Bok, Su and Altschuler "
        "2024",
        claim="The final model alone is μ-GDP, by shifted interpolation: constant noise, no "
        "clipping, a smooth strongly convex loss.",
        run=lambda private, s: whole.last_iterate(private, s["ridge"], int(s["steps"])),
        space={"ridge": _RIDGE, "steps": Range(choices=(20, 40, 80, 160, 320))},
        convex=True,
        releases="model",
        differs="Nobody may see an iterate before the last.",
        checked="the theorem's closed form on its worst case, in the tests",
    ),
)
