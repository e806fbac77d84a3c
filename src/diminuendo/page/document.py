"""page.html, page.css and page.js as one file that needs nothing from anywhere else."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from typing import Any

from diminuendo import __version__
from diminuendo.influence.learning_rates import NAMED
from diminuendo.page import answers
from diminuendo.page.settings import COUNTS, KNOWN, LIMITS, MOST_STEPS, RELATIONS, Settings
from diminuendo.planning import SCHEDULES

HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def live(start: Settings) -> str:
    """The page that asks its server."""
    return _assembled({"start": start.as_dict(), "answer": None, "running": None})


def snapshot(settings: Settings) -> str:
    """The page as a file to keep or to send: its answers are inside, and nothing can be changed."""
    made, warned = answers.make_plan(settings)
    answer = answers.answer(settings, made, warned)
    answer["exports"] = {"plan.json": made.to_json() + "\n", **answer["exports"]}
    running = answers.running(settings, made)
    return _assembled({"start": settings.as_dict(), "answer": answer, "running": running})


def policy(page: str) -> str:
    """The page's own script and style run, nothing else; nothing is loaded or sent elsewhere."""
    script, style = (
        " ".join(_hash(text) for text in re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL))
        for tag in ("script", "style")
    )
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _assembled(facts: dict[str, Any]) -> str:
    facts["limits"] = {
        **{name: list(pair) for name, pair in LIMITS.items()},
        **{name: [1, most] for name, most in COUNTS.items()},
        "steps": [1, MOST_STEPS],
    }
    facts["choices"] = {
        "known": KNOWN,
        "lr": [*NAMED, "joint"],
        "schedule": SCHEDULES,
        "relation": RELATIONS,
    }
    facts["version"] = __version__
    text = json.dumps(facts, ensure_ascii=False).replace("<", "\\u003c")
    page = _part("page.html")
    for mark, content in (
        ("/* page.css */", _part("page.css")),
        ("/* page.js */", _part("page.js")),
        ("/* facts */", text),
    ):
        page = page.replace(mark, content, 1)
    return page


def _part(name: str) -> str:
    return resources.files("diminuendo.page").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
