"""diminuendo audit"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from diminuendo import _files, _validate
from diminuendo.cli.options import AsJson, need_torch, print_json, print_table
from diminuendo.planning import Plan
from diminuendo.report.text import rounded_down, rounded_up, whole

_CLIPS = ("flat", "automatic", "per-layer")


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("audit")(audit)


def audit(
    plan: Annotated[Path, typer.Argument(help="The plan, as `diminuendo plan -o` wrote it.")],
    canaries: Annotated[
        int | None, typer.Option(help="Canaries in each run; by default as many as it takes.")
    ] = None,
    runs: Annotated[
        int | None, typer.Option(help="How often to train; 1 is an audit in one run.")
    ] = None,
    precision: Annotated[
        float, typer.Option(help="How close the bound should come, where the amount is free.")
    ] = 0.015,
    confidence: Annotated[float, typer.Option(help="With which a lower bound holds.")] = 0.95,
    clip: Annotated[
        str, typer.Option(help="How the trainer clips: flat, automatic or per-layer.")
    ] = "flat",
    noise: Annotated[str, typer.Option(help="The trainer's noise: exact or fast.")] = "exact",
    micro_batch: Annotated[
        int | None, typer.Option(help="The trainer's largest number of examples at once.")
    ] = None,
    own_loop: Annotated[
        bool, typer.Option("--own-loop", help="Audit PrivateGradients in a loop, not fit.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option(help="Which canaries are present; the noise stays random.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show progress on stderr.")] = True,
    as_json: AsJson = False,
) -> None:
    """Train on canaries, and bound ε from below by what was released, beside the plan's claim.

    Ends with code 1 if the claim is refuted. With --confidence 0.95, an honest trainer is accused
    in at most 5 audits of 100.

    Example: diminuendo audit plan.json
    """
    need_torch(None)
    from diminuendo.audit import audit as audit_plan
    from diminuendo.audit import by_fit, by_loop
    from diminuendo.training import Automatic, Compute, Flat, PerLayer

    _validate.choice("--clip", clip, _CLIPS)
    _validate.choice("--noise", noise, ("exact", "fast"))
    if micro_batch is not None:
        _validate.count("--micro-batch", micro_batch)
    text = _files.read_text(plan, name="the plan")
    what = Plan.from_json(text, source=str(plan))
    rule = {"flat": Flat, "automatic": Automatic, "per-layer": PerLayer}[clip](what.clip)
    options: dict[str, Any] = {"clip": rule, "noise": noise}
    if own_loop:
        train = by_loop(**options, micro_batch=micro_batch)
    else:
        train = by_fit(**options, device=Compute(micro_batch=micro_batch))
    found = audit_plan(
        what,
        train=train,
        canaries=canaries,
        runs=runs,
        precision=precision,
        confidence=confidence,
        seed=seed,
        progress=progress,
    )
    if as_json:
        print_json(found.to_dict())
    else:
        counted = "1 run" if found.runs == 1 else f"{found.runs:,} runs"
        rows = [
            ["claimed", rounded_up(found.claim), f"δ = {whole(found.delta)}, {found.relation}"],
            [
                "at least",
                rounded_down(found.epsilon_lower),
                f"{found.share:.1%} of the claim, confidence {confidence:g}; assumes "
                + found.assumes,
            ],
            ["at least", rounded_down(found.epsilon_any), "for any mechanism, same confidence"],
            ["noise", f"{found.noise_scale:.4f}", "estimated, in units of the planned noise"],
            [
                "canaries",
                f"{found.canaries:,}",
                f"in {counted} of {found.steps:,} steps",
            ],
        ]
        print_table("Audit: ε", ["", "value", ""], rows)
        for sentence in found.findings:
            typer.echo(f"Found: {sentence}")
        typer.echo(
            "The claim is refuted." if found.exceeded else "Nothing was found above the claim."
        )
    if found.exceeded:
        raise typer.Exit(1)
