"""The page over HTTP: who may ask, how much, and how long."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diminuendo import Plan
from diminuendo.cli import main
from diminuendo.cli import page as page_command
from diminuendo.errors import UsageError
from diminuendo.page import Settings, document, live, snapshot
from diminuendo.page.worker import GivenUp, Worker

JSON = {"Content-Type": "application/json"}
SLOW = {"sampling_rate": 0.0003, "steps": 20_000, "delta": 1e-5, "examples": 10**6}


def ask(
    address: str, kind: str, data: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any]:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    request = urllib.request.Request(f"{address}api/{kind}", body, {**JSON, **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            text = error.read()
        return error.code, json.loads(text) if text.startswith(b"{") else text.decode()


def test_a_plan_over_http(address: str) -> None:
    status, shown = ask(address, "plan", {"epsilon": 2.0, "steps": 30})
    assert status == 200
    status, text = ask(address, "plan.json", {"epsilon": 2.0, "steps": 30})
    plan = Plan.from_json(text)
    assert (plan.digest, plan.steps) == (shown["digest"], 30)
    assert ask(address, "running", {"epsilon": 2.0, "steps": 30})[1]["epsilon"][-1] <= 2


def test_other_pages_get_nothing(address: str) -> None:
    """A page elsewhere cannot ask, neither by a form, nor by fetch, nor by a name of its own."""
    port = address.rstrip("/").rsplit(":", 1)[1]
    assert ask(address, "plan", {}, {"Content-Type": "text/plain"})[0] == 403
    assert ask(address, "plan", {}, {"Content-Type": "application/x-www-form-urlencoded"})[0] == 403
    for origin in (
        "http://evil.example",
        "null",
        "http://127.0.0.1:1",
        f"https://127.0.0.1:{port}",
    ):
        assert ask(address, "plan", {}, {"Origin": origin})[0] == 403, origin
    assert ask(address, "plan", {}, {"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert ask(address, "plan", {}, {"Sec-Fetch-Site": "same-site"})[0] == 403
    own = {"Origin": address.rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    assert ask(address, "plan", {}, own)[0] == 200
    for host in ("evil.example", f"evil.example:{port}", f"127.0.0.1.evil.example:{port}", ""):
        assert ask(address, "plan", {}, {"Host": host, "Origin": f"http://{host}"})[0] == 400, host
        connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=300)
        connection.request("GET", "/", headers={"Host": host})
        assert connection.getresponse().status == 400
        connection.close()


def test_what_the_page_may_do(address: str) -> None:
    with urllib.request.urlopen(address, timeout=300) as reply:
        policy = reply.headers["Content-Security-Policy"]
        page = reply.read().decode()
        assert reply.headers["X-Frame-Options"] == "DENY"
        assert reply.headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in reply.headers
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert not re.search(r"""(src|href)=["'](?!data:)""", page)
    assert not re.search(r"https?://(?!www\.w3\.org/)", page)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"", 400),
        (b"[" * 20_000, 400),
        (b'{"epsilon": NaN}', 422),
        (b'{"epsilon": 1e999}', 422),
        (b'{"epsilon": ' + b"9" * 5000 + b"}", 400),
        (b"[]", 422),
        (b'{"steps": 1e6}', 422),
        (b'{"steps": 999999999999}', 422),
        (b'{"epsilon": "__import__"}', 422),
        (b'{"x": "' + b"a" * 40_000 + b'"}', 413),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_questions(address: str, body: bytes, status: int) -> None:
    found, said = ask(address, "plan", body)
    assert found == status
    assert said["error"]
    assert ask(address, "plan", {})[0] == 200


def test_unknown_places(address: str) -> None:
    assert ask(address, "export", {})[0] == 404
    assert ask(address, "../plan", {})[0] in (403, 404, 405)
    with pytest.raises(urllib.error.HTTPError, match="405"):
        urllib.request.urlopen(f"{address}api/plan", timeout=300)


def test_a_question_given_up_makes_room(address: str) -> None:
    """Who leaves is not computed for: the next question need not wait for the slow one."""
    host = address.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(host, timeout=300)
    connection.request("POST", "/api/plan", json.dumps(SLOW), JSON)
    time.sleep(0.5)
    connection.close()
    assert ask(address, "plan", {"steps": 10})[0] == 200


async def stays() -> bool:
    return False


def test_a_question_that_takes_too_long_is_stopped() -> None:
    async def both() -> Any:
        worker = Worker(longest=0.3)
        try:
            with pytest.raises(UsageError, match=r"took longer than 0\.3 seconds"):
                await worker.ask("plan", SLOW, stays)
            worker._longest = 600.0
            return await worker.ask("plan", {"steps": 3}, stays)
        finally:
            worker.stop()

    assert asyncio.run(both())["steps"] == 3


