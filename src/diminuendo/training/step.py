"""Algorithm 1: request the budget, clip, sum, add noise, divide, hand the gradient on.

Formal guarantees of `PrivateGradients`: a gradient reaches `p.grad` only after `spending` granted
the step; it is (Σ_i clip(g_i) + noise) / divisor, with noise of standard deviation σ_t × the clip's
sensitivity on every coordinate of the *sum*, and a divisor that is public (the examples, or the
expected batch size). An example whose gradient is not finite contributes zero. What the optimiser
then does is post-processing.

The parts: `sampling` draws, `guard` refuses what nobody would pay for, `clipping` makes the clipped
sum, `mechanism` adds the noise, `journal` remembers across a crash, and `resuming` goes on.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from diminuendo import _validate
from diminuendo.errors import UsageError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan
from diminuendo.spending import PlanSpending, Spending
from diminuendo.training import guard
from diminuendo.training.clipping import Clip, Engine, Flat, PerLayer
from diminuendo.training.clipping.certificate import FAILURE
from diminuendo.training.distributed import Group, RankSpending, for_all_ranks
from diminuendo.training.groups import Groups
from diminuendo.training.journal import Journal
from diminuendo.training.learning_rates import Watch
from diminuendo.training.mechanism import ExactNoise, FastNoise, Mechanism, NoiseName, NoisySum
from diminuendo.training.mechanism.device import DeviceSum
from diminuendo.training.mechanism.grid import Grid
from diminuendo.training.resuming import Memory, check_state
from diminuendo.training.sampling import Drawn, Part, Sampler, Source, precision_of
from diminuendo.training.seeds import Seeds
from diminuendo.training.turns import OneThread

if TYPE_CHECKING:
    from diminuendo.training.captured import Captured, Losses

ClipRule = Clip | Callable[[int], Clip]
"""A clip for all steps, or one for each step t = 1, 2, …"""


class Released(NamedTuple):
    """What an adaptive policy may look at: everything in here has been paid for."""

    step: int
    gradients: tuple[Tensor, ...]
    granted: tuple[GaussianStep, ...]


Policy = Callable[[Released], float]
"""From what was released to the next noise multiplier σ > 0."""


_STALE = (
    "This batch was drawn for step {}, and the next step to take is {}. Call private.batches "
    "again: it goes on where the steps are."
)


class _Open(NamedTuple):
    """A step that has been paid for and is being summed up."""

    clip: Clip
    total: NoisySum | DeviceSum | None
    """None where a recording adds up."""


class _Paid(NamedTuple):
    """What the budget was asked for: a step, its clip, and its noise in the sum's own units."""

    event: GaussianStep
    clip: Clip
    sensitivity: float
    noise_std: float


class _Number(NamedTuple):
    """What the last step left for a number beside its gradient: its index, noise and divisor."""

    step: int
    noise_std: float
    divisor: float


