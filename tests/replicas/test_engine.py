"""A replica equals the ordinary trainer's run; studies go on where they stopped."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import diminuendo as dim
from diminuendo.replicas import Outcome, Replica, initialise, train
from diminuendo.replicas import engine as repeats
from diminuendo.replicas.batch import cross_entropy
from diminuendo.replicas.perceptrons import Perceptrons, layers_of
from diminuendo.training import PrivateDescent, fit

N, D, CLASSES = 40, 6, 3
LOSS = nn.CrossEntropyLoss(reduction="none")


def logistic() -> nn.Module:
    return nn.Linear(D, CLASSES).double()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 9), nn.ReLU(), nn.Linear(9, CLASSES)).double()


def deep() -> nn.Module:
    return nn.Sequential(
        nn.Sequential(nn.Linear(D, 7, bias=False), nn.Tanh()),
        nn.Linear(7, 12),
        nn.Sigmoid(),
        nn.Linear(12, 5),
        nn.ReLU(),
        nn.Linear(5, CLASSES, bias=False),
    ).double()


class Normed(nn.Module):
    """No plain perceptron: goes through torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(D, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.nn.functional.gelu(self.norm(self.first(x))))
        return out


class Recurrent(nn.Module):
    """What torch.func cannot map: goes through the engine, one replica after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(2, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.cells(x.view(len(x), -1, 2))[0][:, -1])
        return out


def make_data(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, CLASSES, (N,), generator=generator)


@cache
def make_plan(steps: int, clip: float, rate: float) -> dim.Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        return dim.plan(
            dim.Budget(epsilon=4, delta=1e-5),
            examples=N,
            parameters=10,
            steps=steps,
            clip=clip,
            sampling_rate=rate,
            schedule="uniform" if rate < 1 else "optimal",
        )


def trained(model: Callable[[], nn.Module], data: tuple[Tensor, Tensor], replica: Replica):
    """The same run by `fit`: a plan with the replica's σ_t."""
    plan = make_plan(replica.steps, replica.clip, replica.sampling_rate)
    np.testing.assert_array_equal(plan.sigmas, replica.sigmas)
    module = initialise(model, replica.seed)
    optimizer = PrivateDescent(module.parameters(), lr=replica.lr, beta=replica.beta)
    result = fit(
        module, data, plan, loss=LOSS, optimizer=optimizer, seed=replica.seed, progress=False
    )
    assert result.steps == replica.steps
    return module


def some_replicas(rate: float = 1.0) -> list[Replica]:
    rows = [(7, 0.5, 1.0, 0.0, 3), (12, 0.1, 0.3, 0.9, 4), (12, 0.2, 30.0, 0.5, 5)]
    return [
        Replica(
            sigmas=make_plan(steps, clip, rate).sigmas,
            lr=lr,
            clip=clip,
            beta=beta,
            seed=seed,
            sampling_rate=rate,
        )
        for steps, lr, clip, beta, seed in rows
    ]


def check(model: Callable[[], nn.Module], replicas: list[Replica], **options: object) -> None:
    data = make_data()
    outcomes = train(model, data, replicas, progress=False, keep_parameters=True, **options)
    for replica, outcome in zip(replicas, outcomes, strict=True):
        module = trained(model, data, replica)
        assert outcome.status == "done"
        assert outcome.parameters is not None
        for name, value in module.named_parameters():
            torch.testing.assert_close(
                outcome.parameters[name], value.detach(), rtol=1e-8, atol=1e-9
            )
        logits = module(data[0]).detach()
        assert outcome.train_loss == pytest.approx(float(LOSS(logits, data[1]).mean()), rel=1e-8)
        right = float((logits.argmax(1) == data[1]).double().mean())
        assert outcome.train_accuracy == pytest.approx(right, abs=1e-6)


@pytest.mark.parametrize("model", [logistic, mlp, deep, lambda: Normed().double()])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_replicas_equal_the_trainer(model: Callable[[], nn.Module], rate: float) -> None:
    check(model, some_replicas(rate))


def test_models_beyond_batching_equal_the_trainer_too() -> None:
    check(lambda: Recurrent().double(), some_replicas())


