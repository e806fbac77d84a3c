"""Random sequences of operations on both backends, every answer compared with a model in memory."""

from __future__ import annotations

import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from ledgers import new_database, step

from diminuendo import Budget, BudgetRefused, InputError, Ledger
from diminuendo.ledger import verify

ROOM = Fraction(Budget(epsilon=4, delta=1e-8).mu) ** 2
SIGMAS = st.sampled_from([2.0, 3.0, 5.0, 7.5, 11.0, 30.0])
COUNTS = st.integers(1, 12)


class Model:
    """A budget as a plain sum of 1/σ², and runs as lists of such costs."""

    def __init__(self) -> None:
        self.spent = Fraction(0)
        self.runs: dict[str, dict[str, Any]] = {}

    def take(self, run: dict[str, Any], costs: list[Fraction], start: bool) -> None:
        run["costs"] += costs
        self.spent += sum(costs)
        if start:
            run["started"] = len(run["costs"])

    def give_back(self, run: dict[str, Any], used: int, status: str) -> None:
        self.spent -= sum(run["costs"][used:])
        run.update(status=status, started=used, costs=run["costs"][:used])


class Machine(RuleBasedStateMachine):
    url: str

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.new_url())
        self.ledger.create("b", Budget(epsilon=4, delta=1e-8))
        self.model = Model()

    def new_url(self) -> str:
        raise NotImplementedError

    def teardown(self) -> None:
        verify(self.ledger)
        self.ledger.close()

    @rule()
    def open(self) -> None:
        run = self.ledger.open_run("b").id
        self.model.runs[run] = {"costs": [], "started": 0, "confirmed": 0, "status": "open"}

    def pick(self, data: Any) -> tuple[str, dict[str, Any]]:
        run = data.draw(st.sampled_from(sorted(self.model.runs)))
        return run, self.model.runs[run]

    @precondition(lambda self: self.model.runs)
    @rule(data=st.data(), sigma=SIGMAS, count=COUNTS, start=st.booleans(), partial=st.booleans())
    def grant(self, data: Any, sigma: float, count: int, start: bool, partial: bool) -> None:
        run, known = self.pick(data)
        one = 1 / Fraction(sigma) ** 2
        room = int((ROOM - self.model.spent) / one)
        expected = min(count, room) if partial else (count if count <= room else 0)
        event = step(sigma, count=count)
        if known["status"] != "open":
            with pytest.raises(InputError, match=known["status"]):
                self.ledger.grant(run, [event], start=start, partial=partial)
        elif expected == 0:
            with pytest.raises(BudgetRefused):
                self.ledger.grant(run, [event], start=start, partial=partial)
        else:
            answer = self.ledger.grant(run, [event], start=start, partial=partial)
            assert (answer.first, answer.steps) == (len(known["costs"]), expected)
            self.model.take(known, [one] * expected, start)

    @precondition(lambda self: self.model.runs)
    @rule(data=st.data(), upto=st.integers(0, 30), confirmed=st.integers(0, 30))
    def start(self, data: Any, upto: int, confirmed: int) -> None:
        run, known = self.pick(data)
        good = (
            known["status"] == "open"
            and known["started"] <= upto <= len(known["costs"])
            and known["confirmed"] <= confirmed <= known["started"]
        )
        if good:
            self.ledger.start(run, upto, confirmed=confirmed)
            known.update(started=upto, confirmed=confirmed)
        else:
            with pytest.raises(InputError):
                self.ledger.start(run, upto, confirmed=confirmed)

    @precondition(lambda self: self.model.runs)
    @rule(data=st.data(), back=st.integers(0, 6))
    def close(self, data: Any, back: int) -> None:
        run, known = self.pick(data)
        used = known["started"] - back
        if known["status"] == "open" and used >= known["confirmed"]:
            self.ledger.close_run(run, used=used)
            self.model.give_back(known, used, "closed")
            known["confirmed"] = used
        else:
            with pytest.raises(InputError):
                self.ledger.close_run(run, used=used)

    @precondition(lambda self: self.model.runs)
    @rule(data=st.data(), unreleased=st.booleans())
    def reclaim(self, data: Any, unreleased: bool) -> None:
        run, known = self.pick(data)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("diminuendo.ledger.process.start_time", lambda pid: "dead")
            if known["status"] == "open":
                self.ledger.reclaim(run, unreleased=unreleased)
                used = known["confirmed"] if unreleased else known["started"]
                self.model.give_back(known, used, "reclaimed")
            else:
                with pytest.raises(InputError):
                    self.ledger.reclaim(run, unreleased=unreleased)

    @rule(sigma=SIGMAS, count=COUNTS)
    def charge(self, sigma: float, count: int) -> None:
        cost = count / Fraction(sigma) ** 2
        if cost > ROOM - self.model.spent:
            with pytest.raises(BudgetRefused):
                self.ledger.charge("b", [step(sigma, count=count)])
            refused = self.ledger.runs("b")[-1]
            self.model.runs[refused.id] = {
                "costs": [], "started": 0, "confirmed": 0, "status": "closed",
            }  # fmt: skip
        else:
            run = self.ledger.charge("b", [step(sigma, count=count)]).id
            self.model.spent += cost
            self.model.runs[run] = {
                "costs": [1 / Fraction(sigma) ** 2] * count,
                "started": count,
                "confirmed": count,
                "status": "closed",
            }

    @invariant()
    def agrees(self) -> None:
        status = self.ledger.status("b")
        assert status.spent_units <= status.terms.limit
        assert float(Fraction(status.spent_units, 1 << 200)) == pytest.approx(
            float(self.model.spent), rel=1e-15, abs=1e-50
        )
        for run in self.ledger.runs("b"):
            known = self.model.runs[run.id]
            assert (run.status, run.started, run.confirmed) == (
                known["status"],
                known["started"],
                known["confirmed"],
            )
            if run.status == "open":
                assert run.granted == len(known["costs"])


def machine(new_url: Any, examples: int) -> Any:
    made: Any = type("Driven", (Machine,), {"new_url": lambda self: new_url()})
    case = made.TestCase
    case.settings = settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    return case


def test_sqlite_agrees_with_the_model() -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = (Path(folder) / f"{i}.sqlite" for i in range(10**6))
        machine(lambda: str(next(files)), 15)().runTest()


def test_postgresql_agrees_with_the_model(server: Any) -> None:
    machine(lambda: new_database(server.get_uri()), 8)().runTest()
