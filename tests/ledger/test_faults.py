"""Full disks, damaged files, servers that go away: a clear error or a correct wait."""

from __future__ import annotations

import datetime
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from ledgers import in_child, new_database, running_server, step
from sqlalchemy.engine import make_url

from diminuendo import Budget, InputError, Ledger, LedgerError
from diminuendo.ledger import address, verify

BUDGET = Budget(epsilon=4, delta=1e-8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.create("b", BUDGET)
    return path


def test_a_full_disk_loses_nothing_and_grants_nothing(file: Path, tmp_path: Path) -> None:
    """The child may write no file beyond a size, as on a full disk; it notes what was granted."""
    granted = tmp_path / "granted"

    def fill() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        size = 400_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        ledger = Ledger(file, patience=1)
        run = ledger.open_run("b")
        count = 0
        try:
            while True:
                ledger.grant(run.id, [step(1e6 + count + i) for i in range(50)])
                count += 50
        except LedgerError as error:
            os.write(handle, f"{count}\n{error}".encode())

    handle = os.open(granted, os.O_CREAT | os.O_WRONLY)
    child = in_child(fill)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    count, words = granted.read_text().split("\n")
    assert int(count) > 0
    assert "could not be used" in words
    with Ledger(file) as ledger:
        assert verify(ledger).steps == ledger.runs("b")[0].granted >= int(count)
        ledger.grant(ledger.runs("b")[0].id, [step()])


def test_a_file_that_cannot_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "parse", make_url)
    with pytest.raises(LedgerError, match="readonly"):
        Ledger(f"sqlite:///file:{file}?mode=ro&uri=true", patience=1).open_run("b")
    monkeypatch.undo()
    with Ledger(file) as ledger:
        assert ledger.runs() == []


def test_a_second_ledger_in_one_process_leaves_the_first_its_locks(file: Path) -> None:
    """Closing a handle drops a process's locks: others would then delete the log in use."""
    first = Ledger(file)
    run = first.open_run("b")
    Ledger(file).close()
    other = f"from diminuendo import Ledger; x = Ledger({str(file)!r}); x.open_run('b'); x.close()"
    subprocess.run([sys.executable, "-c", other], check=True, timeout=300)
    first.grant(run.id, [step()])
    seen = f"from diminuendo import Ledger; print(Ledger({str(file)!r}).status('b').spent)"
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, timeout=300)
    assert float(done.stdout) == first.status("b").spent > 0
    first.close()


@pytest.mark.parametrize("lost", ["replaced", "deleted", "log"])
def test_a_file_that_changes_under_a_ledger(file: Path, tmp_path: Path, lost: str) -> None:
    ledger = Ledger(file)
    run = ledger.open_run("b")
    if lost == "replaced":
        with Ledger(tmp_path / "other.sqlite") as other:
            other.create("b", BUDGET)
        (tmp_path / "other.sqlite").replace(file)
    elif lost == "deleted":
        file.unlink()
    else:
        Path(f"{file}-wal").unlink()
    with pytest.raises(LedgerError, match="replaced or deleted"):
        ledger.grant(run.id, [step()])
    ledger.close()


@pytest.mark.parametrize(
    "url",
    [
        ":memory:",
        "file:x.sqlite",
        "sqlite:///:memory:",
        "sqlite:///file:x.sqlite?nolock=1&uri=true",
        "sqlite:///x.sqlite?timeout=0",
        "postgresql:/me:secret@host/db",
    ],
)
def test_addresses_that_would_forget_or_not_lock(url: str) -> None:
    with pytest.raises(InputError) as refused:
        Ledger(url)
    assert "secret" not in str(refused.value)


