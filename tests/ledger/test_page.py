"""The page in a file, over HTTP, and in a real browser."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ledgers import execute, step

from diminuendo import Budget, BudgetRefused, Ledger
from diminuendo.cli import main
from diminuendo.ledger import page, serve, view
from diminuendo.ledger.replay import Replay

NAME, LABEL = "<b>patients</b>", "<script>document.title = 'owned'</script>"
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


@pytest.fixture
def book(ledger: Ledger) -> Ledger:
    """A budget with three runs, of which the last is open."""
    ledger.create(NAME, Budget(epsilon=4, delta=1e-8), unit="patient")
    ledger.charge(NAME, [step(20.0, count=40)], label=LABEL)
    ledger.charge(NAME, [step(20.0, count=40)], label="=1+1")
    ledger.grant(ledger.open_run(NAME).id, [step(20.0, count=40)])
    return ledger


def test_the_facts(book: Ledger) -> None:
    facts = view.facts(book)
    assert facts["verification"]["consistent"] is True
    budget = facts["budgets"][0]
    assert budget["spent"] == pytest.approx(3 * 40 / 400 / 0.51344, rel=1e-4)
    assert budget["forecast"] == {"runs": 2, "like": 3}
    assert [share for _, share in budget["history"]] == sorted(
        share for _, share in budget["history"]
    )
    assert budget["history"][-1][1] == pytest.approx(budget["spent"])
    assert [run["status"] for run in budget["runs"]] == ["closed", "closed", "open"]
    assert budget["epsilon_charged"] < budget["epsilon_odometer"]
    assert budget["epsilon_certified"] == 4
    assert json.loads(json.dumps(facts)) == facts
    assert "'=1+1" in view.runs_csv(facts["budgets"])


def test_a_parent_shows_the_runs_of_its_parts(ledger: Ledger) -> None:
    """And a part's forecast looks at what is left above it."""
    ledger.create("people", Budget(epsilon=1, delta=1e-8))
    ledger.create("part", Budget(epsilon=4, delta=1e-8), parent="people")
    ledger.create("other", Budget(epsilon=4, delta=1e-8), parent="people")
    for name in ("part", "other", "part"):
        ledger.charge(name, [step(50.0, count=10)], label="sums")
    people, part = (view.budget_facts(ledger, ledger.status(name)) for name in ("people", "part"))
    assert [run["budget"] for run in people["runs"]] == ["part", "other", "part"]
    assert sum(people["parts"].values()) == pytest.approx(people["spent"])
    assert people["parts"]["part"] == pytest.approx(2 * people["parts"]["other"])
    one = people["runs"][0]
    assert (one["spent"] * 3, one["spent_of"]) == (pytest.approx(people["spent"]), "people")
    fit = people["forecast"]["runs"]
    assert part["forecast"] == {"runs": fit, "like": 2}
    for _ in range(fit):
        ledger.charge("part", [step(50.0, count=10)])
    with pytest.raises(BudgetRefused):
        ledger.charge("part", [step(50.0, count=10)])
    text = page.html(view.facts(ledger))
    assert "Spent by its parts: part (" in text
    assert "Nothing was spent yet" not in text


def test_damage_is_on_the_page(book: Ledger) -> None:
    execute(book, "UPDATE diminuendo_records SET at = 'then' WHERE seq = 2")
    text = page.html(view.facts(book))
    assert 'class="bad">Not consistent: Record 2' in text


def test_nothing_on_the_page_is_markup_of_others(book: Ledger) -> None:
    text = page.html(view.facts(book))
    assert "&lt;b&gt;patients" in text
    assert "<script" not in text
    assert "<b>patients" not in text


def test_a_file_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIMINUENDO_LEDGER", str(tmp_path / "l.sqlite"))
    assert main(["ledger", "create", "p", "--epsilon", "4", "--delta", "1e-8"]) == 0
    output = tmp_path / "budget.html"
    assert main(["ledger", "page", "-o", str(output)]) == 0
    assert "100.0% is left" in output.read_text()
    assert stat.S_IMODE(output.stat().st_mode) == 0o600


