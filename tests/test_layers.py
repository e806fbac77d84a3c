"""The arrows of docs/architecture.md: a module may import only what lies before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "diminuendo"

BEFORE = {
    "errors": set[str](),
    "_validate": {"errors"},
    "_files": {"errors"},
    "_extras": {"errors"},
    "budget": set[str](),
    "events": {"budget"},
    "accounting": {"budget", "events"},
    "influence": {"budget", "events", "accounting"},
    "schedules": {"budget", "events", "accounting", "influence"},
    "bounds": {"budget", "events", "accounting", "influence", "schedules"},
    "planning": {"budget", "events", "accounting", "influence", "schedules", "bounds"},
}
BEFORE["spending"] = {*BEFORE}
CORE = {*BEFORE}
BEFORE["_progress"] = set[str]()
BEFORE["training"] = {*CORE}
BEFORE["ledger"] = {*CORE}
BEFORE["report"] = {*CORE, "ledger"}
BEFORE["page"] = {*CORE}
BEFORE["replicas"] = {*CORE, "training", "ledger"}
BEFORE["measuring"] = {*BEFORE["replicas"], "replicas"}
BEFORE["tuning"] = {*BEFORE["replicas"], "replicas", "report"}
BEFORE["audit"] = {*CORE, "training"}
BEFORE["paper"] = {*BEFORE}
BEFORE["compare"] = {*BEFORE} - {"measuring"}
BEFORE["experiments"] = {*BEFORE}
BEFORE["adapters"] = {*BEFORE}
BEFORE["cli"] = {*BEFORE} - {"adapters"}
GROUND = {"errors", "_validate", "_files", "_extras", "_progress"}
FACADE = {"__version__", "_later"}
"""What any module may take from `diminuendo` itself, the only module that knows all packages."""


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports(path: Path) -> list[str]:
    """Every module that a file imports, at its top or inside a function."""
    tree = ast.parse(path.read_text())
    modules: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "diminuendo":
            modules += [f"diminuendo.{name.name}" for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.append(node.module)
    return modules


def files() -> list[Path]:
    top = {"__init__.py", "__main__.py"}
    return [
        path
        for path in sorted(SOURCE.rglob("*.py"))
        if path.parent != SOURCE or path.name not in top
    ]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_follow_the_arrows(path: Path) -> None:
    here = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert here in BEFORE, f"{here} has no place in the architecture"
    allowed = (
        BEFORE[here] | {here, *FACADE} | (GROUND - {here} if here not in GROUND else BEFORE[here])
    )
    for module in imports(path):
        if module.startswith("diminuendo"):
            target = room(module)
            assert target in allowed, f"{path.name} in {here} imports {module}"
        if here in CORE:
            assert module.split(".")[0] not in {"torch", "matplotlib", "typer", "rich"}
