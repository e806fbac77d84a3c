"""diminuendo audit: a small one, its JSON, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import diminuendo as dim
from diminuendo.cli import main
from diminuendo.training.clipping import Flat


@pytest.fixture
def plan(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    made = dim.plan((4, 1e-5), examples=500, steps=3, gamma=0.7, alpha=1e-4)
    path.write_text(made.to_json())
    return str(path)


pytestmark = pytest.mark.usefixtures("fixed_keys")
SMALL = ["--canaries", "800", "--confidence", "0.999999", "--no-progress"]


def test_audit(plan: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", plan, *SMALL, "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    facts = json.loads(out)
    assert 0 < facts["epsilon_lower"] <= facts["claim"] == pytest.approx(4)
    assert facts["exceeded"] is False
    assert main(["audit", plan, *SMALL, "--clip", "per-layer", "--own-loop"]) == 0
    assert "Nothing was found above the claim." in capsys.readouterr().out


def test_a_refuted_claim_ends_with_code_1(
    plan: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flat, "factors", lambda self, norms: 3 * self.bound / norms.clamp(min=1))
    assert main(["audit", plan, *SMALL, "--noise", "fast"]) == 1
    assert "The claim is refuted." in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [["--clip", "none"], ["--canaries", "2"], ["--confidence", "2"], ["--noise", "loud"]],
)
def test_wrong_use(plan: str, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", plan, *wrong]) == 2
    assert "Expected" in capsys.readouterr().err


def test_a_plan_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "nowhere.json"]) == 2
    assert "the plan" in capsys.readouterr().err
