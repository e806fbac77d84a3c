"""preview(...): what accuracy to expect for which ε, before anything is spent.

For each ε the settings are chosen by `tune` on auxiliary data, and runs with them are measured on
sets that no choice was made on. What comes out holds for the auxiliary data; `Preview.assumptions`
says what has to be alike for it to hold for the private ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from diminuendo import _progress, _validate
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.report import figures
from diminuendo.tuning import tabular
from diminuendo.tuning.auxiliary import Labelled, Shape
from diminuendo.tuning.choosing import tune
from diminuendo.tuning.defaults import equivalent, model_for
from diminuendo.tuning.results import FamilyResult
from diminuendo.tuning.space import Space

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)
NO_PRIVACY = 1000.0
"""The ε whose noise is too little to matter: what the same model reaches without privacy."""
_MOST_EXAMPLES, _MOST_ENTRIES, _MOST_TESTS = 2000, 400_000, 2000
_ROUNDS, _REPEATS = 2, 3


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one ε is expected to give.

    epsilon   of the budget; None for no privacy
    accuracy  mean test accuracy over the runs that were measured, in [0, 1]
    low, high where one run ends up in 19 of 20 cases on data like these (a prediction interval by
              Student's t over the runs: noise, sampling, differences between sets; for a public
              set also which of its rows happen to be there)
    lost      accuracy that privacy costs: by how much the mean is below that without privacy
    settings  what was chosen, in words
    """

    epsilon: float | None
    accuracy: float
    low: float
    high: float
    lost: float
    settings: str


@dataclass(frozen=True, kw_only=True)
class Preview:
    """Expected accuracy for each ε, in increasing order, and what that rests on.

    without      what the same model reaches without privacy
    assumptions  whole sentences: what has to hold for the private data to fare alike
    """

    delta: float
    points: tuple[Expected, ...]
    without: Expected
    assumptions: tuple[str, ...]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and rows, one for each ε and one for no privacy."""
        rows = [
            [
                "no privacy" if one.epsilon is None else f"{one.epsilon:g}",
                f"{one.accuracy:.3f}",
                f"{one.low:.3f} to {one.high:.3f}",
                "" if one.epsilon is None else f"{one.lost:.3f}",
                one.settings,
            ]
            for one in (*self.points, self.without)
        ]
        return ["ε", "accuracy", "19 of 20 runs", "lost to privacy", "settings"], rows

    def picture(self, path: str | Path) -> Path:
        """Accuracy against ε with its intervals, as SVG, PNG or PDF by the path's ending."""
        columns = [(one.epsilon, one.accuracy, one.low, one.high) for one in self.points]
        x, mean, low, high = zip(*columns, strict=True)
        return figures.band(
            figures.Band(x, mean, low, high),
            path,
            level=self.without.accuracy,
            labels=("mean", "19 of 20 runs", "no privacy (mean)"),
            xlabel=f"ε (δ = {self.delta:g})",
            ylabel="test accuracy",
            title="Expected, from auxiliary data",
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "delta": self.delta,
            "points": [vars(one) for one in self.points],
            "without": vars(self.without),
            "assumptions": list(self.assumptions),
        }


def preview(
    shape: Shape,
    *,
    delta: float = 1e-5,
    epsilons: Sequence[float] = EPSILONS,
    public: Labelled | None = None,
    hidden: int = 0,
    seed: int = 0,
    progress: bool = True,
) -> Preview:
    """Expected test accuracy for each ε, from public data or synthetic tables; costs no privacy.

    shape      public facts about the private set: examples, features, classes, largest norm
    epsilons   which ε to show
    public     features and labels of a public set of one's own, of the same kind as the private one
               and scaled like it; synthetic tables unless given
    hidden     units of the hidden layer; 0 for a linear model
    """
    wanted = sorted({_validate.positive("an ε of epsilons", one) for one in epsilons})
    if not wanted:
        raise InputError("at least one", name="epsilons", value=list(epsilons))
    _validate.count("hidden", hidden, at_least=0)
    small, sets, words = _auxiliary(shape, public, seed)
    share = small.examples / shape.examples
    budgets = [Budget(epsilon=one, delta=delta) for one in (*wanted, NO_PRIVACY)]
    found: list[FamilyResult] = []
    with _progress.bar("preview", total=len(budgets), shown=progress) as bar:
        for budget in budgets:
            tuned = tune(
                equivalent(budget, share),
                small,
                model=model_for(small, hidden),
                space=Space(clipping="flat"),
                auxiliary=[train for train, _ in sets],
                held_out=[test for _, test in sets],
                rounds=_ROUNDS,
                repeats=_REPEATS,
                seed=seed,
                progress=False,
            )
            found.append(tuned.best)
            bar.advance()
    rows = None if public is None else len(public[0])
    plain = _expected(None, found[-1], 0.0, rows)
    points = [
        _expected(epsilon, one, plain.accuracy, rows)
        for epsilon, one in zip(wanted, found, strict=False)
    ]
    return Preview(
        delta=delta,
        points=tuple(points),
        without=plain,
        assumptions=_assumptions(shape, small, hidden, words, public is None),
    )


