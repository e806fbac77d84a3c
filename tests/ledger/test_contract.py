"""What every ledger does, wherever it lives."""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledgers import execute, step
from sqlalchemy import text
from sqlalchemy.engine import make_url

import diminuendo as dim
from diminuendo import (
    Budget,
    BudgetRefused,
    InputError,
    Ledger,
    LedgerError,
    SchemaError,
    UsageError,
)
from diminuendo.ledger import (
    LedgerSpending,
    address,
    export,
    identify,
    import_file,
    schema,
    verify,
)
from diminuendo.ledger.exchange import granted_events, to_dp_accounting

BUDGET = Budget(epsilon=1, delta=1e-5)
DATA = "sha256:" + "ab" * 32


def test_a_new_ledger_is_empty_and_whole(ledger: Ledger) -> None:
    assert ledger.budgets() == []
    assert ledger.runs() == []
    assert verify(ledger).records == 0


def test_create_again_changes_nothing_and_other_terms_are_refused(
    ledger: Ledger, budget: Budget
) -> None:
    first = ledger.create("patients", budget, data=DATA, unit="patient")
    head = ledger.head
    assert ledger.create("patients", budget, data=DATA, unit="patient") == first
    assert ledger.head == head
    with pytest.raises(InputError, match="the terms it has"):
        ledger.create("patients", Budget(epsilon=8, delta=1e-8), data=DATA, unit="patient")
    with pytest.raises(InputError, match="first budget for its data"):
        ledger.create("more", budget, data=DATA)
    ledger.create("more", budget, data=DATA, allow_second=True)


def test_a_plan_fits_its_own_budget_once(ledger: Ledger, some_plan: dim.Plan) -> None:
    ledger.create("b", some_plan.budget)
    run = ledger.open_run("b")
    ledger.grant(run.id, some_plan.events)
    assert ledger.status("b").spent <= 1
    assert ledger.status("b").spent > 1 - 1e-6
    assert ledger.status("b").epsilon <= 4
    with pytest.raises(BudgetRefused, match=r"left .*would fit|Nothing is left"):
        ledger.grant(run.id, [step(1.0)])


def test_what_is_left_can_be_planned_with(ledger: Ledger, some_plan: dim.Plan) -> None:
    ledger.create("b", some_plan.budget)
    run = ledger.open_run("b")
    ledger.grant(run.id, some_plan.events[:20])
    ledger.close_run(run.id, used=20)
    left = ledger.remaining("b")
    assert 0 < left.epsilon < 4
    again = dim.plan(left, examples=100, alpha=1e-4, steps=30, gamma=0.9)
    second = ledger.open_run("b")
    ledger.grant(second.id, again.events)
    assert 1 - 1e-6 < ledger.status("b").spent <= 1
    both = np.concatenate([some_plan.sigmas[:20], again.sigmas])
    assert dim.epsilon(both, 1e-8) <= 4


def test_unused_steps_come_back_at_a_clean_end(ledger: Ledger, some_plan: dim.Plan) -> None:
    ledger.create("b", some_plan.budget)
    run = ledger.open_run("b", label="early stop")
    ledger.grant(run.id, some_plan.events, start=False)
    full = ledger.status("b").spent_units
    ledger.start(run.id, 16)
    ended = ledger.close_run(run.id, used=13)
    assert (ended.status, ended.granted, ended.started, ended.confirmed) == ("closed", 40, 13, 13)
    terms = ledger.status("b").terms
    assert ledger.status("b").spent_units == sum(terms.costs(list(some_plan.events)[:13])) < full
    with pytest.raises(InputError, match="closed"):
        ledger.close_run(run.id, used=13)
    with pytest.raises(InputError, match="closed"):
        ledger.grant(run.id, [step()])
    assert verify(ledger).steps == 13
    assert granted_events(ledger, "b") == list(some_plan.events)[:13]


def test_a_partial_grant_is_as_much_as_fits(ledger: Ledger, budget: Budget) -> None:
    ledger.create("b", budget)
    run = ledger.open_run("b")
    cost = ledger.status("b").terms.costs([step(10.0)])[0]
    room = ledger.status("b").terms.limit // cost
    grant = ledger.grant(run.id, [step(10.0, count=3), step(10.0, count=10**6)], partial=True)
    assert (grant.first, grant.steps) == (0, room)
    with pytest.raises(BudgetRefused):
        ledger.grant(run.id, [step(10.0)], partial=True)


