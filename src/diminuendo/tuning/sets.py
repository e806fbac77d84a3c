"""The auxiliary sets of a search: some to choose on, others to measure what was chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from diminuendo import _validate
from diminuendo.errors import InputError
from diminuendo.tuning.auxiliary import LABELS, MIXED, Labelled, Shape, check_auxiliary, gaussian
from diminuendo.tuning.judge import Objective, Sets

MOST_EXAMPLES = 2000
"""Synthetic training sets are not larger: noise is scaled so that its effect stays the same."""
MOST_PUBLIC_EXAMPLES = 4000
_FEWEST_TESTS, _MOST_TESTS = 100, 2000

Auxiliary = str | Sequence[str] | Labelled | Sequence[Labelled] | None


def auxiliary_sets(
    auxiliary: Auxiliary,
    held_out: Sequence[Labelled] | None,
    shape: Shape,
    minimise: Objective,
    *,
    finals: int,
    unseen: int,
    seed: int,
) -> tuple[Sets, Sets, str]:
    """Sets to search on, others that no choice is made on, and a sentence about them."""
    kinds = _kinds(auxiliary)
    if kinds is not None:
        if held_out is not None:
            raise InputError("left out with synthetic data", name="held_out", value="given")
        makers = [kinds[i % len(kinds)] for i in range(finals + unseen)]
        sets = [_synthetic(shape, kind, 1000 * seed + i) for i, kind in enumerate(makers)]
        words = f"Synthetic data, labels by {', '.join(kinds)}."
        return _sets(sets[:finals]), _sets(sets[finals:]), words
    assert auxiliary is not None
    public: Any = [auxiliary] if isinstance(auxiliary[0], torch.Tensor) else list(auxiliary)
    if held_out is None and minimise != "train-loss":
        if len(public) != 1:
            raise InputError(
                f"a test set for each auxiliary set ({len(public)})", name="held_out", value=None
            )
        return _drawn(public[0], shape, finals=finals, unseen=unseen, seed=seed)
    checked = [check_auxiliary(one, shape) for one in public]
    tests = list(held_out or [])
    if tests and len(tests) != len(checked):
        raise InputError(
            f"a test set for each auxiliary set ({len(checked)})", name="held_out", value=len(tests)
        )
    if len(checked) == 1:
        both = Sets(checked, tests)
        return both, both, "One public set; held-out runs differ in start and noise only."
    half = (len(checked) + 1) // 2
    return (
        Sets(checked[:half], tests[:half]),
        Sets(checked[half:], tests[half:]),
        f"{len(checked)} public sets, the last {len(checked) - half} of them held out.",
    )


def _kinds(auxiliary: Auxiliary) -> tuple[str, ...] | None:
    """The kinds of labels of synthetic data, or None for public data."""
    if auxiliary is None:
        return MIXED
    if isinstance(auxiliary, str):
        auxiliary = (auxiliary,)
    if not isinstance(auxiliary, Sequence):
        raise InputError(
            "data, or kinds of labels",
            name="auxiliary",
            value=type(auxiliary),
            remedy="Public data are a pair (x, y) of tensors, or a list of such pairs.",
        )
    if len(auxiliary) == 0 or not any(isinstance(one, str) for one in auxiliary):
        if len(auxiliary) == 0:
            raise InputError("data, or kinds of labels", name="auxiliary", value=auxiliary)
        return None
    return tuple(_validate.choice("labels", one, LABELS) for one in auxiliary)


def _synthetic(shape: Shape, labels: str, seed: int) -> tuple[Labelled, Labelled]:
    examples = min(shape.examples, MOST_EXAMPLES)
    tests = min(max(examples, 5 * _FEWEST_TESTS), _MOST_TESTS)
    x, y = gaussian(replace(shape, examples=examples + tests), labels=labels, seed=seed)
    return (x[:examples], y[:examples]), (x[examples:], y[examples:])


def _drawn(
    data: Labelled, shape: Shape, *, finals: int, unseen: int, seed: int
) -> tuple[Sets, Sets, str]:
    """Training and test sets drawn from the rows of one public set.

    Two halves of the rows, where both are large enough: one to choose on, the other held out.
    """
    rows = len(data[0]) if isinstance(data, tuple) and len(data) == 2 else 0
    x, y = check_auxiliary(data, replace(shape, examples=max(rows, shape.examples)))
    generator = torch.Generator().manual_seed(_validate.count("seed", seed, at_least=0))
    order = torch.randperm(rows, generator=generator)
    examples = min(shape.examples, MOST_PUBLIC_EXAMPLES, rows - _FEWEST_TESTS)
    if examples < min(shape.examples, MOST_PUBLIC_EXAMPLES) or examples < 2:
        raise InputError(
            f"at least {_FEWEST_TESTS} rows more than the private set ({shape.examples})",
            name="the auxiliary data",
            value=rows,
            remedy='Give test sets as held_out, or minimise="train-loss".',
        )
    apart = rows // 2 >= examples + _FEWEST_TESTS
    parts = (order[: rows // 2], order[rows // 2 :]) if apart else (order, order)

    def some(part: torch.Tensor, count: int) -> Sets:
        sets = []
        for _ in range(count):
            own = part[torch.randperm(len(part), generator=generator)]
            train, test = own[:examples], own[examples : examples + _MOST_TESTS]
            sets.append(((x[train], y[train]), (x[test], y[test])))
        return _sets(sets)

    words = "half of its rows are held out" if apart else "held-out runs draw the same rows anew"
    return some(parts[0], finals), some(parts[1], unseen), f"{rows} public rows; {words}."


def _sets(pairs: Sequence[tuple[Labelled, Labelled]]) -> Sets:
    return Sets([train for train, _ in pairs], [test for _, test in pairs])
