"""Algorithm 1: request the budget, clip, add the sum to the noise, hand the gradient on.

Formal guarantees of `PrivateGradients`: a gradient reaches `p.grad` only after `spending` granted
the step; it is (Σ_i clip(g_i) + noise) / divisor, with noise of deviation σ_t × the clip's
sensitivity on every coordinate of the *sum*, and a divisor that is public (the examples, or the
expected batch size). An example whose gradient is not finite contributes zero. What the optimiser
then does is post-processing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors

from diminuendo import _validate
from diminuendo.errors import InputError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan
from diminuendo.spending import PlanSpending, Spending
from diminuendo.training import sampling
from diminuendo.training.clipping import Clip, Engine, Flat
from diminuendo.training.distributed import Group
from diminuendo.training.seeds import Seeds

ClipRule = Clip | Callable[[int], Clip]
"""A clip for all steps, or one for each step t = 1, 2, …"""


class Released(NamedTuple):
    """What an adaptive policy may look at: everything in here has been paid for."""

    step: int
    gradients: tuple[Tensor, ...]
    granted: tuple[GaussianStep, ...]


Policy = Callable[[Released], float]


class _Part(NamedTuple):
    """A micro-batch's step, its place in the logical batch, and its size."""

    step: int
    first: bool
    last: bool
    size: int


@dataclass
class _Open:
    """A step that has been paid for and is being summed up.

    `flat` holds, from the first micro-batch on, the noise and what was added to it, all of it
    divided by the public divisor already; `sums` are its views, one for each parameter.
    """

    noise_std: float
    clip: Clip
    flat: Tensor | None = None
    sums: list[Tensor] | None = None