def test_a_crashed_run_stays_spent_until_a_person_looks(
    ledger: Ledger, some_plan: dim.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.create("b", some_plan.budget)
    run = ledger.open_run("b")
    ledger.grant(run.id, some_plan.events, start=False)
    ledger.start(run.id, 10)
    ledger.start(run.id, 20, confirmed=10)
    with pytest.raises(UsageError, match="alive"):
        ledger.reclaim(run.id)
    monkeypatch.setattr("diminuendo.ledger.process.start_time", lambda pid: "another process")
    reclaimed = ledger.reclaim(run.id, by="Ada")
    terms = ledger.status("b").terms
    assert reclaimed.status == "reclaimed"
    assert ledger.status("b").spent_units == sum(terms.costs(list(some_plan.events)[:20]))
    said = next(r for r in ledger.records(run=run.id) if r.kind == "reclaim").body
    assert said["by"] == "Ada"
    assert "is dead" in said["assumed"]
    with pytest.raises(InputError, match="reclaimed"):
        ledger.reclaim(run.id)
    with pytest.raises(InputError, match="reclaimed"):
        ledger.start(run.id, 30)
    verify(ledger)


def test_reclaim_when_nothing_was_seen(
    ledger: Ledger, some_plan: dim.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.create("b", some_plan.budget)
    run = ledger.open_run("b")
    ledger.grant(run.id, some_plan.events[:10])
    ledger.grant(run.id, some_plan.events[10:20], confirmed=10)
    monkeypatch.setattr("diminuendo.ledger.process.start_time", lambda pid: "another process")
    ledger.reclaim(run.id, unreleased=True)
    terms = ledger.status("b").terms
    assert ledger.status("b").spent_units == sum(terms.costs(list(some_plan.events)[:10]))
    verify(ledger)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda b: b.status("nobody"), "one of the ledger's"),
        (lambda b: b.open_run("nobody"), "one of the ledger's"),
        (lambda b: b.run("ffff"), "a run of this ledger"),
        (lambda b: b.grant("ffff", [step()]), "a run of this ledger"),
        (lambda b: b.reclaim("ffff"), "a run of this ledger"),
        (lambda b: b.open_run("b", data="sha256:" + "00" * 32), "the data of the budget"),
        (lambda b: b.create("", Budget(epsilon=1, delta=1e-5)), "printable"),
        (lambda b: b.create("x\n", Budget(epsilon=1, delta=1e-5)), "printable"),
        (lambda b: b.create("x", Budget(epsilon=1, delta=1e-5), data="123"), "hexadecimal"),
        (lambda b: b.create("x", Budget(epsilon=1, delta=1e-5), composition="rdp"), "gaussian"),
        (lambda b: b.create("x", BUDGET, composition="gaussian", order=8), "Rényi"),
        (lambda b: b.create("x", BUDGET, window="decade"), "year"),
        (lambda b: b.grant(b.open_run("b").id, []), "at least one event"),
        (lambda b: b.grant(b.open_run("b").id, [step(rate=0.1)]), "Gaussian filter"),
        (lambda b: b.close_run(b.open_run("b").id, used=-1), "at least 0"),
        (lambda b: b.close_run(b.open_run("b").id, used=0.5), "whole number"),
        (lambda b: b.start(b.open_run("b").id, 0, confirmed=0.0), "whole number"),
        (lambda b: b.grant(b.open_run("b").id, ["step"]), "GaussianStep"),
        (lambda b: b.close_run(b.open_run("b").id, used=1), "started"),
        (lambda b: b.start(b.open_run("b").id, 1), "granted"),
        (lambda b: step(math.nan), "finite"),
        (lambda b: step(-1.0), "above 0"),
        (lambda b: step(count=0), "at least 1"),
    ],
)
def test_bad_input_changes_nothing(ledger: Ledger, budget: Budget, call: Any, words: str) -> None:
    ledger.create("b", budget, data=DATA)
    with pytest.raises(InputError, match=words):
        call(ledger)
    assert ledger.status("b").spent_units == 0
    verify(ledger)


