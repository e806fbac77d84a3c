"""tune(...): choose schedule, steps, learning rate, clip norm and momentum without private data.

Candidates are trained on auxiliary data of the private set's public shape, many at once by the
repeats engine, all with the same seeds; Optuna proposes them. Every family of schedules gets the
same number of candidates. A study in a shared storage is resumed, or worked on by several machines.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike

from diminuendo import _validate, schedules
from diminuendo._validate import Vector
from diminuendo.accounting.calibrate import calibrate
from diminuendo.budget import Budget
from diminuendo.errors import InputError
from diminuendo.influence.measured import mark, said_of
from diminuendo.planning import SCHEDULES, Plan, PlanWarning, plan
from diminuendo.replicas.engine import Model, Outcome, Replica, bar, initialise, train
from diminuendo.replicas.fingerprint import identity
from diminuendo.report.figures import Point
from diminuendo.tuning import auxiliary as made
from diminuendo.tuning.auxiliary import Labelled, Shape
from diminuendo.tuning.networks import TwoLayers

if TYPE_CHECKING:
    import optuna

Numbers = float | tuple[float, float]
Influence = Callable[[int], Vector] | ArrayLike

MOST_STEPS = 10_000
MINIMISED = ("train-loss", "test-loss")
_STARTS = 8
LOGARITHMIC = ("lr", "clip")
_PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)
_COLLISIONS = ("already exists", "unique", "duplicate", "locked")
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Space:
    """What is searched: a number stands fixed, a pair (low, high) is searched between its ends.

    `fall` is σ_T/σ_1 and concerns the named shapes that fall; learning rate and clip norm are
    searched on a logarithmic scale.
    """

    steps: int | tuple[int, int] = (50, 150)
    lr: Numbers = 0.1
    clip: Numbers = 4.0
    momentum: Numbers = 0.0
    fall: Numbers = (0.25, 1.0)

    def __post_init__(self) -> None:
        reach = f"Tuning reaches from 1 to {MOST_STEPS} steps."
        checks: dict[str, Callable[[str, Any], float]] = {
            "steps": lambda n, v: _validate.count(n, v, at_most=MOST_STEPS, remedy=reach),
            "lr": _validate.positive,
            "clip": _validate.positive,
            "momentum": lambda n, v: _validate.real(n, v, at_least=0, below=1),
            "fall": lambda n, v: _validate.real(n, v, above=0, at_most=1),
        }
        for name, check in checks.items():
            object.__setattr__(self, name, _number_or_range(name, getattr(self, name), check))

    def searched(self, family: str) -> tuple[str, ...]:
        """The names that have a range and mean something for this family."""
        names = ["steps", "lr", "clip", "momentum"]
        if family not in ("uniform", "optimal"):
            names.append("fall")
        return tuple(name for name in names if isinstance(getattr(self, name), tuple))


def _number_or_range(name: str, value: Any, check: Callable[[str, Any], float]) -> Any:
    if not isinstance(value, (tuple, list)):
        return check(name, value)
    if len(value) != 2:
        raise InputError("a number, or a pair (low, high)", name=name, value=value)
    low, high = (check(f"an end of {name}", end) for end in value)
    if not low < high:
        raise InputError("a pair (low, high) with low < high", name=name, value=value)
    return (low, high)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One point of the space. `fall` is None where the family has none."""

    family: str
    steps: int
    lr: float
    clip: float
    momentum: float
    fall: float | None

    def shape(self, influence: Callable[[int], Vector] | None) -> Vector:
        """σ_t up to scale."""
        if self.family == "optimal":
            assert influence is not None
            return schedules.optimal_shape(influence(self.steps))
        return schedules.shapes.falling(self.family, self.steps, self.fall or 1.0)

    def sigmas(self, budget: Budget, influence: Callable[[int], Vector] | None = None) -> Vector:
        """Noise multipliers that land on the budget."""
        return calibrate(self.shape(influence), budget)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A candidate and what it reached: None where a run was not finite."""

    candidate: Candidate
    score: float | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Chosen:
    """The best candidate of one family, as a plan, with the learning rate to run it at."""

    family: str
    plan: Plan
    lr: float
    score: float
    candidate: Candidate
    searched: tuple[str, ...]
    trials: tuple[Trial, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Tuned:
    """What tuning found, by family."""

    families: Mapping[str, Chosen]
    minimise: str
    settings: Mapping[str, Any]
    warning: str | None = None
    """What the influence was measured on, where that was private data."""

    @property
    def best(self) -> Chosen:
        return min(self.families.values(), key=lambda chosen: chosen.score)

    def points(self) -> list[Point]:
        """Every finite candidate, for a picture of the landscape."""
        return [
            Point(
                name,
                {key: getattr(trial.candidate, key) for key in chosen.searched},
                trial.score,
            )
            for name, chosen in self.families.items()
            for trial in chosen.trials
            if trial.score is not None
        ]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the σ_t: public facts about public data, unless `warning` says other."""
        return {
            "best": self.best.family,
            "warning": self.warning,
            "minimise": self.minimise,
            "settings": dict(self.settings),
            "families": {
                name: {
                    "score": chosen.score,
                    "lr": chosen.lr,
                    **{k: v for k, v in asdict(chosen.candidate).items() if k != "lr"},
                    "plan": chosen.plan.digest,
                    "assumptions": list(chosen.plan.assumptions),
                    "trials": [
                        {**asdict(trial.candidate), "score": trial.score} for trial in chosen.trials
                    ],
                }
                for name, chosen in self.families.items()
            },
        }


