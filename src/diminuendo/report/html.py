"""One self-contained HTML page: text, tables and pictures in a single file.

No scripts and nothing from the network: a page can be mailed, printed and read in ten years.
Plain strings are escaped wherever they go; only `Html`, which these functions return, is taken as
it is. Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from diminuendo import _files
from diminuendo.errors import InputError

_STYLE = """
:root{color-scheme:light dark;--ink:#1d2429;--soft:#5c6b73;--line:#d5dce0;--paper:#fff;
--panel:#f4f6f7;--accent:#0b5fa5;--good:#3a7d44;--warning:#b0413e}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaec;--soft:#9fb0b9;--line:#39444b;--paper:#161b1e;
--panel:#20272b;--accent:#6db3ee;--good:#7fc48a;--warning:#ef8f8c}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:62rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}
h1{font-size:2rem;line-height:1.2;margin:0 0 .5rem}
h2{font-size:1.3rem;margin:2.5rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--line)}
.lead{font-size:1.15rem;color:var(--soft);margin-top:0}
p,ul{max-width:46rem}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,monospace;font-size:.88em}
pre{background:var(--panel);padding:.8rem 1rem;overflow-x:auto;border-radius:6px}
.wide{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums}
caption{text-align:left;color:var(--soft);padding-bottom:.4rem}
th,td{padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line);text-align:right;
white-space:nowrap;font-weight:normal}
th:first-child{text-align:left}
thead th{color:var(--soft);border-bottom:2px solid var(--line)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.25rem 1.5rem}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
figure{margin:1.25rem 0}
figure svg,figure img{display:block;width:100%;height:auto;background:#fff;border-radius:6px}
figcaption{color:var(--soft);font-size:.92rem;margin-top:.5rem;max-width:46rem}
.note{background:var(--panel);border-left:4px solid var(--accent);padding:.7rem 1rem;
border-radius:0 6px 6px 0}
.note.good{border-color:var(--good)}.note.warning{border-color:var(--warning)}
footer{margin-top:3rem;color:var(--soft);font-size:.9rem}
@media print{:root{--ink:#000;--soft:#444;--line:#bbb;--paper:#fff;--panel:#f4f4f4}
main{max-width:none;padding:0}figure,table,.note{break-inside:avoid}h2{break-after:avoid}
.wide,pre{overflow:visible}pre{white-space:pre-wrap}}
"""


class Html(str):
    """Markup that is already safe: what this module's functions return."""

    __slots__ = ()


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it: strings become paragraphs, `Html` is kept."""

    heading: str
    blocks: tuple[str, ...]

    def __init__(self, heading: str, *blocks: str) -> None:
        object.__setattr__(self, "heading", heading)
        object.__setattr__(self, "blocks", blocks)


def text(value: object) -> Html:
    """Anything, escaped unless it is markup already."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def paragraph(*parts: object) -> Html:
    """The parts, one after the other, as one paragraph."""
    return Html(f"<p>{''.join(text(part) for part in parts)}</p>")


def strong(value: object) -> Html:
    """Bold text."""
    return Html(f"<strong>{text(value)}</strong>")


def code(value: object) -> Html:
    """A command, a digest, a file's name."""
    return Html(f"<code>{text(value)}</code>")


def preformatted(value: object) -> Html:
    """Text whose columns matter, as the terminal shows it."""
    return Html(f"<pre>{text(value)}</pre>")


def bullets(items: Iterable[object]) -> Html:
    """A list with a bullet before each item."""
    return Html("<ul>" + "".join(f"<li>{text(item)}</li>" for item in items) + "</ul>")


def note(*parts: object, tone: str = "plain") -> Html:
    """A paragraph that stands out: `plain`, `good` or `warning`."""
    if tone not in ("plain", "good", "warning"):
        raise InputError("one of plain, good, warning", name="tone", value=tone)
    return Html(f'<p class="note {tone}">{"".join(text(part) for part in parts)}</p>')


def facts(pairs: Iterable[tuple[object, object]]) -> Html:
    """Names and values, one below the other."""
    rows = "".join(f"<dt>{text(name)}</dt><dd>{text(value)}</dd>" for name, value in pairs)
    return Html(f"<dl>{rows}</dl>")


def table(
    headers: Sequence[object], rows: Iterable[Sequence[object]], *, caption: str = ""
) -> Html:
    """A table: the first column names the row, the others are aligned as numbers."""
    width = len(headers)
    body = []
    for row in rows:
        if len(row) != width:
            raise InputError(f"{width} cells, as the headers", name="a row", value=list(row))
        first, *rest = row
        cells = "".join(f"<td>{text(cell)}</td>" for cell in rest)
        body.append(f'<tr><th scope="row">{text(first)}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in headers)
    title = f"<caption>{text(caption)}</caption>" if caption else ""
    return Html(
        f'<div class="wide"><table>{title}<thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def figure(picture: str | Path, caption: str, *, described: str = "") -> Html:
    """A picture and its caption: SVG text, or an .svg or .png file that is taken into the page."""
    label = escape(described or caption, quote=True)
    words = f"<figcaption>{text(caption)}</figcaption>"
    if isinstance(picture, str) and "<svg" in picture:
        return Html(f"<figure>{_inline(picture, label)}{words}</figure>")
    path = Path(picture)
    if path.suffix.lower() == ".svg":
        drawn = _files.read_text(path, name="the picture")
        return Html(f"<figure>{_inline(drawn, label)}{words}</figure>")
    if path.suffix.lower() != ".png":
        raise InputError("SVG text, or an .svg or .png file", name="the picture", value=str(path))
    data = base64.b64encode(_files.read_bytes(path, name="the picture")).decode()
    image = f'<img alt="{label}" src="data:image/png;base64,{data}">'
    return Html(f"<figure>{image}{words}</figure>")


def _inline(svg: str, label: str) -> str:
    """The <svg> element alone, scaled to the page, with ids of its own and without scripts."""
    found = re.search(r"<svg\b.*</svg>", svg, flags=re.DOTALL)
    if found is None:
        raise InputError("SVG text", name="the picture", value=svg[:40])
    drawn = found.group(0)
    if re.search(r"<script\b|<foreignObject\b|\son\w+\s*=|javascript:", drawn, flags=re.IGNORECASE):
        raise InputError("without scripts", name="the picture", value=drawn[:40])
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    prefix = f"p{hashlib.sha256(drawn.encode()).hexdigest()[:8]}-"
    drawn = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}\1"', drawn)
    drawn = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}\1"', drawn)
    drawn = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}\1)", drawn)
    opening, rest = drawn.split(">", 1)
    opening = re.sub(r'\s(width|height)="[^"]*"', "", opening)
    return f'{opening} role="img" aria-label="{label}">{rest}'


def page(title: str, sections: Iterable[Section], *, lead: str = "", footer: str = "") -> Html:
    """The whole document."""
    parts = []
    for section in sections:
        blocks = "".join(
            block if isinstance(block, Html) else paragraph(block) for block in section.blocks
        )
        parts.append(f"<section><h2>{text(section.heading)}</h2>{blocks}</section>")
    opening = f'<p class="lead">{text(lead)}</p>' if lead else ""
    closing = f"<footer>{text(footer)}</footer>" if footer else ""
    return Html(
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text(title)}</title><style>{_STYLE}</style></head><body><main>"
        f"<h1>{text(title)}</h1>{opening}{''.join(parts)}{closing}</main></body></html>\n"
    )


def write_page(path: str | Path, document: Html) -> Path:
    """Write the page whole or not at all."""
    _files.write_text(path, document)
    return Path(path)
