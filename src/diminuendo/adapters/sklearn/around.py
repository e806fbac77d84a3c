"""What an estimator can see of the Pipeline or search that it is fitted in.

scikit-learn tells an estimator nothing of either. So the calls under way are looked at: a Pipeline
and a search call their estimators from their own `fit`. Where that finds nothing (another way to
combine estimators, another version of scikit-learn), nothing is said; no claim rests on it.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from sklearn.base import is_classifier
from sklearn.compose import ColumnTransformer
from sklearn.model_selection import GridSearchCV, ParameterGrid, RandomizedSearchCV, check_cv
from sklearn.pipeline import FeatureUnion, Pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    OneHotEncoder,
    OrdinalEncoder,
    PolynomialFeatures,
)
from sklearn.utils import get_tags

from diminuendo import _validate, accounting
from diminuendo.budget import Budget
from diminuendo.errors import BudgetRefused
from diminuendo.events import GaussianStep
from diminuendo.ledger import Ledger
from diminuendo.report.text import rounded_up


class NotCovered(UserWarning):
    """Something was computed from the private data, and no privacy claim covers it."""


class SearchCost(UserWarning):
    """What all fits of a search cost together, before the first of them."""


def warn_of_labels() -> None:
    """Say that labels taken from the data are not covered."""
    warnings.warn(
        "classes is not given: which labels occur in y is read without noise, and no privacy claim "
        "covers it. State the labels that there can be: classes=[0, 1], say.",
        NotCovered,
        stacklevel=3,
    )


def fits_under_way(kinds: Any) -> Iterator[tuple[Any, FrameType]]:
    """Objects of these kinds whose `fit` or `fit_transform` is being called now, inner ones first.

    With each comes the frame of that call.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("fit", "fit_transform"):
            caller = frame.f_locals.get("self")
            if isinstance(caller, kinds):
                yield caller, frame
        frame = frame.f_back


def warn_of_uncovered_steps(estimator: Any, *, grouped: bool = False) -> None:
    """Warn where transformers before `estimator` in a Pipeline have learned from the data.

    grouped  whether the estimator's claim is for persons: what was paid for rows is then too little
    """
    for pipeline, _ in fits_under_way(Pipeline):
        uncovered = [
            name
            for name, step in pipeline.steps[:-1]
            if step is not estimator and not (covered(step) and not (grouped and _by_rows(step)))
        ]
        if uncovered:
            names = ", ".join(repr(name) for name in uncovered)
            warnings.warn(
                f"What the step {names} of the Pipeline learned from the private data is part of "
                f"the model, and the privacy claim of {type(estimator).__name__} does not cover "
                "it. Scale and encode by public facts (PublicScaler, PublicEncoder), or pay for "
                "means and deviations (PrivateScaler).",
                NotCovered,
                stacklevel=3,
            )


def _by_rows(step: Any) -> bool:
    """Whether a transformer has paid for rows, of which a person may have many."""
    return getattr(getattr(step, "result_", None), "unit", None) == "example"


def warn_of_seed(random_state: Any) -> None:
    """Warn where noise can be predicted; an InputError where it is no seed."""
    if random_state is not None:
        _validate.count("random_state", random_state, at_least=0)
        warnings.warn(
            "random_state is fixed, so the noise can be predicted: what is fitted is NOT private. "
            "Leave it out but for tests.",
            NotCovered,
            stacklevel=4,
        )


def covered(step: Any) -> bool:
    """Whether a transformer learns nothing from the data, or pays for what it learns."""
    if step is None or isinstance(step, str):
        return True
    if isinstance(step, Pipeline):
        return all(covered(inner) for _, inner in step.steps)
    if isinstance(step, FeatureUnion):
        return all(covered(inner) for _, inner in step.transformer_list)
    if isinstance(step, ColumnTransformer):
        inner_ones = [inner for _, inner, *_ in step.transformers]
        return all(covered(inner) for inner in [*inner_ones, step.remainder])
    if getattr(step, "covered_by_privacy", False):
        return True
    if isinstance(step, (OneHotEncoder, OrdinalEncoder)):
        stated = not isinstance(step.categories, str)
        return stated and step.min_frequency is None and step.max_categories is None
    if isinstance(step, PolynomialFeatures):
        return True  # learns how many columns there are
    if isinstance(step, FunctionTransformer):  # a function may look at all rows at once
        return step.func is None or isinstance(step.func, np.ufunc)
    return not get_tags(step).requires_fit


def search_under_way() -> tuple[Any, FrameType] | None:
    """The innermost search that has just begun: it copies its estimator before its first fit."""
    for search, frame in fits_under_way((GridSearchCV, RandomizedSearchCV)):
        return None if "base_estimator" in frame.f_locals else (search, frame)
    return None


def fits_of(search: Any, frame: FrameType) -> tuple[list[dict[str, Any]], int, bool]:
    """A search's candidates (none where they are drawn), its folds, and whether it fits again."""
    X, y = frame.f_locals.get("X"), frame.f_locals.get("y")
    groups = (frame.f_locals.get("params") or {}).get("groups")
    cv = check_cv(search.cv, y, classifier=is_classifier(search.estimator))
    folds = int(cv.get_n_splits(X, y, groups))
    if isinstance(search, GridSearchCV):
        candidates: Iterable[dict[str, Any]] = ParameterGrid(search.param_grid)
    else:
        candidates = [{} for _ in range(search.n_iter)]
    return [dict(candidate) for candidate in candidates], folds, search.refit is not False


