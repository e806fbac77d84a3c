from __future__ import annotations

import numpy as np
import pytest

import diminuendo as dim
from diminuendo import events


def test_round_trip() -> None:
    event = dim.GaussianStep(noise_multiplier=1.1, sampling_rate=0.01, count=3)
    assert events.from_dict(events.to_dict(event)) == event


def test_runs_of_equal_steps() -> None:
    sigmas, rates = np.array([2.0, 2, 1, 1, 1, 2]), np.array([1.0, 1, 1, 0.5, 0.5, 1])
    made = events.from_schedule(sigmas, rates)
    assert [(e.noise_multiplier, e.sampling_rate, e.count) for e in made] == [
        (2.0, 1.0, 2),
        (1.0, 1.0, 1),
        (1.0, 0.5, 2),
        (2.0, 1.0, 1),
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"type": "os.system", "noise_multiplier": 1}, "event type"),
        ({"noise_multiplier": 1}, "event type"),
        ({"type": "gaussian-step", "noise_multiplier": 1, "code": "x"}, "event field"),
        ({"type": "gaussian-step", "noise_multiplier": -1}, "noise_multiplier"),
    ],
)
def test_a_file_can_name_nothing_else(data: dict[str, object], said: str) -> None:
    with pytest.raises(dim.InputError, match=said):
        events.from_dict(data)
