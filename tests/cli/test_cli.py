"""The command line: one JSON object with --json, one line and exit code 2 for bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diminuendo as dim
from diminuendo.cli import main

PLAN = [
    "plan",
    "--epsilon",
    "4",
    "--delta",
    "1e-8",
    "--examples",
    "1000",
    "--parameters",
    "71010",
    "--clip",
    "4",
]


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    data = json.loads(out)
    assert isinstance(data, dict)
    return data


def test_budget(capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "budget", "--epsilon", "4", "--delta", "1e-8", "--conversion", "zcdp")
    assert data["R"] == pytest.approx(0.39270, abs=1e-5)
    assert data["rho"] == pytest.approx(0.19635, abs=1e-5)
    assert data["mu"] == pytest.approx(data["R"] ** 0.5)


@pytest.mark.parametrize(
    "extra",
    [
        ["--kappa", "20"],
        ["--gamma", "0.98", "--steps", "100"],
        ["--gamma", "0.98", "--steps", "100", "--momentum", "0.9"],
        ["--steps", "30", "--schedule", "exponential", "--fall", "0.4"],
        ["--steps", "30", "--schedule", "time", "--relation", "replace-one"],
        ["--steps", "30", "--conversion", "zcdp"],
        ["--alpha", "1e-5", "--kappa", "20"],
    ],
)
def test_plan(capsys: pytest.CaptureFixture[str], extra: list[str]) -> None:
    data = run_json(capsys, *PLAN, *extra)
    assert len(data["sigmas"]) == data["steps"]
    assert data["epsilon"] <= 4
    assert data["erub"] <= data["erub_uniform"] * 1.05
    assert dim.Plan.from_json(json.dumps(data)).digest == data["digest"]


def test_plan_from_files_and_into_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    curve, spectrum = tmp_path / "curve.json", tmp_path / "spectrum.csv"
    curve.write_text(json.dumps(list(np.linspace(1, 5, 20))))
    spectrum.write_text("eigenvalues\n0.1\n0.5\n1.0\n")
    plan, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    data = run_json(
        capsys, *PLAN, "--influence", str(curve), "-o", str(plan), "--plot", str(picture)
    )
    assert data["steps"] == 20
    assert dim.Plan.from_json(plan.read_text()).to_json() == json.dumps(data, ensure_ascii=False)
    assert "<svg" in picture.read_text()
    assert run_json(capsys, *PLAN, "--spectrum", str(spectrum), "--steps", "7")["steps"] == 7


def test_account_reads_lists_tables_and_plans(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sigmas = [2.0, 1.5, 1.2] * 20
    plain, table, plan = (tmp_path / name for name in ("s.json", "s.csv", "plan.json"))
    plain.write_text(json.dumps(sigmas))
    rows = "".join(f"{s},{0.05}\n" for s in sigmas)
    table.write_text("sigmas,sampling_rate\n" + rows)
    expected = dim.epsilon(sigmas, 1e-5, 0.05)
    base = ("account", "--delta", "1e-5", "--sigmas")
    data = run_json(capsys, *base, str(plain), "--sampling-rate", "0.05")
    assert data["steps"] == 60
    assert 0 < data["lower"] <= data["epsilon"] <= expected
    assert run_json(capsys, *base, str(table))["epsilon"] == data["epsilon"]
    assert run_json(capsys, *base, str(plain))["epsilon"] > data["epsilon"]
    assert main([*PLAN, "--steps", "30", "-o", str(plan)]) == 0
    capsys.readouterr()
    data = run_json(capsys, "account", "--delta", "1e-8", "--sigmas", str(plan), "--running")
    assert data["epsilon"] == pytest.approx(4, rel=1e-6)
    assert len(data["running"]) == 30
    assert data["running"] == sorted(data["running"])


def test_plan_for_learning_rates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    falling = tmp_path / "lr.json"
    falling.write_text(json.dumps([1.0, 0.5, 0.25]))
    kappa = [*PLAN, "--kappa", "20"]
    assert run_json(capsys, *kappa, "--lr", str(falling))["lr"] == [1.0, 0.5, 0.25]
    cosine = run_json(capsys, *kappa, "--lr", "cosine", "--steps", "8")
    assert cosine["lr"] == pytest.approx(dim.influence.cosine(8).tolist())
    joint = run_json(capsys, *kappa, "--lr", "joint", "--steps", "8")
    assert len(joint["lr"]) == 8
    assert {"gain", "gain_error"} <= set(joint)
    assert main([*kappa, "--lr", "cosin", "--steps", "8"]) == 2
    assert "one of constant, linear, cosine, joint, got 'cosin'" in capsys.readouterr().err
    assert main([*kappa, "--lr", str(tmp_path / "none.json"), "--steps", "8"]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main([*kappa, "--lr", "joint", "--steps", "8"]) == 0
    assert "gain" in capsys.readouterr().out


def test_a_folder_of_that_name_is_no_file_of_learning_rates(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`reproduce joint --out joint` leaves such a folder, and then no joint plan could be made."""
    (tmp_path / "joint").mkdir()
    monkeypatch.chdir(tmp_path)
    sampled = [*PLAN, "--kappa", "20", "--lr", "joint", "--steps", "8", "--sampling-rate", "0.1"]
    loud = run_json(capsys, *sampled)["lr"]
    assert sum(loud) < sum(run_json(capsys, *sampled, "--gradient-norm", "0")["lr"])