def _expected(
    epsilon: float | None, best: FamilyResult, plain: float, rows: int | None
) -> Expected:
    """By the runs of what was chosen; `rows` is how many public rows they all drew from."""
    assert best.accuracy is not None
    runs = 4 * _REPEATS
    # half-width of the mean's interval → of one more run's, both by t with runs − 1 degrees
    half = best.accuracy.half * math.sqrt(runs + 1)
    mean = best.accuracy.mean
    if rows is not None:
        # The runs share these rows: luck in which ones are public does not show between them. Two
        # successes and two failures more keep an accuracy of 1 from passing for certain.
        share = (rows * mean + 2) / (rows + 4)
        shared = math.sqrt(share * (1 - share) / rows)
        half = math.hypot(half, float(stats.t.ppf(0.975, runs - 1)) * shared)
    return Expected(
        epsilon=epsilon,
        accuracy=mean,
        low=max(mean - half, 0.0),
        high=min(mean + half, 1.0),
        lost=0.0 if epsilon is None else plain - mean,
        settings=str(replace(best.candidate, model="")),
    )


def _auxiliary(
    shape: Shape, public: Labelled | None, seed: int
) -> tuple[Shape, list[tuple[Labelled, Labelled]], str]:
    """The shape of the training sets, these with their test sets, and a sentence about them."""
    count = 2 * 4 * _REPEATS
    most = max(min(shape.examples, _MOST_EXAMPLES, _MOST_ENTRIES // shape.features), 2)
    if public is None:
        small = replace(shape, examples=most)
        tests = max(most, 500)
        words = "Synthetic tables: correlated features, classes in clusters, near and far apart."
        return small, list(tabular.pairs(small, tests, count, seed=seed)), words
    x, y = _checked(public, shape)
    most = min(most, int(0.7 * len(x)))
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for _ in range(count):
        order = torch.randperm(len(x), generator=generator)
        train, test = order[:most], order[most : most + _MOST_TESTS]
        sets.append(((x[train], y[train]), (x[test], y[test])))
    norm = max(shape.largest_norm, float(x.norm(dim=1).max()))
    words = f"{len(x)} public rows, drawn anew for each run: {most} to learn from, others to test."
    return replace(shape, examples=most, largest_norm=norm), sets, words


def _checked(public: Labelled, shape: Shape) -> Labelled:
    """Public features as float32 and labels as int64, of the shape's columns and classes."""
    try:
        x = torch.as_tensor(public[0], dtype=torch.float32)
        y = torch.as_tensor(public[1], dtype=torch.int64)
        fits = x.dim() == 2 and y.shape == x.shape[:1] and x.shape[1] == shape.features
        fits = fits and bool(x.isfinite().all()) and len(x) >= 20
        fits = fits and int(y.min()) >= 0 and int(y.max()) < shape.classes
    except (TypeError, ValueError, RuntimeError, IndexError):
        fits = False
    if not fits:
        raise InputError(
            f"20 or more rows of {shape.features} finite features, with labels from 0 to "
            f"{shape.classes - 1}",
            name="the public data",
            value=getattr(public[0], "shape", type(public)) if len(public) else public,
        )
    return x, y


def _assumptions(
    shape: Shape, small: Shape, hidden: int, words: str, synthetic: bool
) -> tuple[str, ...]:
    model = f"a network with {hidden} hidden units" if hidden else "a linear model"
    said = [
        words,
        f"Full-batch private training of {model}; for each ε, settings that did best on sets "
        "other than those measured. Train with settings tuned in the same way.",
        "The interval is for one more run on data like these: it holds noise, sampling and the "
        "differences between sets. How far the private data differ from them it cannot hold.",
    ]
    if synthetic:
        said.append(
            "Accuracy depends on the data more than on ε: read the column of what privacy costs, "
            "and give a public set of the same kind where there is one."
        )
    else:
        said.append("It allows for luck in which rows are public, as if they were a random sample.")
    if small.examples < 0.95 * shape.examples:
        said.append(
            f"Noise is that of {shape.examples} examples, learning is from {small.examples}: with "
            "all of them accuracy without privacy may be higher."
        )
    return tuple(said)
