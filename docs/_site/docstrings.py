"""Our docstrings list arguments in two aligned columns; a page wants a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROW = re.compile(r"^(?P<names>`?[\w*]+`?(?:, `?[\w*]+`?)*)(?: {2,}(?P<text>\S.*))?$")


class AlignedColumns(griffe.Extension):
    """Turns every paragraph of aligned columns into a list."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(_listed, paragraphs))


def _listed(paragraph: str) -> str:
    lines = paragraph.splitlines()
    first = _ROW.match(lines[0]) if lines else None
    if first is None or not (first["text"] or (len(lines) > 1 and lines[1].startswith("   "))):
        return paragraph
    items: list[str] = []
    for line in lines:
        row = _ROW.match(line)
        if line.startswith("  ") and items:
            items[-1] += f" {line.strip()}"
        elif row is not None:
            names = ", ".join(f"`{name.strip('`')}`" for name in row["names"].split(", "))
            items.append(f"- {names} — {row['text'] or ''}".rstrip())
        else:
            return paragraph
    return "\n".join(items)
