"""diminuendo train: from a TOML file to a model, a result and a report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import diminuendo as dim
from diminuendo import training
from diminuendo.cli import main

RUN = """
[model]
factory = "tiny_models:network"
[data]
path = "train.npz"
[budget]
epsilon = 4
delta = 1e-5
[plan]
steps = 12
clip = 1.0
gamma = 0.9
[training]
optimizer = "torch.optim:SGD"
lr = 0.5
{extra}
[output]
folder = "{folder}"
"""


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "train.npz",
        x=rng.standard_normal((50, 4)).astype(np.float32),
        y=rng.integers(0, 2, 50),
    )
    (tmp_path / "tiny_models.py").write_text(
        "import torch\ndef network():\n    return torch.nn.Linear(4, 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(folder="out", extra=""))
    return path


def test_a_run_from_a_file(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(run_file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["status"], facts["steps"], facts["private"]) == ("done", 12, True)
    assert facts["epsilon"] <= 4
    out = run_file.parent / "out"
    assert facts == json.loads((out / "result.json").read_text())
    plan = dim.Plan.from_json((out / "plan.json").read_text())
    assert plan.digest == facts["plan"]
    assert len(json.loads((out / "events.json").read_text())) == 12
    assert set(torch.load(out / "model.pt", weights_only=True)) == {"weight", "bias"}
    report = (out / "report.md").read_text()
    assert "differentially private" in report
    assert "Not covered" in report
    for name in ("result.json", "report.md", "events.json"):
        assert "loss" not in (out / name).read_text().replace("final loss", "").replace(
            "about the loss", ""
        )


def test_a_finished_run_is_not_run_again(run_file: Path) -> None:
    assert main(["train", str(run_file), "--json"]) == 0
    before = torch.load("out/model.pt", weights_only=True)
    assert main(["train", str(run_file), "--json"]) == 0
    after = torch.load("out/model.pt", weights_only=True)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_plan_leaves_a_finished_run_as_it_is(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(run_file), "--json"]) == 0
    before = {path.name: path.read_bytes() for path in Path("out").glob("*.*")}
    run_file.write_text(run_file.read_text().replace("steps = 12", "steps = 13"))
    assert main(["train", str(run_file), "--json"]) == 2
    assert "another folder" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in Path("out").glob("*.*")} == before


def test_what_is_not_private_says_so(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_file.write_text(RUN.format(folder="seeded", extra="seed = 3"))
    assert main(["train", str(run_file), "--reveal-training-loss"]) == 0
    out = capsys.readouterr().out
    assert "NOT PRIVATE" in out
    assert "Mean loss of the last batch (not covered" in out
    facts = json.loads(Path("seeded/result.json").read_text())
    assert facts["private"] is False
    assert facts["training_loss"] > 0


def test_fast_noise_says_so(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(run_file)]) == 0
    assert "real arithmetic" not in capsys.readouterr().out
    run_file.write_text(RUN.format(folder="fast", extra='noise = "fast"'))
    assert main(["train", str(run_file)]) == 0
    assert "in real arithmetic only (fast noise)" in capsys.readouterr().out
    assert json.loads(Path("fast/result.json").read_text())["noise"] == "fast"
    run_file.write_text(RUN.format(folder="asked", extra=""))
    assert main(["train", str(run_file), "--noise", "fast", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["noise"] == "fast"


def test_paths_and_modules_are_relative_to_the_run_file(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(run_file.parent)])
    (run_file.parent / "beside_models.py").write_text(
        "import torch\ndef network():\n    return torch.nn.Linear(4, 2)\n"
    )
    run_file.write_text(run_file.read_text().replace("tiny_models", "beside_models"))
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    monkeypatch.chdir(elsewhere)
    before = list(sys.path)
    assert main(["train", str(run_file), "--json"]) == 0
    assert sys.path == before
    assert (run_file.parent / "out" / "model.pt").exists()
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "extra",
    [
        'clip = "per-layer"\nclip_bounds = [0.5]',
        'clip = "per-layer"',
        'clip = "automatic"',
        'lr_scheduler = "torch.optim.lr_scheduler:StepLR"\n'
        "lr_scheduler_arguments = { step_size = 4 }",
        "micro_batch = 7\npad = true\nworkers = 0\ncheckpoint_every = 5",
        "optimizer_arguments = { momentum = 0.9, weight_decay = 0.01 }",
    ],
)
def test_settings_of_training(run_file: Path, extra: str) -> None:
    run_file.write_text(RUN.format(folder="out", extra=extra))
    assert main(["train", str(run_file), "--json"]) == 0
    assert json.loads(Path("out/result.json").read_text())["status"] == "done"


def test_clip_and_schedule_take_effect(run_file: Path) -> None:
    """With a seed, what differs is what was asked for."""
    ends = []
    for number, extra in enumerate(
        (
            "",
            'clip = "automatic"',
            'lr_scheduler = "torch.optim.lr_scheduler:ExponentialLR"\n'
            "lr_scheduler_arguments = { gamma = 0.5 }",
            "",
        )
    ):
        run_file.write_text(RUN.format(folder=f"out{number}", extra=f"seed = 4\n{extra}"))
        assert main(["train", str(run_file), "--json"]) == 0
        ends.append(torch.load(f"out{number}/model.pt", weights_only=True)["weight"])
    assert torch.equal(ends[0], ends[3])  # initialisation is seeded too
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


def test_data_of_other_types_is_taken_as_meant(run_file: Path) -> None:
    x, y = np.random.default_rng(0).standard_normal((50, 4)), np.arange(50, dtype=np.int32) % 2
    np.savez(run_file.parent / "train.npz", x=x, y=y)
    assert main(["train", str(run_file), "--json"]) == 0


def test_a_loss_is_in_the_files_only_on_request(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_text(RUN.format(folder="open", extra="reveal_training_loss = true"))
    assert main(["train", str(run_file)]) == 0
    facts = json.loads(Path("open/result.json").read_text())
    assert facts["revealed"] is True
    assert facts["training_loss"] > 0
    assert any("loss" in words for words in facts["not_covered"])
    assert "Mean loss" in capsys.readouterr().out
    run_file.write_text(RUN.format(folder="shut", extra=""))
    assert main(["train", str(run_file)]) == 0
    assert "training_loss" not in json.loads(Path("shut/result.json").read_text())


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("refused", 3), ("interrupted", 130)])
def test_the_exit_code_says_how_a_run_ended(
    run_file: Path, status: Any, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(*_: object, **__: object) -> training.Result:
        return training.Result(status, "because", 3, (), 1.0, 1e-5, "add-remove", True)

    monkeypatch.setattr(training, "fit", fit)
    assert main(["train", str(run_file), "--json"]) == code


MODELS = """
import torch
def raises():
    raise KeyError("no such width")
