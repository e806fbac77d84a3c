"""The sums of a chain of records, computed from the records alone, each of which is checked."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from diminuendo.errors import DiminuendoError, LedgerError
from diminuendo.ledger import approval, windows
from diminuendo.ledger.capacity import is_of_window, refund_of, refund_to_parent
from diminuendo.ledger.records import START, canonical, digest_of, start_of, unpack
from diminuendo.ledger.state import CLOSED, OPEN, RECLAIMED, RELEASED
from diminuendo.ledger.terms import Terms

_SLACK = 45
"""Rényi prices computed on another machine may differ in their last bits: by 2⁻⁴⁵ at most."""


@dataclass
class Account:
    """A run, as the records describe it."""

    budget: str
    opened: dict[str, Any]
    status: str = OPEN
    granted: int = 0
    started: int = 0
    confirmed: int = 0
    spent: int = 0
    nonce: str = ""
    grants: list[Mapping[str, Any]] = field(default_factory=list)
    proposed: dict[str, Any] = field(default_factory=dict)
    """The request that the run's last record proposes, if it does."""
    window: str = ""
    """For a run without a plan: the window of its grants."""
    shares: dict[str, int] = field(default_factory=dict)
    """What the run cost each budget that its own is a part of."""

    def drop_confirmed_grants(self) -> None:
        """The cost of confirmed steps cannot be given back any more."""
        while self.grants and self.grants[0]["first"] + self.grants[0]["steps"] <= self.confirmed:
            del self.grants[0]


