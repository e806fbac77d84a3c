"""tune: everything chosen together on auxiliary data, and what each choice gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import diminuendo as dim
from diminuendo.adapters.sklearn import PrivateClassifier
from diminuendo.errors import InputError
from diminuendo.replicas import Replica, initialise, train
from diminuendo.training import Automatic, Flat, PerLayer, fit
from diminuendo.tuning import Choice, Linear, Shape, Space, TuningResult, TwoLayers, auxiliary
from diminuendo.tuning.judge import Judge
from diminuendo.tuning.sets import auxiliary_sets
from diminuendo.tuning.space import Candidate, make_plan

BUDGET = dim.Budget(epsilon=4, delta=1e-6)
SHAPE = Shape(examples=120, features=6, classes=3)
LOSS = nn.CrossEntropyLoss(reduction="none")
QUICK: dict[str, Any] = {
    "models": ["linear", 5],
    "rounds": 1,
    "repeats": 2,
    "progress": False,
}


def tune(**changes: Any) -> TuningResult:
    return dim.tune(BUDGET, **{"shape": SHAPE, **QUICK, **changes})


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tuned() -> TuningResult:
    return tune()


def test_the_choice_is_on_the_budget_and_complete(tuned: TuningResult) -> None:
    best = tuned.best
    assert BUDGET.epsilon * (1 - 1e-6) < best.plan.epsilon <= BUDGET.epsilon
    assert best.plan.examples == 120
    assert best.model is not None
    assert best.plan.parameters == sum(p.numel() for p in best.model().parameters())
    assert best.hidden in (0, 5)
    assert best.accuracy is not None
    assert 0 < best.accuracy.mean < 1
    for name in ("lr", "clip", "momentum", "steps"):
        values = {getattr(t.candidate, name) for f in tuned.families.values() for t in f.trials}
        assert len(values) > 1, name


def test_every_choice_has_its_ablation(tuned: TuningResult) -> None:
    names = [one.name for one in tuned.ablations]
    assert names == [
        "uniform noise, constant rate",
        "uniform noise, falling rate",
        "fading noise, constant rate",
        "fading noise, falling rate",
        "no momentum",
        "flat clipping",
        "automatic clipping",
        "per-layer clipping",
        "none of these",
        "linear alone",
        "hidden 5 alone",
    ]
    by_name = {one.name: one.best.candidate for one in tuned.ablations}
    assert (by_name["fading noise, constant rate"].fall or 1) < 1
    assert by_name["fading noise, constant rate"].lr_shape == "constant"
    assert by_name["uniform noise, falling rate"].lr_fall < 1
    assert by_name["uniform noise, falling rate"].fall is None
    assert by_name["automatic clipping"].clipping == "automatic"
    assert by_name["hidden 5 alone"].model == "hidden 5"
    assert by_name["none of these"].momentum == 0


@pytest.mark.parametrize("labels", ["teacher", "mixtures"])
def test_the_best_beats_or_ties_the_best_of_every_ablation_on_held_out_data(labels: str) -> None:
    """Paired 95% intervals, seeded; the best was chosen on other sets."""
    result = tune(auxiliary=labels, rounds=3, repeats=4, models=["linear", 16])
    assert result.ablations
    for one in result.ablations:
        assert one.loss.high >= 0, one.name
    assert any(one.matters for one in result.ablations)


@pytest.mark.slow
def test_a_linear_teacher_favours_a_linear_model_and_mixtures_a_network() -> None:
    """At a generous budget, so that parameters cost little."""
    generous = dim.Budget(epsilon=200, delta=1e-3)
    shape = Shape(examples=600, features=2, classes=2)
    for labels, name in (("teacher", "linear"), ("mixtures", "hidden 32")):
        result = dim.tune(
            generous, shape, models=["linear", 32], auxiliary=labels, rounds=2, progress=False
        )
        assert result.best.candidate.model == name, labels


def test_what_is_fixed_stays(tuned: TuningResult) -> None:
    fixed = Space(lr=0.7, clip=0.5, momentum=0.25, steps=7, fall=0.5, lr_shape="linear")
    fixed = Space(**{**fixed.to_dict(), "lr_fall": 0.2, "clipping": "automatic"})
    result = tune(models=["linear"], space=fixed, rounds=2)
    wanted = Candidate(
        family="exponential",
        steps=7,
        lr=0.7,
        clip=0.5,
        momentum=0.25,
        fall=0.5,
        lr_shape="linear",
        lr_fall=0.2,
        clipping="automatic",
        model="linear",
    )
    assert result.best.candidate == wanted
    assert result.ablations == ()
    assert isinstance(result.best.clip, Automatic)
    assert isinstance(tuned.ablations[7].best.clip, PerLayer)
    assert isinstance(tuned.ablations[5].best.clip, Flat)


def test_a_fixed_learning_rate_alone_is_kept_in_every_candidate() -> None:
    result = tune(space=Space(lr=0.3))
    for family in result.families.values():
        assert {trial.candidate.lr for trial in family.trials} == {0.3}


def test_the_same_seed_finds_the_same(tuned: TuningResult) -> None:
    assert tune().to_dict() == tuned.to_dict()
    assert tune(seed=1).to_dict() != tuned.to_dict()


def test_sampling_rates_are_searched_where_a_range_is_given() -> None:
    space = Space(sampling_rate=(0.25, 1.0), steps=(4, 8), fall=1.0)
    result = tune(models=["linear"], space=space, rounds=2)
    rates = {t.candidate.sampling_rate for f in result.families.values() for t in f.trials}
    assert min(rates) < 1
    assert "full batch" in {one.name for one in result.ablations}
    assert result.best.plan.sampling_rate == result.best.candidate.sampling_rate
    assert result.best.plan.epsilon <= BUDGET.epsilon


def test_a_candidate_s_plan_holds_what_it_was_trained_with() -> None:
    for rate in (1.0, 0.5):
        candidate = Candidate(
            family="exponential",
            steps=6,
            lr=0.5,
            clip=1.5,
            momentum=0.5,
            fall=0.6,
            lr_shape="cosine",
            lr_fall=0.1,
            clipping="per-layer",
            sampling_rate=rate,
            model="linear",
        )
        replica = candidate.replica(BUDGET, seed=3)
        plan = make_plan(candidate, BUDGET, 120, 21)
        assert plan.sigmas.tolist() == pytest.approx(np.asarray(replica.sigmas).tolist())
        assert plan.lr is not None
        assert (0.5 * plan.lr).tolist() == pytest.approx(np.asarray(replica.lr).tolist())
        assert plan.lr[0] == 1
        assert plan.lr[-1] == pytest.approx(0.1)
        assert (plan.clip, plan.momentum, plan.sampling_rate) == (1.5, 0.5, rate)


@pytest.mark.parametrize(("rate", "batch"), [(0.25, 250), (0.75, 500), (1.0, 500)])
def test_noise_on_fewer_examples_is_that_of_the_whole_set(rate: float, batch: int) -> None:
    """Clip·σ over the expected batch size, the noise on the mean gradient, stays the same."""
    candidate = Candidate(
        family="uniform",
        steps=3,
        lr=1.0,
        clip=1.0,
        momentum=0.0,
        fall=None,
        sampling_rate=rate,
    )
    part = candidate.replica(BUDGET, seed=0, share=0.5)
    assert 500 * part.sampling_rate == pytest.approx(batch)
    noise = candidate.sigmas(BUDGET) / (1000 * rate)
    np.testing.assert_allclose(np.asarray(part.sigmas) / batch, noise)


def test_fit_follows_a_choice_in_everything() -> None:
    """The run that `fit` takes is the replica that was judged."""
    settings = Space(
        lr=0.5, clip=1.0, momentum=0.5, steps=5, fall=0.5, lr_shape="cosine", clipping="automatic"
    )
    best = tune(models=[3], space=settings, rounds=0).best
    assert best.model is not None
    data = auxiliary.gaussian(SHAPE, seed=9)
    replica = best.candidate.replica(BUDGET, seed=11)
    (outcome,) = train(best.model, data, [replica], keep_parameters=True, progress=False)
    model = initialise(best.model, 11)
    result = fit(model, data, best, loss=LOSS, seed=11, noise="fast", progress=False)
    assert result.status == "done"
    assert outcome.parameters is not None
    for name, value in model.named_parameters():
        torch.testing.assert_close(outcome.parameters[name], value.detach(), rtol=1e-4, atol=1e-5)


def test_what_is_given_to_fit_goes_before_the_choice(tuned: TuningResult) -> None:
    assert tuned.best.model is not None
    model = tuned.best.model()
    before = [p.detach().clone() for p in model.parameters()]
    data = auxiliary.gaussian(SHAPE, seed=9)
    fit(model, data, tuned.best, loss=LOSS, lr=1e-12, seed=1, noise="fast", progress=False)
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(old, new.detach(), atol=1e-6, rtol=0)
    with pytest.raises(InputError, match=r"what dim\.tune chose"):
        fit(model, data, "plan.json", loss=LOSS)  # type: ignore[arg-type]


def test_a_choice_reads_back_from_its_json(tuned: TuningResult) -> None:
    for one in tuned.ablations:
        text = one.best.to_json()
        again = Choice.from_json(text)
        assert again.plan == one.best.plan
        assert (again.lr, again.candidate) == (one.best.lr, one.best.candidate)
        assert again.model == one.best.model
        assert again.clip == one.best.clip
    changed = json.loads(text)
    changed["plan"]["sigmas"][0] /= 2
    for broken in (json.dumps(changed), "{}", '{"schema": "diminuendo.choice/9"}', "[]"):
        with pytest.raises(InputError):
            Choice.from_json(broken)


def own() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))


def test_models_of_one_s_own() -> None:
    result = tune(models={"mine": own, "line": "linear"})
    assert {one.name for one in result.ablations} >= {"mine alone", "line alone"}
    mine = next(one.best for one in result.ablations if one.name == "mine alone")
    assert mine.model is own
    assert mine.hidden is None
    assert Choice.from_json(mine.to_json()).model is None
    assert tune(models=[own]).best.candidate.model == "own"
    assert tune(models=None, model=TwoLayers(6, 4, 3)).best.hidden == 4


def test_linear_models_alone_are_not_clipped_by_layers() -> None:
    result = tune(models=["linear"])
    assert "per-layer clipping" not in {one.name for one in result.ablations}
    assert tune(models=["linear"]).settings["space"]["clipping"] == ["flat", "automatic"]


def test_a_linear_model_starts_from_zero() -> None:
    assert all(not p.any() for p in Linear(6, 3)().parameters())
    assert Linear(6, 3).parameters == 21


@pytest.mark.parametrize(("name", "hidden"), [("ordered linear", None), ("ordered 4", 4)])
def test_a_model_of_ordered_features_makes_later_ones_smaller(
    name: str, hidden: int | None
) -> None:
    best = tune(models=[name], rounds=0, repeats=1).best
    assert best.candidate.model == (name if hidden is None else f"ordered hidden {hidden}")
    assert best.hidden is None, "nobody takes it for a plain network"
    again = Choice.from_json(best.to_json())
    for choice in (best, again):
        assert choice.model is not None
        scale = choice.model()[0]  # type: ignore[index]
        factors = scale(torch.ones(1, 6))[0]
        assert factors.square().mean() == pytest.approx(1)
        assert (factors[:-1] > factors[1:]).all()
    data = public(120)
    result = fit(best.model(), data, best, loss=LOSS, progress=False)  # type: ignore[misc]
    assert result.status == "done"
    with pytest.raises(InputError, match="a model of its own"):
        PrivateClassifier(plan=best, classes=[0, 1, 2]).fit(data[0].numpy(), data[1].numpy())


@pytest.mark.slow
def test_ordered_features_are_chosen_where_the_first_ones_matter() -> None:
    """And not where none matters more than another."""
    few = dim.Budget(epsilon=2, delta=1e-5)
    shape = Shape(examples=200, features=40, classes=2)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2000, 40, generator=generator)
    matter = {
        "ordered linear": torch.arange(1, 41) ** -1.0,
        "linear": torch.cat([torch.zeros(30), torch.ones(10)]),
    }
    for expected, weights in matter.items():
        labels = (x @ weights + 0.3 * torch.randn(2000, generator=generator) > 0).long()
        found = dim.tune(
            few, shape, models=["linear", "ordered linear"], auxiliary=(x, labels), rounds=1,
            repeats=6, progress=False,
        )  # fmt: skip
        assert found.best.candidate.model == expected


def public(rows: int, seed: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    shape = Shape(examples=rows, features=6, classes=3)
    return auxiliary.gaussian(shape, labels="clusters", seed=seed)


def test_public_data_of_more_rows_are_drawn_from() -> None:
    result = tune(auxiliary=public(600))
    assert "600 public rows; half of its rows are held out" in result.settings["auxiliary"]
    assert "drawn anew" not in result.settings["auxiliary"]
    few = tune(auxiliary=public(250), models=["linear"])
    assert "draw the same rows anew" in few.settings["auxiliary"]


def test_public_sets_of_one_s_own_are_held_out_by_halves() -> None:
    sets = [public(120, seed) for seed in range(4)]
    result = tune(auxiliary=sets, held_out=sets[::-1], models=["linear"])
    assert "4 public sets, the last 2 of them held out" in result.settings["auxiliary"]
    by_loss = tune(auxiliary=sets, minimise="train-loss", models=["linear"])
    assert by_loss.best.held_out is not None
    alone = tune(auxiliary=sets[0], minimise="train-loss", models=["linear"])
    assert "differ in start and noise only" in alone.settings["auxiliary"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"models": []}, "models"),
        ({"models": "linear"}, "models"),
        ({"models": ["deep"]}, "models"),
        ({"models": [0]}, "models"),
        ({"models": ["ordered deep"]}, "ordered linear"),
        ({"models": ["ordered 0"]}, "models"),
        ({"models": ["linear", "linear"]}, "different names"),
        ({"models": ["linear"], "model": own}, "model"),
        ({"models": ["linear"], "trials": 3}, "models"),
        ({"auxiliary": ("teacher", "wishes")}, "labels"),
        ({"auxiliary": []}, "auxiliary"),
        ({"auxiliary": public(200)}, "100 rows more"),
        ({"auxiliary": [public(120), public(120)]}, "a test set for each"),
        ({"auxiliary": [public(120)] * 2, "held_out": [public(120)]}, "a test set for each"),
        ({"auxiliary": "teacher", "held_out": [public(120)]}, "held_out"),
        ({"minimise": "regret"}, "minimise"),
        ({"repeats": 0}, "repeats"),
        ({"rounds": -1}, "rounds"),
        ({"seed": -1}, "seed"),
        ({"minimise": ""}, "minimise"),
        ({"shape": 100}, "shape"),
        ({"models": 32}, "models"),
        ({"space": {"lr": 1.0}}, "space"),
        ({"auxiliary": 5}, "auxiliary"),
        ({"device": "gpu"}, "device"),
        ({"progress": "no"}, "progress"),
        ({"space": Space(lr=1e300)}, "Lower the learning rate"),
        ({"space": Space(clipping="automatic"), "trials": 3, "models": None}, "clipping"),
    ],
)
def test_bad_input(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        tune(**changes)


@pytest.mark.parametrize(
    "values",
    [
        {"lr_shape": "wavy"},
        {"lr_shape": ()},
        {"lr_shape": ("linear", "linear")},
        {"clipping": ("flat", "round")},
        {"sampling_rate": 0.0},
        {"lr_fall": (0.5, 1.5)},
    ],
)
def test_bad_spaces(values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(values))):
        Space(**values)


def test_the_table_and_the_picture(tuned: TuningResult, tmp_path: Path) -> None:
    headers, rows = tuned.table()
    assert len(rows) == 1 + len(tuned.ablations)
    assert all(len(row) == len(headers) for row in rows)
    assert "±" in rows[1][-1]
    assert tuned.picture(tmp_path / "ablations.svg").stat().st_size > 1000
    told = json.loads(json.dumps(tuned.to_dict()))
    assert len(told["ablations"]) == len(tuned.ablations)
    assert told["chosen"]["accuracy"]["mean"] == tuned.best.accuracy.mean  # type: ignore[union-attr]
    compared = tune(models=None, model=TwoLayers(6, 4, 3), trials=1, families=("uniform",))
    with pytest.raises(InputError, match="landscape"):
        compared.picture(tmp_path / "none.svg")


def test_runs_are_paired_and_held_out_sets_are_others() -> None:
    search, unseen, _ = auxiliary_sets(None, None, SHAPE, "test-error", finals=3, unseen=3, seed=0)
    for one in search.train:
        assert not any(torch.equal(one[0], other[0]) for other in unseen.train)
    judge = Judge(BUDGET, {"linear": Linear(6, 3)}, 120, search, unseen, "test-error")
    candidate = Candidate(
        family="uniform", steps=4, lr=1.0, clip=1.0, momentum=0.0, fall=None, model="linear"
    )
    mean = judge.means([candidate], 3)[0]
    errors = []
    for i in range(3):
        replica = Replica(sigmas=candidate.sigmas(BUDGET), lr=1.0, clip=1.0, seed=i)
        (outcome,) = train(
            Linear(6, 3),
            search.train[i],
            [replica],
            evaluate={"test": search.test[i]},
            progress=False,
        )
        accuracy = outcome.evaluations["test"]["accuracy"]
        assert accuracy is not None
        errors.append(1 - accuracy)
    assert mean == pytest.approx(np.mean(errors))
    assert judge.runs(candidate, 3).tolist() == pytest.approx(errors)


def test_a_choice_clips_to_its_plan_s_norm(tuned: TuningResult) -> None:
    """Whatever its other settings say."""
    told = json.loads(tuned.best.to_json())
    told["candidate"]["clip"] *= 100
    assert Choice.from_json(json.dumps(told)).clip.sensitivity == tuned.best.plan.clip


def test_the_number_of_threads_is_left_as_it_was() -> None:
    torch.set_num_threads(2)
    tune(rounds=0, repeats=1)
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
