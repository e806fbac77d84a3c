"""What an error of the database means: whether waiting may help, and what a person can do."""

from __future__ import annotations

import sqlite3

from sqlalchemy.exc import DBAPIError


def is_transient(error: DBAPIError) -> bool:
    """Whether waiting may help: the database is busy or cannot be reached."""
    words = str(error.orig).lower()
    if isinstance(error.orig, sqlite3.Error):
        return "locked" in words or "busy" in words
    state = str(getattr(error.orig, "sqlstate", None) or "")
    unreachable = state[:2] in ("08", "57") or (not state and not _is_turned_away(words))
    busy = state in ("40001", "40P01", "55P03", "25P03")
    return error.connection_invalidated or unreachable or busy


_FOR_A_WHILE = ("starting up", "shutting down", "recovery", "connection slots", "too many")
"""Why a server that can be reached turns a client away for a while only."""


def _is_turned_away(words: str) -> bool:
    """Whether a server answered that it will not let this user in: waiting does not help.

    A connection that fails has no error code, only words: "FATAL" is the server's answer. In
    another language it is not understood, and the client waits.
    """
    answered = "fatal:" in words or "authentication" in words or "no password supplied" in words
    return answered and not any(reason in words for reason in _FOR_A_WHILE)


def remedy(words: str) -> str:
    """What to do about an error with these words."""
    known = {
        "fatal:": "Look at the user, the password and the database in the ledger's URL.",
        "full": "Free some disk space and try again.",
        "readonly": "Make its file and folder writable for this user.",
        "malformed": "Restore it from a backup, and check that with `diminuendo ledger verify`.",
        "not a database": "Is this path a ledger?",
        "timeout": "Another program holds it, or the server is overloaded; try again.",
    }
    for sign, advice in known.items():
        if sign in words.lower():
            return advice
    return "Try again."
