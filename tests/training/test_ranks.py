"""One spending for several ranks: the first asks, all hear the same answer or the same error."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from small_runs import two_ranks

import diminuendo as dim
from diminuendo.training.distributed import _received, _sent

SCRIPT = """
import datetime, json, os, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {here!r})
import torch, torch.distributed as dist
import diminuendo as dim
from diminuendo.spending import AdaptiveSpending, PlanSpending
from diminuendo.training import fit
from diminuendo.accounting import GaussianFilter
from small_runs import BUDGET, LINEAR, LOSS, run
torch.set_num_threads(1)
case, out = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", os.environ["MEET"], timeout=datetime.timedelta(minutes=5))

class Broken(PlanSpending):
    def __init__(self, plan, error, at):
        super().__init__(plan)
        self.error, self.at = error, at
    def resume(self, *given, **options):
        if self.at == "resume":
            raise self.error
        return super().resume(*given, **options)
    def _charge(self, event):
        if self.at == self.steps:
            raise self.error
        super()._charge(event)

plan = LINEAR.plan()
errors = {{
    "ledger": dim.LedgerError("the ledger cannot be reached"),
    "input": dim.InputError("one of the ledger's", name="the budget", value="nobody"),
    "os": OSError("the disk is full"),
    "local": type("Nameless", (Exception,), {{}})("known to one rank alone"),
}}
options = {{}}
if case in errors:
    options["spending"] = Broken(plan, errors[case], "resume" if case == "input" else 3)
elif case == "absent":
    options |= {{"ledger": out + "/nowhere.sqlite", "budget": "b"}}
elif case == "damaged":
    options |= {{"ledger": out + "/damaged.sqlite", "budget": "b"}}
elif case == "paid":
    options |= {{"ledger": out + "/good.sqlite", "budget": "b", "folder": out + "/run"}}
elif case == "adaptive":
    options["spending"] = AdaptiveSpending(GaussianFilter(BUDGET))
    options["policy"] = lambda released: 9.0
try:
    result = run(LINEAR.model(), plan, **options)
    said = [result.status, result.steps, result.epsilon, sorted(result.ledger)]
except Exception as error:
    said = [type(error).__name__, str(error), getattr(error, "name", None)]
with open(f"{{out}}/{{rank}}.json", "w") as file:
    json.dump(said, file)
dist.barrier()
os._exit(0)  # threads of the backend may abort while the interpreter goes down
"""


def said_by(case: str, folder: Path) -> list[list[Any]]:
    file = folder / "script.py"
    file.write_text(textwrap.dedent(SCRIPT.format(here=str(Path(__file__).parent))))
    ranks = two_ranks([str(file), case, str(folder)])
    try:
        assert [rank.wait(timeout=300) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("ledger", "LedgerError", "cannot be reached"),
        ("input", "InputError", "Expected the budget to be one of"),
        ("os", "OSError", "the disk is full"),
        ("absent", "InputError", "the ledger to be an existing file"),
        ("damaged", "LedgerError", ""),
    ],
)
def test_an_error_is_the_same_on_every_rank(
    case: str, kind: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "damaged.sqlite").write_bytes(b"SQLite format 3\0" + bytes(range(200)) * 50)
    first, second = said_by(case, tmp_path)
    assert first == second
    assert first[0] == kind
    assert words in first[1]


def test_an_error_that_cannot_be_sent_keeps_its_words(tmp_path: Path) -> None:
    first, second = said_by("local", tmp_path)
    assert first[:2] == ["Nameless", "known to one rank alone"]
    assert second[:2] == ["DiminuendoError", "Nameless: known to one rank alone"]


def test_a_ledger_pays_once_for_all_ranks(tmp_path: Path) -> None:
    ledger = dim.Ledger(tmp_path / "good.sqlite")
    ledger.create("b", dim.Budget(epsilon=4, delta=1e-5))
    first, second = said_by("paid", tmp_path)
    assert first[:3] == second[:3] == ["done", 20, pytest.approx(4, rel=1e-3)]
    assert "head" in first[3]
    assert second[3] == []
    [run] = ledger.runs("b")
    assert (run.status, run.confirmed) == ("closed", 20)


def test_all_ranks_claim_what_the_filter_guarantees(tmp_path: Path) -> None:
    first, second = said_by("adaptive", tmp_path)
    assert first == second
    assert first[2] == 4


@pytest.mark.parametrize(
    "error",
    [
        dim.BudgetRefused("nothing is left"),
        dim.SchemaError("of version 1", name="the ledger", value=2),
        KeyError("b"),
    ],
)
def test_an_error_is_made_anew(error: Exception) -> None:
    copy = _received(_sent(error))
    assert (type(copy), str(copy.args[0])) == (type(error), str(error))
    assert copy.__dict__ == error.__dict__
