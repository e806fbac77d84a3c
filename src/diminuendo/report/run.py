"""A training run: what is claimed for it, what that covers, and what it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diminuendo.planning import Plan
from diminuendo.report.text import rounded_up

_BEFORE = "anything computed on the data before training: scaling, selection, tuning"
_SEEDED = "everything: the seed was fixed, so the noise can be predicted"
_REVEALED = "the training loss, revealed on request"


def facts(plan: Plan, result: Mapping[str, Any]) -> dict[str, Any]:
    """The run's public facts, with its plan's digest and what the claim leaves out."""
    known = {name: value for name, value in result.items() if name != "training_loss"}
    not_covered = [_BEFORE] if result["private"] else [_SEEDED, _BEFORE]
    if result["revealed"]:
        known["training_loss"] = result["training_loss"]
        not_covered.append(_REVEALED)
    return {**known, "plan": plan.digest, "not_covered": not_covered}


def page(plan: Plan, run: Mapping[str, Any]) -> str:
    """The report, as Markdown."""
    claim = (
        f"({rounded_up(run['epsilon'])}, {run['delta']:g})-differentially private for "
        f"{run['relation']} neighbours, against an adversary who sees every noisy gradient"
        if run["private"]
        else "NOT PRIVATE: the seed was fixed"
    )
    lines = [
        f"# Run: {run['status']} ({run['reason']})",
        "",
        f"- Steps spent: {run['steps']} of {plan.steps}",
        f"- Claim: {claim}",
        f"- Plan: {run['plan']}",
    ]
    if run.get("ledger"):
        lines.append(
            "- On record: run {run} on the budget {budget!r} of {address}; the chain then ended "
            "at record {record}, {head}".format(**run["ledger"])
        )
    if run["lost"]:
        lines.append(f"- Of these lost in a crash, spent and without effect: {run['lost']}")
    if run.get("training_loss") is not None:
        lines.append(
            f"- Mean loss of the last batch (not covered by the claim): {run['training_loss']:.6g}"
        )
    lines += ["", "Not covered by the claim:", "", *(f"- {words}" for words in run["not_covered"])]
    return "\n".join([*lines, "", "```", plan.summary(), "```", ""])