def tune(
    budget: Budget,
    shape: Shape,
    *,
    families: Sequence[str] = ("uniform", "exponential"),
    space: Space | None = None,
    model: Model | None = None,
    auxiliary: str | Labelled | Sequence[Labelled] = "teacher",
    held_out: Sequence[Labelled] | None = None,
    influence: Influence | None = None,
    minimise: str = "train-loss",
    trials: int = 32,
    repeats: int = 4,
    batch: int = 8,
    seed: int = 0,
    storage: str | None = None,
    name: str = "tuning",
    device: torch.device | str | None = None,
    progress: bool = True,
) -> Tuned:
    """The best of every family, found on auxiliary data.

    shape       the private set's public shape: examples, features, classes, largest norm
    families    "uniform", "exponential", "step", "time", "polynomial", "linear", "optimal"
    model       makes the module; the paper's network with 1000 hidden units unless given
    auxiliary   labels of synthetic data ("teacher", "clusters", "random"), or public sets
    held_out    a test set for each auxiliary set, for minimise="test-loss"; made where the
                auxiliary data is
    influence   for "optimal": a curve, or a function that gives one for T steps
    minimise    the auxiliary set's final "train-loss" (the paper's), or its "test-loss"
    trials      candidates for every family; each is trained `repeats` times
    batch       candidates proposed and trained at a time
    storage     a database URL, or a file ending in .journal; several machines may share it
    """
    space = space or Space()
    for family in families:
        _validate.choice("families", family, SCHEDULES)
        if not space.searched(family):
            raise InputError(
                "a family with something to tune",
                name="families",
                value=family,
                remedy="Give a range (low, high) for steps, lr, clip or momentum"
                + ("." if family in ("uniform", "optimal") else ", or fall."),
            )
    if not families or len(set(families)) != len(families):
        raise InputError("at least one, each once", name="families", value=list(families))
    for label, number in (("trials", trials), ("repeats", repeats), ("batch", batch)):
        _validate.count(label, number)
    _validate.choice("minimise", minimise, MINIMISED)
    curve = _curve(influence, space, families)
    sets, tests = _sets(auxiliary, held_out, shape, repeats, seed, minimise)
    model = model or TwoLayers(shape.features, 1000, shape.classes)
    template = initialise(model, 0)
    parameters = sum(p.numel() for p in template.parameters() if p.requires_grad)
    settings = {
        "budget": asdict(budget),
        "shape": asdict(shape),
        "space": _plain(asdict(space)),
        "auxiliary": _digest(sets + tests),
        "labels": auxiliary if isinstance(auxiliary, str) else "given",
        "minimise": minimise,
        "repeats": repeats,
        "seed": seed,
        "parameters": parameters,
        "model": identity(template),
    }
    if curve is not None:
        settings["influence"] = _curve_digest(curve, space)

    def scores(candidates: Sequence[Candidate]) -> list[float | None]:
        replicas = [
            Replica(
                sigmas=candidate.sigmas(budget, curve),
                lr=candidate.lr,
                clip=candidate.clip,
                beta=candidate.momentum,
                seed=seed + i,
                data=i % len(sets),
            )
            for candidate in candidates
            for i in range(repeats)
        ]
        outcomes = train(
            model,
            sets,
            replicas,
            evaluate={"test": tests} if tests else None,
            device=device,
            progress=False,
        )
        return [
            _score(outcomes[k * repeats : (k + 1) * repeats], minimise)
            for k in range(len(candidates))
        ]

    found = {}
    with bar("tuning", trials * len(families), progress) as advance:
        for family in families:
            search = Search(family, space, settings, storage, f"{name}: {family}", seed)
            search.run(scores, trials, batch, advance)
            found[family] = _chosen(search, trials, budget, shape, parameters, curve)
    return Tuned(
        families=found,
        minimise=minimise,
        settings=settings,
        warning=None if curve is None else _warning(curve, found["optimal"].trials),
    )


