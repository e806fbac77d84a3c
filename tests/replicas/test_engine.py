"""A replica equals the ordinary trainer's run, whatever it is grouped with."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from toys import CLASSES, LOSS, D, N, Normed, Recurrent, deep, logistic, make_data, mlp, replica

import diminuendo as dim
from diminuendo.replicas import Replica, initialise, study, train
from diminuendo.replicas.layers import FeatureScale, layers_of
from diminuendo.training import PrivateDescent, fit
from diminuendo.training.clipping import Automatic, Flat, PerLayer


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


def trained(model: Callable[[], nn.Module], data: tuple[Tensor, Tensor], own: Replica) -> nn.Module:
    """The same run by `fit`: a plan with the replica's σ_t."""
    plan = make_plan(own.steps, own.clip, own.sampling_rate)
    np.testing.assert_array_equal(plan.sigmas, own.sigmas)
    module = initialise(model, own.seed)
    optimizer = PrivateDescent(module.parameters(), lr=float(np.asarray(own.lr)), beta=own.beta)
    result = fit(
        module,
        data,
        plan,
        loss=LOSS,
        optimizer=optimizer,
        clip={"flat": Flat, "automatic": Automatic, "per-layer": PerLayer}[own.clipping](own.clip),
        noise="fast",
        seed=own.seed,
        progress=False,
    )
    assert result.steps == own.steps
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


def check(model: Callable[[], nn.Module], replicas: list[Replica], **options: Any) -> None:
    data = make_data()
    outcomes = train(model, data, replicas, progress=False, keep_parameters=True, **options)
    for own, outcome in zip(replicas, outcomes, strict=True):
        module = trained(model, data, own)
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


def scaled() -> nn.Module:
    scale = FeatureScale(torch.linspace(2.0, 0.1, D)).double()
    return nn.Sequential(scale, *mlp())


def test_a_network_behind_fixed_factors_is_a_perceptron() -> None:
    layers = layers_of(scaled())
    assert layers is not None
    assert len(layers[0].factors) == D
    assert layers_of(nn.Sequential(*mlp(), FeatureScale(torch.ones(CLASSES)))) is None


@pytest.mark.parametrize("model", [logistic, mlp, deep, scaled, lambda: Normed().double()])
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_replicas_equal_the_trainer(model: Callable[[], nn.Module], rate: float) -> None:
    check(model, some_replicas(rate))


@pytest.mark.parametrize(
    "model", [logistic, mlp, deep, lambda: Normed().double(), lambda: Recurrent().double()]
)
@pytest.mark.parametrize("rate", [1.0, 0.3])
def test_other_clipping_rules_equal_the_trainer_s_alone_and_mixed(
    model: Callable[[], nn.Module], rate: float
) -> None:
    rules: list[Any] = ["automatic", "per-layer", "flat"]
    mixed = [
        replace(own, clipping=rule) for own, rule in zip(some_replicas(rate), rules, strict=True)
    ]
    check(model, mixed)
    check(model, mixed[1:2])


def test_models_beyond_batching_equal_the_trainer_too() -> None:
    check(lambda: Recurrent().double(), some_replicas())


def test_groups_blocks_and_order_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = [replica(seed, steps) for seed, steps in [(0, 3), (1, 9), (2, 5), (3, 9), (4, 1)]]
    tests = {"test": make_data(2)}
    together = train(mlp, make_data(), replicas, evaluate=tests, progress=False)
    apart = train(mlp, make_data(), replicas, evaluate=tests, at_once=2, progress=False)
    monkeypatch.setattr(study, "CPU_ENTRIES", 64)
    small = train(mlp, make_data(), replicas, evaluate=tests, progress=False)
    for a, b, c, own in zip(together, apart, small, replicas, strict=True):
        assert a.replica == own.digest
        assert a.steps == own.steps
        for other in (b, c):
            assert a.train_loss == pytest.approx(other.train_loss, rel=1e-9)
            assert a.evaluations["test"]["loss"] == pytest.approx(other.evaluations["test"]["loss"])


def test_replicas_on_different_sets() -> None:
    sets = [make_data(1), make_data(2)]
    replicas = [replica(3, data=0), replica(3, data=1), replica(4, data=1)]
    mixed = train(mlp, sets, replicas, progress=False)
    for outcome, own in zip(mixed, replicas, strict=True):
        alone = train(mlp, sets[own.data], [replica(own.seed)], progress=False)[0]
        assert outcome.train_loss == pytest.approx(alone.train_loss, rel=1e-9)


def test_recorded_steps_are_the_shorter_runs_ends() -> None:
    long, short = train(
        mlp, make_data(), [replica(5, 8), replica(5, 3)], record=[0, 3], progress=False
    )
    assert sorted(long.curve) == [0, 3, 8]
    assert long.curve[3]["train_loss"] == pytest.approx(short.train_loss)
    assert long.curve[8]["train_loss"] == long.train_loss


def test_learning_rate_by_step_and_no_noise() -> None:
    constant = train(mlp, make_data(), [replica(1, sigmas=[0.0] * 6)], progress=False)[0]
    listed = Replica(sigmas=[0.0] * 6, lr=[0.2] * 6, clip=1.0, seed=1)
    assert train(mlp, make_data(), [listed], progress=False)[0].train_loss == constant.train_loss


def test_any_loss_per_example() -> None:
    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return ((outputs - nn.functional.one_hot(targets, CLASSES)) ** 2).sum(1)

    outcome = train(mlp, make_data(), [replica(1)], loss=squared, progress=False)[0]
    general = train(
        lambda: nn.Sequential(mlp(), nn.Flatten()),
        make_data(),
        [replica(1)],
        loss=squared,
        progress=False,
    )[0]
    assert outcome.train_loss == pytest.approx(general.train_loss, rel=1e-9)


@pytest.mark.parametrize("model", [mlp, lambda: Normed().double()])
def test_a_replica_that_diverges_is_reported_and_the_others_go_on(
    model: Callable[[], nn.Module],
) -> None:
    wild = replica(1, steps=9, lr=1e200, clip=1e200)
    bad, good = train(model, make_data(), [wild, replica(2)], progress=False)
    assert bad.status == "not finite"
    assert bad.stopped is not None
    assert 1 < bad.stopped <= 9
    assert good.status == "done"
    alone = train(model, make_data(), [replica(2)], progress=False)[0]
    assert good.train_loss == pytest.approx(alone.train_loss, rel=1e-9)