def plain(seed: int = 0, steps: int = 6, **changes: object) -> Replica:
    return Replica(**{"sigmas": [2.0] * steps, "lr": 0.2, "clip": 1.0, "seed": seed, **changes})


def test_groups_blocks_and_order_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [plain(seed, steps) for seed, steps in [(0, 3), (1, 9), (2, 5), (3, 9), (4, 1)]]
    tests = {"test": make_data(2)}
    together = train(mlp, make_data(), replicas, evaluate=tests, progress=False)
    apart = train(mlp, make_data(), replicas, evaluate=tests, at_once=2, progress=False)
    monkeypatch.setattr(repeats, "CACHED", 64)
    small = train(mlp, make_data(), replicas, evaluate=tests, progress=False)
    for a, b, c, replica in zip(together, apart, small, replicas, strict=True):
        assert a.replica == replica.digest
        assert a.steps == replica.steps
        for other in (b, c):
            assert a.train_loss == pytest.approx(other.train_loss, rel=1e-9)
            assert a.evaluations["test"]["loss"] == pytest.approx(other.evaluations["test"]["loss"])


def test_replicas_on_different_sets() -> None:
    sets = [make_data(1), make_data(2)]
    replicas = [plain(3, data=0), plain(3, data=1), plain(4, data=1)]
    mixed = train(mlp, sets, replicas, progress=False)
    for outcome, replica in zip(mixed, replicas, strict=True):
        alone = train(mlp, sets[replica.data], [plain(replica.seed)], progress=False)[0]
        assert outcome.train_loss == pytest.approx(alone.train_loss, rel=1e-9)


def test_recorded_steps_are_the_shorter_runs_ends() -> None:
    long, short = train(mlp, make_data(), [plain(5, 8), plain(5, 3)], record=[0, 3], progress=False)
    assert sorted(long.curve) == [0, 3, 8]
    assert long.curve[3]["train_loss"] == pytest.approx(short.train_loss)
    assert long.curve[8]["train_loss"] == long.train_loss


def test_learning_rate_by_step_and_no_noise() -> None:
    constant = train(mlp, make_data(), [plain(1, sigmas=[0.0] * 6)], progress=False)[0]
    listed = Replica(sigmas=[0.0] * 6, lr=[0.2] * 6, clip=1.0, seed=1)
    assert train(mlp, make_data(), [listed], progress=False)[0].train_loss == constant.train_loss


def test_any_loss_per_example() -> None:
    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - nn.functional.one_hot(targets, CLASSES)) ** 2).sum(1)

    outcome = train(mlp, make_data(), [plain(1)], loss=squared, progress=False)[0]
    general = train(
        lambda: nn.Sequential(mlp(), nn.Flatten()),
        make_data(),
        [plain(1)],
        loss=squared,
        progress=False,
    )[0]
    assert outcome.train_loss == pytest.approx(general.train_loss, rel=1e-9)


@pytest.mark.parametrize("model", [mlp, lambda: Normed().double()])
def test_a_replica_that_diverges_is_reported_and_the_others_go_on(
    model: Callable[[], nn.Module],
) -> None:
    wild = plain(1, steps=9, lr=1e200, clip=1e200)
    bad, good = train(model, make_data(), [wild, plain(2)], progress=False)
    assert bad.status == "not finite"
    assert bad.stopped is not None
    assert 1 < bad.stopped <= 9
    assert good.status == "done"
    alone = train(model, make_data(), [plain(2)], progress=False)[0]
    assert good.train_loss == pytest.approx(alone.train_loss, rel=1e-9)