def test_names_are_data(ledger: Ledger, budget: Budget) -> None:
    name = "x'; DROP TABLE diminuendo_records; -- \" %s :name"
    ledger.create(name, budget, unit="patient'")
    run = ledger.open_run(name, label="'); DELETE FROM diminuendo_runs; --")
    ledger.grant(run.id, [step()])
    assert ledger.status(name).spent > 0
    assert ledger.runs(name)[0].opened["label"].startswith("')")
    verify(ledger)


def test_subsampled_steps_by_the_renyi_filter(ledger: Ledger) -> None:
    budget = Budget(epsilon=2, delta=1e-5)
    ledger.create("b", budget, composition="renyi", typical=step(1.0, rate=0.01))
    plan = dim.plan(
        budget, examples=1000, alpha=1e-4, steps=50, sampling_rate=0.05, schedule="uniform"
    )
    run = ledger.open_run("b")
    with pytest.raises(BudgetRefused, match="every σ × 1"):
        ledger.grant(run.id, plan.events)
    fitting = ledger.scaled_to_fit("b", plan)
    assert fitting.epsilon < 2
    ledger.grant(run.id, fitting.events)
    status = ledger.status("b")
    assert 1 - 1e-6 < status.spent <= 1
    assert dim.epsilon(fitting.sigmas, 1e-5, 0.05) <= status.epsilon <= 2
    ledger.close_run(run.id, used=20)
    verify(ledger)
    assert ledger.remaining("b").epsilon < 2


def test_asking_twice_with_one_token_is_asking_once(ledger: Ledger, budget: Budget) -> None:
    ledger.create("b", budget)
    run = ledger.open_run("b", token="open")
    assert ledger.open_run("b", token="open") == run
    one = ledger.grant(run.id, [step()], token="grant")
    spent = ledger.status("b").spent_units
    assert ledger.grant(run.id, [step()], token="grant") == one
    assert ledger.status("b").spent_units == spent


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE diminuendo_records SET body = replace(body, '20.0', '30.0') WHERE seq = 3",
         "Record 3 .* was changed"),
        ("UPDATE diminuendo_records SET at = 'yesterday' WHERE seq = 2", "Record 2 .* was changed"),
        ("DELETE FROM diminuendo_records WHERE seq = 3", "Record 3 is missing"),
        ("DELETE FROM diminuendo_records WHERE seq = 1", "Record 1 is missing"),
        ("DELETE FROM diminuendo_records WHERE seq = 5", "cut off"),
        ("UPDATE diminuendo_records SET seq = 7 - seq WHERE seq IN (3, 4)", "chain breaks before"),
        ("UPDATE diminuendo_budgets SET spent = '0'", "budget 'b' does not agree"),
        ("UPDATE diminuendo_runs SET started = 0", "run .* does not agree"),
        ("DELETE FROM diminuendo_runs", "run .* does not agree"),
        ("UPDATE diminuendo_head SET seq = 4", "cut off or added at the end"),
    ],
)  # fmt: skip
def test_verify_finds_what_was_changed_and_says_where(
    ledger: Ledger, budget: Budget, statement: str, words: str
) -> None:
    ledger.create("b", budget)
    run = ledger.open_run("b")
    for _ in range(3):
        ledger.grant(run.id, [step(20.0)])
    verify(ledger)
    if "7 - seq" in statement:
        execute(ledger, "UPDATE diminuendo_records SET seq = -seq WHERE seq IN (3, 4)")
        execute(ledger, "UPDATE diminuendo_records SET seq = 7 + seq WHERE seq < 0")
    else:
        execute(ledger, statement)
    with pytest.raises(LedgerError, match=words):
        verify(ledger)


def test_a_cut_off_end_shows_against_a_cited_head(ledger: Ledger, budget: Budget) -> None:
    ledger.create("b", budget)
    before = ledger.head
    ledger.open_run("b")
    cited = ledger.head.digest
    verify(ledger, cited=[before.digest, cited])
    execute(ledger, "DELETE FROM diminuendo_records WHERE seq = 2")
    execute(ledger, "DELETE FROM diminuendo_runs")
    execute(ledger, "UPDATE diminuendo_head SET seq = 1, digest = :digest", digest=before.digest)
    verify(ledger)
    with pytest.raises(LedgerError, match="cited head"):
        verify(ledger, cited=[cited])


