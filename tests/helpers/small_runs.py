"""Small models, data and plans that several tests of training share, and ranks to run them in."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import diminuendo as dim
from diminuendo.errors import DiminuendoError
from diminuendo.training import Checkpoints, Compute, Progress, Result, fit
from diminuendo.training.clipping.certificate import ALLOWANCE
from diminuendo.training.mechanism import ExactNoise, FastNoise, NoiseSource
from diminuendo.training.mechanism.keys import Keys
from diminuendo.training.seeds import Seeds

BUDGET = dim.Budget(epsilon=4, delta=1e-5)
LOSS = nn.CrossEntropyLoss(reduction="none")


@dataclass(frozen=True)
class Setting:
    """A classification task with three classes: as many examples, features and planned steps."""

    examples: int
    features: int
    parameters: int
    steps: int
    layers: Callable[[int], nn.Module]
    dtype: torch.dtype = torch.float32
    clip: float = 1.0

    def plan(self, **changes: Any) -> dim.Plan:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dim.PlanWarning)
            settings = {
                "examples": self.examples,
                "parameters": self.parameters,
                "steps": self.steps,
                "clip": self.clip,
                **changes,
            }
            return dim.plan(BUDGET, **settings)

    def model(self, seed: int = 0) -> Any:
        torch.manual_seed(seed)
        return self.layers(self.features).to(self.dtype)

    def data(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.examples, self.features, generator=generator, dtype=self.dtype)
        return x, torch.randint(0, 3, (self.examples,), generator=generator)


def _perceptron(features: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, 7), nn.Tanh(), nn.Linear(7, 3))


LINEAR = Setting(30, 4, 15, 20, lambda features: nn.Linear(features, 3))
PERCEPTRON = Setting(40, 5, 60, 6, _perceptron, torch.float64, clip=0.7)


def weights(model: nn.Module) -> Tensor:
    """All parameters in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradient(model: nn.Module) -> Tensor:
    """What is in p.grad, in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


COUNTED = 1 + 2 * ALLOWANCE
"""Sensitivity with exact noise, in units of the clip's."""


def noisy(total: Tensor, std: float, seed: int, step: int = 0, noise: str = "exact") -> Tensor:
    """A sum with the noise that a seeded run adds to it in a step, whose rounding errors count."""
    source: NoiseSource = FastNoise(Seeds.make(seed))
    if noise == "exact":
        source, std = ExactNoise(Keys.make(seed)), std * COUNTED
    return source.add_noise(total.double().clone(), noise_std=std, sensitivity=std, step=step)


def run(model: nn.Module, plan: dim.Plan, **options: Any) -> Result:
    """`fit` on the linear task, with the arguments of `grouped`."""
    settings = grouped({"data": LINEAR.data(), "loss": LOSS, "lr": 0.5, **options})
    return fit(model, settings.pop("data"), plan, **settings)


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `fit`, silent unless told otherwise; `every`, `after_step`, `micro_batch`, `pad`
    and `reveal_training_loss` go where they belong."""
    rest = dict(options)
    shown = Progress(
        shown=rest.pop("progress", False),
        after_step=rest.pop("after_step", None),
        reveal_training_loss=rest.pop("reveal_training_loss", False),
    )
    compute = Compute(
        device=rest.pop("device", None),
        micro_batch=rest.pop("micro_batch", None),
        pad=rest.pop("pad", False),
    )
    if "every" in rest:
        rest["folder"] = Checkpoints(rest["folder"], rest.pop("every"))
    return {**rest, "progress": shown, "device": compute}


def two_ranks(arguments: Sequence[str]) -> list[subprocess.Popen[bytes]]:
    """Two ranks that nobody looks after: torchrun would end the second one itself.

    The script, which comes first among `arguments`, finds in MEET where its ranks meet.
    """
    meet = Path(arguments[0]).with_suffix(".meet")  # nobody takes a file, as one takes a free port
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            stderr=subprocess.DEVNULL,
            env={
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MEET": f"file://{meet}?rank={rank}&world_size=2",
            },
        )
        for rank in range(2)
    ]


def in_a_fork(act: Callable[[], object]) -> str:
    """What `act` gives in a forked process: its value, or the error's words."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = repr(act())
        except DiminuendoError as error:
            answer = f"refused: {error}"
        os.write(write, answer.encode())
        os._exit(0)  # nothing of pytest's may run in here
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer
