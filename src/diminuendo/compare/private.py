"""The private data of a cell, behind a door: whatever is asked is charged first, then noised.

A method holds a `Private` and never the data: gradients, counts and losses come out of it with
Gaussian noise, after a `Spending` granted the release. Full-batch releases may be chosen one after
the other by what was seen (a Gaussian filter pays); Poisson-sampled ones must be declared before
the first (`declare`), because that is what their accounting covers.

Neighbours are add-remove: one example is there, or contributes nothing; N is public.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diminuendo import accounting
from diminuendo.accounting.filters import GaussianFilter
from diminuendo.budget import Budget
from diminuendo.compare.clips import Rule
from diminuendo.compare.convolution import Convolutional
from diminuendo.compare.models import Layer, Model, Turn, Turned, shared
from diminuendo.errors import BudgetRefused, UsageError
from diminuendo.events import GaussianStep
from diminuendo.spending import AdaptiveSpending, Spending

Observer = Callable[[Tensor, float, float, Tensor | None], None]
"""Sees every noisy sum in units of its sensitivity, (R, parameters), its noise multiplier, its
sampling rate, and which examples may be in it, (N,); None for all."""


_ROWS = 10_000
"""Examples at a time when all of them at once would be copied."""


class DeclaredSpending(Spending):
    """Events that were fixed in advance, in their order, and no others."""

    def __init__(self, events: Iterable[GaussianStep], budget: Budget) -> None:
        super().__init__(budget)
        self._left = list(events)
        cost = accounting.claim(self._left, budget)
        if cost > budget.epsilon:
            raise BudgetRefused(f"These steps cost ε = {cost:g}, and there is {budget.epsilon:g}.")

    def fits(self, event: GaussianStep) -> bool:
        """Whether the event is the next one."""
        return bool(self._left) and self._left[0] == event

    def _charge(self, event: GaussianStep) -> None:
        if not self.fits(event):
            raise BudgetRefused(f"{event} is not the next declared step.")
        del self._left[0]


@dataclass(frozen=True)
class Facts:
    """What is public about the data: N, the largest norm of an example's features, the classes."""

    examples: int
    largest_norm: float
    classes: int


