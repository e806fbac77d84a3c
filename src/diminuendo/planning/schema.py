"""A plan as one JSON object, with a schema version and a digest of its content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from diminuendo import _files
from diminuendo.errors import InputError, SchemaError

if TYPE_CHECKING:
    from diminuendo.planning.value import Plan

SCHEMA = "diminuendo.plan"
VERSION = 2
ADDED_IN_2 = ("lr", "gain", "gain_error", "forgetting")
"""A plan without any of these is written as version 1, and keeps the digest that it had there."""


def content(plan: Plan) -> dict[str, Any]:
    """Everything in the plan as JSON values, with the schema's name and version."""
    values = {f.name: getattr(plan, f.name) for f in fields(plan)}
    values["budget"] = asdict(plan.budget)
    values["assumptions"] = list(plan.assumptions)
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            values[name] = value.tolist()
    version = VERSION
    if all(values[name] is None for name in ADDED_IN_2):
        version = 1
        for name in ADDED_IN_2:
            del values[name]
    return {"schema": SCHEMA, "version": version, **values}


def digest(values: Mapping[str, Any]) -> str:
    """SHA-256 of the content, as "sha256:" and 64 hexadecimal digits."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def parse(text: str, names: set[str], *, source: str) -> dict[str, Any]:
    """The fields `names` and the digest from a plan's JSON; other files raise InputError."""
    if not isinstance(text, str):
        raise InputError("text", name="the plan", value=type(text).__name__)
    data = _files.parse_json(text, name="the plan", source=source)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise InputError(
            f'a JSON object with "schema": "{SCHEMA}"',
            name="the plan",
            value=source,
            remedy="`diminuendo plan -o plan.json` writes one.",
        )
    if data.get("version") not in (1, VERSION):
        raise SchemaError(
            f"of schema version 1 or {VERSION}",
            name="the plan",
            value=data.get("version"),
            remedy="Plan again with this version of diminuendo, or use the version that wrote it.",
        )
    if data["version"] == 1:
        names = names - set(ADDED_IN_2)
    expected = names | {"schema", "version", "digest"}
    if set(data) != expected:
        raise InputError(
            "a plan with exactly its own fields",
            name="the plan",
            value=source,
            remedy=f"Differing: {', '.join(sorted(expected ^ set(data)))}.",
        )
    return {name: data[name] for name in (*names, "digest")}