def test_account_takes_the_rate_of_what_will_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Another rate than the plan's would print an ε that no run has."""
    plan, table = tmp_path / "plan.json", tmp_path / "s.json"
    assert main([*PLAN, "--steps", "30", "-o", str(plan)]) == 0
    table.write_text('{"sigmas": [3, 2, 1.5], "sampling_rate": 0.2}')
    capsys.readouterr()
    for path, own in ((plan, "1.0"), (table, "0.2")):
        base = ["account", "--delta", "1e-8", "--sigmas", str(path), "--json", "--sampling-rate"]
        assert main([*base, "0.5"]) == 2
        error = capsys.readouterr().err
        assert f"has its own ({own})" in error
        assert "0.5" in error
        assert main([*base, own]) == 0
        capsys.readouterr()


def test_account_draws_the_running_curve(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source, picture = tmp_path / "s.json", tmp_path / "curve.png"
    source.write_text('{"sigmas": [3, 2, 1.5], "sampling_rate": 0.2}')
    arguments = ["account", "--delta", "1e-5", "--sigmas", str(source), "--plot", str(picture)]
    assert main(arguments) == 0
    assert "certified upper bound" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_an_empty_schedule_costs_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "none.json"
    source.write_text("[]")
    data = run_json(capsys, "account", "--delta", "1e-5", "--sigmas", str(source), "--running")
    assert (data["epsilon"], data["steps"], data["running"]) == (0, 0, [])


@pytest.mark.parametrize(
    ("text", "extra", "said"),
    [
        ("[1, 0]", [], r"sigmas[1]"),
        ("[1, 2", [], "valid JSON"),
        ('{"x": 1}', [], "a list of numbers"),
        ("[1]", ["--sampling-rate", "2"], "sampling_rate"),
        ('{"sigmas": [1, 2], "sampling_rate": [0.1]}', [], "sampling_rate"),
        ("[1]", ["--delta", "0"], "delta"),
        ("[1]", ["--relation", "swap"], "relation"),
        ("[1]", ["--relation", "replace-one", "--running"], "add-remove"),
    ],
)
def test_account_bad_input(
    text: str, extra: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "s.json"
    source.write_text(text)
    assert main(["account", "--delta", "1e-5", "--sigmas", str(source), *extra]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.count("\n") == 1


def test_bounds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = run_json(
        capsys, "bounds", "--parameters", "50", "--examples", "100,1000", "--plot", str(tmp_path)
    )
    assert data["examples"] == [100, 1000]
    assert len(data["empirical"]) == 10
    assert len(data["true"]) == 13
    assert all(len(row["bounds"]) == 2 for row in data["empirical"] + data["true"])
    assert {path.name for path in tmp_path.iterdir()} == {"empirical_risk.svg", "true_risk.svg"}


def test_people_get_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["budget", "--epsilon", "1", "--delta", "1e-5"]) == 0
    assert main(["bounds"]) == 0
    assert main([*PLAN, "--steps", "40"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out.split("Plan:")[0]
    assert "Assumptions" in out


COMMANDS = ("budget", "account", "plan", "bounds", "train")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Example: diminuendo " + command in out
    assert "--json" in out


BAD = [
    ["frob"],
    ["budget"],
    ["budget", "--epsilon", "x", "--delta", "1e-5"],
    ["budget", "--epsilon", "-1", "--delta", "1e-5"],
    ["budget", "--epsilon", "nan", "--delta", "1e-5"],
    ["budget", "--epsilon", "inf", "--delta", "1e-5"],
    ["budget", "--epsilon", "1", "--delta", "1"],
    ["budget", "--epsilon", "1", "--delta", "1e-5", "--conversion", "clt"],
    ["budget", "--epsilon", "1", "--delta", "1e-5", "--relation", "swap"],
    [*PLAN, "--kappa", "20", "--gamma", "0.9"],
    [*PLAN, "--kappa", "0.5"],
    [*PLAN, "--gamma", "1"],
    [*PLAN, "--steps", "0"],
    [*PLAN, "--steps", "1.5"],
    [*PLAN, "--influence", "missing.json"],
    [*PLAN, "--schedule", "cosine"],
    [*PLAN, "--sampling-rate", "0"],
    [*PLAN, "--steps", "5", "--plot", "picture.bmp"],
    [*PLAN, "--steps", "5", "-o", "no/such/folder/plan.json"],
    ["bounds", "--examples", "100,10"],
    ["bounds", "--examples", "many"],
    ["bounds", "--kappa", "0"],
]


@pytest.mark.parametrize("arguments", BAD, ids=[" ".join(a[-4:]) for a in BAD])
def test_bad_input_is_one_line_and_exit_code_two(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    errors = [line for line in captured.err.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_as_a_program() -> None:
    for program in ([sys.executable, "-m", "diminuendo"],):
        done = subprocess.run(
            [*program, "budget", "--epsilon", "0", "--delta", "1e-5"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        done = subprocess.run([*program, "--version"], capture_output=True, text=True, check=True)
        assert done.stdout.startswith("diminuendo ")


def test_a_rate_for_each_step_from_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rates = [0.1, 0.2, 0.3, 0.4]
    (tmp_path / "rates.json").write_text(json.dumps({"sampling_rate": rates}))
    (tmp_path / "rates.csv").write_text("sampling_rate\n" + "\n".join(map(str, rates)))
    common = [*PLAN, "--gamma", "0.9", "--schedule", "uniform"]
    for name in ("rates.json", "rates.csv"):
        data = run_json(capsys, *common, "--sampling-rate", str(tmp_path / name))
        assert data["sampling_rate"] == rates
        assert data["steps"] == 4
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps(data))
    assert run_json(capsys, "account", "--delta", "1e-8", "--sigmas", str(plan))["epsilon"] <= 4
    assert main([*common, "--sampling-rate", str(tmp_path / "none.json")]) == 2
    assert "sampling_rate" in capsys.readouterr().err


def test_plan_by_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    facts = ["plan", "--epsilon", "4", "--delta", "1e-5", "--examples", "100", "--parameters", "9"]
    rate = ["--gamma", "0.9", "--sampling-rate", "0.5", "--epochs", "2"]
    assert run_json(capsys, *facts, *rate, "--lr", "cosine")["steps"] == 4
    assert main([*facts, *rate, "--steps", "4"]) == 2
    assert "epochs" in capsys.readouterr().err
