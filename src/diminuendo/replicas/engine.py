"""Many runs as one: K replicas of a model, trained by private gradient descent as one computation.

Replica k ends where the ordinary trainer (`training.fit` with the same seed, σ_t, learning rate and
clip norm, from `initialise(model, seed)`) ends, to rounding: it draws the same numbers from the
same generators. Seeds are fixed and losses reported: experiments, never private releases.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from diminuendo import _validate
from diminuendo._validate import Vector
from diminuendo.errors import InputError
from diminuendo.replicas import kernels
from diminuendo.replicas.batch import (
    Batch,
    Loss,
    OneByOne,
    Start,
    Update,
    Vmapped,
    cross_entropy,
)
from diminuendo.replicas.checks import Pair, check, tensors
from diminuendo.replicas.cuda_graph import Replayed
from diminuendo.replicas.fingerprint import identity
from diminuendo.replicas.perceptrons import Layer, Perceptrons, layers_of
from diminuendo.replicas.results_file import Store
from diminuendo.replicas.workers import side_by_side
from diminuendo.training.sampling import draw, precision_of
from diminuendo.training.seeds import Seeds

Model = Callable[[], nn.Module]

CACHED = 1 << 21
"""Entries of one layer's activations held at a time on a CPU: what its caches like."""
WORTH_A_THREAD = 1 << 17
"""Entries of one layer's activations in a step from which on all cores take part."""
HELD = 1 << 28
"""The same on a GPU: a gibibyte of float32."""
STATE_BYTES = 1 << 31
"""Most memory for parameters, sums, averages and noise of the replicas that go at once."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Replica:
    """Everything that may differ between replicas.

    sigmas         noise multipliers σ_1…σ_T; their number is T. Zeros are allowed: no noise
    lr             the learning rate, or one for each step
    clip           C: the noise on the sum has deviation C·σ_t
    beta           of the bias-corrected average (training.PrivateDescent); 0 is plain descent
    seed           fixes initialisation, noise and sampling
    data           which of the given training sets
    sampling_rate  below 1: the ordinary trainer's Poisson sample in each step
    """

    sigmas: ArrayLike
    lr: float | ArrayLike
    clip: float
    beta: float = 0.0
    seed: int = 0
    data: int = 0
    sampling_rate: float = 1.0

    def __post_init__(self) -> None:
        sigmas = _validate.vector("sigmas", self.sigmas, positive=False)
        if np.ndim(self.lr) == 0:
            lr: float | Vector = _validate.positive("lr", self.lr)
        else:
            lr = _validate.vector("lr", self.lr)
            _validate.same_length("lr", lr, "sigmas", sigmas)
        checked = {
            "sigmas": sigmas,
            "lr": lr,
            "clip": _validate.positive("clip", self.clip),
            "beta": _validate.real("beta", self.beta, at_least=0, below=1),
            "seed": _validate.count("seed", self.seed, at_least=0),
            "data": _validate.count("data", self.data, at_least=0),
            "sampling_rate": _validate.real(
                "sampling_rate", self.sampling_rate, above=0, at_most=1
            ),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @property
    def steps(self) -> int:
        return int(np.size(self.sigmas))

    @cached_property
    def digest(self) -> str:
        made = hashlib.sha256()
        for entry in fields(self):
            value = np.asarray(getattr(self, entry.name))
            made.update(f"{entry.name} {value.shape} ".encode() + value.tobytes())
        return made.hexdigest()[:16]


@dataclass(frozen=True)
class Outcome:
    """How one replica ended. `stopped` is the step after which its losses were not finite."""

    replica: str
    steps: int
    status: Literal["done", "not finite"]
    train_loss: float
    train_accuracy: float | None = None
    evaluations: dict[str, dict[str, float | None]] = field(default_factory=dict)
    curve: dict[int, dict[str, Any]] = field(default_factory=dict)
    stopped: int | None = None
    parameters: dict[str, Tensor] | None = field(default=None, repr=False, compare=False)


def initialise(model: Model, seed: int) -> nn.Module:
    """The model as a replica with this seed starts; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Seeds.make(seed).number("initialisation", 0))
        return model()


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
    """Train every replica; the outcomes are in the replicas' order.

    model            makes the module; called once for each replica, under its seed
    data             (x, y), tensors or arrays, or several of one size, which replicas choose from
                     by `Replica.data`
    loss             a function of (outputs, targets) that gives one loss per example
    evaluate         named (x, y) on which each replica is assessed at the end and where recorded;
                     or one (x, y) for each training set, where these have a test set of their own
    record           steps after which losses and evaluations are kept in `Outcome.curve`
    at_once          how many replicas go together; chosen to bound the memory unless given
    store            a file of JSON lines: a study that was interrupted goes on where it stopped
    keep_parameters  also return each replica's parameters (not with a store)
    """
    study = Study.of(model, data, replicas, loss, evaluate or {}, record, device)
    if store is not None and keep_parameters:
        raise InputError("left out with a store", name="keep_parameters", value=True)
    kept = None if store is None else Store(store, study.digest)
    done = {} if kept is None else {i: _outcome(e) for i, e in kept.entries.items()}
    left = sorted(
        (i for i in range(len(replicas)) if i not in done), key=lambda i: -replicas[i].steps
    )
    size = study.at_once(len(left)) if at_once is None else _validate.count("at_once", at_once)
    total = sum(replicas[i].steps for i in left)
    title = "replicas, one by one" if study.kind is OneByOne else "replicas"
    with bar(title, total, progress) as advance:
        for start in range(0, len(left), size):
            group = left[start : start + size]
            found = _Group(study, [replicas[i] for i in group], keep_parameters).run(advance)
            if kept is not None:
                kept.add([_entry(i, out) for i, out in zip(group, found, strict=True)])
            done |= dict(zip(group, found, strict=True))
    return [done[i] for i in range(len(replicas))]


