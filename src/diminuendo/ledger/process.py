"""Which user and process opened a run, and whether that process is still alive.

A process id means something only within one PID namespace (a container has its own) and since one
boot of one kernel. Both are recorded with it; elsewhere it cannot be told whether it is alive.
"""

from __future__ import annotations

import getpass
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diminuendo.ledger.state import Run


def user_name() -> str:
    """The name of the user whom the system runs this process for, or "unknown".

    Not what the environment says, where the system knows better: anybody can set $USER.
    """
    try:
        import pwd

        return pwd.getpwuid(os.getuid()).pw_name
    except (ImportError, KeyError):
        pass
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"


def this_process() -> dict[str, Any]:
    """The user and the process that run this code, as a record keeps them."""
    pid = os.getpid()
    return {
        "by": user_name(),
        "host": platform.node(),
        "pid": pid,
        "born": start_time(pid),
        "boot": _boot(),
        "namespace": _namespace(),
    }


def _boot() -> str:
    """An id that is new with every boot of the kernel; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace() -> str:
    """The PID namespace of this process; empty on systems without them."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty if it has ended or is hidden."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] in "ZX" else fields[19]


def is_this(opened: Mapping[str, Any]) -> bool:
    """Whether a run is owned by the process that runs this code."""
    here = this_process()
    names = [name for name in ("pid", "host", "boot", "namespace") if name in opened]
    return all(opened[name] == here[name] for name in names)


def is_alive(opened: Mapping[str, Any]) -> bool | None:
    """Whether the process that owns a run is alive; None if that cannot be told from here."""
    here = {"host": platform.node(), "boot": _boot(), "namespace": _namespace()}
    if any(opened.get(name) != value for name, value in here.items()):
        return None
    if sys.platform == "linux" and not (here["boot"] and here["namespace"]):
        return None
    pid = int(opened["pid"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return bool(start_time(pid) == opened["born"])


def reclaim_assumption(run: Run, unreleased: bool) -> str:
    """What a person asserts by reclaiming a run."""
    opened = run.opened
    dead = f"process {opened['pid']} on {opened['host']} is dead"
    if not unreleased:
        return f"{dead}, so that its steps from {run.started + 1} on were never released"
    return (
        f"{dead}, and nobody has seen any result of its steps from {run.confirmed + 1} on: no "
        "gradient, no checkpoint, no model"
    )