class Replay:
    """Adds up records in order, and raises LedgerError at the first bad one."""

    def __init__(self, ledger: str) -> None:
        self.ledger = ledger
        self.seq, self.digest = 0, start_of(ledger)
        self._at = ""
        self.terms: dict[str, Terms] = {}
        self.spent: dict[str, int] = {}
        """What is spent of each budget, in its last window if it has windows."""
        self.total: dict[str, int] = {}
        """The same in all windows together."""
        self.windows: dict[str, tuple[str, str]] = {}
        """The first and the last window of each budget that has windows."""
        self._latest = windows.now() + datetime.timedelta(days=1)
        self.steps: dict[str, int] = {}
        self.runs: dict[str, Account] = {}
        self._proposals: dict[str, dict[str, Any]] = {}
        self._made_by: dict[str, tuple[str, str]] = {}
        """The import that created a budget: the ledger that it came from, and its head."""
        self._due: list[tuple[str, str, int, str | None]] = []
        """Budgets that the last record's charge is to be shared with: name, run, least cost, and
        the window that it is charged to."""

    def to_dict(self) -> dict[str, Any]:
        """Everything that `from_dict` needs to go on after the last record, as JSON values."""
        return {
            "ledger": self.ledger,
            "seq": self.seq,
            "digest": self.digest,
            "terms": {name: terms.to_dict() for name, terms in self.terms.items()},
            "spent": {name: str(spent) for name, spent in self.spent.items()},
            "total": {name: str(total) for name, total in self.total.items()},
            "windows": self.windows,
            "steps": self.steps,
            "due": self._due,
            "proposals": self._proposals,
            "made_by": self._made_by,
            "runs": {run: {**asdict(a), "spent": str(a.spent)} for run, a in self.runs.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Replay:
        """The sums as they were when `to_dict` was called."""
        replay = cls(data["ledger"])
        replay.seq, replay.digest = data["seq"], data["digest"]
        replay.terms = {name: Terms.from_dict(terms) for name, terms in data["terms"].items()}
        replay.spent = {name: int(spent) for name, spent in data["spent"].items()}
        replay.total = {name: int(total) for name, total in data["total"].items()}
        replay.windows = {name: (first, last) for name, (first, last) in data["windows"].items()}
        replay.steps = dict(data["steps"])
        replay._proposals = dict(data["proposals"])
        replay._made_by = {name: (a, b) for name, (a, b) in data["made_by"].items()}
        replay._due = [tuple(entry) for entry in data["due"]]
        replay.runs = {
            run: Account(**{**account, "spent": int(account["spent"])})
            for run, account in data["runs"].items()
        }
        return replay

    def end(self) -> None:
        """Raise LedgerError if the last record's charge was not shared with all it is due to."""
        _require(not self._due, "What the last record cost is not shared with its parents.")

    def feed(self, row: Mapping[str, Any]) -> None:
        """Check one record and add it to the sums."""
        where = f"record {row['seq']} ({row['kind']} at {row['at']})"
        if row["seq"] != self.seq + 1:
            raise LedgerError(
                f"Record {self.seq + 1} is missing or out of place: after record {self.seq} comes "
                f"{where}."
            )
        named = f"{where[0].upper()}{where[1:]}"
        try:
            body = row["body"] if isinstance(row["body"], str) else canonical(row["body"])
            digest = digest_of(
                row["seq"],
                row["at"],
                row["kind"],
                row["budget"],
                row["run"],
                row["token"],
                body,
                row["previous"],
            )
        except (ValueError, RecursionError) as error:
            raise LedgerError(f"{named} is not a record: {type(error).__name__}.") from None
        first = self.seq == 0 and row["previous"] == START
        if row["previous"] != self.digest and not first:
            raise LedgerError(f"The chain breaks before {where}: it does not follow the last one.")
        if digest != row["digest"]:
            raise LedgerError(f"{named} was changed: its digest does not match.")
        try:
            content = _parsed(row["body"])
            _require_same_user(content)
            self._at = row["at"]
            self._apply(row["kind"], row["budget"], row["run"], row["token"], content)
            self._compare_sums(row["budget"], row["run"], content.get("after"))
        except LedgerError as error:
            raise LedgerError(f"{named} is wrong: {error}") from None
        except (DiminuendoError, KeyError, TypeError, ValueError) as error:
            raise LedgerError(f"{named} makes no sense: {error}") from None
        self.seq, self.digest = row["seq"], digest

    def _apply(self, kind: str, budget: str, run: str, token: str, body: Mapping[str, Any]) -> None:
        _require(kind == "share" or not self._due, "what the last record cost is not shared")
        if kind == "share":
            self._share(budget, body)
        elif kind == "create":
            _require(budget not in self.terms, "its budget was created before")
            terms = Terms.from_dict(body["terms"])
            self._check_approval(terms, "create", body, ("terms",))
            self._create(budget, terms)
        elif kind == "propose" and not run:
            self._proposals[budget] = dict(body)
        elif kind == "import":
            self._check_approval(Terms.from_dict(body["terms"]), "import", body, _IMPORTED)
            if budget not in self.terms:
                self._create(budget, Terms.from_dict(body["terms"]))
            self._spend(budget, int(body["cost"]), over=bool(body["overspend"]))
            _require(int(body["steps"]) >= 0, "its steps are negative")
            self.steps[budget] += int(body["steps"])
        elif kind == "anchor":
            _require(int(body["seq"]) > 0, "it anchors nothing")
        elif kind == "upgrade":
            _require(body["ledger"] == self.ledger, "its ledger is another one")
        elif kind == "open":
            _require(budget in self.terms and run not in self.runs, "its budget or run is unknown")
            self._check_member(budget, body)
            self.runs[run] = Account(budget, _without_sums(body))
        else:
            account = self.runs[run]
            _require(account.status == OPEN and account.budget == budget, "its run is not open")
            {
                "propose": self._propose,
                "resume": self._resume,
                "grant": self._grant,
                "start": self._start,
                "close": self._end,
                "reclaim": self._end,
                "release": self._end,
            }[kind](kind, account, body, run)
            if kind != "propose":
                account.proposed = {}
            if kind == "start" or (kind == "grant" and body["started"]):
                account.nonce = token

    def _compare_sums(self, budget: str, run: str, stated: Mapping[str, Any] | None) -> None:
        """What a record says of the sums after it must be what the records add up to."""
        if stated is None:
            return
        if "spent" in stated:
            _require(int(stated["spent"]) == self.spent[budget], "it states another sum")
            window = self.windows.get(budget)
            _require(stated.get("window") == (window and [*window]), "it states another window")
        if "run" in stated:
            a = self.runs[run]
            sums = [a.status, a.granted, a.started, a.confirmed, str(a.spent), a.opened["turn"],
                    a.nonce]  # fmt: skip
            _require(stated["run"] == sums, "it states other counts of its run")

    def _create(self, name: str, terms: Terms) -> None:
        _require(terms.name == name, "its terms are of another budget")
        _require(terms.parent is None or terms.parent in self.terms, "its parent is unknown")
        self.terms[name], self.spent[name], self.steps[name] = terms, 0, 0
        self.total[name] = 0
        if terms.window is not None:
            label = windows.label_at(terms.window, self._at)
            self.windows[name] = label, label

    def _renew(self, name: str) -> str | None:
        """Begin the next window of a budget if the record is of a later one than its last.

        Returns the window that the record is charged to; None for a budget without windows.
        """
        kind = self.terms[name].window
        if kind is None:
            return None
        first, last = self.windows[name]
        label = windows.label_at(kind, self._at)
        if label > last:
            early = label > windows.label_of(kind, self._latest)
            _require(not early, f"it is charged to {label}, which has not begun yet")
            self.windows[name], self.spent[name] = (first, label), 0
        return self.windows[name][1]

    def _check_approval(
        self, terms: Terms, action: str, body: Mapping[str, Any], names: tuple[str, ...]
    ) -> None:
        """What a budget wants two people for was proposed by another, and is done once."""
        known = self.terms.get(terms.name)
        origin = (str(body.get("origin")), str(body.get("digest")))
        if known is None:
            others = {n: t for n, t in self.terms.items() if self._made_by.get(n) != origin}
            asked = approval.guardian_among(others, terms)
        else:
            asked = known.name if known.two_persons else None
        if known is None and action == "import":
            self._made_by[terms.name] = origin
        if asked is not None:
            first = self._proposals.get(asked, {})
            done = first.setdefault("done", [])
            good = approval.is_approved(first, action, body, names) and terms.name not in done
            _require(good, "it needs two people")
            done.append(terms.name)

    def _propose(self, kind: str, account: Account, body: Mapping[str, Any], run: str) -> None:
        del kind, run
        account.proposed = {
            name: body[name] for name in ("user", "unreleased", "action") if name in body
        }

    def _check_member(self, budget: str, body: Mapping[str, Any]) -> None:
        members = self.terms[budget].members
        _require(not members or body.get("member") in members, "its user is no member")

    def _above(self, budget: str) -> list[str]:
        """The budgets that a budget is a part of, the nearest first."""
        names: list[str] = []
        parent = self.terms[budget].parent
        while parent is not None:
            names.append(parent)
            parent = self.terms[parent].parent
        return names

    def _share(self, budget: str, body: Mapping[str, Any]) -> None:
        """A charge to, or a return from, one of a budget's parts."""
        _require(bool(self._due), "nothing is to be shared")
        name, run, least, window = self._due.pop(0)
        cost = int(body["cost"])
        if window is not None:
            _require(self._renew(budget) == (window or None), "it is charged to another window")
        _require((budget, body["run"]) == (name, run), "it is shared with another budget")
        _require(cost >= least and (cost <= 0 or least > 0), "its share is too small")
        self.spent[budget] += cost
        self.total[budget] += cost
        shares = self.runs[run].shares
        shares[budget] = shares.get(budget, 0) + cost
        _require(
            self.spent[budget] >= 0
            and (cost <= 0 or self.spent[budget] <= self.terms[budget].limit),
            "it goes over the budget",
        )

    def _spend(self, budget: str, cost: int, *, over: bool = False) -> None:
        _require(cost >= 0, "its cost is negative")
        self._renew(budget)
        self.spent[budget] += cost
        self.total[budget] += cost
        within = self.spent[budget] <= self.terms[budget].limit
        _require(over or within, "it goes over the budget")

    def _resume(self, kind: str, account: Account, body: Mapping[str, Any], run: str) -> None:
        del kind, run
        _require(body["turn"] == account.opened["turn"] + 1, "its generation is not the next one")
        self._check_member(account.budget, body)
        account.opened.update(_without_sums(body))

    def _grant(self, kind: str, account: Account, body: Mapping[str, Any], run: str) -> None:
        del kind
        terms, events = self.terms[account.budget], unpack(body["events"])
        cost, steps = int(body["cost"]), sum(event.count for event in events)
        price = sum(terms.costs(events))
        _require(cost >= price - _slack(terms, price), "it cost less than its events do")
        _require((body["first"], body["steps"]) == (account.granted, steps), "its steps differ")
        self._spend(account.budget, cost)
        charged_to = self._windows_of(account, body)
        self.steps[account.budget] += steps
        account.spent += cost
        account.granted += steps
        confirmed = int(body["confirmed"])
        _require(account.confirmed <= confirmed <= account.started, "it confirms too much")
        account.confirmed = confirmed
        if body["started"]:
            account.started = account.granted
        account.grants.append(body)
        account.drop_confirmed_grants()
        for name, window in zip(self._above(account.budget), charged_to[1:], strict=True):
            price = sum(self.terms[name].costs(events))
            self._due.append((name, run, price - _slack(self.terms[name], price), window))

    def _windows_of(self, account: Account, body: Mapping[str, Any]) -> list[str]:
        """The windows that a grant says it is charged to, for its own budget and those above."""
        names = [account.budget, *self._above(account.budget)]
        if not any(name in self.windows for name in names):
            return [""] * len(names)
        labels = [str(label) for label in body["windows"]]
        _require(len(labels) == len(names), "its windows are of other budgets")
        own = self.windows.get(account.budget, ("", ""))[1]
        _require(labels[0] == own, "it is charged to another window")
        if own and not account.opened.get("plan"):
            _require(account.window in ("", own), "a run without a plan goes on in another window")
            account.window = own
        return labels

    def _start(self, kind: str, account: Account, body: Mapping[str, Any], run: str) -> None:
        del kind, run
        upto, confirmed = int(body["upto"]), int(body["confirmed"])
        _require(account.started <= upto <= account.granted, "it starts what was not granted")
        _require(account.confirmed <= confirmed <= account.started, "it confirms too much")
        account.started, account.confirmed = upto, confirmed
        account.drop_confirmed_grants()

    def _end(self, kind: str, account: Account, body: Mapping[str, Any], run: str) -> None:
        used, returned = int(body["used"]), int(body["returned"])
        terms = self.terms[account.budget]
        if kind == "reclaim" and terms.two_persons:
            seconded = approval.is_approved(account.proposed, kind, body, ("unreleased",))
            _require(seconded, "it needs two people")
        _require(account.confirmed <= used <= account.started, "it returns what was used")
        alone = kind == "close" and terms.two_persons and used < account.started
        _require(not alone, "it returns what was started, which needs two people")
        last = self.windows.get(account.budget, ("", ""))[1]
        unused = sum(
            refund_of(terms, grant, used)
            for grant in account.grants
            if is_of_window(grant, 0, last)
        )
        for level, name in enumerate(self._above(account.budget), start=1):
            above, last = self.terms[name], self.windows.get(name, ("", ""))[1]
            back = sum(
                refund_to_parent(above, grant, used)
                for grant in account.grants
                if is_of_window(grant, level, last)
            )
            self._due.append((name, run, -back - _slack(above, back), None))
        most = min(unused + _slack(terms, unused), account.spent)
        _require(0 <= returned <= most, "it returns more than is unused")
        account.spent -= returned
        self.spent[account.budget] -= returned
        self.total[account.budget] -= returned
        self.steps[account.budget] -= account.granted - used
        account.started = used
        if kind == "close":
            account.confirmed = used
        account.status = {"close": CLOSED, "reclaim": RECLAIMED, "release": RELEASED}[kind]
        account.grants = []


_IMPORTED = ("origin", "seq", "digest", "overspend")
"""What is the same in the proposal of an import and in the import."""


def _require_same_user(body: Mapping[str, Any]) -> None:
    """Where the database knows its user, nobody else is named as the one who asked."""
    if "db_user" in body and "user" in body:
        _require(body["user"] == body["db_user"], "it names another user than the database's")


def _slack(terms: Terms, cost: int) -> int:
    return 0 if terms.order is None else cost >> _SLACK


def _without_sums(body: Mapping[str, Any]) -> dict[str, Any]:
    """What an open or resume record says of the run's owner."""
    return {name: value for name, value in body.items() if name not in ("after", "db_user")}


def _parsed(body: Any) -> Mapping[str, Any]:
    content = json.loads(body) if isinstance(body, str) else body
    _require(isinstance(content, Mapping), "its body is not an object")
    return dict(content)


def _require(good: bool, words: str) -> None:
    if not good:
        raise LedgerError(words)
