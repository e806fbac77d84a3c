"""diminuendo train"""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diminuendo import _files, events
from diminuendo.budget import Budget
from diminuendo.cli.options import AsJson, print_json
from diminuendo.errors import InputError
from diminuendo.planning import Plan
from diminuendo.planning import plan as make_plan
from diminuendo.report import run as run_report

if TYPE_CHECKING:
    from diminuendo.training import Result

_SECTIONS = {"model", "data", "plan", "budget", "ledger", "training", "output"}


def register(app: typer.Typer) -> None:
    app.command("train")(train)


def train(
    run: Annotated[Path, typer.Argument(help="What to train, as TOML.")],
    reveal_training_loss: Annotated[
        bool,
        typer.Option(
            "--reveal-training-loss",
            help="Also write the mean training loss, which the privacy claim does not cover.",
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
      path = "plan.json"                # or a [budget] and the arguments of dim.plan here
      [ledger]
      budget = "patients"               # who pays; url = "…" unless it is the default ledger
      [training]
      loss = "torch.nn:CrossEntropyLoss"
      optimizer = "torch.optim:SGD"
      lr = 0.1
      [output]
      folder = "run"
    """
    fit = _fit()
    settings = _read(run)
    output = Path(_get(settings, "output", "folder", kind=str))
    model = _call(
        _get(settings, "model", "factory", kind=str),
        "model.factory",
        settings["model"].get("arguments", {}),
    )
    data = _data(settings["data"], run.parent)
    training = settings["training"]
    plan = _plan(
        settings, run.parent, model, len(data[0]) if isinstance(data, tuple) else len(data)
    )
    loss = _call(
        training.get("loss", "torch.nn:CrossEntropyLoss"), "training.loss", {"reduction": "none"}
    )
    optimizer = None
    if "optimizer" in training:
        factory = _find(training["optimizer"], "training.optimizer")
        optimizer = factory(
            model.parameters(), lr=training["lr"], **training.get("optimizer_arguments", {})
        )
    _files.make_folder(output)
    _files.write_text(output / "plan.json", plan.to_json() + "\n")
    result = fit(
        model,
        data,
        plan,
        loss=loss,
        optimizer=optimizer,
        lr=training.get("lr"),
        micro_batch=training.get("micro_batch"),
        seed=training.get("seed"),
        workers=training.get("workers", 0),
        device=training.get("device"),
        ledger=_ledger(settings).get("url"),
        budget=_ledger(settings).get("budget"),
        source=_source(settings, run.parent),
        folder=output / "checkpoint",
        checkpoint_every=training.get("checkpoint_every", 50),
        progress=not as_json,
    )
    facts = _write(output, model, plan, result)
    if reveal_training_loss:
        facts["training_loss"] = _mean_loss(model, data, loss)
        facts["not_covered"].append("the mean training loss, revealed on request")
    _files.write_text(output / "result.json", json.dumps(facts, indent=1, ensure_ascii=False))
    page = run_report.page(plan, facts)
    _files.write_text(output / "report.md", page)
    print_json(facts) if as_json else print(page)


def _fit() -> Callable[..., Result]:
    try:
        from diminuendo.training import fit
    except ImportError:
        raise InputError(
            "installed",
            name="PyTorch",
            value=None,
            remedy="Training needs it: pip install 'diminuendo[torch]'.",
        ) from None
    return fit


def _read(path: Path) -> dict[str, Any]:
    text = _files.read_text(path, name="the run file")
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            "valid TOML", name="the run file", value=str(path), remedy=f"({error})"
        ) from None
    for name in settings:
        if name not in _SECTIONS:
            raise InputError(
                f"one of {', '.join(sorted(_SECTIONS))}",
                name="a section of the run file",
                value=name,
            )
    for name in ("model", "data", "training", "output"):
        if name not in settings:
            raise InputError(
                "there",
                name=f"the section [{name}] of the run file",
                value=None,
                remedy="`diminuendo train --help` shows one.",
            )
    return settings


def _get(settings: Mapping[str, Any], section: str, name: str, *, kind: type) -> Any:
    value = settings[section].get(name)
    if not isinstance(value, kind):
        raise InputError(f"a {kind.__name__}", name=f"{section}.{name}", value=value)
    return value


def _find(path: str, name: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError):
        raise InputError(
            'importable as "module:name"',
            name=name,
            value=path,
            remedy="Is the module on the Python path?",
        ) from None
    return found


def _call(path: str, name: str, arguments: Mapping[str, Any]) -> Any:
    return _find(path, name)(**arguments)


def _data(section: Mapping[str, Any], folder: Path) -> Any:
    if "factory" in section:
        return _call(section["factory"], "data.factory", section.get("arguments", {}))
    import numpy as np

    path = folder / str(section.get("path"))
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return tuple(arrays[name] for name in ("x", "y"))
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            "an .npz file with arrays x and y",
            name="data.path",
            value=str(path),
            remedy=f"({error})",
        ) from None


def _plan(settings: Mapping[str, Any], folder: Path, model: Any, examples: int) -> Plan:
    section = dict(settings.get("plan", {}))
    if "path" in section:
        path = folder / section["path"]
        return Plan.from_json(_files.read_text(path, name="the plan"), source=str(path))
    if "budget" not in settings:
        raise InputError("there", name="plan.path or the section [budget]", value=None)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    try:
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


def _ledger(settings: Mapping[str, Any]) -> Mapping[str, str]:
    section: Mapping[str, str] = settings.get("ledger", {})
    if "ledger" in settings and "budget" not in section:
        raise InputError(
            "there", name="ledger.budget", value=None, remedy="Which of the ledger's budgets pays?"
        )
    return section


def _source(settings: Mapping[str, Any], folder: Path) -> Path | None:
    """The data's file, where the budget that pays knows the data by it (`ledger create --data`)."""
    if "ledger" not in settings or "path" not in settings["data"]:
        return None
    from diminuendo.ledger import Ledger, identify

    path, section = folder / str(settings["data"]["path"]), _ledger(settings)
    known = Ledger(section.get("url")).status(section["budget"]).terms.data
    return path if known is not None and identify(path) == known else None


def _mean_loss(model: Any, data: Any, loss: Callable[..., Any]) -> float:
    import torch

    with torch.no_grad():
        x, y = (torch.as_tensor(part) for part in data)
        return float(loss(model(x), y).mean())


def _write(output: Path, model: Any, plan: Plan, result: Result) -> dict[str, Any]:
    import torch

    torch.save(model.state_dict(), output / "model.pt")
    _files.write_text(
        output / "events.json", json.dumps([events.to_dict(event) for event in result.events])
    )
    facts = asdict(result)
    del facts["events"]
    return run_report.facts(plan, facts)
