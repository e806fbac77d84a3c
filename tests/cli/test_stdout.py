"""Output that nobody reads to its end: no traceback, and the exit code of what was done."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "diminuendo"]
PLAN = ["plan", "--epsilon", "4", "--delta", "1e-8", "--examples", "1000", "--parameters", "9"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ([*PLAN, "--steps", "20000", "--json"], 0),  # more than a pipe holds
        ([*PLAN, "--steps", "10"], 0),
        (["budget", "--epsilon", "4", "--delta", "1e-8"], 0),  # through rich
        (["--help"], 0),
        ([*PLAN, "--steps", "none"], 2),
    ],
)
def test_a_reader_who_leaves_changes_nothing(words: list[str], code: int, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    if words[0] == "plan":
        words = [*words, "-o", str(output)]
    child = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    said = child.stderr.read().decode()
    child.stderr.close()
    assert child.wait(timeout=600) == code, said
    assert "Traceback" not in said
    assert "BrokenPipe" not in said
    if words[0] == "plan" and code == 0:
        assert json.loads(output.read_text())["schema"] == "diminuendo.plan"


def test_no_stdout_at_all() -> None:
    words = " ".join([*COMMAND, "budget", "--epsilon", "4", "--delta", "1e-8", ">&-"])
    done = subprocess.run(["sh", "-c", words], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
