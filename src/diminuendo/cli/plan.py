"""diminuendo plan"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from diminuendo import _files, _validate, influence
from diminuendo.cli.options import (
    AsJson,
    ConversionName,
    Delta,
    Epsilon,
    RelationName,
    make_budget,
    working,
)
from diminuendo.errors import InputError
from diminuendo.influence.learning_rates import check_name
from diminuendo.planning import SCHEDULES
from diminuendo.planning import plan as make_plan
from diminuendo.planning.planner import steps_of


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("plan")(plan)


def plan(
    epsilon: Epsilon,
    delta: Delta,
    examples: Annotated[int, typer.Option(help="N, the number of training examples (public).")],
    parameters: Annotated[
        int | None, typer.Option(help="D, the number of trained parameters.")
    ] = None,
    clip: Annotated[float, typer.Option(help="Norm to which each gradient is clipped.")] = 1.0,
    steps: Annotated[str, typer.Option(help="T, or auto for the best by the bound.")] = "auto",
    epochs: Annotated[
        float | None, typer.Option(help="In place of --steps: epochs/rate steps.")
    ] = None,
    kappa: Annotated[float | None, typer.Option(help="Condition number of the loss.")] = None,
    gamma: Annotated[float | None, typer.Option(help="Convergence rate, 1 − 1/κ.")] = None,
    spectrum: Annotated[
        Path | None, typer.Option(help="Hessian eigenvalues, as JSON or CSV.")
    ] = None,
    influence_file: Annotated[
        Path | None, typer.Option("--influence", help="Measured influence, as JSON or CSV.")
    ] = None,
    momentum: Annotated[float | None, typer.Option(help="β of the averaged gradient.")] = None,
    step_size: Annotated[float, typer.Option(help="Learning rate in units of 1/M.")] = 1.0,
    smoothness: Annotated[
        float | None, typer.Option(help="M, a public guess; 1 unless given.")
    ] = None,
    gap: Annotated[float, typer.Option(help="Initial gap f(θ₁) − f*, a public guess.")] = 1.0,
    alpha: Annotated[float | None, typer.Option(help="α as such, instead of its parts.")] = None,
    schedule: Annotated[str, typer.Option(help=f"One of {', '.join(SCHEDULES)}.")] = "optimal",
    fall: Annotated[
        float | None, typer.Option(help="Last σ over first, for a named schedule.")
    ] = None,
    sampling_rate: Annotated[
        str,
        typer.Option(help="Poisson rate; 1 is full batch. Or a JSON or CSV file, a rate a step."),
    ] = "1",
    lr: Annotated[
        str | None,
        typer.Option(
            help="Learning rates that training will use: constant, cosine or linear (from 1 to "
            "0), a JSON or CSV file with one for each step, or joint to plan them too. In "
            "units of 1/M; with --spectrum, of one over an eigenvalue; with --influence, those it "
            "was measured with."
        ),
    ] = None,
    max_lr: Annotated[
        float | None, typer.Option(help="The longest step, in the unit of --lr.")
    ] = None,
    gradient_norm: Annotated[
        float,
        typer.Option(
            help="For --lr joint with a sampling rate: root mean square of the clipped gradients' "
            "norms over the clip norm; decides the noise of sampling itself."
        ),
    ] = 1.0,
    relation: RelationName = "add-remove",
    conversion: ConversionName = "exact",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan here, as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the schedule here (.svg, .png or .pdf).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """From a budget and public facts to the number of steps and the noise of each.

    Example: diminuendo plan --epsilon 4 --delta 1e-8 --examples 1000 --parameters 71010
    --clip 4 --gamma 0.98 --steps 100 -o plan.json
    """
    _validate.choice("--schedule", schedule, SCHEDULES)
    rates = _rates(sampling_rate)
    if epochs is not None:
        steps = str(steps_of(epochs, _steps(steps), rates))
    with working("planning"):
        made = make_plan(
            make_budget(epsilon, delta, relation, conversion),
            examples=examples,
            parameters=parameters,
            clip=clip,
            steps=_steps(steps),
            kappa=kappa,
            gamma=gamma,
            spectrum=None
            if spectrum is None
            else _files.read_numbers(
                spectrum, name="eigenvalues", hint="One nonnegative eigenvalue for each entry."
            ),
            influence=None if influence_file is None else influence.from_file(influence_file),
            momentum=momentum,
            step_size=step_size,
            smoothness=smoothness,
            gap=gap,
            alpha=alpha,
            schedule=schedule,
            fall=fall,
            sampling_rate=rates,
            lr=None if lr is None else _learning_rates(lr),
            max_lr=max_lr,
            gradient_norm=gradient_norm,
        )
    if output is not None:
        _files.write_text(output, made.to_json() + "\n")
    if plot is not None:
        from diminuendo.report import figures

        figures.schedules({made.schedule: made.sigmas}, plot)
    print(made.to_json() if as_json else made.summary())


def _steps(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        return int(text)
    except ValueError:
        raise InputError('a whole number or "auto"', name="--steps", value=text) from None


def _learning_rates(text: str) -> Any:
    """A shape's name, "joint", one number, or what a file holds."""
    try:
        return float(text)
    except ValueError:
        pass
    if Path(text).suffix or Path(text).is_file():
        return _files.read_numbers(text, name="lr", hint="One learning rate for each step.")
    return check_name(text, also=("joint",))


def _rates(text: str) -> float | list[float]:
    try:
        return float(text)
    except ValueError:
        return _files.read_numbers(
            text, name="sampling_rate", hint="One rate in (0, 1] for each step."
        )
