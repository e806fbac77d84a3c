"""diminuendo tune"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from diminuendo import _files, _validate
from diminuendo.cli.options import (
    AsJson,
    ConversionName,
    Delta,
    Epsilon,
    RelationName,
    make_budget,
    need_torch,
    print_json,
    print_table,
)
from diminuendo.errors import InputError

if TYPE_CHECKING:
    from diminuendo.tuning import TuningResult


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("tune")(tune)


def tune(
    epsilon: Epsilon,
    delta: Delta,
    examples: Annotated[int, typer.Option(help="Number of examples in the private set.")],
    features: Annotated[int, typer.Option(help="Number of features of an example.")],
    classes: Annotated[int, typer.Option(help="Number of classes.")],
    largest_norm: Annotated[
        float, typer.Option(help="Largest Euclidean norm of an example.")
    ] = 10.0,
    hidden: Annotated[int, typer.Option(help="Hidden units of the two-layer network.")] = 1000,
    families: Annotated[
        str, typer.Option(help="Schedules to compare, separated by commas.")
    ] = "uniform,exponential",
    steps: Annotated[str, typer.Option(help="T: a number, or low:high.")] = "50:150",
    lr: Annotated[str, typer.Option(help="Learning rate: a number, or low:high.")] = "0.1",
    clip: Annotated[str, typer.Option(help="Clip norm: a number, or low:high.")] = "4",
    momentum: Annotated[str, typer.Option(help="β: a number, or low:high.")] = "0",
    fall: Annotated[str, typer.Option(help="σ_T/σ_1: a number, or low:high.")] = "0.25:1",
    influence: Annotated[
        Path | None, typer.Option(help="A measured curve (JSON, CSV), for the family optimal.")
    ] = None,
    labels: Annotated[
        str, typer.Option(help="Labels of the synthetic data: teacher, clusters or random.")
    ] = "teacher",
    auxiliary: Annotated[
        Path | None,
        typer.Option(help="A public set of your own instead: a .npz file with x and y."),
    ] = None,
    minimise: Annotated[str, typer.Option(help="train-loss or test-loss.")] = "train-loss",
    trials: Annotated[int, typer.Option(help="Candidates for every family.")] = 32,
    repeats: Annotated[int, typer.Option(help="Runs of each candidate.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of data, runs and proposals.")] = 0,
    storage: Annotated[
        str | None,
        typer.Option(help="A database URL or a .journal file: resumable, shared by machines."),
    ] = None,
    name: Annotated[str, typer.Option(help="The study's name in the storage.")] = "tuning",
    relation: RelationName = "add-remove",
    conversion: ConversionName = "exact",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A folder for the plans, the study and a picture."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose schedule, steps, learning rate, clip norm and momentum without private data.

    Example: diminuendo tune --epsilon 4 --delta 1e-8 --examples 1000 --features 60
    --classes 10 -o out
    """
    need_torch(device)
    from diminuendo.tuning import Shape, Space, TwoLayers
    from diminuendo.tuning import tune as search

    result = search(
        make_budget(epsilon, delta, relation, conversion),
        Shape(examples=examples, features=features, classes=classes, largest_norm=largest_norm),
        families=[family.strip() for family in families.split(",")],
        space=Space(
            steps=_range("--steps", steps, whole=True),
            lr=_range("--lr", lr),
            clip=_range("--clip", clip),
            momentum=_range("--momentum", momentum),
            fall=_range("--fall", fall),
        ),
        model=TwoLayers(features, _validate.count("--hidden", hidden), classes),
        auxiliary=labels if auxiliary is None else _read_public(auxiliary),
        influence=None
        if influence is None
        else _files.read_numbers(influence, name="influence", hint="One number for each step."),
        minimise=minimise,
        trials=trials,
        repeats=repeats,
        seed=seed,
        storage=storage,
        name=name,
        device=device,
        progress=not as_json and Console(stderr=True).is_terminal,
    )
    if output is not None:
        _write(result, output)
    if as_json:
        print_json(result.to_dict())
        return
    print_table(
        f"Tuned on auxiliary data ({result.minimise}); the best is {result.best.family}",
        ["schedule", "T", "fall", "lr", "clip", "momentum", result.minimise],
        [
            [
                name,
                str(family.candidate.steps),
                "" if family.candidate.fall is None else f"{family.candidate.fall:.3f}",
                f"{family.lr:.4g}",
                f"{family.candidate.clip:.4g}",
                f"{family.candidate.momentum:.3g}",
                f"{family.score:.5g}",
            ]
            for name, family in result.families.items()
        ],
    )
    best = result.best
    if output is None:
        typer.echo("Nothing was written. Use --output FOLDER to get the plans as files.")
    else:
        path = (output / f"plan-{best.family}.json").resolve()
        typer.echo(f'To train by the best: [plan] path = "{path}", [training] lr = {best.lr:.6g}')
        typer.echo("in the configuration file of `diminuendo train`.")


def _range(name: str, text: str, *, whole: bool = False) -> Any:
    try:
        ends = [int(part) if whole else float(part) for part in text.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2):
        raise InputError("a number, or low:high", name=name, value=text)
    return ends[0] if len(ends) == 1 else (ends[0], ends[1])


def _read_public(path: Path) -> Any:
    """Features and labels from a .npz file."""
    import numpy as np
    import torch

    try:
        with np.load(path, allow_pickle=False) as arrays:
            x, y = arrays["x"], arrays["y"]
        return torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y, dtype=torch.int64)
    except (OSError, KeyError, ValueError, TypeError, EOFError) as error:
        raise InputError(
            "a .npz file with x (features) and y (labels)",
            name="--auxiliary",
            value=str(path),
            remedy=f"({error})",
        ) from None


def _write(result: TuningResult, folder: Path) -> None:
    """Write a plan for each family, the study, and a picture of the scores."""
    import json

    from diminuendo.report import figures

    place = _files.make_folder(folder)
    for name, family in result.families.items():
        _files.write_text(place / f"plan-{name}.json", family.plan.to_json())
    _files.write_text(
        place / "study.json", json.dumps(result.to_dict(), indent=1, ensure_ascii=False)
    )
    figures.landscape(result.points(), place / "landscape.svg", ylabel=result.minimise)
