"""Write the table of docs/models.md from what the tests of models found (build/models.json)."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- table -->", "<!-- end of table -->"


def table(results: dict[str, dict[str, str]]) -> str:
    """A Markdown table, one line for each case, by group."""
    lines = ["| group | model | result |", "|---|---|---|"]
    for name, entry in results.items():
        lines.append(f"| {entry['group']} | {name} | {entry['result']} |")
    return "\n".join(lines)


def main() -> None:
    """Replace the table between the two marks."""
    results = json.loads((ROOT / "build" / "models.json").read_text(encoding="utf-8"))
    page = ROOT / "docs" / "models.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
