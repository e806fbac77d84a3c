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
    models: Annotated[
        str | None,
        typer.Option(
            help="Models to choose from, separated by commas: linear, or numbers of hidden units; "
            "linear,32,128 unless stated. For features in order of importance, such as principal "
            "components: 'ordered linear,ordered 32'."
        ),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Hidden units of the only model, a two-layer network.")
    ] = None,
    steps: Annotated[str | None, typer.Option(help="T: a number, or low:high.")] = None,
    lr: Annotated[str | None, typer.Option(help="Learning rate: a number, or low:high.")] = None,
    lr_shape: Annotated[
        str | None,
        typer.Option(help="constant, linear, cosine, exponential; several with commas."),
    ] = None,
    clip: Annotated[str | None, typer.Option(help="Clip norm: a number, or low:high.")] = None,
    clipping: Annotated[
        str | None, typer.Option(help="flat, automatic, per-layer; several with commas.")
    ] = None,
    momentum: Annotated[str | None, typer.Option(help="β: a number, or low:high.")] = None,
    fall: Annotated[str | None, typer.Option(help="σ_T/σ_1: a number, or low:high.")] = None,
    sampling_rate: Annotated[
        str | None, typer.Option(help="Poisson sampling rate: a number, or low:high.")
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            help="Labels of the synthetic data: teacher, network, clusters, mixtures, random; "
            "several with commas take turns."
        ),
    ] = None,
    auxiliary: Annotated[
        Path | None,
        typer.Option(help="A public set of your own instead: a .npz file with x and y."),
    ] = None,
    minimise: Annotated[
        str | None, typer.Option(help="test-error, test-loss or train-loss.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of proposals.")] = 4,
    repeats: Annotated[int, typer.Option(help="Runs of each candidate.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of data, runs and proposals.")] = 0,
    families: Annotated[
        str | None,
        typer.Option(help="Compare these schedules instead, separated by commas: uniform, …"),
    ] = None,
    influence: Annotated[
        Path | None, typer.Option(help="A measured curve (JSON, CSV), for the family optimal.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Candidates for every family that is compared.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="A database URL or a .journal file: resumable, shared by machines."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The study's name in the storage.")] = None,
    relation: RelationName = "add-remove",
    conversion: ConversionName = "exact",
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A folder for the choice, the study and a picture."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Choose noise, steps, learning rate, clipping, momentum and model without private data.

    What is not stated is searched. With --families, --trials, --influence, --storage or --name,
    families of schedules are compared instead, at the paper's settings for what is not stated.

    Example: diminuendo tune --epsilon 4 --delta 1e-8 --examples 1000 --features 60
    --classes 10 -o out
    """
    need_torch(device)
    from diminuendo.tuning import Shape, Space, TwoLayers
    from diminuendo.tuning import tune as search

    if hidden is not None and models is not None:
        raise InputError("left out where --models is given", name="--hidden", value=hidden)
    given: dict[str, Any] = {
        "families": _names(families),
        "influence": None
        if influence is None
        else _files.read_numbers(influence, name="influence", hint="One number for each step."),
        "trials": trials,
        "storage": storage,
        "name": name,
    }
    own_network = (
        None
        if hidden is None
        else TwoLayers(features, _validate.count("--hidden", hidden), classes)
    )
    result = search(
        make_budget(epsilon, delta, relation, conversion),
        Shape(examples=examples, features=features, classes=classes, largest_norm=largest_norm),
        models=None if models is None else [_model(one) for one in _names(models) or ()],
        model=own_network,
        space=Space(
            steps=_range("--steps", steps, whole=True),
            lr=_range("--lr", lr),
            lr_shape=_names(lr_shape),
            clip=_range("--clip", clip),
            clipping=_names(clipping),
            momentum=_range("--momentum", momentum),
            fall=_range("--fall", fall),
            sampling_rate=_range("--sampling-rate", sampling_rate),
        ),
        auxiliary=_labels(labels) if auxiliary is None else read_public(auxiliary),
        minimise=minimise,
        rounds=rounds,
        repeats=repeats,
        seed=seed,
        device=device,
        progress=not as_json and Console(stderr=True).is_terminal,
        **{key: value for key, value in given.items() if value is not None},
    )
    if output is not None:
        _write(result, output)
    if as_json:
        print_json(result.to_dict())
    elif result.chosen is None:
        _print_families(result, output)
    else:
        _print_choice(result, output)


def _print_choice(result: TuningResult, output: Path | None) -> None:
    """The best of all, and what each choice gives."""
    headers, rows = result.table()
    columns = [0, 2, 4] if result.minimise == "test-error" else [0, 2, 3, 4]
    print_table(
        "What each choice gives on held-out auxiliary data: everything else tuned without it",
        [headers[i] for i in columns],
        [[row[i] for i in columns] for row in rows],
    )
    best = result.best
    typer.echo(f"The best: {best.candidate}.")
    typer.echo(f"{result.settings['auxiliary']} Accuracy there: {best.accuracy}.")
    helping = [one.name for one in result.ablations if one.matters]
    if not helping:
        typer.echo("No single choice matters by more than its interval.")
    if output is None:
        typer.echo("Nothing was written. Use --output FOLDER to get the choice as a file.")
    else:
        path = (output / "choice.json").resolve()
        typer.echo(f'To train by it: [plan] path = "{path}"')
        typer.echo("in the configuration file of `diminuendo train`.")


def _print_families(result: TuningResult, output: Path | None) -> None:
    """The best of every family."""
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


def _names(text: str | None) -> tuple[str, ...] | None:
    return None if text is None else tuple(part.strip() for part in text.split(","))


def _labels(text: str | None) -> Any:
    """One kind of labels as it is, several as a list."""
    names = _names(text)
    return names[0] if names is not None and len(names) == 1 else names


def _model(name: str) -> str | int:
    """A number of hidden units as one; anything else as it is."""
    return int(name) if name.isdigit() else name


def _range(name: str, text: str | None, *, whole: bool = False) -> Any:
    if text is None:
        return None
    try:
        ends = [int(part) if whole else float(part) for part in text.split(":")]
    except ValueError:
        ends = []
    if len(ends) not in (1, 2):
        raise InputError("a number, or low:high", name=name, value=text)
    return ends[0] if len(ends) == 1 else (ends[0], ends[1])


def read_public(path: Path) -> Any:
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
    """Write the choice or a plan for each family, the study, and pictures."""
    import json

    from diminuendo.report import figures

    place = _files.make_folder(folder)
    if result.chosen is None:
        for name, family in result.families.items():
            _files.write_text(place / f"plan-{name}.json", family.plan.to_json())
    else:
        _files.write_text(place / "choice.json", result.chosen.to_json())
        result.picture(place / "ablations.svg")
    _files.write_text(
        place / "study.json", json.dumps(result.to_dict(), indent=1, ensure_ascii=False)
    )
    figures.landscape(result.points(), place / "landscape.svg", ylabel=result.minimise)
