"""Cells: one method on one task at one budget, tuned on auxiliary data, run with paired seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from diminuendo import _validate
from diminuendo.budget import Budget
from diminuendo.compare.convolution import Convolutional
from diminuendo.compare.data import TASKS, Pool, Task
from diminuendo.compare.lesson import Lesson
from diminuendo.compare.method import Method, Settings, as_settings
from diminuendo.compare.methods import METHODS
from diminuendo.compare.models import Linear, Model, Network
from diminuendo.compare.private import Private
from diminuendo.errors import InputError
from diminuendo.replicas.statistics import Interval, interval

MODELS = ("linear", "network", "cnn")
_TUNING_SEED, _RUN_SEED, _LESSON_SEED = 10_000, 1, 20_000


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is run: the same for every method.

    trials          candidates of every method
    tuning_repeats  runs of each candidate, on auxiliary data
    repeats         runs with the chosen candidate, on the task's data
    delta           δ of every budget
    given           tuned numbers by name, where they were chosen elsewhere: nothing is tuned then,
                    and methods that share a number share its value
    """

    trials: int = 24
    tuning_repeats: int = 3
    repeats: int = 20
    delta: float = 1e-5
    given: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate.count("trials", self.trials)
        _validate.count("tuning_repeats", self.tuning_repeats)
        _validate.count("repeats", self.repeats, at_least=2)
        _validate.real("delta", self.delta, above=0, below=1)
        for name, value in self.given.items():
            _validate.real(name, value)

    def settings_of(self, method: Method) -> dict[str, float]:
        """The given numbers that the method takes; InputError where one is missing."""
        needed = (*method.space, *method.learned)
        missing = [name for name in needed if name not in self.given]
        if missing:
            raise InputError(
                f"given for {method.key}",
                name=", ".join(missing),
                value=None,
                remedy="Where settings are given, all of a method's tuned numbers are.",
            )
        for name, values in method.space.items():
            if values.low > 0 or values.choices:
                _validate.positive(name, self.given[name])
            whole = bool(values.choices) and all(float(c).is_integer() for c in values.choices)
            if whole and not float(self.given[name]).is_integer():
                raise InputError("a whole number", name=name, value=self.given[name])
        return as_settings({name: self.given[name] for name in needed})


