"""Lessons: private training on auxiliary data, as a function that can be differentiated.

What is learnt in a lesson costs no privacy, because auxiliary data are public. What it then does on
private data is bound by the budget like everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diminuendo.budget import Budget
from diminuendo.compare.models import Model

Settings = Mapping[str, float]
"""The tuned and learnt numbers of a method by name."""

_MOST_EXAMPLES = 1000
"""More examples would change little but the time: the noise is that of the private number."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Lesson:
    """Auxiliary data, and what training on the private data will be like.

    x, y            auxiliary examples, (R, n, features) and (R, n), one sample for each pupil
    test_x, test_y  others, of which the final loss is lowered
    examples        the number of private examples, which sets the noise
    rounds          how often a whole training is differentiated
    """

    model: Model
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    budget: Budget
    examples: int
    rounds: int
    seed: int = 0

    def learn(
        self, numbers: int, train: Callable[[Tensor, Sequence[Tensor]], Tensor], steps: int
    ) -> list[float]:
        """Numbers, from 0 on, that lower the final loss of `train`: by Adam, through everything.

        train  from the numbers and the noises of all steps, each (R, parameters), to the final
               parameters
        """
        values = torch.zeros(numbers, device=self.x.device, requires_grad=True)
        solver = torch.optim.Adam([values], lr=0.1)
        generator = torch.Generator().manual_seed(self.seed)
        shape = (self.x.shape[0], self.model.parameters)
        with torch.enable_grad(), torch.autograd.graph.allow_mutation_on_saved_tensors():
            for _ in range(self.rounds):
                noises = [
                    torch.randn(shape, generator=generator).to(values.device) for _ in range(steps)
                ]
                theta = train(values, noises)
                solver.zero_grad()
                loss = self.model.losses(theta, self.test_x, self.test_y).mean()
                loss.backward()  # type: ignore[no-untyped-call]
                if values.grad is not None and bool(values.grad.isfinite().all()):
                    torch.nn.utils.clip_grad_norm_([values], 1.0)
                    solver.step()
        return [float(value) for value in values.detach()]

    def start(self) -> Tensor:
        """Initial parameters of the pupils."""
        seeds = range(self.seed, self.seed + self.x.shape[0])
        start = self.model.start([torch.Generator().manual_seed(seed) for seed in seeds])
        return start.to(self.x.device)

    def gradient(self, theta: Tensor, clip: Tensor, sigma: Tensor, noise: Tensor) -> Tensor:
        """The noisy mean of clipped gradients, differentiable in everything; the noise is that
        of the private number of examples."""
        layers = self.model.layers(theta, self.x, self.y)
        norms = torch.stack([layer.norms() for layer in layers]).square().sum(0)
        factors = (clip / (norms + 1e-12).sqrt()).clamp(max=1.0)
        mean = torch.cat([layer.sums(factors) for layer in layers], dim=1) / self.x.shape[1]
        return mean + clip * sigma / self.examples * noise

    @staticmethod
    def size(examples: int) -> int:
        """How many auxiliary examples a pupil gets."""
        return min(examples, _MOST_EXAMPLES)
