"""Another model or loss of the same shapes is another study, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from toys import LOSS, make_data, mlp, own, replica, smooth, softened, weighted

import diminuendo as dim
from diminuendo.replicas import Outcome, train


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"model": mlp}, {"model": smooth}),
        ({"model": own(torch.relu)}, {"model": own(torch.tanh)}),
        ({"loss": weighted(1.0)}, {"loss": weighted(2.0)}),
        ({"loss": softened(0)}, {"loss": softened(1)}),
        ({"loss": LOSS}, {"loss": nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)}),
    ],
)
def test_another_model_or_loss_of_the_same_shapes_is_another_study(
    one: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    def run(settings: dict[str, Any]) -> list[Outcome]:
        model, loss = settings.get("model", mlp), settings.get("loss", "cross-entropy")
        path = tmp_path / "results.jsonl"
        return train(model, make_data(), [replica()], loss=loss, store=path, progress=False)

    first = run(one)
    with pytest.raises(dim.InputError, match="of this study"):
        run(other)
    assert run(one) == first


SCRIPT = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from toys import *
from diminuendo.replicas.fingerprint import fingerprint
print([fingerprint(of) for of in (mlp(), own(torch.relu)(), LOSS, weighted(2.0), softened(1))])
"""


def test_another_process_knows_a_model_and_a_loss_again() -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    one, other = (
        subprocess.run(
            command,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    )
    assert one == other
    assert len(set(one.split())) == 5