def test_a_newer_schema_is_refused(ledger: Ledger, url: str) -> None:
    execute(ledger, "UPDATE diminuendo_head SET version = 99")
    with pytest.raises(SchemaError, match="pip install --upgrade"):
        Ledger(url)
    with pytest.raises(SchemaError, match="pip install --upgrade"):
        ledger.create("b", Budget(epsilon=1, delta=1e-5))


def test_an_older_schema_is_brought_forward(
    ledger: Ledger, url: str, budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.create("b", budget)

    def second(connection: Any) -> None:
        connection.execute(text("ALTER TABLE diminuendo_runs ADD COLUMN place TEXT"))

    def broken(connection: Any) -> None:
        second(connection)
        raise LedgerError("half-way")

    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, broken])
    with pytest.raises(LedgerError, match="half-way"):
        Ledger(url)
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS[:2], second])
    newer = Ledger(url)
    newer.open_run("b")
    assert verify(newer).records == 2
    monkeypatch.setattr(schema, "MIGRATIONS", schema.MIGRATIONS[:2])
    with pytest.raises(SchemaError, match="pip install --upgrade"):
        ledger.open_run("b")


def test_out_and_in_again(ledger: Ledger, budget: Budget, tmp_path: Path) -> None:
    ledger.create("b", budget, data=DATA)
    run = ledger.open_run("b")
    ledger.grant(run.id, [step(20.0, count=5)], start=False)
    ledger.start(run.id, 3)
    ledger.close_run(run.id, used=2)
    file = tmp_path / "out.jsonl"
    assert export(ledger, file) == 5
    other = Ledger(tmp_path / "other.sqlite")
    assert import_file(other, file)[0].steps == 2
    assert other.status("b").spent_units == ledger.status("b").spent_units
    again = import_file(other, file)[0]
    assert (again.created, again.steps, again.spent) == (False, 0, 0.0)
    ledger.charge("b", [step(20.0)])
    export(ledger, file)
    assert import_file(other, file)[0].steps == 1
    assert other.status("b").spent_units == ledger.status("b").spent_units
    verify(other)
    with pytest.raises(InputError, match="own export"):
        import_file(ledger, file)


def test_an_import_is_checked_and_raises_nothing(
    ledger: Ledger, budget: Budget, tmp_path: Path
) -> None:
    ledger.create("b", budget)
    ledger.charge("b", [step(20.0, count=5)])
    file = tmp_path / "out.jsonl"
    export(ledger, file)
    lines = file.read_text().splitlines()
    other = Ledger(tmp_path / "other.sqlite")
    bad = {
        "was changed": [lines[0], lines[1].replace("1e-08", "1e-03"), *lines[2:]],
        "cut off": lines[:-1],
        "is missing": [lines[0], *lines[2:]],
        "valid JSON": [lines[0], "{", *lines[2:]],
        "first line": lines[1:],
        "of version": [lines[0].replace('"version":1', '"version":9'), *lines[1:]],
    }
    for words, content in bad.items():
        file.write_text("\n".join(content) + "\n")
        with pytest.raises(InputError, match=words):
            import_file(other, file)
    assert other.budgets() == []
    file.write_text("\n".join(lines) + "\n")
    other.create("b", Budget(epsilon=8, delta=1e-8))
    with pytest.raises(InputError, match="the terms it has"):
        import_file(other, file)
    third = Ledger(tmp_path / "third.sqlite")
    third.create("b", budget)
    third.charge("b", [step(20.0, count=205)])
    with pytest.raises(BudgetRefused, match="overspend"):
        import_file(third, file)
    import_file(third, file, overspend=True)
    assert third.status("b").spent > 1
    assert third.status("b").left is None
    with pytest.raises(BudgetRefused, match="Nothing is left"):
        third.remaining("b")
    verify(third)


def test_events_for_other_accountants(ledger: Ledger, some_plan: dim.Plan) -> None:
    accountant = pytest.importorskip("dp_accounting.pld.pld_privacy_accountant")
    ledger.create("b", some_plan.budget)
    ledger.charge("b", some_plan.events[:10])
    other = accountant.PLDAccountant()
    other.compose(to_dp_accounting(ledger, "b"))
    assert other.get_epsilon(1e-8) == pytest.approx(ledger.status("b").epsilon, rel=2e-3)