def state_cost_of_search(payer: Any) -> None:
    """Say what a search that has just begun costs; refuse it where its ledger has too little left.

    Called while `payer` is copied; of several in one search (a scaler and a classifier), the first
    speaks for all.
    """
    found = search_under_way()
    if found is None:
        return
    search, frame = found
    payers = _payers(search.estimator)
    if not payers or payers[0].estimator is not payer:
        return
    candidates, folds, again = fits_of(search, frame)
    number = len(candidates) * folds + again
    words = (
        f"This search fits {number} private models ({len(candidates)} candidates × {folds} folds"
        f"{', and the best once more' if again else ''})"
    )
    if not _countable(payers, candidates):
        warnings.warn(
            f"{words}, or more where one is fitted several times or exchanged for another. What "
            "that costs cannot be told here: add it up before you go on.",
            SearchCost,
            stacklevel=3,
        )
        return
    costs = [
        [one.estimator.cost_of_a_fit(_own(candidate, one.prefix)) for one in payers]
        for candidate in candidates
    ]
    dearest = max(costs, key=lambda fit: sum(cost.price for cost in fit), default=[])
    every = [cost for fit in costs for cost in fit * folds] + (dearest if again else [])
    _refuse_beyond_ledger(every, words)
    drawn = isinstance(search, RandomizedSearchCV)
    warnings.warn(f"{words}. {_total(every, drawn=drawn)}", SearchCost, stacklevel=3)


class Payer(NamedTuple):
    """An estimator that pays, the prefix of its parameters, and whether it is fitted once a fit."""

    prefix: str
    estimator: Any
    once: bool


def _payers(whole: Any, prefix: str = "", once: bool = True) -> list[Payer]:
    """Estimators that pay, in the order in which they are copied."""
    if hasattr(whole, "cost_of_a_fit"):
        return [Payer(prefix, whole, once)]
    if isinstance(whole, Pipeline):
        parts = whole.steps
    elif isinstance(whole, FeatureUnion):
        parts = whole.transformer_list
    elif isinstance(whole, ColumnTransformer):
        parts = [(name, part) for name, part, *_ in whole.transformers]
    elif hasattr(whole, "get_params"):  # may fit a copy for each fold, class or bag
        parts, once = list(whole.get_params(deep=False).items()), False
    else:
        return []
    return [payer for name, part in parts for payer in _payers(part, f"{prefix}{name}__", once)]


def _countable(payers: list[Payer], candidates: list[dict[str, Any]]) -> bool:
    """Whether every payer is fitted once in each fit, and no candidate exchanges one."""
    replaced = {name for candidate in candidates for name in candidate}
    return all(
        payer.once and not any(payer.prefix.startswith(f"{name}__") for name in replaced)
        for payer in payers
    )


def _own(candidate: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {
        name.removeprefix(prefix): value
        for name, value in candidate.items()
        if name.startswith(prefix)
    }


def _total(costs: list[Cost], *, drawn: bool) -> str:
    paid = "The ledger is charged for each" if costs[0].ledger else "No ledger counts them"
    rest = f"{paid}. Scores on private rows, and the choice by them, are not covered."
    if not all(cost.events for cost in costs):
        epsilon = math.fsum(cost.budget.epsilon for cost in costs)
        delta = math.fsum(cost.budget.delta for cost in costs)
        return (
            f"Together they cost at most the sum: ε ≤ {rounded_up(epsilon)} at δ = {delta:.3g}, "
            f"for somebody who sees all of them. {rest}"
        )
    delta = min(cost.budget.delta for cost in costs)
    budget = replace(costs[0].budget, delta=delta)
    epsilon = accounting.claim([event for cost in costs for event in cost.events], budget)
    return (
        f"Together they cost ε ≤ {rounded_up(epsilon)} at δ = {delta:g}, for somebody who sees all "
        f"of them{', by the settings of the estimator as it is' if drawn else ''}. {rest}"
    )


def _refuse_beyond_ledger(costs: list[Cost], words: str) -> None:
    accounts: dict[tuple[str | None, str], list[GaussianStep]] = {}
    for cost in costs:
        if cost.ledger is not None:
            accounts.setdefault(cost.ledger, []).extend(cost.events)
    for (url, name), events in accounts.items():
        with Ledger(url, create=False) as ledger:
            if not ledger.fits(name, events):
                raise BudgetRefused(
                    f"{words}, and the budget {name!r} has too little left for all of them. "
                    "Nothing was fitted. Search on synthetic or public data, or with fewer "
                    "candidates or a smaller epsilon for each."
                )


@dataclass(frozen=True)
class Cost:
    """What one fit releases, by whose terms, and which ledger pays: (URL, budget) or None.

    No events: what it releases is within the budget, and not known before.
    """

    events: tuple[GaussianStep, ...]
    budget: Budget
    ledger: tuple[str | None, str] | None

    @property
    def price(self) -> float:
        """Comparable between fits: the sum of (rate/σ)² over all steps."""
        return sum(e.count * (e.sampling_rate / e.noise_multiplier) ** 2 for e in self.events)
