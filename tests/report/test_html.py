"""A page is one file, without scripts, and what people write in it stays text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from diminuendo.errors import InputError
from diminuendo.report import html

SVG = (
    '<?xml version="1.0"?><svg width="10pt" height="5pt" viewBox="0 0 10 5">'
    '<metadata>made <b/> today</metadata><defs><path id="a" d="M0 0"/></defs>'
    '<use href="#a"/><g clip-path="url(#a)"/></svg>'
)


class Tags(HTMLParser):
    """Open tags as they come; fails where one is closed that is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        self.seen.append(tag)
        if tag not in {"meta", "img", "path", "use"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        del attrs
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_page_is_well_formed_and_self_contained(tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"not really a png")
    document = html.page(
        "A & B",
        [
            html.Section("One", "text", html.table(["name", "x"], [["a", 1], ["b", "<2>"]])),
            html.Section(
                "Two",
                html.figure(SVG, "drawn"),
                html.figure(picture, "painted"),
                html.bullets(["x", html.code("y")]),
                html.facts([("ε", 4)]),
                html.note("mind", tone="warning"),
                html.preformatted("a  b"),
            ),
        ],
        lead="lead",
        footer="footer",
    )
    tags = Tags()
    tags.feed(document)
    assert tags.open == []
    assert "script" not in tags.seen
    assert "http" not in document.replace("http-equiv", "")
    assert "A &amp; B" in document
    assert "&lt;2&gt;" in document
    assert "<code>y</code>" in document
    assert html.write_page(tmp_path / "p.html", document).read_text() == document


def test_written_text_never_becomes_markup() -> None:
    evil = "<script>alert(1)</script>"
    made = [
        html.paragraph(evil),
        html.bullets([evil]),
        html.table([evil], [[evil]], caption=evil),
        html.facts([(evil, evil)]),
        html.note(evil),
        html.figure(SVG, evil),
        html.page(evil, [html.Section(evil, evil)], lead=evil, footer=evil),
    ]
    assert all("<script" not in part for part in made)


def test_two_pictures_do_not_share_ids() -> None:
    one, other = html.figure(SVG, "x"), html.figure(SVG.replace("M0 0", "M1 1"), "x")
    ids = [part.split('id="')[1].split('"')[0] for part in (one, other)]
    assert ids[0] != ids[1]
    assert f'href="#{ids[0]}"' in one
    assert f"url(#{ids[0]})" in one
    assert "<metadata>" not in one


@pytest.mark.parametrize(
    "make",
    [
        lambda: html.table(["a", "b"], [["only one"]]),
        lambda: html.figure("<svg><script>1</script></svg>", "x"),
        lambda: html.figure('<svg onload="1"></svg>', "x"),
        lambda: html.figure("missing.png", "x"),
        lambda: html.figure("picture.gif", "x"),
        lambda: html.note("x", tone="loud"),
    ],
)
def test_bad_parts_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(InputError):
        make()
