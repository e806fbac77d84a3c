"""Who is asking, from which process, and whether that process still lives."""

from __future__ import annotations

import getpass
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diminuendo.ledger.rows import Run


def person() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def here() -> dict[str, Any]:
    """Who asks, and from which process."""
    pid = os.getpid()
    return {"by": person(), "host": platform.node(), "pid": pid, "born": born(pid)}


def born(pid: int) -> str:
    """When a process was started, as the kernel counts; empty where it is over or unreadable."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def alive(opened: Mapping[str, Any]) -> bool:
    """Whether the process that opened a run is known to be alive: only on its own machine."""
    pid = int(opened["pid"])
    if opened["host"] != platform.node():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return bool(born(pid) == opened["born"])


def assumption(run: Run, unreleased: bool) -> str:
    """What a person says by releasing a run."""
    opened = run.opened
    dead = f"process {opened['pid']} on {opened['host']} is dead"
    if not unreleased:
        return f"{dead}, so that its steps from {run.started + 1} on were never released"
    return (
        f"{dead}, and nobody has seen anything of its steps from {run.confirmed + 1} on: no "
        "gradient, no checkpoint, no model"
    )
