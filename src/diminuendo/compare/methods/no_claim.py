"""Methods that are listed and not run: nothing proves what they claim."""

from __future__ import annotations

from diminuendo.compare.method import Method

_FAMILY = "no valid claim"


def _listed(key: str, title: str, paper: str, why: str) -> Method:
    return Method(key=key, title=title, family=_FAMILY, paper=paper, claim=why, run=None, space={})


METHODS = (
    _listed(
        "validation-free",
        "validation-based decay, validation not charged",
        "Yu, Liu, Pu, Gursoy and Truex 2019, on private validation data",
        "When the noise falls depends on private data that nobody pays for. With the cost charged: "
        "`validation`.",
    ),
    _listed(
        "last-iterate-falling",
        "last iterate of noisy descent with falling noise",
        "after Bok, Su and Altschuler 2024",
        "The theorem that the final model leaks less than all steps is for constant noise; for a "
        "schedule only the sum over all steps is proven here.",
    ),
    _listed(
        "last-iterate-clipped",
        "last iterate of clipped or non-convex descent",
        "after Altschuler and Talwar 2022",
        "A clipped step is no contraction, so hiding the iterates proves nothing.",
    ),
    _listed(
        "objective-exact",
        "objective perturbation with a solver's minimum",
        "Chaudhuri, Monteleoni and Sarwate 2011, as printed",
        "The proof is for the exact minimum, which no solver returns. With the error covered: "
        "`objective`.",
    ),
    _listed(
        "adaptive-poisson",
        "noise chosen on the way under Poisson sampling, exact account",
        "policies on top of Abadi et al. 2016",
        "The certified account of sampled steps is for steps fixed in advance. A Rényi filter "
        "covers it at a higher price; without one there is no claim.",
    ),
    _listed(
        "learned-private",
        "policy or schedule learnt on the private data",
        "learning as in `learned-policy` and `learned-schedule`, on the data to be trained on",
        "What was learnt is a release of its own, of unknown sensitivity, and nobody pays for it. "
        "Learnt on auxiliary data it costs nothing.",
    ),
    _listed(
        "shuffled",
        "shuffled batches, accounted as Poisson samples",
        "common practice; Chua, Ghazi, Kamath, Kumar, Manurangsi, Sinha and Zhang 2024",
        "Shuffling is not Poisson sampling, and can leak much more than the account of Poisson "
        "samples says. Fixed groups in turns are accounted for what they are: `banded-prefix`.",
    ),
)
