"""A training run: what is claimed for it, what that covers, and what it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diminuendo.planning import Plan
from diminuendo.report.text import rounded_up

_BEFORE = "anything computed on the data before training: scaling, selection, tuning"
_SEEDED = "everything: the seed was fixed, so the noise can be predicted"


def facts(plan: Plan, result: Mapping[str, Any]) -> dict[str, Any]:
    """The run's public facts, with its plan's digest and what the claim leaves out."""
    return {
        **result,
        "plan": plan.digest,
        "not_covered": [_BEFORE] if result["private"] else [_SEEDED, _BEFORE],
    }


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
        f"- Steps taken: {run['steps']} of {plan.steps}",
        f"- Claim: {claim}",
        f"- Plan: {run['plan']}",
    ]
    if run.get("ledger"):
        lines.append(
            "- On record: run {run} on the budget {budget!r} of {address}; the chain then ended "
            "at record {record}, {head}".format(**run["ledger"])
        )
    if "training_loss" in run:
        lines.append(f"- Mean training loss (not covered by the claim): {run['training_loss']:.6g}")
    lines += ["", "Not covered by the claim:", "", *(f"- {words}" for words in run["not_covered"])]
    return "\n".join([*lines, "", "```", plan.summary(), "```", ""])
