"""One tree of errors: every class is in it, and the drawing in the docstring is that tree."""

from __future__ import annotations

import contextlib
import pkgutil
import re
from importlib import import_module

import pytest

import diminuendo as dim
from diminuendo import errors
from diminuendo.errors import DiminuendoError, InputError, MissingExtra


def classes(root: type[DiminuendoError]) -> list[type[DiminuendoError]]:
    return [root, *(c for child in root.__subclasses__() for c in classes(child))]


@pytest.fixture(scope="module", autouse=True)
def _every_module() -> None:
    for module in pkgutil.walk_packages(dim.__path__, "diminuendo."):
        if not module.name.endswith("__main__"):
            # An adapter's package may be missing; `make test-adapters` has them all.
            adapter = module.name.startswith("diminuendo.adapters.")
            missing = (MissingExtra, ModuleNotFoundError) if adapter else ()
            with contextlib.suppress(*missing):
                import_module(module.name)


def drawn() -> dict[str, tuple[int, int]]:
    """Each name in the drawing, with its depth and exit code."""
    assert errors.__doc__ is not None
    lines = errors.__doc__.split("\n\n")[1].splitlines()
    tree, depth = {}, {}
    for line in lines:
        match = re.match(r"( *[│├└─ ]*)([A-Z]\w+) ", line)
        if match is None:
            continue
        depth[match[2]] = (len(match[1]) - 4) // 4
        code = re.search(r"(\d)$", line)
        tree[match[2]] = int(code[1]) if code else DiminuendoError.exit_code
    return {name: (depth[name], code) for name, code in tree.items()}


def test_the_drawing_is_the_tree() -> None:
    ours = [
        c
        for c in classes(DiminuendoError)
        if c.__module__.startswith("diminuendo") and not c.__name__.startswith("_")
    ]
    assert set(drawn()) == {c.__name__ for c in ours}
    for c in ours:
        depth = len([base for base in c.__mro__ if issubclass(base, DiminuendoError)]) - 1
        assert drawn()[c.__name__] == (depth, c.exit_code), c.__name__


def test_no_public_error_stands_outside() -> None:
    """Those that a package exports; signals inside a room never reach a caller."""
    for info in pkgutil.walk_packages(dim.__path__, "diminuendo."):
        module = import_module(info.name) if info.ispkg else None
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if isinstance(value, type) and issubclass(value, Exception):
                assert issubclass(value, DiminuendoError | Warning), value


def test_errors_are_also_what_python_would_raise() -> None:
    assert issubclass(InputError, ValueError)
    assert issubclass(errors.UsageError, RuntimeError)
    assert issubclass(errors.MissingExtra, ModuleNotFoundError)


def test_a_message_is_one_line_with_name_value_and_remedy() -> None:
    error = InputError("at most 3", name="steps", value="7\n" * 100, remedy="Use\nfewer.")
    assert str(error).startswith("Expected steps to be at most 3, got '7")
    assert str(error).endswith("…. Use fewer.")
    assert "\n" not in str(error)
