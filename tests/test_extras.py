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


NEEDING = {
    "from diminuendo.training import fit": "torch",
    "from diminuendo.training.clipping import Engine": "torch",
    "import diminuendo as dim; dim.tune": "all",
    "from diminuendo.adapters.sklearn import PrivateClassifier": "torch,experiments",
    "from diminuendo.adapters.opacus import PrivacyEngine": "torch",
    "from diminuendo.adapters.opacus.inside import PlannedNoise": "torch",
    "from diminuendo.report import figures; figures.with_intervals([], 'x.svg')": "plots",
}
COMMANDS = (
    "train run.toml",
    "tune --epsilon 4 --delta 1e-8 --examples 9 --features 2 --classes 2",
    "reproduce tables --out out",
)


def without_extras(code: str, folder: Path) -> dict[str, str]:
    """What code puts into `said`, in a process where no optional package can be imported."""
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{BLOCKER}\nimport json\nsaid = {{}}\n{code}\nprint(json.dumps(said))",
        ],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert isinstance(said, dict)
    return said


def test_the_message_names_the_extra(tmp_path: Path) -> None:
    said = without_extras(
        f"""
for code in {[*NEEDING]!r}:
    try:
        exec(code)
    except Exception as error:
        said[code] = f"{{type(error).__name__}}: {{error}}"
""",
        tmp_path,
    )
    assert said.keys() == NEEDING.keys()
    for code, extra in NEEDING.items():
        assert said[code].startswith("MissingExtra: "), code
        assert said[code].endswith(f"pip install 'diminuendo[{extra}]'"), code


def test_a_command_that_needs_torch_says_so_in_one_line(tmp_path: Path) -> None:
    said = without_extras(
        f"""
import contextlib, io
from diminuendo.cli import main
for line in {COMMANDS!r}:
    with contextlib.redirect_stderr(io.StringIO()) as err:
        said[line] = f"{{main([*line.split(), '--json'])}} {{err.getvalue()}}"
""",
        tmp_path,
    )
    for line in COMMANDS:
        assert re.fullmatch(r"2 error: [^\n]* needs PyTorch, which is not [^\n]*\n", said[line])
    assert list(tmp_path.iterdir()) == []


def test_the_core_works_without_any_extra(tmp_path: Path) -> None:
    said = without_extras(
        """
import diminuendo as dim
from diminuendo.cli import main
budget = dim.Budget(epsilon=4, delta=1e-8)
plan = dim.plan(budget, examples=1000, parameters=10, clip=1, kappa=20)
dim.Ledger("ledger.sqlite").create("patients", budget)
said["epsilon"] = str(plan.epsilon)
said["code"] = str(main(["ledger", "verify", "--ledger", "ledger.sqlite", "--json"]))
""",
        tmp_path,
    )
    assert 3.99 < float(said["epsilon"]) <= 4
    assert said["code"] == "0"


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