@pytest.fixture
def client(book: Ledger, url: str) -> Any:
    pytest.importorskip("httpx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would rather have another client
        from starlette.testclient import TestClient

    del book
    return TestClient(serve.application(url, token="let me in"), base_url="http://localhost")


def test_reading_over_http(client: Any) -> None:
    assert "&lt;b&gt;patients" in client.get("/").text
    budget = client.get("/api/ledger").json()["budgets"][0]
    assert budget["name"] == NAME
    assert client.get("/api/verify").json()["consistent"] is True
    assert client.get("/api/budgets/nobody").status_code == 400
    described = client.get("/openapi.json").json()
    assert described["openapi"].startswith("3.1")
    served = {route.path for route in client.app.routes} - {"/", "/openapi.json"}
    assert set(described["paths"]) == served
    assert set(described["paths"]["/api/budgets"]) == {"get", "post"}
    assert [one["name"] for one in client.get("/api/budgets").json()] == [NAME]
    lines = client.get("/api/runs.csv").text.splitlines()
    assert (lines[0].split(",")[0], len(lines)) == ("run", 4)


def test_a_server_reads_each_record_once(
    client: Any, book: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a ledger that was put back behind what it has verified is not consistent."""
    assert client.get("/api/verify").json()["consistent"] is True
    fed: list[int] = []
    feed = Replay.feed

    def counted(self: Replay, row: Any) -> None:
        fed.append(row["seq"])
        feed(self, row)

    monkeypatch.setattr(Replay, "feed", counted)
    book.charge(NAME, [step(1e3)])
    assert client.get("/api/verify").json()["consistent"] is True
    assert len(fed) == 3
    execute(book, "DELETE FROM diminuendo_records WHERE seq > 3")
    assert client.get("/api/verify").json()["consistent"] is False
    text = client.get("/").text
    assert "Not consistent" in text
    assert "changed the database by hand" in text


def test_a_budget_with_everything_over_http(client: Any, book: Ledger) -> None:
    good = {"Authorization": "Bearer let me in"}
    terms = {"name": "stats", "epsilon": 4.0, "delta": 1e-6, "composition": "renyi", "order": 8,
             "window": "year", "two_persons": True}  # fmt: skip
    assert client.post("/api/budgets", json=terms, headers=good).json()["window"] == "year"
    laplace = {"mechanism": "laplace", "parameters": {"scale": 50.0}, "count": 2, "label": "mean"}
    answer = client.post("/api/budgets/stats/charge", json=laplace, headers=good)
    assert answer.json()["spent"] == book.status("stats").spent > 0
    history = client.get("/api/budgets/stats/history.csv").text.splitlines()
    assert history[0] == "budget,at,spent"
    assert len(history) == 3
    wrong = [{"mechanism": "magic"}, {"mechanism": "laplace"}, {"count": 3}, {},
             {**laplace, "noise_multiplier": 3.0}, {**laplace, "parameters": 3}]  # fmt: skip
    for bad in wrong:
        assert client.post("/api/budgets/stats/charge", json=bad, headers=good).status_code == 400
    assert client.post("/api/budgets", json={"name": "x"}, headers=good).status_code == 400


def test_writing_needs_the_token(client: Any, book: Ledger, url: str) -> None:
    terms = {"name": "new", "epsilon": 1.0, "delta": 1e-6}
    charge = {"noise_multiplier": 50.0, "count": 2, "label": "a mean"}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "let me in"}):
        assert client.post("/api/budgets", json=terms, headers=headers).status_code == 403
    good = {"Authorization": "Bearer let me in"}
    assert client.post("/api/budgets", json=terms, headers=good).json()["name"] == "new"
    answer = client.post("/api/budgets/new/charge", json=charge, headers=good)
    assert answer.json()["spent"] == book.status("new").spent > 0
    much = client.post("/api/budgets/new/charge", json={"noise_multiplier": 0.1}, headers=good)
    assert (much.status_code, "left" in much.json()["error"]) == (409, True)
    for bad in ({"noise_multiplier": -1}, {"sigma": 1}, [1], {"noise_multiplier": "x"}):
        answer = client.post("/api/budgets/new/charge", json=bad, headers=good)
        assert answer.status_code == 400, bad
    assert client.post("/api/budgets", content=b"{", headers=good).status_code == 400
    readers = type(client)(serve.application(url), base_url="http://localhost")
    assert readers.post("/api/budgets", json=terms, headers=good).status_code == 403
    assert readers.get("/", headers={"Host": "evil.example"}).status_code == 400


@pytest.fixture
def served(book: Ledger, url: str) -> Iterator[str]:
    """The address of `diminuendo ledger serve` in a process of its own."""
    pytest.importorskip("uvicorn")
    del book
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "diminuendo", "ledger", "serve", "--port", str(port)]
    child = subprocess.Popen(words, env={**os.environ, "DIMINUENDO_LEDGER": url})
    address = f"http://127.0.0.1:{port}"
    end = time.monotonic() + 300
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{address}/api/verify", timeout=60).close()
            break
        except OSError:
            time.sleep(0.2)
    yield address
    child.send_signal(signal.SIGINT)
    child.wait(timeout=300)


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_in_a_browser(served: str, tmp_path: Path) -> None:
    words = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu",
             f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", served]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert "<title>Privacy budgets</title>" in done.stdout, done.stderr[-2000:]
    assert "&lt;b&gt;patients" in done.stdout
    assert "2 more runs like the last 3 would fit" in done.stdout
    assert 'class="good">Verified' in done.stdout
