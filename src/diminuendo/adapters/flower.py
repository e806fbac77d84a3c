"""A Flower strategy whose every round is a step of a plan: `PrivateStrategy`.

    strategy = PrivateStrategy(FedAvg(), plan)            # the plan's examples are the clients
    result = strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()))
    strategy.result                                       # how it ended and what it spent

A round draws every connected node independently with the plan's rate, clips each update on the
server, adds them up, adds the plan's noise for the round, and divides by the expected number of
clients. What comes out is handed to the wrapped strategy as the one reply of an average client, so
that any server optimizer (FedAvg, FedAvgM, FedAdam, …) is post-processing.

Formal guarantees: for adding or removing a client, the sequence of global models is (ε, δ)-private
as the plan states. Updates are truncated to a grid on which their sum is exact, and the noise is
that of `training.mechanism`: nothing is added to the sensitivity by rounding. A client that fails,
answers something else, or is not finite counts as zero, and the divisor stays.

Trusted: the server, which sees the updates, and its log, which says how many clients were drawn and
failed. Not covered: metrics that clients report. They are dropped unless asked for.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diminuendo import _extras, _validate
from diminuendo.errors import InputError, UsageError
from diminuendo.events import GaussianStep
from diminuendo.planning import Plan
from diminuendo.spending import PlanSpending, Spending

_NEEDED = {"extra": "flower", "purpose": "The Flower adapter"}
with _extras.needed("torch", **_NEEDED), _extras.needed("flwr", **_NEEDED):
    import torch
    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import FedAvg, Strategy
    from torch import Tensor

    from diminuendo.adapters._flower_parts import DrawnNodes, GlobalModel
    from diminuendo.adapters._stepping import how_it_ended
    from diminuendo.training import Flat, Journal, Result
    from diminuendo.training.clipping.rounding import row_norm
    from diminuendo.training.guard import check_plan, check_seed
    from diminuendo.training.journal import Entry
    from diminuendo.training.mechanism import ExactNoise, bernoulli
    from diminuendo.training.mechanism.keys import Keys
    from diminuendo.training.mechanism.noise import NoiseName
    from diminuendo.training.progress import EpsilonSoFar

logger = logging.getLogger("flwr")
_DIGITS = 30
"""Binary digits that are kept of an update, relative to the clip norm."""
_EXACT = 2**53


class PrivateStrategy(Strategy):  # type: ignore[misc]
    """A strategy of Flower with clipping, planned noise and a budget for clients.

    strategy   what to do with the private average: FedAvg or one that is derived from it. Its
               fractions and minimum numbers of training nodes are not used: the plan's rate is
    plan       rounds, noise multipliers, clip norm of an update, and `examples`: how many clients
               there are, of whom the expected number in a round is the divisor
    spending   who pays: `ledger.pay("clients", plan)`; the plan's own budget unless given. A
               budget in a ledger must be for another unit than "example"
    journal    a file that knows across a crash which rounds may have been released
    wait_for   how many nodes must be connected before the first round; all clients of the plan
               unless given. Who is not connected counts as zero
    reveal_client_metrics
               lets the wrapped strategy ask clients to evaluate, and publishes what they report,
               which the claim does not cover
    seed       only for tests and experiments: the run is then not private
    """

    noise: NoiseName = "exact"
    delta_missed = 0.0
    unit = "client"

    def __init__(
        self,
        strategy: Strategy,
        plan: Plan,
        *,
        spending: Spending | None = None,
        journal: str | Path | None = None,
        wait_for: int | None = None,
        reveal_client_metrics: bool = False,
        seed: int | None = None,
    ) -> None:
        for name, value, kind in (("plan", plan, Plan), ("strategy", strategy, FedAvg)):
            if not isinstance(value, kind):
                raise InputError(f"a {kind.__name__}", name=name, value=value)
        check_plan(plan)
        check_seed(seed, spending)
        self.plan, self.clip = plan, Flat(plan.clip)
        self.spending = PlanSpending(plan) if spending is None else spending
        if self.spending.durable and self.spending.unit == "example":
            raise InputError(
                "for clients",
                name="the unit of the budget",
                value=self.spending.unit,
                remedy="A client may hold many examples, and its update is what is clipped: "
                'ledger.create(name, budget, unit="client").',
            )
        self._spacing = 2.0 ** (math.floor(math.log2(plan.clip)) - _DIGITS)
        if plan.examples * 2 ** (_DIGITS + 1) > _EXACT:
            raise InputError("at most 4,194,304", name="examples", value=plan.examples)
        self._wait_for = _validate.count(
            "wait_for", plan.examples if wait_for is None else wait_for, at_most=plan.examples
        )
        self._evaluating, self._reveal = strategy, reveal_client_metrics
        self.strategy = copy.copy(strategy)
        self.strategy.fraction_train = 1.0
        self.strategy.min_train_nodes = self.strategy.min_available_nodes = 0
        self._keys = Keys.make(seed)
        self._noise = ExactNoise(self._keys)
        self._journal = None if journal is None else Journal(journal, plan)
        self.step = self.lost = 0
        self.result: Result | None = None
        """How the last `start` ended and what it spent; None before."""
        self._begun = False
        self._round: tuple[int, ArrayRecord, set[int]] | None = None

    @property
    def private(self) -> bool:
        """False where a fixed seed makes the noise predictable."""
        return self._keys.private

    @property
    def divisor(self) -> float:
        """The expected number of clients in the next round: public, never the number drawn."""
        return self.plan.examples * float(self.plan.rates[self.step])

    def start(
        self, grid: Grid, initial_arrays: ArrayRecord, num_rounds: int | None = None, **more: Any
    ) -> Any:
        """Flower's rounds: as many as the plan has left, or `num_rounds` if that is fewer.

        `more` are the other arguments of Flower's `Strategy.start`. Returns Flower's own result.
        """
        self.begin()
        left = self.plan.steps - self.step
        if not left:
            raise UsageError(
                "Every round of this plan has been spent, as its journal or ledger says: nothing "
                "is trained. Another run needs another journal and pays again."
            )
        rounds = (
            left if num_rounds is None else min(_validate.count("num_rounds", num_rounds), left)
        )
        try:
            output = super().start(grid, initial_arrays, rounds, **more)
        except BaseException as error:
            self._end(type(error).__name__)
            raise
        self.result = how_it_ended(self, "start was asked for fewer rounds than the plan has")
        self._end(self.result.status)
        return output

    def begin(self) -> None:
        """Open the budget, and count what a journal says may have been released before.

        Raises BudgetRefused where a ledger has too little left for the plan.
        """
        if self._begun:
            return
        entry = Entry()
        if self._journal is not None:
            alone = self.private and not self.spending.durable
            entry = self._journal.read(alone=alone)
        seen = entry.upto if self._journal is not None and self.private else None
        self.step = self.lost = self.spending.resume(
            None, seen=seen, receipt=entry.receipt, events=self.plan.events
        )
        self._epsilon = EpsilonSoFar(self.plan) if self.private else None
        self._begun = True

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages for the clients that were drawn; none where the budget allows no more."""
        self.begin()
        self._round = None
        if self.step >= self.plan.steps or not self.spending.fits(self._event()):
            return []
        nodes = self._nodes(grid)
        places = bernoulli.chosen(
            len(nodes), self._event().sampling_rate, self._keys.sampling(self.step)
        )
        drawn = {nodes[place] for place in places.tolist()}
        messages = list(
            self.strategy.configure_train(server_round, arrays, config, DrawnNodes(grid, drawn))
        )
        asked = [message.metadata.dst_node_id for message in messages]
        if len(asked) != len(set(asked)) or not set(asked) == drawn:
            raise UsageError(
                f"{type(self.strategy).__name__} asks other clients than were drawn: the claim is "
                "for the plan's own sample. Wrap a strategy that asks all nodes of its grid."
            )
        self._round = (server_round, arrays, drawn)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Pay for the round, then clip, sum, add noise and divide; the rest is post-processing."""
        if self._round is None:
            return None, None
        number, arrays, drawn = self._round
        if number != server_round:
            raise UsageError(f"Round {server_round} was aggregated and {number} was drawn.")
        model = GlobalModel(arrays)
        total = torch.zeros(model.size, dtype=torch.float64)
        waiting, failed = set(drawn), 0
        for reply in replies:
            node = reply.metadata.src_node_id
            if node in waiting and not reply.has_error():
                waiting.discard(node)
                update = self._update(model, reply)
                total += update
                failed += not bool(update.any())
        if failed or waiting:
            words = "%s of %s clients did not answer, and %s added nothing"
            logger.warning(words, len(waiting), len(drawn), failed)
        released = self._release(total)
        average = RecordDict(
            {
                "arrays": model.moved_by(released),
                "metrics": MetricRecord({self.strategy.weighted_by_key: 1.0}),
            }
        )
        reply = Message(content=average, dst_node_id=0, message_type="train")
        aggregated, _ = self.strategy.aggregate_train(server_round, [reply])
        if aggregated is not None:
            aggregated = model.in_its_types(aggregated)
        return aggregated, MetricRecord(self._public())

    def _update(self, model: GlobalModel, reply: Message) -> Tensor:
        """What a client adds to the sum: zero for whatever else it sent."""
        try:
            update = model.update(reply.content)
        except Exception:
            update = None
        if update is None:
            return torch.zeros(model.size, dtype=torch.float64)
        return self.clipped(update)

    def clipped(self, update: Tensor) -> Tensor:
        """An update of norm at most the clip norm, on a grid whose sums are exact in float64."""
        norm = row_norm(update.unsqueeze(0))
        if not bool(norm.isfinite().all()):
            return torch.zeros_like(update)
        scaled = update * self.clip.factors(norm)
        return (scaled / self._spacing).trunc_() * self._spacing

    def _release(self, total: Tensor) -> Tensor:
        """Budget first. A round that was paid for and then fails stays spent."""
        event, step, divisor = self._event(), self.step, self.divisor
        self.spending.request(event)
        self._round = None
        self.step += 1
        if self._journal is not None:
            self._journal.before_release(step, event, self.spending, planned=True)
        sensitivity = self.clip.sensitivity
        noisy = self._noise.add_noise(
            total,
            noise_std=event.noise_multiplier * sensitivity,
            sensitivity=sensitivity,
            step=step,
        )
        return noisy / divisor

    def _event(self) -> GaussianStep:
        return GaussianStep(
            noise_multiplier=float(self.plan.sigmas[self.step]),
            sampling_rate=float(self.plan.rates[self.step]),
        )

    def _public(self) -> dict[str, float]:
        """What the plan fixed: σ of this round, and ε so far."""
        values = {"noise-multiplier": float(self.plan.sigmas[self.step - 1])}
        if self._epsilon is not None:
            values["epsilon"] = self._epsilon(self.step)
        return values

    def _nodes(self, grid: Grid) -> list[int]:
        while len(nodes := sorted(set(grid.get_node_ids()))) < self._wait_for and not self.step:
            time.sleep(0.5)
        if len(nodes) > self.plan.examples:
            raise InputError(
                f"at most the plan's examples ({self.plan.examples})",
                name="the number of connected clients",
                value=len(nodes),
                remedy=f"Plan with examples={len(nodes)}.",
            )
        return nodes

    def _end(self, reason: str) -> None:
        self.spending.close(reason)
        if self._journal is not None:
            self._journal.settle(self.step)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No clients, unless what they report may be revealed."""
        if not self._reveal:
            return []
        messages: Iterable[Message] = self._evaluating.configure_evaluate(
            server_round, arrays, config, grid
        )
        return messages

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """What clients reported, if that may be revealed; else None."""
        if not self._reveal:
            return None
        return self._evaluating.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the plan, and the wrapped strategy's own summary."""
        self._evaluating.summary()
