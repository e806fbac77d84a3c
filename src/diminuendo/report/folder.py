"""A finished run's folder, read back: what it claims, and whether that can still be confirmed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diminuendo import _files, accounting, events
from diminuendo.errors import DiminuendoError, InputError
from diminuendo.events import GaussianStep
from diminuendo.ledger import Ledger, verify
from diminuendo.planning import Plan

_NEEDED = ("status", "reason", "steps", "epsilon", "delta", "relation", "private", "plan")


@dataclass(frozen=True)
class Check:
    """Something that a report claims, whether it holds, and how that was seen."""

    claim: str
    holds: bool
    seen: str


@dataclass(frozen=True)
class Folder:
    """What `diminuendo train` wrote."""

    plan: Plan
    run: Mapping[str, Any]
    events: tuple[GaussianStep, ...]

    @classmethod
    def read(cls, path: str | Path) -> Folder:
        """The folder of a finished run; InputError where one of its files is missing or damaged."""
        folder = Path(path)
        plan = Plan.from_json(
            _files.read_text(folder / "plan.json", name="the run's plan"),
            source=str(folder / "plan.json"),
        )
        run = _json(folder / "result.json", dict)
        missing = [name for name in _NEEDED if name not in run]
        if missing:
            raise InputError(
                f"a result with {', '.join(_NEEDED)}",
                name=str(folder / "result.json"),
                value=f"one without {', '.join(missing)}",
            )
        released = _json(folder / "events.json", list)
        return cls(plan, run, tuple(events.from_dict(event) for event in released))

    def checks(self, ledger: Ledger | None) -> list[Check]:
        """The plan is the run's, ε covers the events, and the ledger has them on record."""
        run, accounted = self.run, self.epsilon()
        steps = sum(event.count for event in self.events)
        found = [
            Check(
                "the plan is the one that was run",
                self.plan.digest == run["plan"],
                f"digest {self.plan.digest}",
            ),
            Check(
                "as many steps were spent as events were written",
                steps == run["steps"],
                f"{steps} events, {run['steps']} steps",
            ),
            Check(
                "ε covers the events, accounted anew",
                accounted <= run["epsilon"] * (1 + 1e-9),
                f"{accounted:.6g} accounted, {run['epsilon']:.6g} claimed",
            ),
        ]
        return found if ledger is None else [*found, *self._on_record(ledger)]

    def epsilon(self) -> float:
        """The events' ε at the run's δ and relation."""
        terms = {"delta": self.run["delta"], "relation": self.run["relation"]}
        return accounting.claim(self.events, replace(self.plan.budget, conversion="exact", **terms))

    def _on_record(self, ledger: Ledger) -> list[Check]:
        cited = self.run["ledger"]
        try:
            verified = verify(ledger, cited=[cited["head"]])
            whole = Check(
                "the ledger is whole and has the cited head",
                True,
                f"{verified.records} records verified, {cited['head']} among them",
            )
        except DiminuendoError as error:
            return [Check("the ledger is whole and has the cited head", False, str(error))]
        paid = [ledger.run(run) for run in cited["runs"]]
        spent = sum(account.started for account in paid if account.budget == cited["budget"])
        return [
            whole,
            Check(
                "the run's steps are on record",
                spent >= self.run["steps"],
                f"{spent} steps on {cited['budget']!r}, in {len(paid)} runs of the ledger",
            ),
        ]


def _json(path: Path, kind: type) -> Any:
    data = _files.parse_json(
        _files.read_text(path, name="the run's result"), name=path.name, source=str(path)
    )
    if not isinstance(data, kind):
        raise InputError(f"a JSON {kind.__name__}", name=str(path), value=type(data).__name__)
    return data
