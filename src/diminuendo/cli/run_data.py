"""The data of a run: arrays in an .npz file, columns of a table, or what a function returns."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diminuendo import _validate
from diminuendo.cli.run_file import made, plain_errors
from diminuendo.errors import InputError

if TYPE_CHECKING:
    from diminuendo.training.groups import Groups

_COLUMNS = ("target", "features", "classes", "target_type")
_TARGETS = ("class", "number")


@dataclass(frozen=True)
class Test:
    """Rows that a trained model is scored on, and whether they are stated to be public."""

    data: Any
    public: bool

    def evaluate(self, model: Any, loss: Any) -> dict[str, Any]:
        """The scores, with what they were computed from."""
        from diminuendo.training.evaluation import evaluate

        return {**evaluate(model, self.data, loss)._asdict(), "public": self.public}


def read(section: Mapping[str, Any], name: str, folder: Path, model: Any) -> Any:
    """(x, y) as the model takes them, or what the factory returns; `name` is the section's."""
    if "factory" in section:
        return made(section["factory"], f"{name}.factory", section.get("arguments", {}))
    if "path" not in section:
        raise InputError("there", name=f"{name}.path or {name}.factory", value=None)
    from diminuendo.training.sampling import as_trained, precision_of
    from diminuendo.training.tables import SUFFIXES

    path, precision = folder / section["path"], precision_of(model)
    if path.suffix.lower() in SUFFIXES:
        x, y = _columns(section, path)
    else:
        x, y = _arrays(section, name, path)
    try:
        return as_trained(x, precision), as_trained(y, precision)
    except (TypeError, ValueError) as error:
        raise _not_arrays(name, path, error) from None


def groups(section: Mapping[str, Any], folder: Path) -> Groups | None:
    """Whose each row is, from the named array beside x and y, or from the named column."""
    if "groups" not in section:
        return None
    if "path" not in section:
        raise InputError("given with data.path", name="data.groups", value=section["groups"])
    import numpy as np

    from diminuendo.training import tables
    from diminuendo.training.groups import Groups

    path = folder / section["path"]
    if path.suffix.lower() in tables.SUFFIXES:
        table = tables.read_table(path)
        return Groups(tables.texts(table, section["groups"], "groups"))
    with np.load(path, allow_pickle=False) as arrays:
        _validate.choice("data.groups", section["groups"], sorted(arrays))
        return Groups(arrays[section["groups"]])


def test_set(settings: Mapping[str, Any], folder: Path, model: Any, loss: Any) -> Test | None:
    """What [test] describes, tried on the untrained model before anything is spent."""
    if "test" not in settings:
        return None
    own, data = settings["test"], settings["data"]
    paths = [(folder / part["path"]).resolve() for part in (own, data) if "path" in part]
    if len(paths) == 2 and paths[0] == paths[1]:
        raise InputError(
            "another file than data.path",
            name="test.path",
            value=own["path"],
            remedy="A score of the rows that were trained on says little and is not covered; "
            "--reveal-training-loss shows the training loss.",
        )
    shared = {key: data[key] for key in (*_COLUMNS, "groups") if key in data}
    rows = read({**shared, **_same_columns(data, folder), **own}, "test", folder, model)
    test = Test(rows, own.get("public", False))
    with plain_errors():
        from diminuendo.training.evaluation import evaluate

        evaluate(model, rows, loss, at_most=2)
    return test


def _same_columns(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The columns that the model is trained on, in their order, whatever order a test file has."""
    from diminuendo.training import tables

    path = folder / data.get("path", "")
    if "features" in data or path.suffix.lower() not in tables.SUFFIXES:
        return {}
    apart = {data.get("target"), data.get("groups")}
    return {"features": [name for name in tables.read_table(path).names if name not in apart]}


def _arrays(section: Mapping[str, Any], name: str, path: Path) -> tuple[Any, Any]:
    import numpy as np

    for key in _COLUMNS:
        if key in section and name == "data":
            raise InputError(
                "given with a .csv or .parquet file", name=f"data.{key}", value=section[key]
            )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return arrays["x"], arrays["y"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise _not_arrays(name, path, error) from None


def _not_arrays(name: str, path: Path, error: Exception) -> InputError:
    return InputError(
        "an .npz file with arrays x and y, or a .csv or .parquet file",
        name=f"{name}.path",
        value=str(path),
        remedy=f"({error})",
    )


def _columns(section: Mapping[str, Any], path: Path) -> tuple[Any, Any]:
    from diminuendo.training import tables

    table = tables.read_table(path)
    if "target" not in section:
        raise InputError(
            "the name of the column to learn",
            name="data.target",
            value=None,
            remedy=f"{path.name} has {', '.join(table.names[:8])}.",
        )
    target = section["target"]
    kind = _validate.choice("data.target_type", section.get("target_type", "class"), _TARGETS)
    apart = {target, section.get("groups")}
    listed = section.get("features")
    if listed is not None and apart & set(listed):
        raise InputError(
            "without the target and the groups",
            name="data.features",
            value=sorted(map(str, listed)),
        )
    if kind == "number" and "classes" in section:
        raise InputError(
            'given with target_type = "class"', name="data.classes", value=section["classes"]
        )
    y: Any = (
        tables.labels(table, target, section.get("classes"))
        if kind == "class"
        else tables.numbers(table, target, "target")
    )
    return tables.features(table, listed, apart - {None}), y