@dataclass(frozen=True, order=True)
class Cell:
    """Where a method is compared."""

    task: str
    model: str
    examples: int
    epsilon: float
    method: str

    @property
    def name(self) -> str:
        """The cell's file name, without its ending."""
        return f"{self.task}-{self.model}-{self.examples}-{self.epsilon:.12g}-{self.method}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a cell reached.

    epsilon_claimed  the certified ε of each run
    source           which data were drawn from
    definition       the digest of the method's tuned numbers and their ranges
    settings         the tuned numbers, and `auxiliary` the accuracy that chose them; None where
                     the numbers were given
    accuracy, loss   test accuracy and training loss of each run, in the order of seeds; None where
                     a run was not finite
    """

    cell: Cell
    epsilon_claimed: float
    delta: float
    settings: Settings
    auxiliary: float | None
    accuracy: Sequence[float | None]
    loss: Sequence[float | None]
    seconds: float
    definition: str
    source: str

    @property
    def mean(self) -> Interval:
        """Mean test accuracy with its 95% interval."""
        return interval([math.nan if a is None else a for a in self.accuracy])

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "settings": dict(self.settings)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Entry:
        """What `to_dict` made; InputError if it is something else."""
        try:
            return cls(**{**data, "cell": Cell(**data["cell"])})
        except (TypeError, KeyError) as error:
            raise InputError(
                "a cell that `diminuendo compare` wrote", name="a cell", value=str(error)
            ) from None


@dataclass(eq=False)
class Bench:
    """Where cells are run: data by task, kept while it is used."""

    effort: Effort
    folders: dict[str, Path] = field(default_factory=dict)
    """Data folders by task; a task without one uses embedded data, or says what it needs."""
    device: str = "cpu"
    """Where runs are computed; what is drawn at random is the same everywhere."""
    _pools: dict[str, Pool] = field(default_factory=dict)
    _auxiliary: dict[str, Pool] = field(default_factory=dict)

    def pool(self, key: str) -> Pool:
        """The task's data."""
        if key not in self._pools:
            task = TASKS[_validate.choice("the task", key, TASKS)]
            self._pools[key] = task.load(self.folders.get(key)).to(self.device)
        return self._pools[key]

    def auxiliary(self, key: str) -> Pool:
        """The task's auxiliary data, on which methods are tuned."""
        if key not in self._auxiliary:
            task = TASKS[_validate.choice("the task", key, TASKS)]
            found = task.auxiliary(_TUNING_SEED, self.folders.get(key))
            self._auxiliary[key] = found.to(self.device)
        return self._auxiliary[key]

    def run(self, cell: Cell) -> Entry:
        """Tune on auxiliary data, then run with paired seeds."""
        started = time.process_time()
        method, task = METHODS[cell.method], TASKS[cell.task]
        budget = Budget(epsilon=cell.epsilon, delta=self.effort.delta)
        score = None
        if self.effort.given:
            settings = self.effort.settings_of(method)
        else:
            settings, score = self._tuned(method, task, cell, self.auxiliary(cell.task), budget)
        pool = self.pool(cell.task)
        seeds = [_RUN_SEED + k for k in range(self.effort.repeats)]
        accuracy, loss, claimed = _trained(method, settings, task, cell, pool, budget, seeds)
        return Entry(
            cell=cell,
            epsilon_claimed=claimed,
            delta=budget.delta,
            settings=settings,
            auxiliary=score,
            accuracy=accuracy,
            loss=loss,
            seconds=round(time.process_time() - started, 2),
            definition=method.digest,
            source=pool.source,
        )

    def _tuned(
        self, method: Method, task: Task, cell: Cell, pool: Pool, budget: Budget
    ) -> tuple[dict[str, float], float]:
        """The candidate with the best mean accuracy on auxiliary data.

        A method that learns tries half as many, then learns at the best of them for as many rounds
        as are left, and keeps what it learnt if that is better.
        """
        seeds = [_TUNING_SEED + k for k in range(self.effort.tuning_repeats)]
        trials = self.effort.trials if method.learn is None else max(self.effort.trials // 2, 1)

        def score(settings: Settings) -> float:
            accuracy, _, _ = _trained(method, settings, task, cell, pool, budget, seeds)
            return sum(0.0 if a is None else a for a in accuracy) / len(accuracy)

        best: tuple[float, list[float]] | None = None
        reason = ""
        for number in range(trials):
            point = _next_point(method, number, trials, best)
            try:
                reached = score(method.settings(point))
            except InputError as error:  # e.g. too little regularisation for this budget
                reason = str(error)
                continue
            if best is None or reached > best[0]:
                best = (reached, point)
        if best is None:
            raise InputError(
                "possible on the auxiliary data, within the budget",
                name=f"a candidate of {method.key}",
                value=cell.name,
                remedy=f"The last one failed: {reason}",
            )
        settings = method.settings(best[1])
        if method.learn is not None:
            rounds = max(self.effort.trials - trials, 1)
            lesson = _lesson(task, cell, pool, budget, self.effort.tuning_repeats, rounds)
            learnt = {**settings, **method.learn(lesson, settings)}
            reached = score(learnt)
            if reached >= best[0]:
                return learnt, reached
        return settings, best[0]


def _lesson(task: Task, cell: Cell, pool: Pool, budget: Budget, pupils: int, rounds: int) -> Lesson:
    """Auxiliary samples to learn on, other than those on which candidates are scored."""
    seeds = [_LESSON_SEED + k for k in range(pupils)]
    drawn = pool.samples(Lesson.size(cell.examples), seeds)
    most = Lesson.size(len(pool.test_x))
    return Lesson(
        model=model_of(cell.model, pool, task),
        x=drawn.x,
        y=drawn.y,
        test_x=drawn.test_x[:, :most],
        test_y=drawn.test_y[:, :most],
        budget=budget,
        examples=cell.examples,
        rounds=rounds,
        seed=_LESSON_SEED,
    )


def _next_point(
    method: Method, number: int, trials: int, best: tuple[float, list[float]] | None
) -> list[float]:
    """Spread evenly at first; from five eighths on around the best so far, ever closer."""
    even = method.point(number)
    share = number / trials
    if best is None or share < 0.625:
        return even
    reach = 0.5 if share < 0.8 else 0.2
    return [centre + reach * (own - 0.5) for centre, own in zip(best[1], even, strict=True)]


def model_of(name: str, pool: Pool, task: Task) -> Model:
    """The linear model, the network with 32 hidden units, or the small convolutional one."""
    _validate.choice("the model", name, MODELS)
    if name == "linear":
        return Linear(pool.features, task.classes)
    if name == "network":
        return Network(pool.features, task.classes)
    if pool.image is None:
        raise InputError(
            "linear or network for features that are no images",
            name="the model",
            value=name,
            remedy=f"Those of {task.key} are not.",
        )
    return Convolutional(pool.image, task.classes)


@torch.no_grad()
def _trained(
    method: Method,
    settings: Settings,
    task: Task,
    cell: Cell,
    pool: Pool,
    budget: Budget,
    seeds: list[int],
) -> tuple[list[float | None], list[float | None], float]:
    assert method.run is not None
    model = model_of(cell.model, pool, task)
    drawn = pool.samples(cell.examples, seeds)
    private = Private(model, drawn.x, drawn.y, budget, seeds=seeds)
    theta = method.run(private, settings)
    accuracy = model.accuracy(theta, drawn.test_x, drawn.test_y)
    loss = model.losses(theta, drawn.x, drawn.y).mean(1)
    finite = theta.isfinite().all(1)
    return (
        [float(a) if ok else None for a, ok in zip(accuracy, finite, strict=True)],
        [float(v) if ok and v.isfinite() else None for v, ok in zip(loss, finite, strict=True)],
        private.claimed(),
    )


def cells(
    tasks: Sequence[str],
    models: Sequence[str],
    examples: Sequence[int],
    epsilons: Sequence[float],
    methods: Sequence[str],
) -> list[Cell]:
    """Every combination that can be run: methods for convex losses only on the linear model, and
    methods that read examples' gradients layer by layer not on the convolutional one."""
    for name, given, known in (
        ("the task", tasks, TASKS),
        ("the model", models, MODELS),
        ("the method", methods, METHODS),
    ):
        for one in given:
            _validate.choice(name, one, known)
    return [
        Cell(
            task, model, _validate.count("examples", size), _validate.positive("epsilon", eps), key
        )
        for task in tasks
        for model in models
        for eps in epsilons
        for size in examples
        for key in methods
        if METHODS[key].trains(model)
    ]