def test_network_mounts_with_names_beyond_ascii(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "mountinfo"
    lines = (
        b"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:5 / /mnt/donn\xc3\xa9es\\040x rw - nfs4 h:/ rw\n"
    )
    table.write_bytes(lines + b"3 1 0:5 / /mnt/\xff rw - ext4 /dev/sdb rw\n")
    monkeypatch.setattr(address, "_MOUNTS", table)
    assert address.file_system(Path("/mnt/données x/ledger.sqlite")) == "nfs4"
    assert address.file_system(Path("/mnt/other")) == "ext4"


def test_a_damaged_file(file: Path) -> None:
    with Ledger(file) as ledger:
        run = ledger.open_run("b")
        for i in range(200):
            ledger.grant(run.id, [step(1e4 + i)])
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.seek(size // 3)
        handle.write(os.urandom(size // 3))
    with pytest.raises(LedgerError):
        verify(Ledger(file, patience=1))


def test_what_is_no_ledger(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("These are not records. " * 1000)
    with pytest.raises(LedgerError, match="Is this path a ledger"):
        Ledger(path)
    assert path.read_text().startswith("These")
    with pytest.raises(InputError, match="can be created"):
        Ledger(path / "below")
    with pytest.raises(InputError, match="can be created"):
        Ledger(tmp_path)


def test_a_ledger_that_somebody_holds(file: Path) -> None:
    import sqlite3

    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with Ledger(file, patience=0.3) as ledger:
        assert ledger.status("b").spent == 0
        with pytest.raises(LedgerError, match=f"Process {os.getpid()} .* holds it"):
            ledger.open_run("b")
        other.execute("COMMIT")
        ledger.open_run("b")
    other.close()


def test_a_clock_that_jumps_backwards(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are the server's where there is one, and a wrong one stops nothing."""
    past = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    with Ledger(url) as ledger:
        ledger.create("b", BUDGET)
        run = ledger.open_run("b")
        ledger.grant(run.id, [step()])
        with monkeypatch.context() as patch:
            patch.setattr("diminuendo.ledger.windows.now", lambda: past)
            ledger.grant(run.id, [step()])
        ledger.grant(run.id, [step()])
        jumped = url.startswith("sqlite")
        wanted = [False, False, False, jumped, False]
        assert [r.at[:4] == "1970" for r in ledger.records()] == wanted
        assert verify(ledger).steps == 3


@pytest.fixture
def own_server() -> Iterator[Any]:
    """A server that a test may stop."""
    with running_server() as made:
        yield made


def postmaster(server: Any) -> int:
    return int((Path(server.pgdata) / "postmaster.pid").read_text().split()[0])


def test_a_server_that_goes_away_and_comes_back(own_server: Any) -> None:
    url = new_database(own_server.get_uri())
    with Ledger(url, patience=120) as ledger:
        ledger.create("b", BUDGET)
        run = ledger.open_run("b")
        ledger.grant(run.id, [step()])
        own_server.stop()
        with pytest.raises(LedgerError, match="could not be used"):
            _impatient(url)
        back = threading.Timer(1.0, own_server.ensure_postgres_running)
        back.start()
        ledger.grant(run.id, [step()])
        back.join()
        assert ledger.run(run.id).granted == 2
        verify(ledger)


@pytest.mark.parametrize("wrong", [{"username": "nobody"}, {"database": "nothing"}])
def test_who_is_turned_away_does_not_wait(server: Any, wrong: dict[str, str]) -> None:
    """A wrong role, or a database that does not exist: no time makes it right."""
    url = make_url(server.get_uri()).set(**wrong)  # type: ignore[arg-type]
    begun = time.monotonic()
    with pytest.raises(LedgerError, match=r"does not exist.*Look at the user") as refused:
        Ledger(url.render_as_string(hide_password=False), patience=600)
    assert time.monotonic() - begun < 60, "it waited, however slow this machine is"
    assert "Nothing was released" in str(refused.value)


def _impatient(url: str) -> None:
    Ledger(url, patience=0.5)


def _killed_for_a_second(server: Any) -> None:
    time.sleep(0.05)
    pid = postmaster(server)
    os.kill(pid, signal.SIGQUIT)
    end, state = time.monotonic() + 120, Path(f"/proc/{pid}/stat")
    with suppress(OSError):  # it is gone
        while state.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < end:
            time.sleep(0.01)
    time.sleep(1)
    server.ensure_postgres_running()


def test_a_server_killed_in_the_middle(own_server: Any) -> None:
    """Backends die with the server; every grant that was answered is there afterwards."""
    url = new_database(own_server.get_uri())
    with Ledger(url, patience=120) as ledger:
        ledger.create("b", BUDGET)
        run = ledger.open_run("b")
        granted = 0
        for _ in range(2):
            outage = threading.Thread(target=_killed_for_a_second, args=(own_server,))
            outage.start()
            while outage.is_alive():
                ledger.grant(run.id, [step(1e4)])
                granted += 1
            outage.join()
        assert ledger.run(run.id).granted == granted
        assert verify(ledger).steps == granted


def test_a_server_that_hangs(own_server: Any) -> None:
    url = new_database(own_server.get_uri())
    with Ledger(url, patience=1.0) as ledger:
        ledger.create("b", BUDGET)
        run = ledger.open_run("b")
        backends = _children(postmaster(own_server))
        for pid in (postmaster(own_server), *backends):
            os.kill(pid, signal.SIGSTOP)
        try:
            begun = time.monotonic()
            with pytest.raises(LedgerError, match="could not be used"):
                ledger.grant(run.id, [step()])
            assert time.monotonic() - begun < 300
        finally:
            for pid in (*backends, postmaster(own_server)):
                os.kill(pid, signal.SIGCONT)
    with Ledger(url, patience=300) as patient:
        patient.grant(run.id, [step()], token="again")
        assert patient.run(run.id).granted in (1, 2)
        verify(patient)


def _children(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()]
