"""What the site computes when it is built: the reference, the commands, the tables of evidence."""

from __future__ import annotations

import ast
import csv
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from diminuendo.cli import app

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "diminuendo"
HIDDEN = {"cli"}
"""Rooms that have a page of another kind."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every room of the package, one for the commands, and an index of both."""
    rooms = _rooms()
    pages = {
        f"reference/{name}.md": f"# diminuendo.{name}\n\n::: diminuendo.{name}\n" for name in rooms
    }
    pages["reference/commands.md"] = _commands()
    rows = [f"| [`{name}`]({name}.md) | {_lead(path)} |" for name, path in rooms.items()]
    pages["reference/index.md"] = (
        "# Reference\n\nEvery public name, with its docstring. The command line is on "
        "[its own page](commands.md).\n\n| module | what it is for |\n|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )
    for name in ("SECURITY", "CONTRIBUTING", "CHANGELOG"):
        text = (ROOT / f"{name}.md").read_text().replace("](docs/", "](")
        pages[f"{name.lower()}.md"] = text
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    config.nav[-1] = {
        "Reference": [
            "reference/index.md",
            {"Command line": "reference/commands.md"},
            *({f"diminuendo.{name}": f"reference/{name}.md"} for name in rooms),
        ]
    }
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace `<!-- table: NAME -->` on the evidence page by what the CSV file holds."""
    if page.file.src_uri == "evidence/index.md":
        tables = (("cells", _cells), ("efficiency", _efficiency), ("joint", _joint))
        for name, table in tables:
            markdown = markdown.replace(f"<!-- table: {name} -->", table())
    return markdown


def on_post_build(config: MkDocsConfig) -> None:
    """Replace the one script that the theme loads from the network; let no page load another."""
    site = Path(config.site_dir)
    for path in site.rglob("*.html"):
        up = "../" * (len(path.relative_to(site).parts) - 1)
        text = path.read_text().replace("https://unpkg.com/iframe-worker/shim", f"{up}worker.js")
        path.write_text(text)
        away = re.findall(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=\"?https?:[^>]*>", text)
        if away:
            raise PluginError(f"{path} loads {away[0]}: the site must work without a network")


def _rooms() -> dict[str, Path]:
    """Public modules by dotted name: those at the top, packages inside packages, and the modules of
    a package that lists no names (`__all__`) of its own."""
    found: dict[str, Path] = {}
    for path in SOURCE.rglob("*.py"):
        package = path.name == "__init__.py"
        parts = (path.parent if package else path.with_suffix("")).relative_to(SOURCE).parts
        if not parts or HIDDEN & {*parts} or any(part[0] == "_" for part in parts):
            continue
        inner = package or (len(parts) == 2 and not _lists_names(path.with_name("__init__.py")))
        if len(parts) == 1 or (inner and (not package or _lists_names(path))):
            found[".".join(parts)] = path
    return dict(sorted(found.items()))


def _lists_names(path: Path) -> bool:
    return "__all__" in path.read_text()


def _lead(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]


def _commands() -> str:
    """Every command with its help, as the terminal shows it."""
    parts = ["# Command line\n"]
    root: Any = typer.main.get_command(app)
    context = root.context_class(root, info_name="diminuendo", max_content_width=88)
    _add_command(parts, root, context, level=2)
    return "\n".join(parts)


def _add_command(parts: list[str], command: Any, context: Any, level: int) -> None:
    parts.append(f"{'#' * level} `{context.command_path}`\n")
    parts.append(f"```text\n{command.get_help(context)}\n```\n")
    for name, child in sorted(getattr(command, "commands", {}).items()):
        within = child.context_class(child, info_name=name, parent=context, max_content_width=88)
        _add_command(parts, child, within, min(level + 1, 3))


def _read(name: str) -> list[dict[str, str]]:
    with (ROOT / "docs" / "evidence" / f"{name}.csv").open(newline="") as handle:
        return list(csv.DictReader(handle))


def _cells() -> str:
    rows = [
        f"| {r['task']}, {r['examples']} | {r['variant']} | {r['steps']} "
        f"| {float(r['train_loss']):.4f} ± {float(r['train_loss_half']):.4f} "
        f"| {float(r['test_accuracy']):.4f} ± {float(r['test_accuracy_half']):.4f} |"
        for r in _read("cells")
    ]
    head = "| task, N | variant | steps | training loss | test accuracy |\n|---|---|---|---|---|\n"
    return head + "\n".join(rows)


def _efficiency() -> str:
    rows = [
        f"| {r['task']}, {r['examples']} | {r['variant']} "
        + (
            f"| {float(r['uniform_needs']):.0f} | {float(r['ratio']):.2f} × |"
            if r["uniform_needs"]
            else "| more than was measured | |"
        )
        for r in _read("efficiency")
    ]
    head = "| task, N | variant | uniform noise needs | ratio |\n|---|---|---|---|\n"
    return head + "\n".join(rows)


def _joint() -> str:
    """One row for each model in a cell: uniform noise, and what the other ways add to it."""
    places: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for r in _read("joint"):
        key = tuple(r[name] for name in ("task", "examples", "epsilon", "delta", "model"))
        places.setdefault(key, {})[r["method"]] = r
    rows = []
    for (task, examples, epsilon, delta, model), ways in places.items():
        chosen = any(r["chosen"] == "True" for r in ways.values())
        added = [
            f"{float(r['against_uniform']):+.4f} ± {float(r['against_uniform_half']):.4f}"
            if (r := ways.get(way)) and "uniform" in ways
            else ""
            for way in ("fading", "falling", "joint")
        ]
        reached = [
            f"{float(way['test_accuracy']):.4f} ± {float(way['test_accuracy_half']):.4f}"
            if way
            else ""
            for way in (ways.get("uniform"), ways["joint"])
        ]
        name = f"**{model}**" if chosen else model
        rows.append(
            f"| {task}, {examples} | ({float(epsilon):g}, {float(delta):g}) | {name} "
            f"| {reached[0]} | {added[0]} | {added[1]} | {added[2]} | {reached[1]} |"
        )
    return (
        "| task, N | (ε, δ) | model | uniform | fading noise adds | falling rate adds "
        "| best of both adds | best of both |\n|---|---|---|---|---|---|---|---|\n"
        + "\n".join(rows)
    )
