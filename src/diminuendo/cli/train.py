"""diminuendo train"""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diminuendo import _files, _validate, events
from diminuendo.budget import Budget
from diminuendo.cli.options import AsJson, print_json, working
from diminuendo.cli.report import drawn
from diminuendo.errors import DiminuendoError, InputError
from diminuendo.planning import Plan
from diminuendo.planning import plan as make_plan
from diminuendo.report import html
from diminuendo.report import run as run_report

if TYPE_CHECKING:
    from diminuendo.ledger import LedgerSpending
    from diminuendo.training import Checkpoints, Result
    from diminuendo.training.groups import Groups
    from diminuendo.tuning import Choice

_NUMBER = (int, float)
_KEYS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "model": {"factory": str, "arguments": dict},
    "data": {"path": str, "factory": str, "arguments": dict, "groups": str},
    "budget": {"epsilon": _NUMBER, "delta": _NUMBER, "relation": str, "conversion": str},
    "plan": {
        "path": str,
        "clip": _NUMBER,
        "steps": (int, str),
        "epochs": _NUMBER,
        "kappa": _NUMBER,
        "gamma": _NUMBER,
        "spectrum": list,
        "influence": list,
        "momentum": _NUMBER,
        "step_size": _NUMBER,
        "smoothness": _NUMBER,
        "gap": _NUMBER,
        "alpha": _NUMBER,
        "schedule": (str, list),
        "fall": _NUMBER,
        "sampling_rate": (int, float, list),
        "lr": (int, float, str, list),
        "max_lr": _NUMBER,
        "gradient_norm": _NUMBER,
        "examples": int,
        "parameters": int,
    },
    "ledger": {"url": str, "budget": str},
    "training": {
        "loss": str,
        "optimizer": str,
        "optimizer_arguments": dict,
        "lr": _NUMBER,
        "lr_scheduler": str,
        "lr_scheduler_arguments": dict,
        "strict": bool,
        "clip": str,
        "clip_bounds": list,
        "micro_batch": int,
        "noise": str,
        "seed": int,
        "workers": int,
        "device": str,
        "checkpoint_every": int,
        "reveal_training_loss": bool,
    },
    "output": {"folder": str},
}
_EXIT_CODES = {"done": 0, "refused": 3, "interrupted": 130}
_CLIPS = ("flat", "per-layer", "automatic")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("train")(train)