def test_an_interrupted_study_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = [plain(seed) for seed in range(5)] + [plain(9, lr=1e200, clip=1e200)]
    path = tmp_path / "study" / "results.jsonl"
    options = {"at_once": 2, "progress": False, "evaluate": {"test": make_data(3)}}
    whole = train(mlp, make_data(), replicas, **options)
    real, calls = repeats._Group.run, []

    def stopping(self: repeats._Group, advance: Callable[[int], None]) -> list[Outcome]:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(self, advance)

    monkeypatch.setattr(repeats._Group, "run", stopping)
    with pytest.raises(KeyboardInterrupt):
        train(mlp, make_data(), replicas, store=path, **options)
    assert len(path.read_text().splitlines()) == 1 + 4
    with path.open("a") as handle:
        handle.write('{"index": 5, "repl')
    resumed = train(mlp, make_data(), replicas, store=path, **options)
    assert len(calls) == 4
    again = train(mlp, make_data(), replicas, store=path, **options)
    assert len(calls) == 4
    for a, b, c in zip(whole, resumed, again, strict=True):
        assert (a.replica, a.status, a.stopped) == (b.replica, b.status, b.stopped)
        assert (a.replica, a.status, a.stopped) == (c.replica, c.status, c.stopped)
        if a.status == "done":
            assert a == b == c
        else:
            assert math.isnan(c.train_loss)
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_a_study_resumed_with_other_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    train(mlp, make_data(), [plain(1)], store=path, progress=False)
    before = path.read_text()
    for model, data, replicas in (
        (mlp, make_data(), [plain(2)]),
        (mlp, make_data(7), [plain(1)]),
        (logistic, make_data(), [plain(1)]),
    ):
        with pytest.raises(dim.InputError, match="of this study"):
            train(model, data, replicas, store=path, progress=False)
    assert path.read_text() == before
    other = tmp_path / "other.txt"
    other.write_text('{"a": 1}\n')
    with pytest.raises(dim.InputError, match="the results of a study"):
        train(mlp, make_data(), [plain(1)], store=other, progress=False)


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 9), nn.Tanh(), nn.Linear(9, CLASSES)).double()


def own(activation: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(D, 4), nn.Linear(4, CLASSES)
            self.activation = activation

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.last(self.activation(self.first(x)))
            return out

    return lambda: Own().double()


def weighted(weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return weight * LOSS(outputs, targets)

    return loss


def softened(kind: int) -> Callable[[Tensor, Tensor], Tensor]:
    if kind == 0:
        return lambda outputs, targets: LOSS(outputs.relu(), targets)
    return lambda outputs, targets: LOSS(outputs.tanh(), targets)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": mlp}, {"model": smooth}),
        ({"model": own(torch.relu)}, {"model": own(torch.tanh)}),
        ({"loss": weighted(1.0)}, {"loss": weighted(2.0)}),
        ({"loss": softened(0)}, {"loss": softened(1)}),
        ({"loss": LOSS}, {"loss": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)}),
    ],
)
def test_another_model_or_loss_of_the_same_shapes_is_another_study(
    one: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    def run(given: dict[str, Any]) -> list[Outcome]:
        model, loss = given.get("model", mlp), given.get("loss", "cross-entropy")
        path = tmp_path / "results.jsonl"
        return train(model, make_data(), [plain()], loss=loss, store=path, progress=False)

    first = run(one)
    with pytest.raises(dim.InputError, match="of this study"):
        run(other)
    assert run(one) == first


SAID = """
import sys
sys.path.insert(0, sys.argv[1])
from test_engine import *
from diminuendo.replicas.fingerprint import identity
print([identity(of) for of in (mlp(), own(torch.relu)(), LOSS, weighted(2.0), softened(1))])
"""


def test_another_process_knows_a_model_and_a_loss_again() -> None:
    command = [sys.executable, "-c", SAID, str(Path(__file__).parent)]
    one, other = (
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    )
    assert one == other
    assert len(set(one.split())) == 5


def test_arrays_are_data_too() -> None:
    x, y = make_data()
    given = (x.float().numpy(), y.int().numpy())
    (outcome,) = train(mlp, given, [plain()], evaluate={"test": given}, progress=False)
    (same,) = train(mlp, (x.float().double(), y), [plain()], progress=False)
    assert outcome.train_loss == same.train_loss


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"loss": nn.CrossEntropyLoss()}, "one number for each example"),
        ({"y": lambda y: y + 1}, "labels from 0 to 2"),
        ({"y": lambda y: y - 1}, "labels from 0 to 2"),
        ({"y": lambda y: y.double()}, "int64"),
        ({"y": lambda y: y.int()}, "int64"),
        ({"y": lambda y: y.int(), "loss": LOSS}, "what the loss takes"),
        ({"x": lambda x: x.float()}, "precision"),
        ({"x": lambda x: x[:, 1:]}, "what the model takes|training inputs' shape"),
        ({"x": lambda x: x.numpy().astype(str)}, "numbers"),
        ({"x": lambda _: None}, "a pair"),
    ],
)
def test_what_does_not_fit_is_told_before_anything_is_trained(
    changes: dict[str, Any], told: str
) -> None:
    x, y = make_data()
    data = changes.get("x", lambda x: x)(x), changes.get("y", lambda y: y)(y)
    loss = changes.get("loss", "cross-entropy")
    with pytest.raises(dim.InputError, match=told):
        train(mlp, data, [plain()], loss=loss, progress=False)
    with pytest.raises(dim.InputError, match=told):
        train(mlp, (x, y), [plain()], loss=loss, evaluate={"test": data}, progress=False)