def test_a_worker_that_dies_is_replaced() -> None:
    async def both() -> Any:
        worker = Worker()
        try:
            worker.start()
            worker._process.kill()
            worker._process.join()
            with pytest.raises(UsageError, match="stopped unexpectedly"):
                await worker.ask("plan", {}, stays)
            return await worker.ask("plan", {"steps": 3}, stays)
        finally:
            worker.stop()

    assert asyncio.run(both())["steps"] == 3


def test_leaving_before_ones_turn() -> None:
    async def gone() -> bool:
        return True

    async def one() -> None:
        worker = Worker()
        with pytest.raises(GivenUp):
            await worker.ask("plan", {}, gone)
        assert worker._process is None

    asyncio.run(one())


def test_not_too_many_wait() -> None:
    async def many() -> list[Any]:
        worker = Worker()
        try:
            questions = [worker.ask("plan", {"steps": n}, stays) for n in range(1, 20)]
            return await asyncio.gather(*questions, return_exceptions=True)
        finally:
            worker.stop()

    found = asyncio.run(many())
    refused = [one for one in found if isinstance(one, UsageError)]
    assert 0 < len(refused) < 19
    assert all("waiting" in str(one) for one in refused)
    assert [one["steps"] for one in found if isinstance(one, dict)] == list(
        range(1, 20 - len(refused))
    )


def test_a_snapshot_needs_no_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "page.html"
    words = ["page", "--epsilon", "2", "--delta", "1e-5", "--steps", "20", "-o", str(target)]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"page": str(target)}
    text = target.read_text()
    facts = json.loads(re.findall(r'id="facts">(.*?)</script>', text, re.DOTALL)[0])
    assert facts["answer"]["steps"] == 20
    assert Plan.from_json(facts["answer"]["exports"]["plan.json"]).budget.epsilon == 2
    assert facts["running"]["epsilon"][-1] <= 2
    assert "http" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text)


def test_marks_are_filled_once() -> None:
    for page in (live(Settings()), snapshot(Settings(steps=5))):
        assert "/* page." not in page
        assert "/* facts" not in page
        assert page.count("<script") == 2
        assert len(re.findall("sha256-", document.policy(page))) == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--epsilon", "-1"], "epsilon"),
        (["--steps", "lots"], "steps"),
        (["--gamma", "0.9", "--kappa", "3"], "--kappa"),
        (["--lr", "cosin"], "lr"),
        (["--port", "99999"], "--port"),
    ],
)
def test_wrong_use(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["page", "--no-open", *words]) == 2
    assert named in capsys.readouterr().err


def test_a_port_that_is_taken(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = address.rstrip("/").rsplit(":", 1)[1]
    assert main(["page", "--no-open", "--port", port]) == 2
    assert "--port 0 takes any" in capsys.readouterr().err


@pytest.fixture
def asking(address: str) -> Iterator[list[float]]:
    """Somebody who asks without pause while a test runs."""
    times: list[float] = []
    over = threading.Event()

    def go() -> None:
        while not over.is_set():
            began = time.monotonic()
            ask(address, "plan", {"steps": 40})
            times.append(time.monotonic() - began)

    thread = threading.Thread(target=go)
    thread.start()
    yield times
    over.set()
    thread.join()


def test_the_page_itself_answers_while_a_plan_is_made(address: str, asking: list[float]) -> None:
    del asking
    for _ in range(5):
        with urllib.request.urlopen(address, timeout=300) as reply:
            assert reply.status == 200


def test_nothing_is_left_behind_by_a_server_that_is_killed() -> None:
    """The process that computes ends with the one that it computes for."""
    psutil = pytest.importorskip("psutil")
    words = [sys.executable, "-m", "diminuendo", "page", "--no-open", "--port", "0", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["address"]
        assert ask(address, "plan", {"steps": 3})[0] == 200
        children = psutil.Process(server.pid).children(recursive=True)
        assert children
        server.kill()
    assert psutil.wait_procs(children, timeout=300)[1] == []


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_a_missing_extra_is_said_before_anything_opens(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["page", "--port", "0"]) == 2
    captured = capsys.readouterr()
    assert "pip install 'diminuendo[serve]'" in captured.err
    assert (captured.out, opened) == ("", [])


def test_no_browser_without_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert page_command._has_screen() is False
    monkeypatch.setenv("DISPLAY", ":0")
    assert page_command._has_screen() is True
