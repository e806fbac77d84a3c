"""Our docstrings list arguments in two aligned columns; a page wants a list."""

from __future__ import annotations

import re
from typing import Any

import griffe

_NAMES = re.compile(r"`?[\w*]+`?(?:, `?[\w*]+`?)*$")
_FIRST = re.compile(r"(?P<names>\S(?:[^ ]| (?! ))*)(?: {2,}|\n {3,})(?=\S)")


class AlignedColumns(griffe.Extension):
    """Turns every paragraph of aligned columns into a list."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            paragraphs = obj.docstring.value.split("\n\n")
            obj.docstring.value = "\n\n".join(map(_listed, paragraphs))


def _listed(paragraph: str) -> str:
    """A paragraph whose first line has two columns, and whose other lines keep to them."""
    first = _FIRST.match(paragraph)
    if first is None or not _NAMES.match(first["names"]):
        return paragraph
    column = len(first[0].rsplit("\n", 1)[-1])
    items: list[str] = []
    for line in paragraph.splitlines():
        names, text = line[:column].strip(), line[column:].strip()
        if len(line) <= column or line[column - 1] != " ":
            names, text = line.strip(), ""
        if not names and items:
            items[-1] += f" {text}"
        elif _NAMES.match(names):
            listed = ", ".join(f"`{name.strip('`')}`" for name in names.split(", "))
            items.append(f"- {listed} — {text}".rstrip())
        else:
            return paragraph
    return "\n".join(items)
