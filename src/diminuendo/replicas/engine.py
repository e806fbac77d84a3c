"""train(...): K replicas of a model, trained by private gradient descent as one computation.

Replica k ends where the ordinary trainer (`training.fit` with noise="fast" and the same seed, σ_t,
learning rate and clip norm, from `initialise(model, seed)`) ends, to rounding: it draws the same
numbers from the same generators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from diminuendo import _progress, _validate
from diminuendo.errors import InputError
from diminuendo.replicas.batch import Loss
from diminuendo.replicas.checks import Pair
from diminuendo.replicas.cuda_graph import CapturedSteps
from diminuendo.replicas.general import OneByOne, Vmapped
from diminuendo.replicas.initial import initial_rows
from diminuendo.replicas.noise import Noise
from diminuendo.replicas.perceptrons import Perceptrons
from diminuendo.replicas.replica import Model, Outcome, Replica
from diminuendo.replicas.results_file import ResultsFile
from diminuendo.replicas.step_settings import StepSettings
from diminuendo.replicas.study import Study
from diminuendo.training.sampling import draw
from diminuendo.training.seeds import Seeds


def train(
    model: Model,
    data: Pair | Sequence[Pair],
    replicas: Sequence[Replica],
    *,
    loss: Literal["cross-entropy"] | Loss = "cross-entropy",
    evaluate: Mapping[str, Pair | Sequence[Pair]] | None = None,
    record: Sequence[int] | None = None,
    at_once: int | None = None,
    device: torch.device | str | None = None,
    progress: bool = True,
    store: str | Path | None = None,
    keep_parameters: bool = False,
) -> list[Outcome]:
    """Train every replica; returns their outcomes in the replicas' order.

    model            makes the module; called once for each replica, under its seed
    data             (x, y), tensors or arrays, or several such sets of one size; each replica
                     chooses one by `Replica.data`
    loss             a function of (outputs, targets) that returns one loss per example
    evaluate         evaluation sets (x, y) by name, used after the last step and after recorded
                     ones; or one set for each training set
    record           steps after which losses and evaluations are kept in `Outcome.curve`
    at_once          how many replicas train together; by default as many as the memory is meant for
    device           where to train; by default where the model makes its parameters
    store            a file of JSON lines: with the same arguments, an interrupted call resumes
    keep_parameters  also return each replica's parameters (not with a store)
    """
    study = Study.of(model, data, replicas, loss, evaluate or {}, record, device)
    if store is not None and keep_parameters:
        raise InputError("left out with a store", name="keep_parameters", value=True)
    results = None if store is None else ResultsFile(store, study.digest)
    stored = {} if results is None else results.entries
    done = {i: Outcome.from_entry(entry) for i, entry in stored.items()}
    left = sorted(
        (i for i in range(len(replicas)) if i not in done), key=lambda i: -replicas[i].steps
    )
    size = study.group_size(len(left)) if at_once is None else _validate.count("at_once", at_once)
    total = sum(replicas[i].steps for i in left)
    title = "replicas, one by one" if study.kind is OneByOne else "replicas"
    with _progress.bar(title, total=total, shown=progress) as bar:
        for start in range(0, len(left), size):
            group = left[start : start + size]
            outcomes = Group(study, [replicas[i] for i in group], keep_parameters).run(bar.advance)
            if results is not None:
                results.add([out.to_entry(i) for i, out in zip(group, outcomes, strict=True)])
            done |= dict(zip(group, outcomes, strict=True))
    return [done[i] for i in range(len(replicas))]


class Group:
    """Replicas that train together, the longest first, so that the active ones are a prefix."""

    def __init__(self, study: Study, replicas: Sequence[Replica], keep: bool) -> None:
        self.study, self.replicas, self.keep = study, replicas, keep
        count = len(replicas)
        self.batch: Perceptrons | Vmapped | OneByOne = study.batch(count, count)
        seeds = [replica.seed for replica in replicas]
        self.batch.write(initial_rows(study.model, seeds, study.device))
        indices = [replica.data for replica in replicas]
        self.data = self.batch.data(study.x, study.y, indices)
        self.tests = {
            name: self.batch.data(x, y, indices if len(x) > 1 else [0] * count)
            for name, (x, y) in study.evaluate.items()
        }
        self.seeds = [Seeds.make(replica.seed) for replica in replicas]
        self.curves: list[dict[int, dict[str, Any]]] = [{} for _ in replicas]

    def run(self, advance: Callable[[int], None]) -> list[Outcome]:
        """Train all of them; `advance` is called after each step with the number of active ones."""
        study, like = self.study, self.study.like
        noise = Noise(self.seeds, study.parameters, like)
        settings = StepSettings(self.replicas, self.data.examples, like)
        lengths = np.array([replica.steps for replica in self.replicas])
        ends: list[dict[str, Any]] = [{} for _ in self.replicas]
        steps = CapturedSteps(self.batch, self.data)
        if 0 in study.record:
            self._record(slice(0, len(lengths)), 0)
        for step in range(lengths[0]):
            active = int((lengths > step).sum())
            rows = slice(0, active)
            add_noise = noise.adder(self.batch, settings.stds[step, rows].tolist(), step)
            update = settings.update(rows, step, self._sampled(settings.rates[:active], step))
            steps.take(rows, add_noise, update, remaining=int(lengths[active - 1]) - step)
            if step + 1 in study.record:
                self._record(rows, step + 1)
            left = int((lengths > step + 1).sum())
            if left < active:
                ends[left:active] = self._assess(slice(left, active))
            advance(active)
        broken = self.batch.broken.tolist()
        return [self._outcome(k, ends[k], broken[k]) for k in range(len(self.replicas))]

    def _sampled(self, rates: Sequence[float], step: int) -> Tensor | None:
        """Each replica's Poisson sample as zeros and ones, or None for full batches."""
        if all(rate == 1 for rate in rates):
            return None
        sampled = torch.zeros(len(rates), self.data.examples, dtype=self.study.like.dtype)
        for row, (rate, seeds) in enumerate(zip(rates, self.seeds, strict=False)):
            sampled[row, draw(self.data.examples, rate, seeds, step)] = 1
        return sampled.to(self.study.device)

    def _assess(self, rows: slice) -> list[dict[str, Any]]:
        """Losses and accuracies of these replicas now; the training set's under an empty name."""
        loss = self.study.loss
        tables = {name: self.batch.assess(d, rows, loss) for name, d in self.tests.items()}
        tables[""] = self.batch.assess(self.data, rows, loss)
        columns = {
            name: (losses.tolist(), None if accuracy is None else accuracy.tolist())
            for name, (losses, accuracy) in tables.items()
        }
        return [
            {
                name: {"loss": losses[k], "accuracy": None if accuracy is None else accuracy[k]}
                for name, (losses, accuracy) in columns.items()
            }
            for k in range(rows.stop - rows.start)
        ]

    def _record(self, rows: slice, step: int) -> None:
        for k, facts in enumerate(self._assess(rows)):
            self.curves[k][step] = _point(facts.pop(""), facts)

    def _outcome(self, k: int, facts: dict[str, Any], broken: int) -> Outcome:
        replica, own = self.replicas[k], facts.pop("")
        if broken < 0 and not math.isfinite(own["loss"]):
            broken = replica.steps
        return Outcome(
            replica=replica.digest,
            steps=replica.steps,
            status="done" if broken < 0 else "not finite",
            train_loss=own["loss"],
            train_accuracy=own["accuracy"],
            evaluations=facts,
            curve=self.curves[k] | {replica.steps: _point(own, facts)},
            stopped=None if broken < 0 else broken,
            parameters=self._parameters(k) if self.keep else None,
        )

    def _parameters(self, k: int) -> dict[str, Tensor]:
        named = [(n, p) for n, p in self.study.template.named_parameters() if p.requires_grad]
        split = torch.split(self.batch.read(k).cpu(), [p.numel() for _, p in named])
        return {name: part.view_as(p) for (name, p), part in zip(named, split, strict=True)}


def _point(own: dict[str, Any], evaluations: dict[str, Any]) -> dict[str, Any]:
    """One point of `Outcome.curve`."""
    return {
        "train_loss": own["loss"],
        "train_accuracy": own["accuracy"],
        "evaluations": evaluations,
    }
