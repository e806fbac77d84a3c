"""Without an optional package, whoever needs it is told which extra to install."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from diminuendo import _extras
from diminuendo.errors import MissingExtra

OPTIONAL = ("torch", "matplotlib", "optuna", "psycopg", "sklearn", "mlxtend", "opacus")
BLOCKER = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def without_extras(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process where no optional package can be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + code], capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("from diminuendo.training import fit", "torch"),
        ("from diminuendo.training.clipping import Engine", "torch"),
        ("import diminuendo as dim; dim.tune", "all"),
        ("from diminuendo.adapters.sklearn import PrivateClassifier", "torch,experiments"),
        (
            "from diminuendo.report import figures; import numpy as np; "
            "figures.running(np.ones(3), '/dev/null/x.svg', title='')",
            "plots",
        ),
    ],
)
def test_the_message_names_the_extra(code: str, extra: str) -> None:
    ran = without_extras(code)
    last = ran.stderr.strip().splitlines()[-1]
    assert ran.returncode == 1
    assert last.startswith("diminuendo.errors.MissingExtra: ")
    assert last.endswith(f"pip install 'diminuendo[{extra}]'")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "run.toml"],
        [
            "tune",
            "--epsilon",
            "4",
            "--delta",
            "1e-8",
            "--examples",
            "9",
            "--features",
            "2",
            "--classes",
            "2",
        ],
        ["reproduce", "tables", "--out", "out"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_that_needs_torch_says_so_in_one_line(arguments: list[str]) -> None:
    ran = without_extras(
        f"from diminuendo.cli import main; sys.exit(main({arguments!r} + ['--json']))"
    )
    assert ran.returncode == 2, ran.stderr
    assert ran.stderr.count("\n") == 1
    assert "needs PyTorch, which is not installed" in ran.stderr


def test_the_core_works_without_any_extra(tmp_path: Path) -> None:
    url = str(tmp_path / "ledger.sqlite")
    ran = without_extras(
        f"""
import diminuendo as dim
from diminuendo.cli import main
plan = dim.plan(dim.Budget(epsilon=4, delta=1e-8), examples=1000, parameters=10, clip=1, kappa=20)
ledger = dim.Ledger({url!r})
ledger.create("patients", dim.Budget(epsilon=4, delta=1e-8))
sys.exit(main(["ledger", "show", "patients", "--ledger", {url!r}, "--json"]))
"""
    )
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["name"] == "patients"


def test_a_broken_package_keeps_its_own_error() -> None:
    def fail() -> None:
        with _extras.needed("torch", extra="torch", purpose="Testing"):
            raise ModuleNotFoundError(
                "No module named 'typing_extensions'", name="typing_extensions"
            )

    with pytest.raises(ModuleNotFoundError, match="typing_extensions") as raised:
        fail()
    assert not isinstance(raised.value, MissingExtra)


def test_what_no_extra_brings_is_named_itself() -> None:
    def fail() -> None:
        with _extras.needed("absent", extra=None, purpose="This test"):
            importlib.import_module("absent.part")

    with pytest.raises(MissingExtra, match=r"pip install absent$") as raised:
        fail()
    assert raised.value.name == "absent"


def test_every_extra_that_is_named_exists() -> None:
    root = Path(__file__).parent.parent
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    named = {
        extra
        for path in (root / "src").rglob("*.py")
        for extras in re.findall(r"""\bextra(?:=|": )"([a-z,]+)\"""", path.read_text())
        for extra in extras.split(",")
    }
    assert named
    assert named <= set(project["optional-dependencies"])
