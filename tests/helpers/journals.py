"""Runs with a journal, copied and killed at any moment, for the tests of the ledger."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from ledgers import in_child, step

import diminuendo as dim
from diminuendo import Budget, Ledger, PlanWarning, _files
from diminuendo.ledger import LedgerSpending, verify
from diminuendo.planning import Plan


def wait_for_a_release(log: Path, size: int) -> None:
    """So that some kills come late enough, however busy the machine is."""
    end = time.monotonic() + 300
    while log.stat().st_size == size and time.monotonic() < end:
        time.sleep(0.001)


def spend_with_a_journal(url: str, folder: Path, log: Path) -> None:
    """Take the steps of a plan; each is in the log once released. Starts or resumes."""
    journal, sigmas = folder / "journal", [200.0] * 400
    plan = replace(small_plan(), sigmas=np.array(sigmas))
    ledger = Ledger(url)
    spending = LedgerSpending(ledger, "b", plan, block=7)
    kept = json.loads(journal.read_text()) if journal.exists() else None
    coming = [step(200.0)] * 400
    if kept is None:
        spending.resume()
    else:
        done = sum(event["count"] for event in kept["state"]["granted"])
        spending.resume(
            kept["state"], seen=kept["upto"], receipt=kept["receipt"], events=coming[done:]
        )
    reserved = 0
    for number in range(spending.steps, len(sigmas)):
        spending.request(step(200.0))
        if number >= reserved:
            reserved = number + 5
            content = {
                "state": spending.state(),
                "receipt": spending.receipt(reserved),
                "upto": reserved,
            }
            _files.write_text(journal, json.dumps(content))
        with log.open("a") as handle:
            handle.write(f"{number}\n")


def on_another_host(work: Callable[[], None]) -> None:
    """Work that cannot tell which processes of this machine are alive."""
    from diminuendo.ledger import process

    process._boot = lambda: "another"
    work()


def older_copies(url: str, folder: Path, times: int, *, elsewhere: bool = False) -> None:
    """Copy the journal at a random moment, kill, resume the copy: no step is released twice.

    elsewhere  the original is not killed before the copy goes on, on another host
    """
    chance, log = random.Random(2), folder / "log"
    ledger = Ledger(url)
    for i in range(times):
        original, copy = folder / f"original-{i}", folder / f"copy-{i}"
        original.mkdir()
        copy.mkdir()
        log.write_text("")
        child = in_child(lambda original=original: spend_with_a_journal(url, original, log))  # type: ignore[misc]
        wait_for_a_release(log, 0)
        time.sleep(chance.uniform(0, 0.05))
        if (original / "journal").exists():
            shutil.copy(original / "journal", copy / "journal")
        time.sleep(chance.uniform(0, 0.05))
        children = [child]
        if not elsewhere:
            end(children)
        children.append(in_child(functools.partial(resume_copy, url, copy, log, elsewhere)))
        time.sleep(chance.uniform(0.05, 0.2))
        end(children)
        run = ledger.runs("b")[-1]
        steps = [int(line) for line in log.read_text().splitlines() if line]
        if (copy / "journal").exists():
            assert len(steps) == len(set(steps)), (i, run.id)
        for open_run in ledger.runs("b"):
            if open_run.status == "open":
                ledger.reclaim(open_run.id, unreleased=True, dead=True)
    verify(ledger)


def resume_copy(url: str, copy: Path, log: Path, elsewhere: bool) -> None:
    """Go on with a copy of the journal, if there was anything to copy."""
    work = functools.partial(spend_with_a_journal, url, copy, log)
    if elsewhere and not (copy / "journal").exists():
        return
    on_another_host(work) if elsewhere else work()


def end(children: list[int]) -> None:
    """Kill them, and forget them."""
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    children.clear()


def small_plan() -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PlanWarning)
        return dim.plan(Budget(epsilon=4, delta=1e-8), examples=30, parameters=15, steps=400)
