"""diminuendo train"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from diminuendo import _files, events
from diminuendo.cli import run_data, run_file, run_parts
from diminuendo.cli.options import AsJson, print_json
from diminuendo.cli.report import drawn
from diminuendo.planning import Plan
from diminuendo.report import html
from diminuendo.report import run as run_report

if TYPE_CHECKING:
    from diminuendo.training import Result
    from diminuendo.tuning import Choice

_EXIT_CODES = {"done": 0, "refused": 3, "interrupted": 130}


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
      path = "train.npz"                # arrays x and y; or .csv or .parquet with target =
                                        # "column"; or factory = "module:function"
      [test]
      path = "test.npz"                 # what the model is scored on when it is trained
      public = true                     # unless it is, the scores are not covered by the claim
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

    settings, here = run_file.read(run), run.parent.resolve()
    choice = run_parts.read_choice(settings, here)
    training = {**run_parts.chosen(choice), **settings["training"]}
    with run_file.importable(here):
        run_parts.seed_initialisation(training.get("seed"))
        model = run_parts.make_model(settings.get("model"), choice)
        data = run_data.read(settings["data"], "data", here, model)
        groups = run_data.groups(settings["data"], here)
        plan = (
            run_parts.make_plan(settings, here, model, data, groups)
            if choice is None
            else choice.plan
        )
        loss = run_file.made(
            training.get("loss", "torch.nn:CrossEntropyLoss"),
            "training.loss",
            {"reduction": "none"},
        )
        test = run_data.test_set(settings, here, model, loss)
        optimizer, lr_scheduler = run_parts.make_optimizer(training, model, plan)
        clip = run_parts.make_clip(training, plan)
        output = _files.make_folder(here / str(run_file.needed(settings, "output", "folder")))
        with run_file.plain_errors():
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
                    pad=training.get("pad", False),
                ),
                spending=run_parts.make_spending(settings, here, plan, data, progress=not as_json),
                folder=run_parts.make_checkpoints(output / "checkpoint", training, moved),
                progress=Progress(
                    shown=not as_json,
                    reveal_training_loss=reveal_training_loss
                    or training.get("reveal_training_loss", False),
                ),
            )
    facts = _write(output, model, plan, result, None)
    if test is not None:  # after all that was paid for is in its files
        with run_file.plain_errors():
            facts = _write(output, model, plan, result, test.evaluate(model, loss))
    page = run_report.page(plan, facts) + _loading(
        settings.get("model"), choice, output / "model.pt"
    )
    _files.write_text(output / "report.md", page)
    html.write_page(output / "report.html", run_report.document(plan, facts, (), drawn(plan)))
    print_json(facts) if as_json else print(page)
    raise typer.Exit(_EXIT_CODES[result.status])


def _write(
    output: Path, model: Any, plan: Plan, result: Result, test: dict[str, Any] | None
) -> dict[str, Any]:
    from diminuendo.training.checkpoint import write_tensors

    _files.write_text(output / "plan.json", plan.to_json() + "\n")
    write_tensors(output / "model.pt", model.state_dict())
    _files.write_text(
        output / "events.json", json.dumps([events.to_dict(event) for event in result.events])
    )
    described = asdict(result)
    del described["events"]
    facts = run_report.facts(plan, described, test)
    _files.write_text(output / "result.json", json.dumps(facts, indent=1, ensure_ascii=False))
    return facts


def _loading(section: dict[str, Any] | None, choice: Choice | None, path: Path) -> str:
    """How to get the trained model back, as lines of the report."""
    if section is None:
        assert choice is not None
        assert choice.model is not None
        maker = choice.model
        module, name = "diminuendo.tuning", type(maker).__name__
        made = f"{maker!r}()"
    else:
        module, _, name = str(section["factory"]).partition(":")
        settings = section.get("arguments", {}).items()
        arguments = ", ".join(f"{key}={value!r}" for key, value in settings)
        made = f"{name}({arguments})"
    return f"""
To load the model:

```python
import torch
from {module} import {name}

model = {made}
model.load_state_dict(torch.load({str(path)!r}, weights_only=True))
model.eval()
```
"""
