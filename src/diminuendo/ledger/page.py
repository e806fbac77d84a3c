"""A ledger as one HTML file: every budget's history, what each run cost, who, and what is left.

The page needs no network and no script.
"""

from __future__ import annotations

from datetime import datetime
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
.scroll { overflow-x: auto } svg path { stroke: #2458a6 } svg line { stroke: #b7c0ca }
.small { font-size: .85rem; margin-top: .2rem }
@media (prefers-color-scheme: dark) { body { color: #e6edf3; background: #0d1117 }
  td, th { border-color: #30363d } .bar { background: #30363d } .bar div { background: #6ea8fe }
  .bad { color: #ff8182 } .good { color: #57c26b }
  svg path { stroke: #6ea8fe } svg line { stroke: #4a525c } }
"""


def html(facts: dict[str, Any]) -> str:
    """The page for what `view.facts` says of a ledger."""
    budgets = "".join(_budget(budget) for budget in facts["budgets"])
    state = facts["verification"]
    empty = "" if facts["damage"] else "<p>There is no budget yet.</p>"
    checked = ""
    if state is not None:
        kind = "good" if state["consistent"] else "bad"
        title = "Verified" if state["consistent"] else "Not consistent"
        checked = f'<p class="{kind}">{title}: {escape(state["message"])}</p>'
    if facts["damage"]:
        checked += f'<p class="bad">{escape(facts["damage"])}</p>'
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Privacy budgets</title><style>{_STYLE}</style></head><body>"
        f"<h1>Privacy budgets</h1><p>{escape(facts['ledger'])}, {facts['records']} records, head "
        f"<code>{escape(facts['head'])}</code></p>{checked}"
        f"{budgets or empty}</body></html>"
    )


def _budget(budget: dict[str, Any]) -> str:
    terms = budget["budget"]
    share = min(max(budget["spent"], 0.0), 1.0)
    left = max(1 - budget["spent"], 0.0)
    return (
        f"<section><h2>{escape(budget['name'])}</h2>{_part_of(budget)}"
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


def _part_of(budget: dict[str, Any]) -> str:
    """Whose part it is, and for whom."""
    words = ""
    if parent := budget.get("parent"):
        words += f"<p>A part of {escape(parent)}: what is charged here counts there.</p>"
    if members := budget.get("members"):
        words += f"<p>Only for {escape(', '.join(members))}.</p>"
    if parts := budget["parts"]:
        each = ", ".join(f"{escape(name)} ({share:.2%})" for name, share in parts.items())
        words += f"<p>Spent by its parts: {each}.</p>"
    return words


def _forecast(forecast: dict[str, Any]) -> str:
    if forecast["runs"] is None:
        return "Nothing was spent yet."
    runs = forecast["runs"]
    return (
        f"{runs} more {'run' if runs == 1 else 'runs'} like the last {forecast['like']} would fit."
    )


def _drawing(history: list[list[Any]]) -> str:
    """The share spent over time, as a line of steps from nothing to the limit."""
    if len(history) < 2:
        return ""
    times = _seconds([at for at, _ in history])
    span = times[-1] - times[0]
    path = f"M0 {_height(history[0][1])}"
    for i, (_, share) in enumerate(history[1:], start=1):
        part = (times[i] - times[0]) / span if span > 0 else i / (len(history) - 1)
        path += f" H{600 * min(max(part, 0.0), 1.0):.1f} V{_height(share)}"
    label = (
        f"Share spent, from nothing to the limit, {_time(history[0][0])} to {_time(history[-1][0])}"
    )
    return (
        f'<svg viewBox="0 0 600 104" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}"><line x1="0" y1="2" x2="600" y2="2" '
        'stroke-dasharray="6 6" vector-effect="non-scaling-stroke"/>'
        '<line x1="0" y1="102" x2="600" y2="102" vector-effect="non-scaling-stroke"/>'
        f'<path d="{path}" fill="none" stroke-width="2" vector-effect="non-scaling-stroke"/></svg>'
        f'<p class="small">{escape(label)} UTC</p>'
    )


def _seconds(moments: list[str]) -> list[float]:
    """Moments on one scale; evenly spread where somebody has damaged one."""
    try:
        return [datetime.fromisoformat(moment).timestamp() for moment in moments]
    except ValueError:
        return [float(i) for i in range(len(moments))]


def _height(share: float) -> str:
    return f"{102 - 100 * min(max(share, 0.0), 1.0):.1f}"


def _time(text: str) -> str:
    """Date and minute of a moment in a record."""
    return escape(text[:16].replace("T", " "))


def _runs(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "<p>No run has asked for it.</p>"
    names = ("run", "budget", "what", "who", "when (UTC)", "status")
    titles = "".join(f"<th>{name}</th>" for name in names)
    rows = "".join(
        f"<tr><td><code>{escape(run['run'])}</code></td><td>{escape(run['budget'])}</td>"
        f"<td>{escape(run['label']) or '–'}</td><td>{_who(run)}</td>"
        f"<td>{_time(run['opened'])}</td><td>{escape(run['status'])}</td>"
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
