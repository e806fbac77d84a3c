"""What the page shows is what the library computes; what one takes along from it runs."""

from __future__ import annotations

import json
import math
import tomllib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diminuendo as dim
from diminuendo.cli import main
from diminuendo.page import Settings, answer, exports, running
from diminuendo.page.answers import drawn_steps, make_plan
from diminuendo.page.settings import MOST_STEPS
from diminuendo.planning import mismatch

CASES: list[dict[str, Any]] = [
    {},
    {"known": "nothing"},
    {"known": "nothing", "steps": "auto", "examples": 100_000, "parameters": 100, "clip": 1.0},
    {"known": "kappa", "kappa": 30.0, "lr": "cosine"},
    {"known": "spectrum", "lr": "joint", "steps": 20},
    {"known": "spectrum", "lr": "linear", "steps": 20},
    {"momentum": 0.9, "steps": 30},
    {"schedule": "exponential", "steps": 30},
    {"schedule": "uniform", "steps": 7},
    {"relation": "replace-one", "steps": 30},
    {"sampling_rate": 0.2, "steps": 12, "epsilon": 2.0},
    {"sampling_rate": 0.2, "steps": 12, "lr": "joint"},
    {"sampling_rate": 0.2, "steps": 5, "relation": "replace-one"},
    {"steps": 1},
]