class PrivateGradients:
    """Private gradients for your own loop.

        private = PrivateGradients(model, plan)
        for x, y in private.batches(dataset):
            private.backward(loss_fn(model(x), y))     # one loss per example
            optimizer.step(); optimizer.zero_grad()

    clip         the plan's norm, flat, unless given: a Clip, or a function of the step t = 1, 2, …
    spending     who is asked before each step; the plan itself unless given
    policy       with a spending that has a filter: sees what was released, returns the next σ
    micro_batch  largest number of examples held at once; results are the same to rounding, and
                 p.grad stays None until the logical batch is complete
    seed         only for tests and experiments: the run is then not private

    A step that was paid for and then failed half-way stays spent; the next one goes on after it.
    `close()` gives the model its own forward back.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        clip: ClipRule | None = None,
        spending: Spending | None = None,
        policy: Policy | None = None,
        micro_batch: int | None = None,
        seed: int | None = None,
    ) -> None:
        if policy is not None and (spending is None or isinstance(spending, PlanSpending)):
            raise InputError(
                "given together with a spending that has a filter",
                name="policy",
                value=policy,
                remedy="A plan fixes every σ; use AdaptiveSpending.",
            )
        if clip is not None and not isinstance(clip, Clip) and not callable(clip):
            raise InputError(
                "Flat, PerLayer or Automatic, or a function of the step that returns one",
                name="clip",
                value=clip,
                remedy="For the norm C write Flat(C).",
            )
        self.model, self.plan, self.policy = model, plan, policy
        self._rates: list[float] = plan.rates.tolist()
        self._sigmas: list[float] = plan.sigmas.tolist()
        self.clip: ClipRule = Flat(plan.clip) if clip is None else clip
        self.spending = PlanSpending(plan) if spending is None else spending
        self.micro_batch = (
            None if micro_batch is None else _validate.count("micro_batch", micro_batch)
        )
        self.group = Group.current()
        self.seeds = self.group.same_seeds(Seeds.make(seed))
        self.engine = Engine(model, eval_mode="raise")
        self.step = 0
        self._part: _Part | None = None
        self._next: GaussianStep | None = None
        self._open: _Open | None = None
        self.released: tuple[Tensor, ...] = ()
        """The last step's private gradient, one tensor for each parameter, in its shape."""
        self.granted: Callable[[GaussianStep], None] | None = None
        """Called with every event that was granted, before anything of the step is released."""
        self._covered = {id(parameter) for parameter in self.engine.parameters}
        self._untrained = self._all_untrained()

    def close(self) -> None:
        """Detach from the model: its layers get their own forward back."""
        self.engine.close()

    @property
    def charged(self) -> int:
        """Steps that may have been paid for: those taken, and one that is under way."""
        return self.step + (self._open is not None)

    @property
    def private(self) -> bool:
        """False where a fixed seed makes the noise predictable."""
        return self.seeds.private

    @property
    def divisor(self) -> float:
        """The examples, or this step's expected batch: public, never the size that was drawn."""
        return self.plan.examples * self._rate(self.step)

    def _rate(self, step: int) -> float:
        return self._rates[min(step, len(self._rates) - 1)]

    def batches(
        self,
        dataset: Any,
        *,
        workers: int = 0,
        pin_memory: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """The plan's own sampler, until the plan or the budget ends. An empty draw is a step."""
        source = sampling.Source(dataset, sampling.precision_of(self.model))
        if len(source) != self.plan.examples:
            raise InputError(
                f"the plan's examples ({self.plan.examples})",
                name="the size of the dataset",
                value=len(source),
                remedy="Plan for this dataset.",
            )
        self._abandon()
        parts: deque[_Part] = deque()
        for batch in source.batches(
            self._indices(parts),
            workers=workers,
            pin_memory=pin_memory,
            collate=collate,
            generator=self.seeds.generator("loading", self.step),
        ):
            part = parts.popleft()
            if part.first and not self._may_go_on():
                return
            if part.first and part.step != self.step:
                raise InputError(
                    f"of step {self.step + 1}, which has not been taken",
                    name="the batch",
                    value=f"of step {part.step + 1}",
                    remedy="Call private.batches again: it goes on where the steps are.",
                )
            self._part = part
            self._untrained = self._all_untrained()
            yield batch
            if self._part is not None:
                raise InputError(
                    "called once for each batch",
                    name="private.backward",
                    value="no call",
                    remedy="A batch that was drawn belongs to a step.",
                )

    def _indices(self, parts: deque[_Part]) -> Iterator[Tensor]:
        step = self.step
        while self._unbounded or step < self.plan.steps:
            drawn = sampling.draw(self.plan.examples, self._rate(step), self.seeds, step)
            pieces = sampling.chunks(self.group.share(drawn), self.micro_batch)
            for i, piece in enumerate(pieces):
                parts.append(_Part(step, i == 0, i == len(pieces) - 1, len(piece)))
                yield piece
            step += 1

    @property
    def _unbounded(self) -> bool:
        """A policy goes on as long as its filter lets it, where the plan has one rate for all."""
        return self.policy is not None and isinstance(self.plan.sampling_rate, float)

    def _may_go_on(self) -> bool:
        self._abandon()
        event = self._next = self._next_event()
        return self.group.agree(lambda: self.spending.fits(event))

    def _next_event(self) -> GaussianStep:
        if self.policy is None:
            sigma = self._sigmas[min(self.step, len(self._sigmas) - 1)]
        else:
            released = Released(self.step, self.released, self.spending.granted)
            sigma = _validate.positive("the policy's σ", self.policy(released))
        return GaussianStep(noise_multiplier=sigma, sampling_rate=self._rate(self.step))

    def backward(self, losses: Tensor) -> None:
        """One loss per example in; the private gradient in `p.grad` out, once the step is whole."""
        self.engine.check_losses(losses)
        part = self._own_batch(losses) if self._part is None else self._part
        self._check(losses, part)
        self._part = None
        if part.first:
            self._request()
        step = self._open
        if step is None:
            raise InputError("begun", name="the step", value=None, remedy="Draw the next batch.")
        noisy = partial(self._noise, step) if step.sums is None else step.sums
        try:
            step.sums = self.engine.clipped_sum(losses, step.clip, noisy, 1 / self.divisor).sums
        except BaseException:
            self._abandon()
            raise
        if part.last:
            self._release(step)
            self._open = None

    def _abandon(self) -> None:
        """A step that was paid for and not finished stays spent; its sum is never released."""
        if self._open is not None:
            self._open = None
            self.step += 1

    def _check(self, losses: Tensor, part: _Part) -> None:
        """Raise where the step would release more than the budget pays for; changes nothing."""
        if len(losses) != part.size:
            raise InputError(
                f"one for each of the {part.size} examples of the batch that was drawn",
                name="the number of losses",
                value=len(losses),
                remedy="Compute them from this batch, whole and alone.",
            )
        for module in self.model.modules():  # half as long as model.parameters() takes
            for name, parameter in module._parameters.items():
                if (
                    parameter is not None
                    and parameter.requires_grad
                    and id(parameter) not in self._covered
                ):
                    raise InputError(
                        "there when PrivateGradients was made",
                        name=f"the parameter {name} of a {type(module).__name__}",
                        value="added since",
                        remedy="Its gradient would not be private: close() this one and make "
                        "another.",
                    )
        now = self._all_untrained()
        if len(now) != len(self._untrained) or any(
            part is not old or version != known
            for (part, version), (old, known) in zip(now, self._untrained, strict=True)
        ):
            raise InputError(
                "left alone by the forward pass",
                name="the model's buffers and frozen parameters",
                value="changed",
                remedy="A running statistic of the data is a release that nobody pays for. "
                "Changes of your own belong before the batch is drawn.",
            )
        _refuse_other_leaves(losses, self._covered)

    def _all_untrained(self) -> list[tuple[Tensor, int]]:
        """Whatever the model holds beside trained parameters, with versions."""
        return [
            (part, part._version)
            for module in self.model.modules()
            for parts in (module._buffers, module._parameters)
            for part in parts.values()
            if part is not None and not part.requires_grad
        ]

    def _request(self) -> None:
        """The budget request: refused, it raises BudgetRefused and nothing has changed."""
        self._abandon()
        clip = self.clip(self.step + 1) if callable(self.clip) else self.clip
        if not isinstance(clip, Clip):
            raise InputError("Flat, PerLayer or Automatic", name="what clip(t) gives", value=clip)
        event = self._next or self._next_event()
        self._next = None
        self.group.agree(lambda: self.spending.request(event))
        if not self.group.first:
            self.spending.note(event)
        bound = clip.sensitivity * self.engine.sensitivity_factor(certified=False)
        self._open = _Open(event.noise_multiplier * bound, clip)
        if self.granted is not None:
            self.granted(event)

    def _noise(self, step: _Open) -> list[Tensor]:
        """The buffer that the sum is added to: the noise, once among all ranks.

        To start from the noise saves two passes over the gradient.
        """
        parameters = self.engine.parameters
        dtype = reduce(torch.promote_types, {p.dtype for p in parameters}, torch.float32)
        device = parameters[0].device
        size = sum([p.numel() for p in parameters])
        if self.group.first:
            generator = self.seeds.generator("noise", self.step, device)
            std = step.noise_std / self.divisor
            step.flat = torch.normal(
                0.0, std, (size,), generator=generator, dtype=dtype, device=device
            )
        else:
            step.flat = torch.zeros(size, dtype=dtype, device=device)
        views = _unflatten_dense_tensors(step.flat, parameters)  # type: ignore[no-untyped-call]
        return list(views)

    def _release(self, step: _Open) -> None:
        """One sum over the ranks, then p.grad."""
        assert step.flat is not None
        assert step.sums is not None
        self.group.sum(step.flat)
        kept = step.sums if self.policy is None else [part.clone() for part in step.sums]
        self.released = tuple(kept)  # a policy sees them even if an optimiser writes on p.grad
        for parameter, gradient in zip(self.engine.parameters, step.sums, strict=True):
            same = gradient.dtype == parameter.dtype
            parameter.grad = gradient if same else gradient.to(parameter.dtype)
        self.step += 1
        self._untrained = self._all_untrained()

    def skip(self, events: Iterable[GaussianStep]) -> None:
        """Single steps that may have been released before a crash: spent, not taken again."""
        for event in events:
            count = self.spending.skip if self.group.first else self.spending.note
            count(event)
            self.step += 1

    def _own_batch(self, losses: Tensor) -> _Part:
        """A batch that `batches` did not draw: only the whole dataset can be one."""
        whole = self._rate(self.step) == 1 and losses.shape[:1] == (self.plan.examples,)
        if not whole or self.group.world > 1:
            raise InputError(
                "drawn by private.batches(dataset)",
                name="the batch",
                value=tuple(losses.shape),
                remedy="The claim is for the plan's own sampler; only a full batch may come from "
                "elsewhere, and only in a single process.",
            )
        return _Part(self.step, first=True, last=True, size=len(losses))


def _refuse_other_leaves(losses: Tensor, covered: set[int]) -> None:
    """A parameter outside the model (of the loss, say) would get its plain gradient."""
    waiting, seen = [losses.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [source for source, _ in node.next_functions]
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in covered:
            raise InputError(
                "trained only as part of the model",
                name="every parameter that the loss depends on",
                value=tuple(leaf.shape),
                remedy="The gradient of this one would be neither clipped nor noisy: move it into "
                "a module of the model, or detach it.",
            )
