"""What a run is made of, from the sections of its run file: model, plan, optimiser, who pays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diminuendo import _files, _validate
from diminuendo.budget import Budget
from diminuendo.cli.options import working
from diminuendo.cli.run_file import made
from diminuendo.errors import InputError
from diminuendo.planning import Plan
from diminuendo.planning import plan as planned

if TYPE_CHECKING:
    from diminuendo.ledger import LedgerSpending
    from diminuendo.training import Checkpoints
    from diminuendo.training.groups import Groups
    from diminuendo.tuning import Choice

_CLIPS = ("flat", "per-layer", "automatic")


def seed_initialisation(seed: Any) -> None:
    """A fixed seed fixes the model's first parameters too."""
    if seed is not None:
        import torch

        torch.manual_seed(_validate.count("training.seed", seed, at_least=0, at_most=2**63))


def read_choice(settings: Mapping[str, Any], folder: Path) -> Choice | None:
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


def chosen(choice: Choice | None) -> dict[str, Any]:
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


def make_model(section: Mapping[str, Any] | None, choice: Choice | None) -> Any:
    """The nn.Module that the factory returns, or the one that was chosen."""
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
    model = made(section.get("factory"), "model.factory", section.get("arguments", {}))
    if not isinstance(model, nn.Module):
        raise InputError(
            "a function that returns an nn.Module", name="model.factory", value=type(model).__name__
        )
    return model


def make_plan(
    settings: Mapping[str, Any], folder: Path, model: Any, data: Any, groups: Groups | None
) -> Plan:
    """The plan of [plan] path, or the one that [budget] and [plan] describe."""
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
            return planned(
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


def make_spending(
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


def make_checkpoints(folder: Path, training: Mapping[str, Any], moved: bool) -> Checkpoints:
    """Where the run is kept, and how often."""
    from diminuendo.training import Checkpoints

    return Checkpoints(folder, training.get("checkpoint_every", Checkpoints.every), moved)


def make_optimizer(training: Mapping[str, Any], model: Any, plan: Plan) -> tuple[Any, Any]:
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
        optimizer = made(training["optimizer"], "training.optimizer", arguments, model.parameters())
    if "lr_scheduler" not in training:
        return optimizer, None
    if optimizer is None:
        optimizer = PrivateDescent(model.parameters(), lr=rate, beta=plan.momentum or 0.0)
    arguments = training.get("lr_scheduler_arguments", {})
    return optimizer, made(training["lr_scheduler"], "training.lr_scheduler", arguments, optimizer)


def make_clip(training: Mapping[str, Any], plan: Plan) -> Any:
    """The named style, with the plan's norm as its sensitivity."""
    from diminuendo.training import Automatic, Flat, PerLayer

    name = _validate.choice("training.clip", training.get("clip", "flat"), _CLIPS)
    bounds = training.get("clip_bounds")
    if bounds is not None and name != "per-layer":
        raise InputError('given with clip = "per-layer"', name="training.clip_bounds", value=bounds)
    if name == "per-layer":
        return PerLayer(plan.clip if bounds is None else bounds)
    return Flat(plan.clip) if name == "flat" else Automatic(plan.clip)
