"""A training run: what is claimed for it, what that covers, and what it does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from diminuendo.planning import Plan
from diminuendo.report import html
from diminuendo.report.text import rounded_up, whole

if TYPE_CHECKING:
    from diminuendo.report.folder import Check

_BEFORE = "anything computed on the data before training: scaling, selection, tuning"
_SEEDED = "everything: the seed was fixed, so the noise can be predicted"
_FAST = (
    "rounding: the noise was the fast one, which is Gaussian in real arithmetic only. Who looks at "
    "the last bits of what is released may learn more"
)
_REVEALED = "the training loss, revealed on request"
_SCORED = (
    "the test scores: they were computed from {examples} rows that nobody stated to be public, and "
    "nothing was paid for that. Private rows need a budget and noise of their own before a score "
    "of them is published"
)
_STOPPED = (
    "a stop that somebody chose because of what the run had released: the claim is then the "
    "plan's own ε"
)


def facts(
    plan: Plan, result: Mapping[str, Any], test: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The run's public facts, with its plan's digest and what the claim leaves out.

    `test` are scores on rows that the model was not trained on, and whether those are public.
    """
    public = {name: value for name, value in result.items() if name != "training_loss"}
    not_covered = [_BEFORE] if result["private"] else [_SEEDED, _BEFORE]
    if result.get("noise") == "fast":
        not_covered.append(_FAST)
    if result["private"] and result["status"] == "interrupted":
        not_covered.append(_STOPPED)
    if result["revealed"]:
        public["training_loss"] = result["training_loss"]
        not_covered.append(_REVEALED)
    if test is not None:
        public["test"] = dict(test)
        if not test["public"]:
            not_covered.append(_SCORED.format(examples=f"{test['examples']:,}"))
    return {**public, "plan": plan.digest, "not_covered": not_covered}


def claim(run: Mapping[str, Any], checks: Sequence[Check] = ()) -> str:
    """The privacy claim in one sentence, or that a check refutes it."""
    if not run["private"]:
        return "NOT PRIVATE: the seed was fixed"
    refuted = "" if all(check.holds for check in checks) else "THE CLAIM DOES NOT HOLD: "
    unit = run.get("unit", "example")
    return (
        f"{refuted}({rounded_up(run['epsilon'])}, {_delta(run)})-differentially private for "
        f"{run['relation']} neighbours"
        + (f" (one {unit})" if unit != "example" else "")
        + ", against an adversary who sees every noisy gradient"
        + ("; in real arithmetic only (fast noise)" if run.get("noise") == "fast" else "")
    )


def _delta(run: Mapping[str, Any]) -> str:
    """δ, and what is added to it for sums whose rounding error may not have been noticed."""
    added = run.get("delta_added")
    return f"{whole(run['delta'])} + {rounded_up(added)}" if added else whole(run["delta"])


def page(plan: Plan, run: Mapping[str, Any]) -> str:
    """The report, as Markdown."""
    lines = [
        f"# Run: {run['status']} ({run['reason']})",
        "",
        f"- Steps spent: {run['steps']} of {plan.steps}",
        f"- Claim: {claim(run)}",
        f"- Plan: {run['plan']}",
    ]
    if run.get("ledger"):
        lines.append(
            "- On record: run {run} on the budget {budget!r} of {address}; the chain then ended "
            "at record {record}, {head}".format(**run["ledger"])
        )
    if run["lost"]:
        lines.append(f"- Lost in a crash: {run['lost']} of these steps, spent without effect")
    if run.get("training_loss") is not None:
        lines.append(
            f"- Mean loss of the last batch (not covered by the claim): {run['training_loss']:.6g}"
        )
    if run.get("test"):
        lines.append(f"- Test set: {_scores(run['test'])}")
    lines += ["", "Not covered by the claim:", "", *(f"- {words}" for words in run["not_covered"])]
    return "\n".join([*lines, "", "```", plan.summary(), "```", ""])


def _scores(test: Mapping[str, Any]) -> str:
    """Loss and accuracy on the test rows, and whose those are."""
    accuracy = "" if test["accuracy"] is None else f"accuracy {test['accuracy']:.4g}, "
    whose = "stated to be public" if test["public"] else "not covered by the claim"
    return f"{accuracy}mean loss {test['loss']:.6g} on {test['examples']:,} rows ({whose})"


def document(
    plan: Plan, run: Mapping[str, Any], checks: Sequence[Check] = (), picture: str = ""
) -> html.Html:
    """The report, as one HTML page; `picture` is the schedule's, as SVG."""
    cited = run.get("ledger") or {}
    facts_shown: list[tuple[object, object]] = [
        ("How it ended", f"{run['status']}: {run['reason']}"),
        ("Steps spent", f"{run['steps']} of {plan.steps}"),
        ("Plan", html.code(run["plan"])),
    ]
    if run.get("lost"):
        facts_shown.append(
            ("Lost in a crash", f"{run['lost']} of these steps, spent without effect")
        )
    if run.get("test"):
        facts_shown.append(("Test set", _scores(run["test"])))
    if cited:
        facts_shown += [
            ("Ledger", f"{cited['address']} ({cited['ledger']})"),
            ("Budget and run", f"{cited['budget']}, run {cited['run']}"),
            ("Chain head", html.code(f"{cited['head']} (record {cited['record']})")),
        ]
    sound = run["private"] and run.get("noise") != "fast" and all(c.holds for c in checks)
    tone = "good" if sound else "warning"
    sections = [
        html.Section(
            "What is claimed", html.note(claim(run, checks), tone=tone), html.facts(facts_shown)
        ),
        html.Section("What the claim does not cover", html.bullets(run["not_covered"])),
    ]
    if checks:
        rows = [[c.claim, "holds" if c.holds else "DOES NOT HOLD", c.seen] for c in checks]
        sections.append(
            html.Section("Checks made for this report", html.table(["", "", "seen"], rows))
        )
    drawn = [html.figure(picture, "Noise multiplier and spending by step")] if picture else []
    sections.append(html.Section("The plan", *drawn, html.preformatted(plan.summary())))
    return html.page("A private training run", sections, lead=claim(run, checks))
