"""Every code block of the README and of the pages under docs/ runs as it stands, page by page.

Blocks of a page share a folder and their names, in the order of the page. A block with a title is
written to the file of that name. `<!-- not run: REASON -->` above a block leaves it out.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import diminuendo as dim
from diminuendo.cli import main

ROOT = Path(__file__).parent.parent
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")),
]
GENERATED = ("reference/", "security.md", "contributing.md", "changelog.md")
"""Pages that `make docs` adds, to which others may link."""


class Block(NamedTuple):
    language: str
    title: str
    text: str
    skipped: str
    line: int


def blocks(page: str) -> Iterator[Block]:
    fenced = re.compile(
        r"(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?"
        r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]*)\")?\n(?P<text>.*?)^```$",
        re.DOTALL | re.MULTILINE,
    )
    content = (ROOT / page).read_text()
    for match in fenced.finditer(content):
        yield Block(
            language=match["language"],
            title=match["title"] or "",
            text=match["text"],
            skipped=match["reason"] or "",
            line=content.count("\n", 0, match.start("text")),
        )


@pytest.mark.parametrize("page", [page for page in PAGES if list(blocks(page))])
@pytest.mark.usefixtures("fixed_keys")
def test_examples(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "example"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dim.PlanWarning)
        for block in blocks(page):
            if not block.skipped:
                run(block, page, names)


def run(block: Block, page: str, names: dict[str, object]) -> None:
    if block.title:
        Path(block.title).write_text(block.text)
    if block.language == "toml":
        tomllib.loads(block.text)
    elif block.language == "json":
        json.loads(block.text)
    elif block.language == "python" and not block.title:
        exec(compile("\n" * block.line + block.text, ROOT / page, "exec"), names)
    elif block.language == "sh":
        for line in block.text.replace("\\\n", " ").splitlines():
            command, *arguments = shlex.split(line, comments=True) or [""]
            assert command in ("", "diminuendo"), f"{page}: {line}"
            assert not command or main(arguments) == 0, f"{page}: {line}"
    else:
        assert block.title or block.language == "text", f"{page}: a block of {block.language!r}"


def test_few_blocks_are_left_out() -> None:
    skipped = [
        (page, block.skipped)
        for page in PAGES
        for block in blocks(page)
        if block.skipped and not re.search(r"`make test-\w+` runs it$", block.skipped)
    ]
    assert len(skipped) <= 6, skipped


INDENTED_CODE = re.compile(r"^    (diminuendo |import |from |\w+ = |\w+\(.*\)$)", re.MULTILINE)


@pytest.mark.parametrize("page", [p for p in PAGES if p.startswith(("docs/start", "docs/how-to"))])
def test_no_code_hides_in_indented_blocks(page: str) -> None:
    outside = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    assert INDENTED_CODE.search(outside) is None


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
        path = (folder / target).resolve()
        generated = path.is_relative_to(ROOT / "docs") and str(
            path.relative_to(ROOT / "docs")
        ).startswith(GENERATED)
        assert path.exists() or generated, f"{page} links to {target}"


def test_every_page_is_in_the_sites_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        if page.startswith("docs/"):
            assert f" {page.removeprefix('docs/')}\n" in navigation, f"add {page} to mkdocs.yml"
