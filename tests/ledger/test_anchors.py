"""Keys and published heads find what somebody does who can write to the whole database."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from ledgers import execute, step
from sqlalchemy import text

from diminuendo import Budget, InputError, Ledger, LedgerError, UsageError
from diminuendo.ledger import LedgerWarning, keys, verify
from diminuendo.ledger.records import Record, canonical, start_of

BUDGET = Budget(epsilon=4, delta=1e-8)
SECRET = "env:THE_KEY"


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "a secret that is long enough")


def spend(ledger: Ledger, times: int = 3) -> None:
    if not ledger.budgets():
        ledger.create("b", BUDGET)
    for _ in range(times):
        ledger.charge("b", [step(20.0)])


def cut_off(ledger: Ledger, number: int) -> None:
    """Everything after a record is undone, consistently, by who can write to the database."""
    records = [record for record in ledger.records() if record.seq <= number]
    last = records[-1]
    execute(ledger, "DELETE FROM diminuendo_records WHERE seq > :n", n=number)
    runs = {record.run: record.body["after"]["run"] for record in records if record.run}
    kept = ", ".join(f"'{run}'" for run in runs)
    execute(ledger, f"DELETE FROM diminuendo_runs WHERE id NOT IN ({kept})")
    move = "UPDATE diminuendo_head SET seq = :n, digest = :digest"
    execute(ledger, move, n=number, digest=last.digest)
    spent = "UPDATE diminuendo_budgets SET spent = :spent"
    execute(ledger, spent, spent=last.body["after"]["spent"])


def rewrite(ledger: Ledger, new_id: str) -> None:
    """The whole chain again, with another id and so other digests, consistently."""
    previous = start_of(new_id)
    for record in list(ledger.records()):
        new = Record.link(seq=record.seq, at=record.at, kind=record.kind, budget=record.budget,
                          run=record.run, token=record.token, body=record.body,
                          previous=previous)  # fmt: skip
        change = (
            "UPDATE diminuendo_records SET previous = :previous, digest = :digest WHERE seq = :seq"
        )
        execute(ledger, change, previous=previous, digest=new.digest, seq=new.seq)
        previous = new.digest
    move = "UPDATE diminuendo_head SET ledger = :id, digest = :digest"
    execute(ledger, move, id=new_id, digest=previous)


def ed25519(folder: Path) -> tuple[str, str]:
    """A private key and its public key, as PEM files."""
    ed = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    from cryptography.hazmat.primitives import serialization as s

    private = ed.Ed25519PrivateKey.generate()
    secret = private.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption())
    public = private.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    (folder / "key.pem").write_bytes(secret)
    (folder / "key.pub").write_bytes(public)
    return f"file:{folder / 'key.pem'}", f"file:{folder / 'key.pub'}"


@pytest.mark.parametrize("kind", ["hmac", "ed25519"])
def test_a_rewritten_chain_has_no_signatures(url: str, tmp_path: Path, kind: str) -> None:
    signing, checking = (SECRET, SECRET) if kind == "hmac" else ed25519(tmp_path)
    with Ledger(url, key=signing) as ledger:
        spend(ledger)
        assert verify(ledger, key=checking).signed == ledger.head.seq
        rewrite(ledger, ledger.head.ledger + "x")
        verify(ledger)
        with pytest.raises(LedgerError, match="Record 1 is not signed with this key"):
            verify(ledger, key=checking)
        execute(ledger, "UPDATE diminuendo_records SET signature = ''")
        with pytest.raises(LedgerError, match=r"last record .* is not signed"):
            verify(ledger, key=checking)
    with Ledger(url) as ledger:
        ledger.charge("b", [step(20.0)])


def test_who_has_no_key_cannot_write_unseen(url: str) -> None:
    with Ledger(url, key=SECRET) as ledger:
        spend(ledger)
        with Ledger(url) as other:
            other.charge("b", [step(20.0)])
        with pytest.raises(LedgerError, match="not signed with the ledger's key"):
            ledger.charge("b", [step(20.0)])


def test_a_ledger_is_signed_from_now_on(url: str) -> None:
    with Ledger(url) as ledger:
        spend(ledger)
        before = ledger.head.seq
        with pytest.raises(LedgerError, match="is not signed"):
            verify(ledger, key=SECRET)
    with Ledger(url, key=SECRET) as ledger:
        spend(ledger)
        assert verify(ledger, key=SECRET).signed == ledger.head.seq - before
        with pytest.raises(LedgerError, match="not signed with this key"):
            verify(ledger, key=keys.HmacKey(b"another key, long enough"))


def test_bad_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHORT", "hunter2")
    (tmp_path / "bad.pem").write_text("-----BEGIN PRIVATE KEY-----\nhunter2\n")
    for place in ("env:SHORT", "env:NONE", f"file:{tmp_path / 'no'}", "secret", "command:false",
                  "command:no-such-program", f"file:{tmp_path / 'bad.pem'}"):  # fmt: skip
        with pytest.raises(InputError) as refused:
            keys.load(place)
        assert "hunter2" not in str(refused.value)
    assert isinstance(keys.load("command:echo a key of sixteen bytes"), keys.HmacKey)
    _, public = ed25519(tmp_path)
    with pytest.raises(UsageError, match="public key"):
        keys.load(public).sign("sha256:00")  # type: ignore[union-attr]


@pytest.fixture
def hook() -> Iterator[str]:
    """A web server that keeps what is sent to it with the right token."""
    kept: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body: bytes) -> None:
            good = self.headers["Authorization"] == "Bearer hook-token"
            self.send_response(200 if good else 403)
            self.end_headers()
            self.wfile.write(body if good else b"")

        def do_POST(self) -> None:
            kept.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(b"")

        def do_GET(self) -> None:
            self.answer(b"".join(kept))

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/heads"
    server.shutdown()
    thread.join()
    server.server_close()


def place_of(kind: str, tmp_path: Path, hook: str) -> str:
    if kind == "git":
        repository = tmp_path / "repository"
        subprocess.run(["git", "init", "--quiet", str(repository)], check=True)
        return f"git:{repository}"
    return {
        "file": f"file:{tmp_path / 'heads.jsonl'}",
        "ledger": f"ledger:{tmp_path / 'second.sqlite'}",
        "http": hook,
    }[kind]


@pytest.mark.parametrize("kind", ["file", "git", "ledger", "http"])
@pytest.mark.parametrize("attack", ["cut off", "rewritten"])
def test_a_published_head_finds(
    tmp_path: Path, hook: str, monkeypatch: pytest.MonkeyPatch, kind: str, attack: str
) -> None:
    monkeypatch.setenv("DIMINUENDO_ANCHOR_TOKEN", "hook-token")
    place, path = place_of(kind, tmp_path, hook), tmp_path / "ledger.sqlite"
    with Ledger(path, anchors=[place]) as ledger:
        spend(ledger)
    with Ledger(path, anchors=()) as ledger:
        assert verify(ledger, anchors=[place]).anchored >= 1
        if attack == "cut off":
            cut_off(ledger, 4)
            words = "published to .* is not in the chain"
        else:
            rewrite(ledger, "another")
            words = "has no head of the ledger another"
        verify(ledger)
        with pytest.raises(LedgerError, match=words):
            verify(ledger, anchors=[place])


def test_an_anchor_out_of_reach_is_a_warning_and_no_proof(tmp_path: Path) -> None:
    place = f"file:{tmp_path / 'nowhere' / 'heads.jsonl'}"
    with Ledger(tmp_path / "ledger.sqlite", anchors=[place]) as ledger:
        with pytest.warns(LedgerWarning, match="could not be published"):
            ledger.create("b", BUDGET)
        with pytest.raises(LedgerError, match="could not be read"):
            verify(ledger, anchors=[place])
        ledger.anchors.clear()
    with pytest.raises(InputError, match="the anchor"):
        Ledger(tmp_path / "ledger.sqlite", anchors=["somewhere"])


def test_verifying_goes_on_from_what_was_verified(ledger: Ledger, tmp_path: Path) -> None:
    state = tmp_path / "verified.json"
    spend(ledger)
    open_run = ledger.open_run("b").id
    ledger.grant(open_run, [step(20.0, count=4)], start=False)
    whole = verify(ledger, state=state)
    ledger.start(open_run, 2)
    ledger.close_run(open_run, used=1)
    spend(ledger, 2)
    seen: list[int] = []
    again = verify(ledger, state=state, progress=lambda done, _: seen.append(done))
    assert seen == list(range(whole.records + 1, again.records + 1))
    assert again == verify(ledger)
    known = json.loads(state.read_text())
    assert known["seq"] == again.records
    cut_off(ledger, 4)
    verify(ledger)
    with pytest.raises(LedgerError, match="behind what was seen"):
        verify(ledger, state=state)
    state.write_text("{}")
    with pytest.raises(InputError, match="what `verify` wrote"):
        verify(ledger, state=state)


def test_a_changed_record_after_the_verified_ones(ledger: Ledger, tmp_path: Path) -> None:
    state = tmp_path / "verified.json"
    spend(ledger)
    verify(ledger, state=state)
    spend(ledger, 1)
    body = ledger.read_transaction(
        lambda c: c.execute(text("SELECT body FROM diminuendo_records WHERE seq = 12")).scalar()
    )
    changed = canonical({**json.loads(body), "steps": 0})
    execute(ledger, "UPDATE diminuendo_records SET body = :body WHERE seq = 12", body=changed)
    with pytest.raises(LedgerError, match=r"Record 12 .* was changed"):
        verify(ledger, state=state)