@pytest.mark.parametrize("changed", CASES, ids=str)
def test_the_page_says_what_the_library_says(changed: dict[str, Any]) -> None:
    settings = Settings(**changed)
    made, warned = make_plan(settings)
    shown, later = answer(settings, made, warned), running(settings, made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        same = dim.plan(settings.budget, **settings.plan_arguments())
    assert shown["digest"] == same.digest == made.digest
    assert shown["epsilon"] == same.epsilon <= settings.epsilon
    assert float(shown["epsilon_words"]) >= same.epsilon
    assert shown["sigmas"][-1] == same.sigmas[-1]
    assert json.loads(json.dumps([shown, later])) == [shown, later]
    # noise as planned is what the plan itself says, and no plan beats the best
    planned = next(one for one in shown["speeds"] if math.isclose(one["speed"], 1.0))
    assert planned["plan"] == pytest.approx(same.noise_ratio, rel=1e-9)
    for one in shown["speeds"]:
        assert one["best"] is None or one["best"] <= one["plan"] * (1 + 1e-9)
    uniform = dim.calibrate(np.ones(same.steps), settings.budget, settings.sampling_rate)
    assert shown["uniform"] == pytest.approx(uniform[0], rel=2e-4)
    # ε by step: certified, rising, ending at the plan's
    assert later["epsilon"] == sorted(later["epsilon"])
    assert later["epsilon"][-1] <= same.epsilon
    assert later["steps"][-1] == same.steps
    for step, value, words in list(
        zip(later["steps"], later["epsilon"], later["epsilon_words"], strict=True)
    )[:: max(1, len(later["steps"]) // 3)]:
        exact = dim.epsilon(
            same.sigmas[:step],
            settings.delta,
            settings.sampling_rate,
            relation=same.budget.relation,
        )
        assert exact * (1 - 2e-3) <= value <= exact * 1.03 + 1e-9
        assert float(words) >= value


def test_what_uniform_noise_would_need() -> None:
    settings = Settings(steps=50, gamma=0.9)
    made, _ = make_plan(settings)
    needs = float(running(settings, made)["uniform_needs"])
    uniform = dim.plan(
        dim.Budget(epsilon=needs, delta=settings.delta),
        examples=1000,
        parameters=10,
        steps=50,
        gamma=0.9,
        schedule="uniform",
    )
    q = dim.influence.gradient_descent(gamma=0.9, steps=50)
    assert np.sum(q * uniform.sigmas**2) == pytest.approx(np.sum(q * made.sigmas**2), rel=1e-4)
    assert needs > settings.epsilon
    flat = Settings(steps=50, schedule="uniform")
    assert running(flat, make_plan(flat)[0])["uniform_needs"] is None


def test_the_price_of_other_learning_rates() -> None:
    settings = Settings(steps=50, lr="cosine")
    made, warned = make_plan(settings)
    costs = {one["used"]: one for one in answer(settings, made, warned)["mismatches"]}
    assert set(costs) == {"constant", "linear"}
    expected = mismatch(made, np.ones(50))
    assert expected is not None
    assert costs["constant"]["uniform"] == expected.over_uniform


def test_many_steps_are_thinned_out() -> None:
    shown = drawn_steps(10_000)
    assert shown[0] == 1
    assert shown[-1] == 10_000
    assert len(shown) == len(set(shown.tolist())) <= 400
    assert drawn_steps(3).tolist() == [1, 2, 3]
    assert drawn_steps(1).tolist() == [1]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"epsilon": 0}, "epsilon"),
        ({"epsilon": 1e9}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": "4"}, "epsilon"),
        ({"epsilon": True}, "epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"steps": MOST_STEPS + 1}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"steps": "many"}, "steps"),
        ({"sampling_rate": 1e-9}, "sampling_rate"),
        ({"gamma": 1.0}, "gamma"),
        ({"spectrum": [1.0] * 101}, "spectrum"),
        ({"spectrum": "1,2"}, "spectrum"),
        ({"spectrum": [-1.0]}, "spectrum"),
        ({"spectrum": []}, "spectrum"),
        ({"lr": "cosin"}, "lr"),
        ({"known": []}, "known"),
        ({"path": "/etc/passwd"}, "the settings"),
        ([], "the settings"),
        (None, "the settings"),
    ],
    ids=str,
)
def test_limits(wrong: Any, named: str) -> None:
    with pytest.raises(dim.InputError, match=named):
        Settings.read(wrong)


def test_auto_does_not_ask_for_a_million_steps() -> None:
    huge: dict[str, Any] = {
        "known": "kappa",
        "kappa": 1e6,
        "steps": "auto",
        "examples": 10**9,
        "parameters": 10,
    }
    with pytest.raises(dim.InputError, match="the bound asks for"):
        make_plan(Settings(**huge, clip=1.0))


SCRIPTS = [{}, {"lr": "cosine", "steps": 6}, {"sampling_rate": 0.2, "steps": 6, "clip": 1.5}]


@pytest.fixture
def small(request: pytest.FixtureRequest) -> Settings:
    return Settings(
        **{"examples": 40, "parameters": 10, "steps": 5, **request.param, "delta": 1e-3}
    )


@pytest.mark.parametrize("small", SCRIPTS, indirect=True, ids=str)
def test_the_python_script_runs(
    small: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {
        "model": torch.nn.Linear(4, 2),
        "data": (torch.randn(40, 4), torch.randint(0, 2, (40,))),
        "loss": torch.nn.CrossEntropyLoss(reduction="none"),
    }
    made, _ = make_plan(small)
    exec(exports.python(small).replace('folder="run"', 'folder="run", progress=False'), names)
    assert names["plan"].digest == made.digest
    assert names["result"].steps == made.steps


@pytest.mark.parametrize("small", SCRIPTS, indirect=True, ids=str)
def test_the_run_file_makes_the_same_plan(
    small: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    rng = np.random.default_rng(0)
    np.savez("train.npz", x=rng.standard_normal((40, 4), np.float32), y=rng.integers(0, 2, 40))
    text = (
        exports.run_file(small)
        .replace("mymodels:network", "torch.nn:Linear")
        .replace("[data]", "arguments = {in_features = 4, out_features = 2}\n[data]")
    )
    assert tomllib.loads(text)["plan"]["examples"] == 40
    Path("run.toml").write_text(text)
    assert main(["train", "run.toml", "--json"]) == 0
    made, _ = make_plan(small)
    assert dim.Plan.from_json(Path("run/plan.json").read_text()).digest == made.digest


@pytest.mark.parametrize("small", SCRIPTS, indirect=True, ids=str)
def test_the_opacus_script_follows_the_plan(
    small: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step's noise multiplier is the plan's, to the bit, and the rate is no higher."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("opacus")
    from opacus.optimizers import DPOptimizer

    monkeypatch.chdir(tmp_path)
    made, _ = make_plan(small)
    Path("plan.json").write_text(made.to_json())
    used: list[float] = []
    add_noise = DPOptimizer.add_noise

    def noted(self: Any) -> None:
        used.append(self.noise_multiplier)
        add_noise(self)

    monkeypatch.setattr(DPOptimizer, "add_noise", noted)
    model = torch.nn.Linear(4, 2)
    names: dict[str, Any] = {
        "model": model,
        "dataset": torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,))),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": torch.nn.CrossEntropyLoss(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(exports.opacus(made), names)
    assert used == made.sigmas.tolist()
    assert names["optimizer"].max_grad_norm == made.clip
    assert names["loader"].sample_rate <= small.sampling_rate
    assert repr(made.epsilon) in exports.opacus(made)
