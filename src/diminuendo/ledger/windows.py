"""Windows that renew: calendar days, weeks, months, quarters or years, in UTC.

A budget with a window has its whole limit again when the next window begins. Its claim is about
what was charged *in each window*; over k windows it is the claim of k limits (`Terms.claim_over`).
A window never comes back: a clock that was set back charges to the last window that has begun.
"""

from __future__ import annotations

import datetime
import re

from diminuendo.errors import InputError

WINDOWS = ("day", "week", "month", "quarter", "year")
_LABELS = {
    "day": re.compile(r"\d{4}-\d\d-\d\d"),
    "week": re.compile(r"\d{4}-W\d\d"),
    "month": re.compile(r"\d{4}-\d\d"),
    "quarter": re.compile(r"\d{4}-Q[1-4]"),
    "year": re.compile(r"\d{4}"),
}


def label_of(window: str, at: datetime.datetime) -> str:
    """The window in which a moment lies: 2026-11-18, 2026-W47, 2026-11, 2026-Q4 or 2026.

    Labels of one kind are in order as texts.
    """
    at = at.astimezone(datetime.UTC)
    year, week, _ = at.isocalendar()
    return {
        "day": f"{at:%Y-%m-%d}",
        "week": f"{year:04d}-W{week:02d}",
        "month": f"{at:%Y-%m}",
        "quarter": f"{at.year:04d}-Q{(at.month + 2) // 3}",
        "year": f"{at.year:04d}",
    }[window]


def label_at(window: str, at: str) -> str:
    """The same for a moment as a record states it (ISO 8601); raises ValueError for other text."""
    moment = datetime.datetime.fromisoformat(at)
    if moment.tzinfo is None:
        raise ValueError("a time without its zone")
    return label_of(window, moment)


def begin_of(window: str, label: str) -> datetime.datetime:
    """When a window begins."""
    if not _LABELS[window].fullmatch(label):
        raise InputError(f"a {window}, as in {label_of(window, now())}", name="window", value=label)
    year = int(label[:4])
    if window == "week":
        first = datetime.date.fromisocalendar(year, int(label[6:]), 1)
    elif window == "quarter":
        first = datetime.date(year, 3 * int(label[6:]) - 2, 1)
    else:
        parts = [int(part) for part in label.split("-")]
        first = datetime.date(*[*parts, 1, 1][:3])
    return datetime.datetime(first.year, first.month, first.day, tzinfo=datetime.UTC)


def end_of(window: str, label: str) -> datetime.datetime:
    """When the next window begins."""
    begin = begin_of(window, label)
    days = {"day": 1, "week": 7, "month": 31, "quarter": 92, "year": 366}[window]
    return begin_of(window, label_of(window, begin + datetime.timedelta(days=days)))


def count(window: str, first: str, last: str) -> int:
    """How many windows there are from the first to the last, both included."""
    begin, end = begin_of(window, first), begin_of(window, last)
    if window in ("day", "week"):
        return (end - begin).days // (1 if window == "day" else 7) + 1
    months = (end.year - begin.year) * 12 + end.month - begin.month
    return months // {"month": 1, "quarter": 3, "year": 12}[window] + 1


def now() -> datetime.datetime:
    """This machine's clock."""
    return datetime.datetime.now(datetime.UTC)
