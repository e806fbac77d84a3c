"""A ledger as one HTML file: every budget's history, what each run cost, who, and what is left.

The page needs no network and no script.
"""

from __future__ import annotations

from html import escape
from typing import Any

from diminuendo.planning.text import rounded_up, whole

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem;
  color: #1b1f24; background: #fff } h1 { font-size: 1.5rem } h2 { margin-top: 2.5rem }
table { border-collapse: collapse; width: 100%; font-size: .9rem } td, th { text-align: left;
  padding: .3rem .6rem; border-bottom: 1px solid #d8dee4; vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
.bar { background: #e6eaef; border-radius: 4px; height: 1rem; overflow: hidden }
.bar div { background: #2458a6; height: 100% } .bad { color: #a40e26; font-weight: 600 }
.good { color: #116329 } code { overflow-wrap: anywhere } svg { width: 100%; height: 8rem }
.scroll { overflow-x: auto }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117 }
  td, th { border-color: #30363d } .bar { background: #30363d } .bar div { background: #6ea8fe }
  .bad { color: #ff8182 } .good { color: #57c26b } }
"""


def html(facts: dict[str, Any]) -> str:
    """The page for what `view.facts` says of a ledger."""
    budgets = "".join(_budget(budget) for budget in facts["budgets"])
    state = facts["verification"]
    checked = ""
    if state is not None:
        kind = "good" if state["consistent"] else "bad"
        title = "Verified" if state["consistent"] else "Not consistent"
        checked = f'<p class="{kind}">{title}: {escape(state["message"])}</p>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Privacy budgets</title><style>{_STYLE}</style></head><body>"
        f"<h1>Privacy budgets</h1><p>{escape(facts['ledger'])}, {facts['records']} records, head "
        f"<code>{escape(facts['head'])}</code></p>{checked}"
        f"{budgets or '<p>There is no budget yet.</p>'}</body></html>"
    )


def _budget(budget: dict[str, Any]) -> str:
    terms = budget["budget"]
    share = min(max(budget["spent"], 0.0), 1.0)
    left = max(1 - budget["spent"], 0.0)
    return (
        f"<section><h2>{escape(budget['name'])}</h2>{_part_of(budget.get('parent'))}"
        f'<div class="bar" role="img" aria-label="{share:.1%} spent">'
        f'<div style="width:{share:.2%}"></div></div>'
        f"<p><strong>{left:.1%} is left{_period(budget)}</strong> of ε = "
        f"{whole(terms['epsilon'])} at δ = "
        f"{whole(terms['delta'])}{_each(budget)} ({escape(terms['relation'])}, one row is one "
        f"{escape(budget['unit'])}). {_forecast(budget['forecast'])}</p>"
        f"<p>Certified, whatever was released and whenever a run stopped: "
        f"{escape(budget['claim'])}{_moment(budget)} What was charged{_period(budget)} is ε = "
        f"{rounded_up(budget['epsilon_charged'])} only if that amount had been fixed in advance."
        f"</p><p>It pays for {escape(budget['pays_for'])}.</p>"
        f"{_drawing(budget['history'])}{_runs(budget['runs'])}</section>"
    )


def _moment(budget: dict[str, Any]) -> str:
    """Said only where it is the better claim: near the limit the limit is."""
    if not budget["epsilon_odometer"]:
        return ""
    return f" At this moment, however it was chosen: ε ≤ {rounded_up(budget['epsilon_odometer'])}."


def _period(budget: dict[str, Any]) -> str:
    return f" in {escape(budget['window_now'])}" if "window_now" in budget else ""


def _each(budget: dict[str, Any]) -> str:
    if "window_now" not in budget:
        return ""
    return f" for each {escape(budget['window'])}, renewed on {escape(budget['window_ends'][:10])}"


def _part_of(parent: str | None) -> str:
    return (
        f"<p>A part of {escape(parent)}: what is charged here counts there.</p>" if parent else ""
    )


def _forecast(forecast: dict[str, Any]) -> str:
    if forecast["runs"] is None:
        return "Nothing was spent yet."
    runs = forecast["runs"]
    return (
        f"{runs} more {'run' if runs == 1 else 'runs'} like the last {forecast['like']} would fit."
    )


def _drawing(history: list[list[Any]]) -> str:
    """The share spent after each change, as a line of steps from 0 to 1."""
    if len(history) < 2:
        return ""
    width = 600 / (len(history) - 1)
    path = f"M0 {100 - 100 * min(history[0][1], 1):.1f}"
    for i, (_, share) in enumerate(history[1:], start=1):
        path += f" H{i * width:.1f} V{100 - 100 * min(share, 1):.1f}"
    label = f"Share spent, from {history[0][0][:16]} to {history[-1][0][:16]}"
    return (
        f'<svg viewBox="0 0 600 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}"><path d="{path}" fill="none" stroke="#2458a6" '
        f'stroke-width="2" vector-effect="non-scaling-stroke"/></svg><p>{escape(label)}</p>'
    )


def _runs(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "<p>No run has asked for it.</p>"
    titles = "".join(f"<th>{name}</th>" for name in ("run", "what", "who", "when", "status"))
    rows = "".join(
        f"<tr><td><code>{escape(run['run'])}</code></td><td>{escape(run['label']) or '–'}</td>"
        f"<td>{_who(run)}</td><td>{escape(run['opened'][:16])}</td><td>{escape(run['status'])}</td>"
        f'<td class="number">{run["granted"]}</td><td class="number">{run["spent"]:.2%}</td></tr>'
        for run in reversed(runs)
    )
    return (
        f'<div class="scroll"><table><thead><tr>{titles}<th class="number">steps</th>'
        f'<th class="number">cost</th></tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _who(run: dict[str, Any]) -> str:
    """The database's user where there is one, and the name that the client claims."""
    claimed = f"{escape(run['by'])} on {escape(run['host'])}"
    return f"{escape(run['db_user'])} (says: {claimed})" if run["db_user"] else claimed