@dataclass(frozen=True)
class Study:
    """What all replicas share, checked."""

    model: Model
    template: nn.Module
    x: Tensor
    y: Tensor
    loss: Loss
    evaluate: dict[str, Pair]
    record: tuple[int, ...]
    digest: str

    @classmethod
    def of(
        cls,
        model: Model,
        data: Pair | Sequence[Pair],
        replicas: Sequence[Replica],
        loss: str | Loss,
        evaluate: Mapping[str, Pair | Sequence[Pair]],
        record: Sequence[int] | None,
        device: torch.device | str | None,
    ) -> Study:
        if not replicas:
            raise InputError("at least one replica", name="replicas", value=list(replicas))
        template = initialise(model, replicas[0].seed)
        first = next(template.parameters(), None)
        if first is None:
            raise InputError("a model with parameters", name="model", value=template)
        precision = precision_of(template)
        pairs = _pairs(data, "data", precision)
        highest = max(replica.data for replica in replicas)
        if highest >= len(pairs):
            raise InputError(
                f"below the number of training sets ({len(pairs)})",
                name="Replica.data",
                value=highest,
            )
        if isinstance(loss, str):
            _validate.choice("loss", loss, ["cross-entropy"], remedy="Or give a function.")
        steps = sorted({_validate.count("record", t, at_least=0) for t in record or ()})
        frozen = [name for name, p in template.named_parameters() if not p.requires_grad]
        if frozen:
            raise InputError(
                "trained in all its parameters",
                name="model",
                value=frozen,
                remedy="Put the data through the frozen layers once, and train the rest on that.",
            )
        where = torch.device(device) if device is not None else first.device
        tests = {
            name: _pairs(given, f"evaluate[{name!r}]", precision)
            for name, given in evaluate.items()
        }
        shape = pairs[0][0].shape[1:]
        for name, given in tests.items():
            inputs = given[0][0]
            if len(given) not in (1, len(pairs)):
                raise InputError(
                    f"one test set, or one for each training set ({len(pairs)})",
                    name=f"evaluate[{name!r}]",
                    value=len(given),
                )
            if inputs.shape[1:] != shape:
                raise InputError(
                    f"of the training inputs' shape {tuple(shape)}",
                    name=f"the inputs of evaluate[{name!r}]",
                    value=tuple(inputs.shape[1:]),
                )
        called = cross_entropy if isinstance(loss, str) else loss
        for name, given in {
            "data": pairs,
            **{f"evaluate[{n!r}]": t for n, t in tests.items()},
        }.items():
            for pair in given:
                check(pair, template, called, name)
        parts = [loss if isinstance(loss, str) else identity(loss), identity(template)]
        parts += [str([(n, tuple(p.shape)) for n, p in template.named_parameters()])]
        parts += [_tensors_digest(x, y) for x, y in pairs]
        parts += [
            f"{name} {_tensors_digest(*pair)}" for name in sorted(tests) for pair in tests[name]
        ]
        parts += [str(steps), *(replica.digest for replica in replicas)]
        return cls(
            model,
            template,
            *_stacked(pairs, where),
            called,
            {name: _stacked(given, where) for name, given in tests.items()},
            tuple(steps),
            _digest("\n".join(parts)),
        )

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def like(self) -> Tensor:
        first = next(self.template.parameters())
        return torch.empty(0, dtype=first.dtype, device=self.device)

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.template.parameters() if p.requires_grad)

    @cached_property
    def width(self) -> int:
        """Entries held for each example of each replica."""
        layers = layers_of(self.template)
        if layers is None:
            return self.parameters
        return max(layers[0].fan_in + 1, *(layer.fan_out for layer in layers))

    def at_once(self, replicas: int) -> int:
        """As many replicas as the memory is meant for, the groups about equal."""
        together, _ = self.piece(replicas)
        state = STATE_BYTES // (5 * self.parameters * self.like.element_size())
        split = self.device.type == "cpu" and layers_of(self.template) is not None
        pieces = 2 * torch.get_num_threads() if split else 1
        most = max(1, min(pieces * together, state))
        return math.ceil(max(1, replicas) / math.ceil(max(1, replicas) / most))

    def piece(self, replicas: int) -> tuple[int, int]:
        """How many replicas and how many examples are worked on at a time."""
        room = CACHED if self.device.type == "cpu" else HELD
        examples = min(self.x.shape[1], 256 if layers_of(self.template) is not None else 1)
        together = max(1, min(replicas, room // (examples * self.width)))
        if self.device.type == "cpu" and replicas * self.x.shape[1] * self.width >= WORTH_A_THREAD:
            together = min(together, -(-replicas // torch.get_num_threads()))
        return together, max(1, min(self.x.shape[1], room // (together * self.width)))

    @cached_property
    def kind(self) -> type[Perceptrons | Vmapped | OneByOne]:
        """The fastest kind of batch that can hold this model; tried out where it has to be."""
        layers = layers_of(self.template)
        if layers is not None and layers[0].fan_in == self.x[0, 0].numel():
            return Perceptrons
        rows, clip = slice(0, 1), self.like.new_ones(1)
        try:
            batch = Vmapped(self.template, 1, self.loss, 1, self.like)
            batch.write(flat_parameters(self.template).to(self.device).unsqueeze(0))
            one = batch.data(self.x[:, :1], self.y[:, :1], [0])
            batch.clipped_sum(one, rows, Update(clip, clip))
            batch.outputs(one.inputs(rows, rows), rows)
        except (RuntimeError, NotImplementedError, ValueError):
            return OneByOne
        return Vmapped

    def batch(self, replicas: int, at_once: int) -> Perceptrons | Vmapped | OneByOne:
        """A batch of this study's models of which `at_once` take their steps together."""
        piece = self.piece(at_once)
        if self.kind is Perceptrons:
            layers = layers_of(self.template) or []
            return Perceptrons(layers, replicas, self.loss, piece, self.like)
        if self.kind is Vmapped:
            return Vmapped(self.template, replicas, self.loss, piece[1], self.like)
        return OneByOne(self.template, replicas, self.loss, self.x.shape[1], self.like)


def flat_parameters(module: nn.Module) -> Tensor:
    """The trainable parameters as one vector, in the order that the trainer's noise has."""
    return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])


def initial_rows(model: Model, seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """`initialise` for many seeds, as rows of flat parameters.

    Linear layers as PyTorch initialises them are filled straight from the generators, in threads,
    and stretched on the device; that this is what the model does is checked on the first seed.
    """
    template = initialise(model, seeds[0])
    first, layers = flat_parameters(template), layers_of(template)
    if layers is not None:
        bounds = _default_bounds(layers, device)
        drawn, here = torch.empty(len(seeds), len(first)), torch.device(device).type == "cpu"
        generators = [
            torch.Generator().manual_seed(Seeds.make(seed).number("initialisation", 0))
            for seed in seeds
        ]

        def stretched(unit: Tensor) -> Tensor:
            return unit.double().mul_(2 * bounds).sub_(bounds).float()

        def draw_row(row: int, own: Sequence[Tensor] = drawn.unbind()) -> None:
            own[row].uniform_(generator=generators[row])
            if here:
                own[row].copy_(stretched(own[row]))

        side_by_side(draw_row, len(seeds))
        rows = (drawn if here else stretched(drawn.to(device))).to(first.dtype)
        if torch.equal(rows[0].cpu(), first):
            return rows
    return torch.stack([flat_parameters(initialise(model, seed)) for seed in seeds]).to(device)


def _default_bounds(layers: Sequence[Layer], device: torch.device | str) -> Tensor:
    """Between which ±bounds PyTorch draws each parameter of linear layers, in their order."""
    gain = nn.init.calculate_gain("leaky_relu", math.sqrt(5))
    bounds = []
    for layer in layers:
        spread = math.sqrt(3) * (gain / math.sqrt(layer.fan_in))
        bounds.append(torch.full((layer.fan_in * layer.fan_out,), spread, device=device))
        shift = 1 / math.sqrt(layer.fan_in)
        bounds.append(torch.full((layer.fan_out * layer.bias,), shift, device=device))
    return torch.cat(bounds).double()


class Noise:
    """Rows of Gaussian noise: for every replica the trainer's own numbers of that step.

    On a CPU every row has its own generator, and rows are filled by as many threads as torch has;
    on a GPU one kernel draws what the generators would.
    """

    def __init__(self, seeds: Sequence[Seeds], parameters: int, like: Tensor) -> None:
        self.seeds, self.rows = seeds, like.new_empty(len(seeds), parameters)
        single = like.dtype is torch.float32
        self._philox = kernels.philox(parameters, like.device) if single else None

    def fill(self, stds: Sequence[float], step: int, purpose: str = "noise") -> Tensor:
        """The first len(stds) rows, with these deviations, for a step that counts from zero."""
        rows = self.rows[: len(stds)]
        if self._philox is None:
            side_by_side(
                lambda row: self._draw(slice(row, row + 1), stds, step, purpose), len(stds)
            )
        else:
            self._philox.fill(rows, self._philox.order, *self._sent(stds, step, purpose))
        return rows

    def start(self, batch: Batch, stds: Sequence[float], step: int) -> Start:
        """The same, drawn where and when some of the rows are asked for."""
        philox = self._philox
        if philox is None:
            return lambda rows, place: batch.start(rows, self._draw(place, stds, step, "noise"))
        seeds, scales = self._sent(stds, step, "noise")

        def start(rows: slice, place: slice) -> None:
            for part, order in zip(batch.sums, batch.orders, strict=True):
                philox.fill(part[rows], order, seeds[place], scales[place])

        return start

    def _sent(self, stds: Sequence[float], step: int, purpose: str) -> tuple[Tensor, ...]:
        """Seeds and deviations, on their way to the GPU."""
        numbers = [own.number(purpose, step) for own in self.seeds[: len(stds)]]
        both = torch.tensor(numbers), torch.tensor(stds, dtype=self.rows.dtype)
        return tuple(p.pin_memory().to(self.rows.device, non_blocking=True) for p in both)

    def _draw(self, place: slice, stds: Sequence[float], step: int, purpose: str) -> Tensor:
        rows = self.rows[place]
        for row, own in zip(range(place.start, place.stop), rows, strict=True):
            generator = self.seeds[row].generator(purpose, step, rows.device)
            own.normal_(0.0, stds[row], generator=generator)
        return rows


class Settings:
    """The numbers of replicas as tables over steps, a column for each replica."""

    def __init__(self, replicas: Sequence[Replica], examples: int, like: Tensor) -> None:
        longest = max(replica.steps for replica in replicas)
        self.stds = np.zeros((longest, len(replicas)))
        scales = np.zeros((longest, len(replicas)))
        for k, replica in enumerate(replicas):
            self.stds[: replica.steps, k] = replica.sigmas
            scales[: replica.steps, k] = replica.lr
        self.stds *= [replica.clip for replica in replicas]
        beta = np.array([replica.beta for replica in replicas])
        scales *= (1 - beta) / (1 - beta ** np.arange(1, longest + 1)[:, None])
        scales /= [examples * replica.sampling_rate for replica in replicas]
        self.scales = torch.tensor(scales).to(like)
        self.clip = like.new_tensor([replica.clip for replica in replicas])
        betas = like.new_tensor([replica.beta for replica in replicas])
        self.beta = betas if bool((betas > 0).any()) else None
        self.rates = [replica.sampling_rate for replica in replicas]

    def update(self, rows: slice, step: int, taken: Tensor | None) -> Update:
        return Update(
            self.clip[rows],
            self.scales[step, rows],
            None if self.beta is None else self.beta[rows],
            taken,
        )


class _Group:
    """Replicas that go at once, the longest first, so that the active ones are a prefix."""

    def __init__(self, study: Study, replicas: Sequence[Replica], keep: bool) -> None:
        self.study, self.replicas, self.keep = study, replicas, keep
        count = len(replicas)
        self.batch: Perceptrons | Vmapped | OneByOne = study.batch(count, count)
        seeds = [replica.seed for replica in replicas]
        self.batch.write(initial_rows(study.model, seeds, study.device))
        chosen = [replica.data for replica in replicas]
        self.data = self.batch.data(study.x, study.y, chosen)
        self.tests = {
            name: self.batch.data(x, y, chosen if len(x) > 1 else [0] * count)
            for name, (x, y) in study.evaluate.items()
        }
        self.seeds = [Seeds.make(replica.seed) for replica in replicas]
        self.curves: list[dict[int, dict[str, Any]]] = [{} for _ in replicas]

    def run(self, advance: Callable[[int], None]) -> list[Outcome]:
        study, like = self.study, self.study.like
        noise = Noise(self.seeds, study.parameters, like)
        settings = Settings(self.replicas, self.data.examples, like)
        lengths = np.array([replica.steps for replica in self.replicas])
        ends: list[dict[str, Any]] = [{} for _ in self.replicas]
        stepper = Replayed(self.batch, self.data)
        if 0 in study.record:
            self._note(slice(0, len(lengths)), 0)
        for step in range(lengths[0]):
            active = int((lengths > step).sum())
            rows = slice(0, active)
            start = noise.start(self.batch, settings.stds[step, rows].tolist(), step)
            update = settings.update(rows, step, self._taken(settings.rates[:active], step))
            stepper.step(rows, start, update, to_come=int(lengths[active - 1]) - step)
            if step + 1 in study.record:
                self._note(rows, step + 1)
            left = int((lengths > step + 1).sum())
            if left < active:
                ends[left:active] = self._assess(slice(left, active))
            advance(active)
        broken = self.batch.broken.tolist()
        return [self._outcome(k, ends[k], broken[k]) for k in range(len(self.replicas))]

    def _taken(self, rates: Sequence[float], step: int) -> Tensor | None:
        if all(rate == 1 for rate in rates):
            return None
        taken = torch.zeros(len(rates), self.data.examples, dtype=self.study.like.dtype)
        for row, (rate, seeds) in enumerate(zip(rates, self.seeds, strict=False)):
            taken[row, draw(self.data.examples, rate, seeds, step)] = 1
        return taken.to(self.study.device)

    def _assess(self, rows: slice) -> list[dict[str, Any]]:
        """Losses and accuracies of these replicas, now."""
        loss = self.study.loss
        found = {name: self.batch.assess(d, rows, loss) for name, d in self.tests.items()}
        found[""] = self.batch.assess(self.data, rows, loss)
        columns = {
            name: (losses.tolist(), None if right is None else right.tolist())
            for name, (losses, right) in found.items()
        }
        return [
            {
                name: {"loss": losses[k], "accuracy": None if right is None else right[k]}
                for name, (losses, right) in columns.items()
            }
            for k in range(rows.stop - rows.start)
        ]

    def _note(self, rows: slice, step: int) -> None:
        for k, facts in enumerate(self._assess(rows)):
            own = facts.pop("")
            self.curves[k][step] = {
                "train_loss": own["loss"],
                "train_accuracy": own["accuracy"],
                "evaluations": facts,
            }

    def _outcome(self, k: int, facts: dict[str, Any], broken: int) -> Outcome:
        replica, own = self.replicas[k], facts.pop("")
        if broken < 0 and not math.isfinite(own["loss"]):
            broken = replica.steps
        curve = self.curves[k] | {
            replica.steps: {
                "train_loss": own["loss"],
                "train_accuracy": own["accuracy"],
                "evaluations": facts,
            }
        }
        return Outcome(
            replica=replica.digest,
            steps=replica.steps,
            status="done" if broken < 0 else "not finite",
            train_loss=own["loss"],
            train_accuracy=own["accuracy"],
            evaluations=facts,
            curve=curve,
            stopped=None if broken < 0 else broken,
            parameters=self._parameters(k) if self.keep else None,
        )

    def _parameters(self, k: int) -> dict[str, Tensor]:
        named = [(n, p) for n, p in self.study.template.named_parameters() if p.requires_grad]
        split = torch.split(self.batch.read(k).cpu(), [p.numel() for _, p in named])
        return {name: part.view_as(p) for (name, p), part in zip(named, split, strict=True)}


def _pairs(given: Any, name: str, precision: torch.dtype) -> list[Pair]:
    """One set or several, all of one shape."""
    if not isinstance(given, (tuple, list)) or not given:
        raise InputError(
            "a pair (inputs, targets), or several", name=name, value=type(given).__name__
        )
    sets = [given] if hasattr(given[0], "__array__") else list(given)
    pairs = [tensors(pair, precision, f"{name}[{i}]") for i, pair in enumerate(sets)]
    shapes = {(tuple(x.shape), tuple(y.shape)) for x, y in pairs}
    if len(shapes) > 1:
        raise InputError("sets of one shape", name=name, value=sorted(shapes))
    kinds = {(str(x.dtype), str(y.dtype)) for x, y in pairs}
    if len(kinds) > 1:
        raise InputError("sets of one type", name=name, value=sorted(kinds))
    return pairs


def _stacked(pairs: Sequence[Pair], where: torch.device) -> Pair:
    return torch.stack([x for x, _ in pairs]).to(where), torch.stack([y for _, y in pairs]).to(
        where
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _tensors_digest(*tensors: Tensor) -> str:
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        made.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return made.hexdigest()[:16]


def _entry(index: int, outcome: Outcome) -> dict[str, Any]:
    values = asdict(replace(outcome, parameters=None))
    del values["parameters"]
    plain: dict[str, Any] = _finite({"index": index, **values})
    return plain


def _finite(value: Any) -> Any:
    """Numbers that JSON has no word for as null."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _outcome(entry: dict[str, Any]) -> Outcome:
    values = {key: value for key, value in entry.items() if key != "index"}
    if values["train_loss"] is None:
        values["train_loss"] = math.nan
    values["curve"] = {int(step): facts for step, facts in values["curve"].items()}
    return Outcome(**values)


@contextmanager
def bar(title: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar with the time left, counted in steps of replicas."""
    if not shown:
        yield lambda _: None
        return
    columns = (TextColumn(title), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown_bar:
        task = shown_bar.add_task(title, total=total)
        yield lambda steps: shown_bar.advance(task, steps)
