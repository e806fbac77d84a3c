# mypy: allow-untyped-defs, allow-incomplete-defs
"""Influences against their definitions, written out as sums."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import diminuendo as dim
from diminuendo import influence
from diminuendo.influence.measured import from_values, mark, origin_of

gammas = st.floats(0.05, 0.9999)
betas = st.floats(0.01, 0.98)
lengths = st.integers(1, 60)


def u3_coefficients(gamma: float, beta: float, steps: int) -> list[float]:
    return [
        math.fsum(
            gamma ** (steps - t) * ((1 - beta) / (1 - beta**t)) ** 2 * beta ** (2 * (t - i))
            for t in range(i, steps + 1)
        )
        for i in range(1, steps + 1)
    ]


@given(gamma=gammas, steps=lengths)
def test_gradient_descent(gamma: float, steps: int) -> None:
    expected = [gamma ** (steps - t) for t in range(1, steps + 1)]
    np.testing.assert_allclose(
        influence.gradient_descent(gamma=gamma, steps=steps), expected, rtol=1e-12
    )


def test_shorter_steps_converge_more_slowly_and_let_less_noise_in() -> None:
    q = influence.gradient_descent(gamma=0.9, steps=4, step_size=0.5)
    rate = 1 - 0.1 * 0.5 * 1.5
    np.testing.assert_allclose(q, 0.25 * rate ** np.arange(3, -1, -1))


@given(gamma=gammas, beta=betas, steps=lengths)
def test_momentum_is_u3(gamma: float, beta: float, steps: int) -> None:
    np.testing.assert_allclose(
        influence.momentum(gamma=gamma, beta=beta, steps=steps),
        u3_coefficients(gamma, beta, steps),
        rtol=1e-10,
    )


def test_momentum_without_memory_is_gradient_descent() -> None:
    np.testing.assert_allclose(
        influence.momentum(gamma=0.97, beta=0.0, steps=50),
        influence.gradient_descent(gamma=0.97, steps=50),
    )


@pytest.mark.parametrize("gamma", [0.3, 0.6, 0.9, 0.99, 0.999, 0.99999])
@pytest.mark.parametrize("beta", [0.05, 0.3, 0.5, 0.9, 0.99])
def test_split_lemma(gamma: float, beta: float) -> None:
    """Lemma "beta gamma cond": (1−β)/(1−β^t) ≤ γ^{t−1} up to T̂, and < γ^{T̂−1} beyond."""
    split = influence.momentum_split(gamma=gamma, beta=beta)
    t = np.unique(np.concatenate([np.arange(1, min(split, 2000) + 1), [split]]))
    weights = (1 - beta) / (1 - beta ** t.astype(float))
    assert (weights <= gamma ** (t - 1.0) * (1 + 1e-12)).all()
    later = np.arange(split + 1, split + 2000, dtype=float)
    beyond = (1 - beta) / (1 - beta**later)
    assert (beyond <= gamma ** (split - 1) * (1 + 1e-12)).all()
    assert beyond[0] > gamma**split


@given(gamma=gammas, beta=betas, steps=lengths)
def test_two_phase_never_below_the_exact_influence(gamma: float, beta: float, steps: int) -> None:
    if beta >= gamma:
        with pytest.raises(dim.InputError, match="below gamma"):
            influence.momentum_two_phase(gamma=gamma, beta=beta, steps=steps)
        return
    relaxed = influence.momentum_two_phase(gamma=gamma, beta=beta, steps=steps)
    assert (relaxed >= np.array(u3_coefficients(gamma, beta, steps)) * (1 - 1e-9)).all()


def test_exponential() -> None:
    np.testing.assert_allclose(influence.exponential(rate=0.5, steps=3), np.exp([-1.0, -0.5, 0.0]))
    np.testing.assert_allclose(influence.exponential(rate=-0.5, steps=3), np.exp([0.0, -0.5, -1.0]))


@given(
    eigenvalues=st.lists(st.floats(0, 10), min_size=1, max_size=8),
    steps=lengths,
    size=st.floats(0.1, 1.9),
)
def test_spectrum(eigenvalues: list[float], steps: int, size: float) -> None:
    largest = max(eigenvalues)
    if largest <= 1e-6:
        return
    expected = [
        size**2
        * np.mean(
            [x / largest * (1 - size * x / largest) ** (2 * (steps - t)) for x in eigenvalues]
        )
        for t in range(1, steps + 1)
    ]
    got = influence.spectrum(eigenvalues, steps=steps, step_size=size)
    np.testing.assert_allclose(got, np.maximum(expected, influence.FLOOR), rtol=1e-9)


def test_spectrum_with_weights_is_a_density() -> None:
    np.testing.assert_allclose(
        influence.spectrum([1.0, 0.2], weights=[1, 3], steps=9),
        influence.spectrum([1.0, 0.2, 0.2, 0.2], steps=9),
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda n: influence.gradient_descent(gamma=0.5, steps=n),
        lambda n: influence.gradient_descent(gamma=0.0, steps=n),
        lambda n: influence.momentum(gamma=0.5, beta=0.9, steps=n),
        lambda n: influence.momentum(gamma=0.9999999, beta=0.999, steps=n),
        lambda n: influence.momentum_two_phase(gamma=0.95, beta=0.9, steps=n),
        lambda n: influence.exponential(rate=3.0, steps=n),
        lambda n: influence.exponential(rate=-3.0, steps=n),
        lambda n: influence.spectrum([0.0, 1e-9, 0.5, 1.0], steps=n),
    ],
)
def test_a_million_steps_stay_positive_and_finite(make) -> None:
    q = make(1_000_000)
    assert q.shape == (1_000_000,)
    assert np.isfinite(q).all()
    assert (q > 0).all()
    sigmas = dim.schedules.optimal(q, 0.5)
    assert np.isfinite(sigmas).all()
    assert math.fsum(1 / sigmas**2) <= 0.5


def test_measured_curve_from_files(tmp_path: Path) -> None:
    values = [0.5, 1.0, 2.0]
    files = {
        "plain.json": "[0.5, 1.0, 2.0]",
        "object.json": '{"influence": [0.5, 1.0, 2.0]}',
        "single.csv": "0.5\n1.0\n2.0\n",
        "titled.csv": "influence\n0.5\n1.0\n2.0\n",
        "table.csv": "step,influence\n1,0.5\n2,1.0\n3,2.0\n",
        "marked.csv": "\ufeff0.5\n1.0\n2.0\n",
        "blank.csv": "\n\ninfluence\n0.5\n\n1.0\n2.0\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.write_text(text)
        np.testing.assert_allclose(influence.from_file(path), np.array(values) / 2)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("missing.json", None, "readable"),
        ("broken.json", "[1, 2", "valid JSON"),
        ("other.json", '{"curve": [1]}', "a list of numbers"),
        ("negative.json", "[1, -2]", r"influence\[1\]"),
        ("nan.json", "[1, NaN]", r"influence\[1\]"),
        ("empty.json", "[]", "non-empty"),
        ("words.json", '["a"]', "numbers"),
        ("two.csv", "a,b\n1,2\n", "a column titled 'influence'"),
        ("other.csv", "epsilon\n1\n2\n", "a column titled 'influence'"),
        ("typo.csv", "1.0x\n1\n2\n", "a column titled 'influence'"),
        ("words.csv", "influence\n1\nx\n", "row 3"),
        ("empty.csv", "", "a column titled"),
        ("deep.json", "[" * 100_000, "valid JSON"),
        ("comma.csv", "influence\n1,5\n", "row 2"),
    ],
)
def test_unreadable_curves(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(dim.InputError, match=said):
        influence.from_file(path)


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(dim.InputError, match="not UTF-8"):
        influence.from_file(path)


@pytest.mark.parametrize("gamma", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_gamma_outside_its_range(gamma: float) -> None:
    with pytest.raises(dim.InputError, match="Expected gamma"):
        influence.gradient_descent(gamma=gamma, steps=3)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "3", None])
def test_steps_that_are_no_count(steps: object) -> None:
    with pytest.raises(dim.InputError, match="Expected steps"):
        influence.gradient_descent(gamma=0.5, steps=steps)  # type: ignore[arg-type]


def test_a_mark_survives_what_is_done_with_a_curve() -> None:
    marked = mark(np.array([0.25, 0.5, 1.0]), "not private")
    made = [
        marked.copy(),
        marked[1:],
        2 * marked,
        marked**0.5,
        np.sqrt(marked),
        copy.copy(marked),
        copy.deepcopy(marked),
        pickle.loads(pickle.dumps(marked)),
        pickle.loads(pickle.dumps(marked[::2])),
        from_values(marked[:2]),
    ]
    assert [origin_of(one) for one in made] == ["not private"] * len(made)
    assert origin_of(np.concatenate([marked, marked])) is not None
    np.testing.assert_array_equal(made[7], marked)