def number():
    return 3
def narrow():
    return torch.nn.Linear(3, 2)
def batch_norm():
    return torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
"""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tiny_models:network", "no_such:thing", "importable"),
        ("train.npz", "missing.npz", ".npz"),
        ("[budget]\nepsilon = 4\ndelta = 1e-5\n", "", "budget"),
        ("[output]", "[outputs]", "section"),
        ("gamma = 0.9", "gama = 0.9", "gama"),
        ("[model]", "[model", "valid TOML"),
        ("epsilon = 4", "epsilon = -4", "epsilon"),
        ('"out"', "3", "output.folder"),
        ('folder = "out"', "", "output.folder"),
        ("lr = 0.5", "", "training.lr"),
        ("lr = 0.5", 'lr = "fast"', "training.lr"),
        ("lr = 0.5", "lr = true", "training.lr"),
        ("lr = 0.5", "lr = 0.5\nlerning = 1", "micro_batch"),
        ("lr = 0.5", "lr = 0.5\nmicro_batch = 2.5", "training.micro_batch"),
        ("lr = 0.5", "lr = 0.5\nmicro_batch = 0", "micro_batch"),
        ("lr = 0.5", "lr = 0.5\npad = 1", "training.pad"),
        ("lr = 0.5", "lr = 0.5\nseed = -1", "seed"),
        ("lr = 0.5", 'lr = 0.5\nnoise = "loud"', "noise"),
        ("lr = 0.5", 'lr = 0.5\ndevice = "cuda:77"', "device"),
        ("lr = 0.5", 'lr = 0.5\ndevice = "abacus"', "device"),
        ("lr = 0.5", 'lr = 0.5\nclip = "square"', "per-layer"),
        ("lr = 0.5", "lr = 0.5\nclip_bounds = [1.0]", "clip_bounds"),
        ("lr = 0.5", 'lr = 0.5\nclip = "per-layer"\nclip_bounds = ["a"]', "bounds"),
        ("lr = 0.5", 'lr = 0.5\nclip = "per-layer"\nclip_bounds = [1, 2, 3]', "layers"),
        ("lr = 0.5", "lr = 0.5\noptimizer_arguments = { momentun = 1 }", "momentun"),
        ("lr = 0.5", "lr = 0.5\nlr_scheduler_arguments = { gamma = 1 }", "lr_scheduler"),
        ("torch.optim:SGD", "torch.optim:SGDD", "importable"),
        ("torch.optim:SGD", "torch.optim:lr_scheduler", "something to call"),
        ("torch.optim:SGD", "torch.optim:LBFGS", "LBFGS"),
        ("tiny_models:network", "bad_models:raises", "no such width"),
        ("tiny_models:network", "bad_models:number", "nn.Module"),
        ("tiny_models:network", "bad_models:narrow", "shapes"),
        ("tiny_models:network", "bad_models:batch_norm", "GroupNorm"),
        ("tiny_models:network", "os:name", "something to call"),
        ("steps = 12", "steps = 12\nexamples = 60", "size of the dataset"),
        ("steps = 12", 'steps = "some"', "steps"),
        ("steps = 12", "sampling_rate = [0.1, 2.0]", "sampling_rate"),
        ('path = "train.npz"', "", "data.path"),
        ('path = "train.npz"', 'path = "words.npz"', ".npz"),
        ('path = "train.npz"', 'path = "run.toml"', ".npz"),
        ('path = "train.npz"', 'path = "empty.npz"', "at least"),
        ("[training]", "[[training]]", "a section"),
    ],
)
def test_bad_run_files(
    run_file: Path, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run_file.parent / "bad_models.py").write_text(MODELS)
    np.savez(run_file.parent / "words.npz", x=np.array(["a", "b"]), y=np.array([0, 1]))
    np.savez(run_file.parent / "empty.npz", x=np.zeros((0, 4)), y=np.zeros(0, dtype=int))
    assert old in run_file.read_text()
    run_file.write_text(run_file.read_text().replace(old, new))
    assert main(["train", str(run_file)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("known_by", ["file", "arrays", "other"])
def test_a_budget_knows_its_data_by_the_file_or_by_the_arrays(
    run_file: Path, known_by: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load("train.npz") as arrays:
        given = {
            "file": ["--data", "train.npz"],
            "arrays": ["--digest", dim.ledger.identify((arrays["x"], arrays["y"]))],
            "other": ["--data", "tiny_models.py"],
        }[known_by]
    terms = ["--epsilon", "5", "--delta", "1e-5", "--ledger", "l.sqlite"]
    assert main(["ledger", "create", "b", *terms, *given]) == 0
    paid = '[ledger]\nurl = "l.sqlite"\nbudget = "b"'
    run_file.write_text(RUN.format(folder="out", extra=paid))
    capsys.readouterr()
    assert main(["train", str(run_file), "--json"]) == (2 if known_by == "other" else 0)
    assert ("the data of the budget" in capsys.readouterr().err) == (known_by == "other")


def test_groups_are_a_column_of_the_data(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    patients = np.array([f"p{row % 9}" for row in range(50)])
    x, y = rng.standard_normal((50, 4)).astype(np.float32), rng.integers(0, 2, 50)
    np.savez(run_file.parent / "train.npz", x=x, y=y, patient=patients)
    named = '"train.npz"\ngroups = "patient"'
    run_file.write_text(run_file.read_text().replace('"train.npz"', named))
    assert main(["train", str(run_file), "--json"]) == 0
    plan = dim.Plan.from_json((run_file.parent / "out" / "plan.json").read_text())
    assert plan.examples == 9
    capsys.readouterr()
    run_file.write_text(run_file.read_text().replace('"patient"', '"nobody"'))
    assert main(["train", str(run_file)]) == 2
    assert "one of patient, x, y, got 'nobody'" in capsys.readouterr().err


def tables(folder: Path, suffix: str) -> None:
    """The same kind of rows as train.npz, as train and test tables with a text target."""
    rng = np.random.default_rng(1)
    for name, rows in (("train", 50), ("test", 30)):
        x = rng.standard_normal((rows, 4)).round(3)
        sick = np.where(x[:, 0] > 0, "yes", "no")
        columns = {f"x{i}": x[:, i] for i in range(4)} | {"sick": sick, "who": np.arange(rows)}
        if suffix == "csv":
            lines = [
                ",".join(columns),
                *(",".join(map(str, r)) for r in zip(*columns.values(), strict=True)),
            ]
            (folder / f"{name}.csv").write_text("\n".join(lines))
        else:
            pyarrow = pytest.importorskip("pyarrow", reason="the parquet extra is not installed")
            from pyarrow.parquet import write_table

            write_table(pyarrow.table(columns), folder / f"{name}.parquet")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_tables_and_a_test_set(
    run_file: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tables(run_file.parent, suffix)
    data = (
        f'path = "train.{suffix}"\ntarget = "sick"\nclasses = ["no", "yes"]\ngroups = "who"\n'
        f'[test]\npath = "test.{suffix}"\npublic = true\n'
    )
    run_file.write_text(run_file.read_text().replace('path = "train.npz"\n', data))
    assert main(["train", str(run_file)]) == 0
    out = capsys.readouterr().out
    facts = json.loads(Path("out/result.json").read_text())
    assert facts["test"]["examples"] == 30
    assert facts["test"]["public"] is True
    assert "30 rows (stated to be public)" in out
    assert "test scores" not in out
    assert "Test set" in Path("out/report.html").read_text()
    # the printed lines load the model, which scores the same
    lines = out.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(lines, names)
    state = torch.load("out/model.pt", weights_only=True)
    assert all(torch.equal(state[k], v) for k, v in names["model"].state_dict().items())
    assert main(["report", "out"]) == 0


def test_test_columns_are_found_by_name(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another order of columns in the test file must not feed the model other features."""
    rows = np.random.default_rng(2).standard_normal((50, 4))
    names = [f"x{i}" for i in range(4)]
    for name, order in (("train", [0, 1, 2, 3]), ("same", [0, 1, 2, 3]), ("turned", [3, 1, 0, 2])):
        titles = ",".join([names[i] for i in order] + ["y"])
        lines = [
            ",".join([*(repr(float(row[i])) for i in order), str(int(row[0] > 0))]) for row in rows
        ]
        Path(f"{name}.csv").write_text("\n".join([titles, *lines]))
    base = run_file.read_text()
    losses = []
    for name in ("same", "turned"):
        data = f'path = "train.csv"\ntarget = "y"\n[test]\npath = "{name}.csv"\n'
        text = base.replace('path = "train.npz"\n', data).replace("lr = 0.5", "lr = 0.5\nseed = 3")
        run_file.write_text(text.replace('folder = "out"', f'folder = "{name}"'))
        assert main(["train", str(run_file), "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["test"]["loss"])
    assert losses[0] == losses[1]


def test_scores_of_private_rows_are_not_covered(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("held_out.npz", x=np.ones((7, 4), np.float32), y=np.ones(7, int))
    run_file.write_text(run_file.read_text() + '[test]\npath = "held_out.npz"\n')
    assert main(["train", str(run_file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["test"]["accuracy"] in (0.0, 1.0)
    assert any("the test scores: they were computed from 7 rows" in w for w in facts["not_covered"])
    assert "not covered by the claim" in Path("out/report.md").read_text()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('path = "train.csv"', "data.target"),
        ('path = "train.csv"\ntarget = "ill"', "a column in target"),
        ('path = "train.csv"\ntarget = "sick"', "a number in every row"),
        ('path = "train.csv"\ntarget = "sick"\nclasses = ["no"]', "one of the 1 classes"),
        ('path = "train.csv"\ntarget = "x0"', "target_type"),
        ('path = "train.csv"\ntarget = "x0"\ntarget_type = "sum"', "one of class, number"),
        ('path = "train.csv"\ntarget = "sick"\nfeatures = ["sick"]', "without the target"),
        ('path = "train.npz"\ntarget = "y"', ".csv or .parquet"),
        ('path = "train.npz"\n[test]\npath = "train.npz"', "another file than data.path"),
        ('path = "train.npz"\n[test]\npath = "none.npz"', "test.path"),
        ('path = "train.npz"\n[test]\npublic = true', "test.path or test.factory"),
        ('path = "train.npz"\n[test]\npath = "wide.npz"', "made for each other"),
    ],
)
def test_bad_tables_and_test_sets(
    run_file: Path, data: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything is tried before the first step: nothing was spent, no folder was made."""
    tables(run_file.parent, "csv")
    np.savez("wide.npz", x=np.ones((7, 5), np.float32), y=np.ones(7, int))
    run_file.write_text(run_file.read_text().replace('path = "train.npz"', data))
    assert main(["train", str(run_file)]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""
    assert not Path("out/result.json").exists()
    assert not Path("out/checkpoint").exists()


@pytest.mark.filterwarnings("default::diminuendo.tuning.ChosenSettings")
def test_epochs_and_a_learning_rate_that_nobody_gave(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = run_file.read_text().replace("steps = 12", "epochs = 5")
    run_file.write_text(text.replace('optimizer = "torch.optim:SGD"\nlr = 0.5\n', ""))
    assert main(["train", str(run_file), "--json"]) == 0
    shown = capsys.readouterr()
    assert "warning: lr not given: chosen on synthetic data" in shown.err
    facts = json.loads(shown.out)
    assert (facts["status"], facts["steps"]) == ("done", 5)