class Private:
    """The training data of R replicas; every release is paid for, by all of them alike."""

    def __init__(
        self,
        model: Model,
        x: Tensor,
        y: Tensor,
        budget: Budget,
        *,
        seeds: Sequence[int],
        largest_norm: float = 1.0,
        observe: Observer | None = None,
    ) -> None:
        self.model, self.budget = model, budget
        self.facts = Facts(x.shape[1], largest_norm, int(getattr(model, "classes", 1)))
        self.replicas = x.shape[0]
        self._x, self._y, self._seeds, self._observe = x, y, list(seeds), observe
        self._lengths = (x[:1] if shared(x) else x).norm(dim=2).expand(x.shape[:2])
        self._alone: list[Private] = []
        self.spending: Spending = AdaptiveSpending(GaussianFilter(budget))
        self._noise = [torch.Generator().manual_seed(4 * seed + 1) for seed in self._seeds]
        self._draws = [torch.Generator().manual_seed(4 * seed + 2) for seed in self._seeds]

    def start(self) -> Tensor:
        """Initial parameters; the same for every method that has the same seeds."""
        start = self.model.start([torch.Generator().manual_seed(4 * s) for s in self._seeds])
        return start.to(self.device)

    @property
    def device(self) -> torch.device:
        """Where the data are, and all that is computed from them; noise, samples and starts are
        drawn on the CPU, so that they are the same everywhere."""
        return self._x.device

    def each(self) -> Iterable[Private]:
        """The replicas one by one, each with a budget of its own: for choices by what was seen."""
        if self.spending.steps or self._alone:
            raise UsageError("The replicas have spent already.")
        for r, seed in enumerate(self._seeds):
            one = Private(
                self.model,
                self._x[r : r + 1],
                self._y[r : r + 1],
                self.budget,
                seeds=[seed],
                largest_norm=self.facts.largest_norm,
                observe=self._observe,
            )
            self._alone.append(one)
            yield one

    def declare(self, sigmas: Iterable[float], rates: Iterable[float]) -> None:
        """Fix all releases in advance: needed where any rate is below 1."""
        if self.spending.steps:
            raise UsageError("Steps are declared before the first release.")
        events = [
            GaussianStep(noise_multiplier=float(s), sampling_rate=float(p))
            for s, p in zip(sigmas, rates, strict=True)
        ]
        self.spending = DeclaredSpending(events, self.budget)

    def fits(self, sigma: float) -> bool:
        """Whether a full-batch release with this noise multiplier would be granted now."""
        return self.spending.fits(GaussianStep(noise_multiplier=sigma))

    def claimed(self) -> float:
        """The certified ε of all releases so far, at the budget's δ: never above the budget's.

        Where replicas spent on their own, the largest of theirs.
        """
        return max([self.spending.epsilon(), *(one.claimed() for one in self._alone)])

    def granted(self) -> list[tuple[GaussianStep, ...]]:
        """What was charged, as events: one list, or one for each replica that spent on its own."""
        own = [] if self._alone else [self.spending.granted]
        return own + [events for one in self._alone for events in one.granted()]

    # Releases

    def gradient(
        self,
        theta: Tensor,
        rule: Rule,
        sigma: float,
        *,
        rate: float = 1.0,
        anchor: Tensor | None = None,
    ) -> Tensor:
        """The noisy mean of clipped gradients at theta, (R, parameters).

        rate    Poisson sampling rate; declared before
        anchor  parameters whose per-example gradients are subtracted before clipping (one layer)
        """
        self.pay(sigma, rate)
        sums = self.clipped(theta, rule, self.sample(rate), anchor)
        noisy = self.noised(sums, rule.bound, sigma, rate=rate)
        return noisy / (self.facts.examples * rate)

    def count_below(self, theta: Tensor, bound: Tensor, sigma: float) -> Tensor:
        """The noisy share of examples whose gradient norm is at most `bound`, (R,).

        Each example adds ½ or −½: the sensitivity is ½.
        """
        self.pay(sigma)
        norms = self._norms(theta)
        return self._share((norms <= bound.unsqueeze(1)).float(), sigma)

    def accuracy(self, theta: Tensor, sigma: float) -> Tensor:
        """The noisy share of training examples that are classified correctly, (R,)."""
        self.pay(sigma)
        correct = self.model.outputs(theta, self._x).argmax(2) == self._y
        return self._share(correct.float(), sigma)

    def mean_losses(self, thetas: Sequence[Tensor], most: float, sigma: float) -> Tensor:
        """Noisy mean losses, each cut at `most`, at several parameters: (R, how many).

        An example adds a vector of numbers in ± most/2: sensitivity (most/2)·√(how many).
        """
        self.pay(sigma)
        sums = torch.stack(
            [
                (self.model.losses(theta, self._x, self._y).clamp(max=most) - most / 2).sum(1)
                for theta in thetas
            ],
            dim=1,
        )
        noisy = self.noised(sums, most / 2 * len(thetas) ** 0.5, sigma, seen=False)
        return noisy / self.facts.examples + most / 2

    def second_moments(self, sigma: float) -> Iterator[Tensor]:
        """Noisy second moments (1/N) Σ_i x_i x_iᵀ of the features, (features, features), of one
        replica after the other, because each may be large.

        An example adds the matrix x xᵀ, of Frobenius norm |x|² ≤ B²: a longer x is cut to B.
        """
        self.pay(sigma)
        return (self._noisy_moments(r, total, sigma) for r, total in self._moments())

    def _moments(self) -> Iterator[tuple[int, Tensor]]:
        """The exact sums of each replica; those of rows that all replicas share are made once."""
        total: Tensor | None = None
        for r in range(self.replicas):
            if total is None or not shared(self._x):
                total = self._moments_of(r)
            yield r, total

    def _moments_of(self, replica: int) -> Tensor:
        size, largest = self._x.shape[2], self.facts.largest_norm
        factors = (largest / self._lengths[replica].clamp(min=largest)).unsqueeze(1)
        total = torch.zeros(size, size, device=self.device)
        for start in range(0, self.facts.examples, _ROWS):
            rows = slice(start, start + _ROWS)
            cut = self._x[replica, rows] * factors[rows]
            total.addmm_(cut.T, cut)
        return total

    def _noisy_moments(self, replica: int, total: Tensor, sigma: float) -> Tensor:
        flat, most = total.view(1, -1), self.facts.largest_norm**2
        noisy = self.noised(flat, most, sigma, seen=False, replicas=slice(replica, replica + 1))
        noisy = noisy.view_as(total)
        return (noisy + noisy.T).div_(2 * self.facts.examples)

    def turned(self, turns: Sequence[Turn]) -> Private:
        """The same data with other features, at the expense of the same budget; for one layer.

        turns  for each replica a symmetric linear map of features; decided by what was released or
               is public
        """
        if len(self.model.layers(self.start(), self._x[:, :1], self._y[:, :1])) != 1:
            raise UsageError("Features are turned for models of one layer.")
        turned = copy.copy(self)
        turned.model = Turned(self.model, self._x.shape[2], turns)
        turned._lengths = torch.cat(
            [
                torch.cat([turn(rows.T).norm(dim=0) for rows in x.split(_ROWS)]).unsqueeze(0)
                for turn, x in zip(turns, self._x, strict=True)
            ]
        )
        return turned

    def noises(self, mixing: Tensor) -> Tensor:
        """mixing · z for each replica, (R, T, parameters), z independent standard normal vectors
        and mixing (T, T); one replica after the other, because all of it may be large."""
        shape = (len(mixing), self.model.parameters)
        drawn = [mixing @ torch.randn(shape, generator=g) for g in self._noise]
        return torch.stack(drawn).to(self.device)

    # What releases are made of

    def pay(self, sigma: float, rate: float = 1.0) -> None:
        """Ask the spending; BudgetRefused leaves everything as it was."""
        if self._alone:
            raise UsageError("The replicas spend on their own now.")
        self.spending.request(GaussianStep(noise_multiplier=float(sigma), sampling_rate=rate))

    def noised(
        self,
        sums: Tensor,
        bound: float | Tensor,
        sigma: float,
        *,
        rate: float = 1.0,
        seen: bool = True,
        replicas: slice = slice(None),
    ) -> Tensor:
        """sums + σ·bound·z for what has been paid; of some replicas alone if given."""
        sources = self._noise[replicas]
        noise = torch.stack([torch.randn(sums.shape[1], generator=g) for g in sources])
        scale = bound.unsqueeze(1) if isinstance(bound, Tensor) else bound
        noisy = sums + noise.to(sums.device).mul_(sigma * scale)
        if seen:
            self.show(noisy / scale, sigma, rate)
        return noisy

    @property
    def observed(self) -> bool:
        """Whether somebody looks at what is released."""
        return self._observe is not None

    def show(
        self, noisy: Tensor, sigma: float, rate: float = 1.0, rows: Tensor | None = None
    ) -> None:
        """Tell an observer, if there is one, what has been released, and of which examples."""
        if self._observe is not None:
            self._observe(noisy, sigma, rate, rows)

    def _share(self, flags: Tensor, sigma: float) -> Tensor:
        sums = (flags - 0.5).sum(1, keepdim=True)
        return (self.noised(sums, 0.5, sigma, seen=False) / self.facts.examples + 0.5).squeeze(1)

    def layers(self, theta: Tensor) -> list[Layer]:
        """What the gradients are made of. Not private: for releases alone, after `pay`."""
        first, *others = self.model.layers(theta, self._x, self._y)
        if first.inputs is self._x:
            first = first._replace(lengths=self._lengths)
        return [first, *others]

    def mean_gradient(self, theta: Tensor, part: slice | None = None) -> Tensor:
        """The mean gradient, of a part of the rows if given, without clipping, in theta's
        precision. Not private: for releases alone, after `pay`."""
        rows = slice(None) if part is None else part
        x, y = self._x[:, rows], self._y[:, rows]
        x = x[:1].to(theta.dtype).expand_as(x) if shared(x) else x.to(theta.dtype)
        sums = [
            layer.sums(torch.ones_like(layer.deltas[:, :, 0]))
            for layer in self.model.layers(theta, x, y)
        ]
        return torch.cat(sums, dim=1) / x.shape[1]

    def _norms(self, theta: Tensor) -> Tensor:
        if isinstance(self.model, Convolutional):
            return self.model.norms(theta, self._x, self._y)
        return torch.as_tensor(torch.stack([x.norms() for x in self.layers(theta)]).norm(dim=0))

    def _layers(self, theta: Tensor, anchor: Tensor | None) -> list[Layer]:
        layers = self.layers(theta)
        if anchor is None:
            return layers
        before = self.layers(anchor)
        if len(layers) != 1:
            raise UsageError("Differences of gradients are clipped for models of one layer.")
        return [layers[0]._replace(deltas=layers[0].deltas - before[0].deltas)]

    def clipped(
        self,
        theta: Tensor,
        rule: Rule,
        drawn: Tensor | None = None,
        anchor: Tensor | None = None,
    ) -> Tensor:
        """The clipped sums, of the drawn examples (R, N) if given. Not private: for releases
        alone, after `pay`."""
        if isinstance(self.model, Convolutional) and anchor is None:
            return self.model.clipped(theta, self._x, self._y, rule, drawn)
        layers = self._layers(theta, anchor)
        factors = rule.factors([layer.norms() for layer in layers])
        if drawn is not None:
            factors = [factor * drawn for factor in factors]
        return torch.cat([x.sums(f) for x, f in zip(layers, factors, strict=True)], dim=1)

    def sample(self, rate: float) -> Tensor | None:
        """Which examples a Poisson sample holds, (R, N) of zeros and ones; None for all of them.
        Not private: for releases alone."""
        if rate == 1:
            return None
        size = self.facts.examples
        drawn = torch.stack([torch.rand(size, generator=g) < rate for g in self._draws])
        return drawn.to(self.device).float()
