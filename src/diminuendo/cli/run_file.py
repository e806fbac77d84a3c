"""The run file of `diminuendo train`: its keys, and the objects that it names."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diminuendo import _files, _validate
from diminuendo.errors import DiminuendoError, InputError

_NUMBER = (int, float)
KEYS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "model": {"factory": str, "arguments": dict},
    "data": {
        "path": str,
        "factory": str,
        "arguments": dict,
        "groups": str,
        "target": str,
        "features": list,
        "classes": list,
        "target_type": str,
    },
    "test": {"path": str, "factory": str, "arguments": dict, "public": bool},
    "budget": {"epsilon": _NUMBER, "delta": _NUMBER, "relation": str, "conversion": str},
    "plan": {
        "path": str,
        "clip": _NUMBER,
        "steps": (int, str),
        "epochs": _NUMBER,
        "kappa": _NUMBER,
        "gamma": _NUMBER,
        "spectrum": list,
        "influence": list,
        "momentum": _NUMBER,
        "step_size": _NUMBER,
        "smoothness": _NUMBER,
        "gap": _NUMBER,
        "alpha": _NUMBER,
        "schedule": (str, list),
        "fall": _NUMBER,
        "sampling_rate": (int, float, list),
        "lr": (int, float, str, list),
        "max_lr": _NUMBER,
        "gradient_norm": _NUMBER,
        "examples": int,
        "parameters": int,
    },
    "ledger": {"url": str, "budget": str},
    "training": {
        "loss": str,
        "optimizer": str,
        "optimizer_arguments": dict,
        "lr": _NUMBER,
        "lr_scheduler": str,
        "lr_scheduler_arguments": dict,
        "strict": bool,
        "clip": str,
        "clip_bounds": list,
        "micro_batch": int,
        "pad": bool,
        "noise": str,
        "seed": int,
        "workers": int,
        "device": str,
        "checkpoint_every": int,
        "reveal_training_loss": bool,
    },
    "output": {"folder": str},
}


def read(path: Path) -> dict[str, Any]:
    """The sections, with every key known and of its type."""
    text = _files.read_text(path, name="the run file")
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(
            "valid TOML", name="the run file", value=str(path), remedy=f"({error})"
        ) from None
    for section, content in settings.items():
        _validate.choice("a section of the run file", section, KEYS)
        if not isinstance(content, dict):
            raise InputError(f"a section, [{section}]", name=section, value=content)
        for key, value in content.items():
            _validate.choice(f"a key of [{section}]", key, KEYS[section])
            kinds = KEYS[section][key]
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                raise InputError(_kinds_said(kinds), name=f"{section}.{key}", value=value)
    for section in ("data", "training", "output"):
        if section not in settings:
            raise InputError(
                "there",
                name=f"the section [{section}] of the run file",
                value=None,
                remedy="`diminuendo train --help` shows one.",
            )
    return settings


def _kinds_said(kinds: type | tuple[type, ...]) -> str:
    words = {
        str: "text",
        dict: "a table",
        list: "a list",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
    }
    listed = kinds if isinstance(kinds, tuple) else (kinds,)
    return " or ".join(words[kind] for kind in listed if not (kind is int and float in listed))


def needed(settings: Mapping[str, Any], section: str, key: str) -> Any:
    """A key that has to be there."""
    if key not in settings[section]:
        raise InputError("there", name=f"{section}.{key}", value=None)
    return settings[section][key]


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules beside the run file and in the working folder can be named in it."""
    added = [str(folder), str(Path.cwd())]
    sys.path[:0] = added
    try:
        yield
    finally:
        for path in added:
            sys.path.remove(path)


@contextmanager
def plain_errors() -> Iterator[None]:
    """What PyTorch raises over a model and its data, as one line."""
    try:
        yield
    except DiminuendoError:
        raise
    except Exception as error:
        raise InputError(
            "made for each other",
            name="the model, the data and the loss",
            value=type(error).__name__,
            remedy=f"({_first_line(error)})",
        ) from error


def _failed(what: str, value: object, error: Exception) -> InputError:
    said = f"({type(error).__name__}: {_first_line(error)})"
    return InputError("free of errors", name=what, value=value, remedy=said)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _find(path: Any, name: str) -> Callable[..., Any]:
    module, _, attribute = str(path).partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            'importable as "module:name"',
            name=name,
            value=path,
            remedy=f"Is the module beside the run file or on the Python path? ({error})",
        ) from None
    except Exception as error:
        raise _failed(f"the import of {name}", path, error) from error
    if not callable(found):
        raise InputError("something to call", name=name, value=path)
    return found


def made(path: Any, name: str, arguments: Mapping[str, Any], *positional: Any) -> Any:
    """What the function or class "module:name" returns; its errors as one line."""
    made = _find(path, name)
    try:
        return made(*positional, **arguments)
    except DiminuendoError:
        raise
    except Exception as error:
        raise _failed(name, path, error) from error