def test_spending_asks_in_blocks_and_returns_the_rest(ledger: Ledger, some_plan: dim.Plan) -> None:
    ledger.create("b", some_plan.budget)
    with LedgerSpending(ledger, "b", some_plan, block=8) as spending:
        assert ledger.status("b").spent > 1 - 1e-6
        for sigma in some_plan.sigmas[:13]:
            assert spending.fits(step(float(sigma)))
            spending.request(step(float(sigma)))
        assert ledger.run(spending.run).started == 16
        assert ledger.run(spending.run).confirmed == 8
        assert not spending.fits(step(1.0))
        with pytest.raises(BudgetRefused, match="Step 14"):
            spending.request(step(1.0))
    assert ledger.run(spending.run).confirmed == 13
    assert spending.cite()["head"] == ledger.head.digest
    verify(ledger, cited=[spending.cite()["head"]])


def test_spending_ahead_stops_where_the_budget_does(ledger: Ledger, some_plan: dim.Plan) -> None:
    ledger.create("b", some_plan.budget)
    ledger.charge("b", some_plan.events[20:])
    spending = LedgerSpending(ledger, "b", some_plan, ahead=7)
    taken = 0
    while spending.fits(step(float(some_plan.sigmas[taken]))):
        spending.request(step(float(some_plan.sigmas[taken])))
        taken += 1
    assert 20 <= taken < 40
    with pytest.raises(BudgetRefused):
        spending.request(step(float(some_plan.sigmas[taken])))
    spending.close()
    assert 0.98 < ledger.status("b").spent <= 1
    with pytest.raises(BudgetRefused, match="would fit"):
        ledger.pay("b", some_plan).resume()
    assert ledger.runs("b")[-1].status == "closed"


def test_a_restored_spending_does_not_repeat_what_was_started(
    ledger: Ledger, some_plan: dim.Plan
) -> None:
    ledger.create("b", some_plan.budget)
    first = LedgerSpending(ledger, "b", some_plan, block=8)
    first.resume()
    for sigma in some_plan.sigmas[:10]:
        first.request(step(float(sigma)))
        if first.steps == 5:
            saved = json.loads(json.dumps(first.state()))
    spent = ledger.status("b").spent_units
    second = LedgerSpending(ledger, "b", some_plan, block=8)
    coming = [step(float(sigma)) for sigma in some_plan.sigmas[5:]]
    assert second.resume(saved, events=coming) == 16
    assert second.run == first.run
    for sigma in some_plan.sigmas[16:]:
        second.request(step(float(sigma)))
    second.close()
    assert ledger.status("b").spent_units == spent
    third = LedgerSpending(ledger, "b", some_plan)
    with pytest.raises(BudgetRefused):
        third.resume(saved)
    verify(ledger)


def test_step_by_step_without_a_plan(ledger: Ledger, budget: Budget) -> None:
    ledger.create("b", budget)
    with LedgerSpending(ledger, "b") as spending:
        assert spending.epsilon() == 0
        while spending.fits(step(4.0)):
            spending.request(step(4.0))
        with pytest.raises(BudgetRefused):
            spending.request(step(4.0))
        assert spending.epsilon() == 4
    assert spending.steps == ledger.runs()[0].confirmed == int(budget.R * 16)


def test_the_file_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.delenv("DIMINUENDO_LEDGER", raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    before = os.umask(0)
    try:
        ledger = Ledger()
        ledger.create("b", Budget(epsilon=1, delta=1e-5))
    finally:
        os.umask(before)
    folder = tmp_path / "share" / "diminuendo"
    for file in folder.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "_mounts", lambda: {Path("/"): "ext4", tmp_path / "far": "nfs4"})
    with pytest.raises(InputError, match=r"network file system \(nfs4\)"):
        Ledger(tmp_path / "far" / "ledger.sqlite")
    assert not (tmp_path / "far").exists()
    Ledger(tmp_path / "near.sqlite").close()
    for kind in ("fuse.sshfs", "cifs", "smb3", "9p", "nfs", "fuse.glusterfs", "smbfs", "afpfs"):
        assert address._is_shared(kind), kind
    for kind in ("ext4", "xfs", "btrfs", "apfs", "tmpfs", "overlay", "zfs"):
        assert not address._is_shared(kind), kind


@pytest.mark.parametrize(
    "bad", ["mysql://x/y", "sqlite://", "sqlite:///:memory:", "://", "", "http://x", "sqlite:foo"]
)
def test_other_urls_are_refused(bad: str) -> None:
    with pytest.raises(InputError, match="the ledger's URL"):
        Ledger(bad)


