"""The settings of many replicas as tables: a row for each step, a column for each replica."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from diminuendo.replicas.batch import Rules, Update
from diminuendo.replicas.replica import Clipping, Replica
from diminuendo.training.clipping import Automatic


class StepSettings:
    """Tables of a group of replicas; after a replica's last step its columns hold zeros.

    stds    standard deviations C·σ_t of the noise on the sum of gradients
    scales  factors from the noisy sum to the change of the parameters (`Update.scale`)
    clip    clip norms, one for each replica
    beta    momenta, one for each replica, or None where all are zero
    rates   sampling rates, one for each replica
    rules   clipping rules, or None where all replicas clip the whole gradient where it is too long
    """

    def __init__(self, replicas: Sequence[Replica], examples: int, like: Tensor) -> None:
        longest = max(replica.steps for replica in replicas)
        self.stds = np.zeros((longest, len(replicas)))
        scales = np.zeros((longest, len(replicas)))
        for k, replica in enumerate(replicas):
            self.stds[: replica.steps, k] = replica.sigmas
            scales[: replica.steps, k] = replica.lr
        self.stds *= [replica.clip for replica in replicas]
        beta = np.array([replica.beta for replica in replicas])
        scales *= (1 - beta) / (1 - beta ** np.arange(1, longest + 1)[:, None])
        scales /= [examples * replica.sampling_rate for replica in replicas]
        self.scales = torch.tensor(scales).to(like)
        self.clip = like.new_tensor([replica.clip for replica in replicas])
        betas = like.new_tensor([replica.beta for replica in replicas])
        self.beta = betas if bool((betas > 0).any()) else None
        self.rates = [replica.sampling_rate for replica in replicas]
        self.rules = _rules([replica.clipping for replica in replicas], like)

    def update(self, rows: slice | Tensor, step: int, sampled: Tensor | None = None) -> Update:
        """One step's numbers for some replicas; `step` counts from zero."""
        return Update(
            self.clip[rows],
            self.scales[step, rows],
            None if self.beta is None else self.beta[rows],
            sampled,
            None if self.rules is None else self.rules.of(rows),
        )


def _rules(names: Sequence[Clipping], like: Tensor) -> Rules | None:
    if set(names) == {"flat"}:
        return None
    automatic = [name == "automatic" for name in names]
    return Rules(
        like.new_tensor([Automatic.gamma if own else 0.0 for own in automatic]),
        like.new_tensor([math.inf if own else 1.0 for own in automatic]),
        torch.tensor([name == "per-layer" for name in names], device=like.device),
    )