def train(
    run: Annotated[Path, typer.Argument(help="What to train, as TOML.")],
    reveal_training_loss: Annotated[
        bool,
        typer.Option(
            "--reveal-training-loss",
            help="Also show and write the mean loss of a batch, which the claim does not cover.",
        ),
    ] = False,
    noise: Annotated[
        Literal["exact", "fast"] | None,
        typer.Option(
            help="exact (the default), or fast: then the claim is for real arithmetic only."
        ),
    ] = None,
    moved: Annotated[
        bool,
        typer.Option(
            "--moved",
            help="The output folder was moved here or restored, and no other copy of it has gone "
            "on or will.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a PyTorch model by a plan; writes model, plan, events, result and report.

    Example: diminuendo train run.toml, with in run.toml:

    \b
      [model]
      factory = "mymodels:network"      # module:function that returns the nn.Module
      [data]
      path = "train.npz"                # arrays x and y; or factory = "module:function"
      [plan]
      path = "plan.json"                # or choice.json of `diminuendo tune`, which brings lr, clip
                                        # and model; or a [budget] and dim.plan's arguments here
      [ledger]
      budget = "patients"               # who pays; url = "…" unless it is the default ledger
      [training]
      loss = "torch.nn:CrossEntropyLoss"
      optimizer = "torch.optim:SGD"
      lr = 0.1
      [output]
      folder = "run"

    Paths are relative to the file; modules beside it can be imported. All keys: docs/training.md.
    """
    from diminuendo.training import Compute, Progress, fit

    settings, here = _read(run), run.parent.resolve()
    choice = _choice(settings, here)
    training = {**_chosen(choice), **settings["training"]}
    with _importable(here):
        _seed_initialisation(training.get("seed"))
        model = _model(settings.get("model"), choice)
        data = _data(settings["data"], here, model)
        groups = _groups(settings["data"], here)
        plan = _plan(settings, here, model, data, groups) if choice is None else choice.plan
        loss = _made(
            training.get("loss", "torch.nn:CrossEntropyLoss"),
            "training.loss",
            {"reduction": "none"},
        )
        optimizer, lr_scheduler = _optimizer(training, model, plan)
        clip = _clip(training, plan)
        output = _files.make_folder(here / str(_needed(settings, "output", "folder")))
        with _plain_errors():
            result = fit(
                model,
                data,
                plan,
                loss=loss,
                groups=groups,
                optimizer=optimizer,
                lr=training.get("lr"),
                lr_scheduler=lr_scheduler,
                strict=training.get("strict", False),
                clip=clip,
                noise=noise or training.get("noise", "exact"),
                seed=training.get("seed"),
                device=Compute(
                    device=training.get("device"),
                    workers=training.get("workers", 0),
                    micro_batch=training.get("micro_batch"),
                ),
                spending=_spending(settings, here, plan, data, progress=not as_json),
                folder=_checkpoints(output / "checkpoint", training, moved),
                progress=Progress(
                    shown=not as_json,
                    reveal_training_loss=reveal_training_loss
                    or training.get("reveal_training_loss", False),
                ),
            )
    facts = _write(output, model, plan, result)
    page = run_report.page(plan, facts)
    _files.write_text(output / "report.md", page)
    html.write_page(output / "report.html", run_report.document(plan, facts, (), drawn(plan)))
    print_json(facts) if as_json else print(page)
    raise typer.Exit(_EXIT_CODES[result.status])


def _read(path: Path) -> dict[str, Any]:
    text = _files.read_text(path, name="the run file")
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            "valid TOML", name="the run file", value=str(path), remedy=f"({error})"
        ) from None
    for section, content in settings.items():
        _validate.choice("a section of the run file", section, _KEYS)
        if not isinstance(content, dict):
            raise InputError(f"a section, [{section}]", name=section, value=content)
        for key, value in content.items():
            _validate.choice(f"a key of [{section}]", key, _KEYS[section])
            kinds = _KEYS[section][key]
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                raise InputError(_kinds_said(kinds), name=f"{section}.{key}", value=value)
    for section in ("data", "training", "output"):
        if section not in settings:
            raise InputError(
                "there",
                name=f"the section [{section}] of the run file",
                value=None,
                remedy="`diminuendo train --help` shows one.",
            )
    return settings


def _kinds_said(kinds: type | tuple[type, ...]) -> str:
    words = {
        str: "text",
        dict: "a table",
        list: "a list",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
    }
    listed = kinds if isinstance(kinds, tuple) else (kinds,)
    return " or ".join(words[kind] for kind in listed if not (kind is int and float in listed))


def _needed(settings: Mapping[str, Any], section: str, key: str) -> Any:
    if key not in settings[section]:
        raise InputError("there", name=f"{section}.{key}", value=None)
    return settings[section][key]


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Modules beside the run file and in the working folder can be named in it."""
    added = [str(folder), str(Path.cwd())]
    sys.path[:0] = added
    try:
        yield
    finally:
        for path in added:
            sys.path.remove(path)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What PyTorch raises over a model and its data, as one line."""
    try:
        yield
    except DiminuendoError:
        raise
    except Exception as error:
        raise InputError(
            "made for each other",
            name="the model, the data and the loss",
            value=type(error).__name__,
            remedy=f"({_first_line(error)})",
        ) from error


def _failed(what: str, value: object, error: Exception) -> InputError:
    said = f"({type(error).__name__}: {_first_line(error)})"
    return InputError("free of errors", name=what, value=value, remedy=said)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _find(path: Any, name: str) -> Callable[..., Any]:
    module, _, attribute = str(path).partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            'importable as "module:name"',
            name=name,
            value=path,
            remedy=f"Is the module beside the run file or on the Python path? ({error})",
        ) from None
    except Exception as error:
        raise _failed(f"the import of {name}", path, error) from error
    if not callable(found):
        raise InputError("something to call", name=name, value=path)
    return found


def _made(path: Any, name: str, arguments: Mapping[str, Any], *positional: Any) -> Any:
    made = _find(path, name)
    try:
        return made(*positional, **arguments)
    except DiminuendoError:
        raise
    except Exception as error:
        raise _failed(name, path, error) from error


def _seed_initialisation(seed: Any) -> None:
    """A fixed seed fixes the model's first parameters too."""
    if seed is not None:
        import torch

        torch.manual_seed(_validate.count("training.seed", seed, at_least=0, at_most=2**63))


def _choice(settings: Mapping[str, Any], folder: Path) -> Choice | None:
    """What `diminuendo tune` chose, where that is the file that plan.path names."""
    section = settings.get("plan", {})
    if "path" not in section:
        return None
    path = folder / section["path"]
    text = _files.read_text(path, name="the plan")
    if '"diminuendo.choice/' not in text[:100]:
        return None
    from diminuendo.tuning import Choice

    _check_alone(settings)
    return Choice.from_json(text, source=str(path))


def _chosen(choice: Choice | None) -> dict[str, Any]:
    """What a choice says of [training]."""
    if choice is None:
        return {}
    return {"lr": choice.lr, "clip": choice.candidate.clipping}


def _check_alone(settings: Mapping[str, Any]) -> None:
    section = settings.get("plan", {})
    if len(section) > 1 or "budget" in settings:
        raise InputError(
            "left out where plan.path is given",
            name="the rest of [plan], and [budget]",
            value=sorted({*section, "budget"} - {"path"}),
        )


def _model(section: Mapping[str, Any] | None, choice: Choice | None) -> Any:
    from torch import nn

    if section is None:
        if choice is None or choice.model is None:
            raise InputError(
                "there",
                name="the section [model] of the run file",
                value=None,
                remedy="`diminuendo train --help` shows one.",
            )
        return choice.model()
    model = _made(section.get("factory"), "model.factory", section.get("arguments", {}))
    if not isinstance(model, nn.Module):
        raise InputError(
            "a function that returns an nn.Module", name="model.factory", value=type(model).__name__
        )
    return model


def _data(section: Mapping[str, Any], folder: Path, model: Any) -> Any:
    if "factory" in section:
        return _made(section["factory"], "data.factory", section.get("arguments", {}))
    if "path" not in section:
        raise InputError("there", name="data.path or data.factory", value=None)
    import numpy as np

    from diminuendo.training.sampling import as_trained, precision_of

    path, precision = folder / section["path"], precision_of(model)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return as_trained(arrays["x"], precision), as_trained(arrays["y"], precision)
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            "an .npz file with arrays x and y",
            name="data.path",
            value=str(path),
            remedy=f"({error})",
        ) from None


def _groups(section: Mapping[str, Any], folder: Path) -> Groups | None:
    """Whose each row is, from the named array beside x and y."""
    if "groups" not in section:
        return None
    if "path" not in section:
        raise InputError("given with data.path", name="data.groups", value=section["groups"])
    import numpy as np

    from diminuendo.training.groups import Groups

    with np.load(folder / section["path"], allow_pickle=False) as arrays:
        _validate.choice("data.groups", section["groups"], sorted(arrays))
        return Groups(arrays[section["groups"]])


def _plan(
    settings: Mapping[str, Any], folder: Path, model: Any, data: Any, groups: Groups | None
) -> Plan:
    section = dict(settings.get("plan", {}))
    if "path" in section:
        _check_alone(settings)
        path = folder / section["path"]
        return Plan.from_json(_files.read_text(path, name="the plan"), source=str(path))
    if "budget" not in settings:
        raise InputError("there", name="plan.path or the section [budget]", value=None)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    try:
        examples = len(data[0]) if isinstance(data, tuple) else len(data)
        if groups is not None:
            examples = len(groups)
        with working("planning"):
            return make_plan(
                Budget(**settings["budget"]),
                **{"examples": examples, "parameters": parameters, **section},
            )
    except TypeError as error:
        raise InputError(
            "the arguments of dim.Budget and dim.plan",
            name="[budget] and [plan]",
            value=sorted(section),
            remedy=f"({error})",
        ) from None


def _spending(
    settings: Mapping[str, Any], folder: Path, plan: Plan, data: Any, *, progress: bool
) -> LedgerSpending | None:
    """Who pays; a ledger's path is relative to the run file, as all paths in it are.

    The data are compared by their file where the budget knows them by it (`ledger create --data`),
    else by their content.
    """
    if "ledger" not in settings:
        return None
    from diminuendo.ledger import Ledger, identify
    from diminuendo.training.progress import reading

    section: dict[str, str] = dict(settings["ledger"])
    if "budget" not in section:
        raise InputError(
            "there", name="ledger.budget", value=None, remedy="Which of the ledger's budgets pays?"
        )
    if "://" not in section.get("url", "://"):
        section["url"] = str(folder / Path(section["url"]).expanduser())
    ledger = Ledger(section.get("url"), create=False)
    if "path" in settings["data"]:
        file = folder / str(settings["data"]["path"])
        tied_to = ledger.status(section["budget"]).terms.data
        if tied_to is not None and identify(file) == tied_to:
            data = file
    with reading(progress) as shown:
        return ledger.pay(section["budget"], plan, data=data, progress=shown)


def _checkpoints(folder: Path, training: Mapping[str, Any], moved: bool) -> Checkpoints:
    from diminuendo.training import Checkpoints

    return Checkpoints(folder, training.get("checkpoint_every", Checkpoints.every), moved)


def _optimizer(training: Mapping[str, Any], model: Any, plan: Plan) -> tuple[Any, Any]:
    """The optimiser and its schedule, or None for the paper's own and for none."""
    from diminuendo.training import PrivateDescent

    for dependent, leader in (
        ("optimizer_arguments", "optimizer"),
        ("lr_scheduler_arguments", "lr_scheduler"),
    ):
        if dependent in training and leader not in training:
            raise InputError("given", name=f"training.{leader}", value=None)
    if not {"lr", "optimizer", "lr_scheduler"} & training.keys():
        return None, None  # `fit` chooses a learning rate, where it can
    rate = _validate.positive("training.lr", training.get("lr"), remedy="The learning rate.")
    optimizer: Any = None
    if "optimizer" in training:
        arguments = {"lr": rate, **training.get("optimizer_arguments", {})}
        optimizer = _made(
            training["optimizer"], "training.optimizer", arguments, model.parameters()
        )
    if "lr_scheduler" not in training:
        return optimizer, None
    if optimizer is None:
        optimizer = PrivateDescent(model.parameters(), lr=rate, beta=plan.momentum or 0.0)
    arguments = training.get("lr_scheduler_arguments", {})
    return optimizer, _made(training["lr_scheduler"], "training.lr_scheduler", arguments, optimizer)


def _clip(training: Mapping[str, Any], plan: Plan) -> Any:
    """The named style, with the plan's norm as its sensitivity."""
    from diminuendo.training import Automatic, Flat, PerLayer

    name = _validate.choice("training.clip", training.get("clip", "flat"), _CLIPS)
    bounds = training.get("clip_bounds")
    if bounds is not None and name != "per-layer":
        raise InputError('given with clip = "per-layer"', name="training.clip_bounds", value=bounds)
    if name == "per-layer":
        return PerLayer(plan.clip if bounds is None else bounds)
    return Flat(plan.clip) if name == "flat" else Automatic(plan.clip)


def _write(output: Path, model: Any, plan: Plan, result: Result) -> dict[str, Any]:
    from diminuendo.training.checkpoint import write_tensors

    _files.write_text(output / "plan.json", plan.to_json() + "\n")
    write_tensors(output / "model.pt", model.state_dict())
    _files.write_text(
        output / "events.json", json.dumps([events.to_dict(event) for event in result.events])
    )
    described = asdict(result)
    del described["events"]
    facts = run_report.facts(plan, described)
    _files.write_text(output / "result.json", json.dumps(facts, indent=1, ensure_ascii=False))
    return facts