def test_secrets_appear_nowhere(server: Any) -> None:
    uri = make_url(server.get_uri())
    query = {**uri.query, "sslpassword": "hunter3"}
    url = uri.set(username="nobody", password="hunter2", query=query)
    with pytest.raises(LedgerError) as caught:
        Ledger(url.render_as_string(hide_password=False), patience=1)
    assert "hunter" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert "hunter" not in address.display(url)


def test_identities(tmp_path: Path) -> None:
    x, y = np.arange(12.0).reshape(4, 3), np.arange(4)
    one = identify((x, y))
    assert one == identify((x.copy(), y))
    assert one == identify((np.asfortranarray(x), y.astype(">i8").astype("<i8")))
    assert len({one, identify((x, y[::-1])), identify((x.reshape(3, 4), y)), identify(x)}) == 4
    assert one != identify((x.astype(np.float32), y))
    torch = pytest.importorskip("torch")
    tensors = torch.as_tensor(x), torch.as_tensor(y)
    assert one == identify(tensors) == identify(torch.utils.data.TensorDataset(*tensors))
    rows = [(x[i], int(y[i])) for i in range(4)]
    assert identify(rows) != one
    file = tmp_path / "a" / "x.bin"
    file.parent.mkdir()
    file.write_bytes(b"1" * 100)
    seen: list[tuple[int, int]] = []
    digest = identify(file, progress=lambda done, total: seen.append((done, total)))
    assert digest == identify(str(file))
    assert seen[-1][0] == seen[-1][1] >= 100
    assert digest != identify(file.parent)
    (tmp_path / "a" / "y.bin").write_bytes(b"")
    assert identify(file.parent) == identify(file.parent)
    with pytest.raises(InputError, match="a file or a folder"):
        identify(tmp_path / "nothing")
    with pytest.raises(InputError, match="numbers"):
        identify([("a", object())])
    with pytest.raises(InputError, match="map-style"):
        identify(3)


def test_names_of_the_version_before_go_on_working(
    ledger: Ledger, some_plan: dim.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.warns(DeprecationWarning, match="allow_second"):
        ledger.create("b", some_plan.budget, beside=False)  # type: ignore[call-arg]
    run = ledger.open_run("b")
    with pytest.warns(DeprecationWarning, match="Run.generation"):
        assert run.turn == 0
    monkeypatch.setattr("diminuendo.ledger.process.start_time", lambda pid: "another process")
    with pytest.warns(DeprecationWarning, match="partial|generation"):
        ledger.grant(run.id, [step(20.0)], most=True, turn=0)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="scaled_to_fit"):
        assert ledger.fitting("b", some_plan).steps == some_plan.steps
    with pytest.warns(DeprecationWarning, match="Ledger.reclaim"):
        assert ledger.release(run.id).status == "reclaimed"
    with pytest.warns(DeprecationWarning, match="Verification"):
        assert dim.ledger.Verified is dim.ledger.Verification


@pytest.mark.parametrize("planned", [False, True])
def test_what_is_refused_leaves_no_run_open(
    ledger: Ledger, budget: Budget, some_plan: dim.Plan, planned: bool
) -> None:
    """Mini-batches on a budget for full batches, and steps that cost too much."""
    ledger.create("b", replace(budget, epsilon=budget.epsilon / 100))
    with pytest.raises(InputError, match="RenyiFilter"):
        ledger.charge("b", [step(rate=0.5)])
    assert ledger.runs("b") == []
    with pytest.raises(BudgetRefused):
        ledger.charge("b", [step(0.1)])
    if planned:
        with pytest.raises(BudgetRefused):
            LedgerSpending(ledger, "b", some_plan).resume()
    else:
        spending = LedgerSpending(ledger, "b")
        for bad, error in ((step(rate=0.5), InputError), (step(0.1), BudgetRefused)):
            with pytest.raises(error):
                spending.request(bad)
            assert not any(run.status == "open" for run in ledger.runs("b"))
        spending.request(step(1e4))
        with pytest.raises(BudgetRefused):
            spending.request(step(0.1))
        spending.request(step(1e4))
        spending.close()
    assert {run.status for run in ledger.runs("b")} == {"closed"}
    verify(ledger)