class Search:
    """One family's Optuna study."""

    def __init__(
        self,
        family: str,
        space: Space,
        settings: Mapping[str, Any],
        storage: str | None,
        name: str,
        seed: int,
        *,
        ends_first: bool = True,
    ) -> None:
        self.family, self.space = family, space
        self.study = _study(name, storage, seed)
        _same_settings(self.study, {**settings, "family": family}, name)
        if ends_first and not self.study.get_trials(deepcopy=False):
            for point in self._first():
                self.study.enqueue_trial(point, skip_if_exists=True)

    def _first(self) -> list[dict[str, float]]:
        """Both ends and the middle of T, the rest in the middle: the best T is often an end."""
        names = self.space.searched(self.family)
        middle: dict[str, float] = {}
        for name in names:
            low, high = getattr(self.space, name)
            middle[name] = math.sqrt(low * high) if name in LOGARITHMIC else (low + high) / 2
        if "steps" not in names:
            return [middle]
        low, high = _ends(self.space.steps)
        return [{**middle, "steps": t} for t in (low, high, (low + high) // 2)]

    def run(
        self,
        scores: Callable[[Sequence[Candidate]], list[float | None]],
        trials: int,
        batch: int,
        advance: Callable[[int], None],
    ) -> None:
        """Ask for a batch, train it, tell; until as many candidates are finished as wanted."""
        advance(min(trials, self._finished()))
        while (left := trials - self._finished()) > 0:
            asked = [self.study.ask() for _ in range(min(batch, left))]
            candidates = [self.candidate(trial) for trial in asked]
            for trial, score in zip(asked, scores(candidates), strict=True):
                self.tell(trial.number, score)
            advance(len(asked))

    def tell(self, number: int, score: float | None) -> None:
        """End a trial, as failed without a score, unless somebody has: what ended stays so."""
        from optuna.exceptions import UpdateFinishedTrialError
        from optuna.trial import TrialState

        state = TrialState.FAIL if score is None else TrialState.COMPLETE
        with suppress(UpdateFinishedTrialError):
            self.study.tell(number, score, state=state, skip_if_finished=True)

    def asked(self) -> int:
        """Every candidate ever handed out, finished or not."""
        from optuna.trial import TrialState

        return sum(
            trial.state != TrialState.WAITING for trial in self.study.get_trials(deepcopy=False)
        )

    def _finished(self) -> int:
        return sum(trial.state.is_finished() for trial in self.study.get_trials(deepcopy=False))

    def candidate(self, trial: Any) -> Candidate:
        values = {
            name: getattr(self.space, name) for name in ("steps", "lr", "clip", "momentum", "fall")
        }
        for name in self.space.searched(self.family):
            low, high = values[name]
            if name == "steps":
                values[name] = trial.suggest_int(name, low, high)
            else:
                values[name] = trial.suggest_float(name, low, high, log=name in LOGARITHMIC)
        if self.family in ("uniform", "optimal"):
            values["fall"] = None
        return Candidate(family=self.family, **values)

    def trials(self, most: int) -> tuple[Trial, ...]:
        """The first `most` that were finished: machines that share a study may finish more."""
        from optuna.trial import FixedTrial

        known = self.study.get_trials(deepcopy=False)
        done = [t for t in known if t.state.is_finished() and t.params]
        done.sort(key=lambda t: (t.datetime_complete, t.number))
        kept = sorted(done[:most], key=lambda t: t.number)
        return tuple(
            Trial(candidate=self.candidate(FixedTrial(trial.params)), score=trial.value)
            for trial in kept
        )


def _ends(steps: int | tuple[int, int]) -> tuple[int, int]:
    return steps if isinstance(steps, tuple) else (steps, steps)


def _study(name: str, storage: str | None, seed: int) -> optuna.Study:
    try:
        import optuna
    except ImportError:
        raise InputError(
            "installed", name="optuna", value=None, remedy="pip install 'diminuendo[tune]'."
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=_STARTS,
            multivariate=True,
            constant_liar=True,
            seed=seed if storage is None else None,
        )
    if storage is not None and storage.endswith(".journal") and not Path(storage).parent.is_dir():
        raise InputError("in a folder that is there", name="storage", value=storage)

    def made() -> optuna.Study:
        place: Any = storage
        if storage is not None and storage.endswith(".journal"):
            from optuna.storages.journal import JournalFileBackend, JournalStorage

            place = JournalStorage(JournalFileBackend(storage))
        return optuna.create_study(
            study_name=name, storage=place, sampler=sampler, load_if_exists=True
        )

    try:
        return _persistently(made)
    except Exception as error:
        if storage is None:
            raise
        raise InputError(
            "a database URL that can be reached, or a file ending in .journal",
            name="storage",
            value=re.sub(r"//[^/]*@", "//***@", storage.split("?")[0]),
            remedy=f"({type(error).__name__})",
        ) from None


def _persistently(call: Callable[[], Made]) -> Made:
    """Try again where somebody else made the same thing at the same time, and got there first."""
    for pause in _PAUSES:
        try:
            return call()
        except Exception as error:
            said = f"{error} {error.__cause__}".lower()
            if not any(words in said for words in _COLLISIONS):
                raise
            time.sleep(pause)
    return call()


def _same_settings(study: optuna.Study, settings: Mapping[str, Any], name: str) -> None:
    """Refuse to go on with a study that was begun with other settings."""
    wanted = json.loads(json.dumps(settings))
    stored = study.user_attrs.get("settings")
    if stored is None:
        _persistently(lambda: study.set_user_attr("settings", wanted))
        return
    differing = sorted(key for key in {*wanted, *stored} if wanted.get(key) != stored.get(key))
    if differing:
        raise InputError(
            "resumed with the settings that it was begun with",
            name=f"the study {name!r}",
            value=f"others: {', '.join(differing)}",
            remedy="Use these settings, or give the study another name.",
        )


def _score(outcomes: Sequence[Outcome], minimise: str) -> float | None:
    if any(outcome.status != "done" for outcome in outcomes):
        return None
    values = [
        outcome.train_loss if minimise == "train-loss" else outcome.evaluations["test"]["loss"]
        for outcome in outcomes
    ]
    mean = float(np.mean([math.nan if v is None else v for v in values]))
    return mean if math.isfinite(mean) else None


def _chosen(
    search: Search,
    trials: int,
    budget: Budget,
    shape: Shape,
    parameters: int,
    influence: Callable[[int], Vector] | None,
) -> Chosen:
    done = search.trials(trials)
    sound = [trial for trial in done if trial.score is not None]
    if not sound:
        raise InputError(
            "a space in which some candidate's loss stays finite",
            name=f"the space of {search.family!r}",
            value=f"{len(done)} candidates, none finite",
            remedy="Lower the learning rate.",
        )
    best = min(sound, key=lambda trial: trial.score or 0.0)
    candidate = best.candidate
    planned = make_plan(candidate, budget, shape.examples, parameters, influence)
    return Chosen(
        family=search.family,
        plan=planned,
        lr=candidate.lr,
        score=float(best.score or 0.0),
        candidate=candidate,
        searched=search.space.searched(search.family),
        trials=done,
    )


def make_plan(
    candidate: Candidate,
    budget: Budget,
    examples: int,
    parameters: int,
    influence: Callable[[int], Vector] | None = None,
) -> Plan:
    """The candidate as a plan, whose σ_t are those it was trained with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        return plan(
            budget,
            examples=examples,
            parameters=parameters,
            clip=candidate.clip,
            steps=candidate.steps,
            influence=influence(candidate.steps)
            if candidate.family == "optimal" and influence
            else None,
            momentum=candidate.momentum if candidate.momentum > 0 else None,
            schedule=candidate.family,
            fall=candidate.fall,
        )


def _curve(
    influence: Influence | None, space: Space, families: Sequence[str]
) -> Callable[[int], Vector] | None:
    if "optimal" not in families:
        if influence is not None:
            raise InputError(
                'given with the family "optimal"', name="influence", value=list(families)
            )
        return None
    if influence is None:
        raise InputError(
            "given, since the optimal schedule follows it",
            name="influence",
            value=None,
            remedy="dim.influence.measure estimates it on auxiliary data.",
        )
    if callable(influence):
        return influence
    values = mark(_validate.vector("influence", influence), said_of(influence))
    if space.steps != values.size:
        raise InputError(
            f"the length of the influence curve ({values.size})",
            name="steps",
            value=space.steps,
            remedy="A curve of fixed length plans that many steps; a function of T plans any.",
        )
    return lambda _: values


def _warning(curve: Callable[[int], Vector], trials: Sequence[Trial]) -> str | None:
    """What any of the curves that were tried carries: the choice was between all of them."""
    said = (said_of(curve(steps)) for steps in sorted({t.candidate.steps for t in trials}))
    return next((words for words in said if words is not None), None)


def _sets(
    auxiliary: str | Labelled | Sequence[Labelled],
    held_out: Sequence[Labelled] | None,
    shape: Shape,
    repeats: int,
    seed: int,
    minimise: str,
) -> tuple[list[Labelled], list[Labelled]]:
    """Auxiliary sets and, where they are needed, a test set for each."""
    if isinstance(auxiliary, str):
        if held_out is not None:
            raise InputError("left out where data is made", name="held_out", value="given")
        double = Shape(**{**asdict(shape), "examples": 2 * shape.examples})
        n = shape.examples
        if minimise == "train-loss":
            return made.several(shape, repeats, labels=auxiliary, seed=seed), []
        both = made.several(double, repeats, labels=auxiliary, seed=seed)
        return [(x[:n], y[:n]) for x, y in both], [(x[n:], y[n:]) for x, y in both]
    given = [auxiliary] if isinstance(auxiliary[0], torch.Tensor) else list(auxiliary)
    sets = [made.check(one, shape) for one in given]  # type: ignore[arg-type]
    tests = list(held_out or [])
    if minimise == "test-loss" and len(tests) != len(sets):
        raise InputError(
            f"a test set for each auxiliary set ({len(sets)})", name="held_out", value=len(tests)
        )
    return sets, tests


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}


def _digest(sets: Sequence[Labelled]) -> str:
    digest = hashlib.sha256()
    for x, y in sets:
        digest.update(x.detach().cpu().contiguous().numpy().tobytes())
        digest.update(y.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _curve_digest(curve: Callable[[int], Vector], space: Space) -> str:
    values = np.asarray(curve(_ends(space.steps)[1]), dtype=np.float64)
    return hashlib.sha256((values / values.max()).round(12).tobytes()).hexdigest()[:16]