def test_bad_input() -> None:
    with pytest.raises(dim.InputError, match="sigmas"):
        plain(sigmas=[1.0, -1.0])
    with pytest.raises(dim.InputError, match="lr"):
        plain(lr=[0.1])
    with pytest.raises(dim.InputError, match="at least one replica"):
        train(mlp, make_data(), [], progress=False)
    with pytest.raises(dim.InputError, match=r"Replica\.data"):
        train(mlp, make_data(), [plain(data=1)], progress=False)
    x, y = make_data()
    with pytest.raises(dim.InputError, match="of one shape"):
        train(mlp, [(x, y), (x[1:], y[1:])], [plain()], progress=False)
    with pytest.raises(dim.InputError, match="evaluate"):
        train(mlp, (x, y), [plain()], evaluate={"test": (x[:, 1:], y)}, progress=False)


def test_frozen_parameters_are_refused() -> None:
    def partly() -> nn.Module:
        model = mlp()
        model[0].weight.requires_grad_(False)
        return model

    with pytest.raises(dim.InputError, match="all its parameters"):
        train(partly, make_data(), [plain()], progress=False)


def test_the_kind_of_batch_follows_the_model() -> None:
    kinds = [
        repeats.Study.of(model, make_data(), [plain()], "cross-entropy", {}, None, None).kind
        for model in (mlp, lambda: Normed().double(), lambda: Recurrent().double())
    ]
    assert [kind.__name__ for kind in kinds] == ["Perceptrons", "Vmapped", "OneByOne"]


def test_a_perceptron_with_hooks_goes_through_them() -> None:
    def hooked() -> nn.Module:
        model = mlp()
        model[0].register_forward_hook(lambda *given: 2 * given[-1])
        return model

    def prepared() -> nn.Module:
        model = mlp()
        model.register_forward_pre_hook(lambda _, given: (2 * given[0],))
        return model

    assert layers_of(mlp()) is not None
    data = make_data()
    (bare,) = train(mlp, data, [plain()], progress=False)
    for model in (hooked, prepared):
        assert layers_of(model()) is None
        (outcome,) = train(model, data, [plain()], progress=False)
        assert outcome.train_loss != pytest.approx(bare.train_loss, rel=1e-6)


class Forgetful(dict[Any, Any]):
    """As if another thread had emptied it at once."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.clear()


def test_what_is_kept_may_be_thrown_away_by_another_thread() -> None:
    x, y = make_data()
    batch = Perceptrons(layers_of(mlp()) or [], 2, cross_entropy, (2, N), x.new_empty(0))
    points = batch.data(x.unsqueeze(0), y.unsqueeze(0), [0, 0])
    batch._kept, points._kept = Forgetful(), Forgetful()
    rows = slice(0, 2)
    assert len(batch._views(rows)[0]) == 2
    assert points.some(rows, slice(0, N)).x.shape == (2, N, D + 1)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    train(mlp, make_data(), [plain(1)], progress=False)
    assert torch.equal(before, torch.get_rng_state())


def test_rows_are_what_initialise_gives() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 3))

    rows = repeats.initial_rows(network, [3, 8])
    for row, seed in zip(rows, [3, 8], strict=True):
        assert torch.equal(row, repeats.flat_parameters(initialise(network, seed)))
