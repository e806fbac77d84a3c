"""The README's examples run as they stand, in the order in which they stand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from diminuendo.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_examples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = re.findall(r"```(python|sh)\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 4
    for language, text in blocks:
        if language == "python":
            exec(compile(text, "README.md", "exec"), names)
            continue
        for line in text.splitlines():
            command, *arguments = shlex.split(line)
            assert command == "diminuendo"
            assert main(arguments) == 0, line
    assert "Plan: " in capsys.readouterr().out


@pytest.mark.parametrize("path", ["README.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))])
def test_links_lead_somewhere(path: str) -> None:
    page = ROOT / path
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{path} links to {target}"