_UP = 1 + 2.0**-40
"""What rounding may take from a standard deviation is far below this."""


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
    pad          fill sampled batches up with rows of zeros to one of a few sizes: the model and
                 the loss see them, a loss for each is wanted, and they count for nothing
    journal      a file that knows across a crash which steps may have been released; with it, or
                 with a ledger, a saved `state_dict` can be gone on from
    noise        "exact": what is released is a post-processing of the ideal Gaussian mechanism;
                 "fast", for experiments: PyTorch's, and the claim is for real arithmetic only
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
        pad: bool = False,
        journal: Journal | str | Path | None = None,
        noise: NoiseName = "exact",
        seed: int | None = None,
    ) -> None:
        guard.check_kind(plan)
        guard.check_spending(spending)
        guard.check_policy(policy, spending)
        guard.check_seed(seed, spending)
        _validate.choice("noise", noise, ["exact", "fast"])
        if policy is None:
            guard.check_plan(plan)
        self.noise: NoiseName = noise
        if clip is not None:
            guard.check_clip(clip, callable_too=True)
        self.model, self.plan, self.policy = model, plan, policy
        self.clip: ClipRule = Flat(plan.clip) if clip is None else clip
        self._sigmas: list[float] = plan.sigmas.tolist()
        self.group = Group.current()
        self.seeds = Seeds.make(seed)
        self.group.same_sample(self.seeds.keys)
        self.sampler = Sampler(plan, self.seeds, self.group, micro_batch, pad=pad)
        self.spending = self._asked_by_the_first(spending)
        if journal is not None and not isinstance(journal, Journal):
            journal = Journal(journal, plan, writes=self.group.first)
        self.journal = journal
        self.engine = Engine(model, eval_mode="raise")
        self.guard = guard.Guard(self.engine.model, self.engine.parameters)
        self.guard.watch(plan.examples)
        self.engine.before_forward(self.guard.before_forward)
        source = ExactNoise(self.seeds.keys) if noise == "exact" else FastNoise(self.seeds)
        self.mechanism = Mechanism(self.engine.parameters, source, self.group)
        self.step = 0
        """How many steps are over: taken, or lost by a crash or an error."""
        self.lost = 0
        """How many of them a crash cost: spent, and not taken."""
        self.released: tuple[Tensor, ...] = ()
        """The last step's private gradient, one tensor for each parameter, in its shape: until the
        next step is paid for."""
        self.watch = self._watch_learning_rates()
        """Warns where a loop steps with other learning rates than the plan has."""
        self.alone = OneThread()
        """Holds off other threads while a step is being taken."""
        self._begun = False
        self._checked_before = False
        self._part: Part | None = None
        self._next: GaussianStep | None = None
        self._open: _Open | None = None
        self._parts_taken = 0
        self._asked: tuple[ClipRule, int, Clip] | None = None
        """A rule of clips, the step that it was asked about, and its answer."""
        self.set_aside: Callable[[int], float] = lambda step: 0.0  # noqa: ARG005
        """The share in [0, 1) of the budget of step t = 1, 2, … that `release_number` may use."""
        self._number: _Number | None = None
        self.unit = "example"
        """What the claim protects: an example, or what the rows of one group belong to."""

    def _watch_learning_rates(self) -> Watch | None:
        """None where the noise is for any learning rates: all the same, or decided by then."""
        planned, sigmas = self.plan.lr, self.plan.sigmas
        if self.policy is not None or (planned is None and sigmas.min() == sigmas.max()):
            return None
        own = weakref.ref(self)

        def taken() -> int | None:
            private = own()
            return None if private is None else private.step

        rates = None if planned is None else planned.tolist()
        steps, momentum = self.plan.steps, self.plan.momentum
        return Watch(self.engine.parameters, rates, steps, taken, momentum)

    def _asked_by_the_first(self, spending: Spending | None) -> Spending:
        if isinstance(spending, RankSpending):
            return spending
        return for_all_ranks(
            self.group, lambda: PlanSpending(self.plan) if spending is None else spending
        )

    @property
    def private(self) -> bool:
        """False where a fixed seed makes the noise predictable."""
        return self.seeds.private

    @property
    def divisor(self) -> float:
        """The examples, or this step's expected batch: public, never the size that was drawn."""
        return self.plan.examples * self.sampler.rate(self.step)

    @property
    def charged(self) -> int:
        """Steps that may have been paid for: those that are over, and one that is under way."""
        return self.step + (self._open is not None)

    @property
    def waiting(self) -> int | None:
        """The size of the batch, or part of one, that waits for `backward`; blank rows count."""
        return None if self._part is None else self._part.size

    @property
    def drawn(self) -> int | None:
        """How many of its rows, the first ones, are examples: private where `pad` is on."""
        if self._part is None:
            return None
        return self._part.size if self._part.drawn is None else self._part.drawn

    # Algorithm 1

    def batches(
        self,
        dataset: Any,
        *,
        epochs: float | None = None,
        groups: Any = None,
        workers: int = 0,
        pin_memory: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """The plan's own sampler, until the plan or the budget ends. An empty draw is a step.

        epochs  stop after so many steps that each example is drawn so often on average; the next
                call goes on from there: `while not private.finished: for x, y in
                private.batches(dataset, epochs=1)` is a loop over epochs
        groups  whose each row is, where several are one person's: a column with an entry for each
                row. Persons are drawn, and one row of each; the plan's examples are persons
        """
        if torch.is_inference_mode_enabled():
            raise UsageError("A step needs gradients: leave torch.inference_mode() first.")
        source = Source(dataset, precision_of(self.model))
        persons = Groups.of(groups)
        guard.check_unit(self.spending, persons is not None)
        if persons is not None:
            self.unit = "group" if self.spending.unit == "example" else self.spending.unit
        self.sampler.check(source, persons)
        self.begin()
        self._abandon()
        self.verify()
        for part, batch in self.sampler.batches(
            source,
            self.step,
            self._end_of(epochs),
            groups=persons,
            workers=workers,
            pin_memory=pin_memory,
            collate=collate,
        ):
            if part.first and not self._may_go_on():
                break
            if part.step != self.step and (part.first or self._open is not None):
                raise UsageError(_STALE.format(part.step + 1, self.step + 1))
            self._part = part
            rows = part.size if part.drawn is None else part.drawn
            self.guard.watch(part.size, Drawn(source, batch, rows))
            yield batch
            if self._part is not None:
                raise UsageError(
                    "A batch was drawn and private.backward was not called for it. Call it once "
                    "for each batch: a batch that was drawn belongs to a step."
                )
        self.verify()

    def verify(self) -> None:
        """Raise where somebody wrote on the model unseen, or a GPU released no number: at the
        beginning, the end and whenever a state is saved."""
        self.guard.verify()
        self.mechanism.verify()

    def _end_of(self, epochs: float | None) -> int | None:
        """The step before which these batches end; None where only the budget ends them."""
        whole = None if self._unbounded else self.plan.steps
        if epochs is None:
            return whole
        left = _validate.positive("epochs", epochs) * (1 - 1e-12)
        end = self.step
        while left > 0 and (whole is None or end < whole):
            left -= self.sampler.rate(end)
            end += 1
        return end

    @property
    def finished(self) -> bool:
        """Whether no step is left: the plan is at its end, or the budget refuses the next one."""
        if not self._unbounded and self.step >= self.plan.steps:
            return True
        return self._begun and self._open is None and not self._may_go_on()

    def backward(self, losses: Tensor) -> None:
        """One loss per example in; the private gradient in `p.grad` out, once the step is whole."""
        with self.alone:
            self._backward(losses)

    def _backward(self, losses: Tensor) -> None:
        self.engine.check_losses(losses)
        part = self._own_batch(losses) if self._part is None else self._part
        self.guard.check(losses, part.size)
        self.engine.probe_if_due(losses)
        self.guard.refuse_writes()
        self.begin()
        self._part = None
        if part.first:
            self._check_first(part)
            self._request()
        self._check_turn(part)
        assert self._open is not None
        clip, total = self._open
        assert total is not None
        self._parts_taken += 1
        with self._or_abandon():
            found = self.engine.clipped_sum(
                losses,
                clip,
                total.buffers(part.parts),
                total.scale,
                certify=self._certified,
                share=1 / (part.parts * self.group.world),
                real=part.mask(losses.device),
                beside=total.beside() if part.last else None,
                places=total.places(part.parts),
            )
            total.take(found.sums)
            self.guard.refuse_writes()
            if part.last:
                self._release(total)
        if part.last:
            self._open = None

    def captured(self, losses: Losses, optimizer: torch.optim.Optimizer) -> Captured:
        """Whole steps, recorded once and replayed on a GPU: call it with every batch.

            take = private.captured(lambda x, y: loss_fn(model(x), y), optimizer)
            for x, y in private.batches(data):
                take(x, y)

        In place of the model's call, `backward`, `optimizer.step()` and `zero_grad()`. Where steps
        cannot be recorded, on a CPU, say, they run as they would without.
        """
        from diminuendo.training.captured import Captured

        return Captured(self, losses, optimizer)

    def _request(self) -> None:
        """The budget request: refused, it raises BudgetRefused and nothing has changed."""
        paid = self._pay()
        total = self.mechanism.begin(
            noise_std=paid.noise_std,
            sensitivity=paid.sensitivity,
            divisor=self.divisor,
            step=self.step,
        )
        self._begin_step(paid, total)

    def _begin_step(self, paid: _Paid, total: NoisySum | DeviceSum | None) -> None:
        """A step that was paid for is under way, also where it fails from here on."""
        self._open, self._parts_taken = _Open(paid.clip, total), 0
        if self.journal is not None:
            with self._or_abandon():
                planned = self.policy is None
                self.journal.before_release(self.step, paid.event, self.spending, planned=planned)

    def _open_recorded(self, part: Part) -> bytes | None:
        """Pay for a step that is about to be replayed; what its release needs, with its first part.

        Raises as `backward` does where a part is out of turn.
        """
        if part.first:
            self._check_first(part)
            paid = self._pay()
            self._begin_step(paid, None)
            with self._or_abandon():
                return self.mechanism.order_of(
                    noise_std=paid.noise_std, divisor=self.divisor, step=self.step
                )
        self._check_turn(part)
        return None

    def _check_first(self, part: Part) -> None:
        """Raise unless the next step begins with this part; one that is under way is over."""
        self._abandon()
        if part.step != self.step:
            raise UsageError(_STALE.format(part.step + 1, self.step + 1))

    def _check_turn(self, part: Part) -> None:
        if self._open is None:
            raise UsageError(
                "The first part of this batch failed, and its step is over. Draw the next batch."
            )
        if part.step != self.step:
            raise UsageError(_STALE.format(part.step + 1, self.step + 1))
        if part.place != self._parts_taken:
            raise UsageError(
                f"Part {part.place + 1} of this batch comes after part {self._parts_taken}: every "
                "part enters the sum once. Take batches from one private.batches at a time."
            )

    def _pay(self) -> _Paid:
        """Ask for the budget of the next step, and say what it pays for."""
        self._abandon()
        clip = self._clip_of(self.step)
        share = _validate.real(
            "the share set aside", self.set_aside(self.step + 1), at_least=0, below=1
        )
        event = self._next or self._next_event()
        self._next = None
        sensitivity = clip.sensitivity * self.engine.sensitivity_factor(self._certified)
        std = event.noise_multiplier * sensitivity * _louder(1 - share)
        if self._certified:
            Grid.of(std)  # raises where no grid is fine or wide enough
        self.spending.request(event)
        if self.policy is None:
            self.released = ()  # memory that the backward pass may need
        self._number = self._kept_for_a_number(event, share)
        return _Paid(event, clip, sensitivity, std)

    def _clip_of(self, step: int) -> Clip:
        """The clip of the step that is under way or next: its rule is asked once, or a step could
        be recorded with one clip and paid for by another."""
        if self._open is not None:
            return self._open.clip
        known = self._asked
        if known is None or known[0] is not self.clip or known[1] != step:
            known = self._asked = self.clip, step, self._asked_for(step)
        return known[2]

    def _asked_for(self, step: int) -> Clip:
        clip = self.clip(step + 1) if callable(self.clip) else self.clip
        guard.check_clip(clip, "what clip(t) gives")
        if self._certified and self.engine.parameters[0].is_cuda:
            guard.check_clip_on_gpu(clip)
        if isinstance(clip, PerLayer):
            clip.check(len(self.engine.layers))
        return clip

    def _release(self, total: NoisySum | DeviceSum) -> None:
        """The noisy sum over the divisor, to p.grad."""
        gradients = total.release()
        self._hand_on(gradients)
        self._taken(gradients)

    def _hand_on(self, gradients: Sequence[Tensor]) -> None:
        """The private gradient to p.grad, in each parameter's type."""
        for parameter, gradient in zip(self.engine.parameters, gradients, strict=True):
            same = gradient.dtype == parameter.dtype
            parameter.grad = gradient if same else gradient.to(parameter.dtype)

    def _taken(self, gradients: Sequence[Tensor], *, watched: bool = True) -> None:
        """The step is over, with this gradient."""
        kept = gradients if self.policy is None else [part.clone() for part in gradients]
        self.released = tuple(kept)  # a policy sees them even if an optimiser writes on p.grad
        self.step += 1
        if watched:
            self.guard.watch(self.plan.examples)

    def _kept_for_a_number(self, event: GaussianStep, share: float) -> _Number | None:
        if share == 0:
            return None
        return _Number(self.step, event.noise_multiplier * _louder(share), self.divisor)

    def release_number(self, total: float) -> float:
        """A sum of numbers in [0, 1], one of each row of the batch of the step just taken, with the
        noise that the share of `set_aside` pays for, over the step's divisor: once for each step.

        total   of the rows that were drawn for this step and no others. Each row's number must
                depend on that row and on what was released before
        """
        kept, self._number = self._number, None
        if kept is None or kept.step != self.step - 1 or self.group.world > 1:
            raise UsageError(
                "Nothing of this step's budget was set aside for a number, or it was released "
                "before. A number beside a gradient is released once, after its step, on one rank."
            )
        noisy = self.mechanism.noise.add_beside(total, noise_std=kept.noise_std, step=kept.step)
        return noisy / kept.divisor

    @property
    def _certified(self) -> bool:
        """Whether rounding errors of the sums are bounded and counted: not with fast noise."""
        return not isinstance(self.mechanism.noise, FastNoise)

    @property
    def delta_added(self) -> float:
        """What is to be added to δ: the probability that some sum of the whole plan, or of a
        policy's steps beyond it, passes for more exact than it is (docs/rounding.md), and what a
        GPU leaves open of the noise (docs/noise.md). From public facts; 0 with fast noise."""
        return self._delta_of_sums + self._delta_of_noise

    @property
    def delta_missed(self) -> float:
        """What is to be added to δ for the steps that were taken: `delta_added`, without the part
        of the sums where none had a shape that needs random vectors: that of a layer whose narrower
        side is wide."""
        return self.delta_added if self._checked or self.group.world > 1 else self._delta_of_noise

    @property
    def _delta_of_sums(self) -> float:
        if not self._certified:
            return 0.0
        largest = self.sampler.smallest or self.plan.examples
        calls = (math.ceil(self.plan.examples / largest) + 1) * self.group.world
        return 2 * FAILURE * calls * self._most_steps

    @property
    def _delta_of_noise(self) -> float:
        return self.mechanism.delta_of_a_step * self._most_steps

    @property
    def _most_steps(self) -> int:
        return max(self.plan.steps, self.charged)

    @property
    def _checked(self) -> bool:
        """Whether some sum of the run may have been checked; of lost steps nobody knows."""
        return self.engine.checks or self._checked_before

    def _next_event(self) -> GaussianStep:
        if self.policy is None:
            sigma = self._sigmas[min(self.step, len(self._sigmas) - 1)]
        else:
            released = Released(self.step, self.released, self.spending.granted)
            sigma = _validate.positive("the policy's σ", self.policy(released))
        return GaussianStep(noise_multiplier=sigma, sampling_rate=self.sampler.rate(self.step))

    def _may_go_on(self) -> bool:
        self._abandon()
        self._next = self._next_event()
        return self.spending.fits(self._next)

    @contextmanager
    def _or_abandon(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        """A step that was paid for and not finished stays spent; its sum is never released."""
        if self._open is not None:
            self._open = None
            self.step += 1

    @property
    def _unbounded(self) -> bool:
        """A policy goes on as long as its filter lets it, where the plan has one rate for all."""
        return self.policy is not None and isinstance(self.plan.sampling_rate, float)

    def _own_batch(self, losses: Tensor) -> Part:
        """A full batch that `batches` did not draw."""
        rate = self.sampler.rate(self.step)
        guard.check_own_batch(losses, self.plan, rate, self.group.world)
        return self._own_part()

    def _own_part(self) -> Part:
        """The whole dataset, as somebody else has it."""
        guard.check_unit(self.spending, grouped=False)
        return Part(self.step, first=True, last=True, size=self.plan.examples)

    # Stopping and going on

    def begin(self) -> None:
        """Open the spending, and count what a journal says may have been released before.

        The first batch does so where nobody did. Raises BudgetRefused where a ledger has too
        little left for the plan.
        """
        if not self._begun:
            self._resume(None)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs to go on: no seeds, and nothing that was not released.

        Save it together with the model and the optimiser, between steps.
        """
        self.verify()
        return {
            **self._identity,
            "step": self.charged,
            "lost": self.lost,
            "smallest_part": self.sampler.smallest,
            "checked": self._checked,
            "leaves_open": self.mechanism.delta_of_a_step > 0,
            "spending": self.spending.state(),
            "released": list(self.released) if self.policy is not None else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, before the first step of this object.

        Steps that may have been released after it was saved stay spent and are not taken again
        (`lost`): nobody gets a second noise for the same step. So somebody must know of them: the
        journal, or a ledger. With a fixed seed the same noise is drawn again, and nothing is lost.
        """
        check_state(state, self._identity)
        if self._begun:
            raise UsageError(
                "load_state_dict comes before the first batch. Make another PrivateGradients."
            )
        self._memory.check()
        self._resume(state)
        self.guard.watch(self.plan.examples)

    def _resume(self, state: Mapping[str, Any] | None) -> None:
        found = self._memory.resume(state, self._planned if self.policy is None else None)
        if state is not None:
            self.lost, self.released = int(state["lost"]), tuple(state["released"])
            # How finely batches were split decides what rounding may cost.
            parts = [n for n in (self.sampler.smallest, state.get("smallest_part")) if n]
            self.sampler.smallest = min(parts, default=None)
        self.lost += found.lost
        self.step = found.over
        self._checked_before = found.lost > 0 or (
            self.step > 0 if state is None else bool(state.get("checked", True))
        )
        taken_elsewhere = self.step > 0 if state is None else state.get("leaves_open", False)
        self.mechanism.leaves_open = self.mechanism.leaves_open or bool(taken_elsewhere)
        self._begun = True

    @property
    def _memory(self) -> Memory:
        return Memory(self.spending, self.journal, self.group, self.private)

    @property
    def _identity(self) -> dict[str, Any]:
        """What a state must have in common with the run that goes on from it."""
        return {
            "plan": self.plan.digest,
            "examples": self.plan.examples,
            "seed": self.seeds.fixed,
            "noise": self.noise,
        }

    def _planned(self, step: int) -> Iterable[GaussianStep]:
        """The plan's single steps from one on."""
        rates = self.plan.rates.tolist()
        for sigma, rate in zip(self._sigmas[step:], rates[step:], strict=True):
            yield GaussianStep(noise_multiplier=sigma, sampling_rate=rate)

    def close(self) -> None:
        """Detach from the model: its layers get their own forward back.

        The journal then says which steps were paid for, and no more: this is no crash.
        """
        self.engine.close()
        if self.watch is not None:
            self.watch.stop()
        if self.journal is not None:
            self.journal.settle(self.charged)


def _louder(share: float) -> float:
    """What noise is multiplied by where only a share of a step's budget pays for it."""
    return 1.0 if share == 1 else _UP / math.sqrt(share)
