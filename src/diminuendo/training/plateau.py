"""A learning rate that follows a metric: one of public rows, or one that the steps pay for.

`ReduceLROnPlateau` needs a number that says how good the model is. The training loss is private,
and so is a score of any row that the claim protects: the learning rates would tell of it. So `fit`
takes such a scheduler inside an `OnPlateau`, which says where its metric comes from.

Formal guarantee of a paid metric: in a step that measures, the share s of what the step pays for is
the number of rows of its batch that the model predicts correctly, with Gaussian noise of standard
deviation σ_t/√s; the gradient gets noise σ_t/√(1−s). One example changes the pair (gradient sum ×
√(1−s)/C, number × √s) by at most 1 in norm, so that both together are one Gaussian release at σ_t
of the same sample: the very event that the plan has, and that was charged before the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from diminuendo import _validate
from diminuendo.errors import InputError
from diminuendo.training.evaluation import evaluate, is_class_score
from diminuendo.training.probe import Loss
from diminuendo.training.sampling import arrays_of

if TYPE_CHECKING:
    from diminuendo.training.step import PrivateGradients


class OnPlateau:
    """`fit(..., lr_scheduler=OnPlateau(scheduler, public=(x, y)))`, or `paid=0.1` instead.

    scheduler  a ReduceLROnPlateau of the run's optimizer. With mode="min" it is told the mean loss
               of the public rows, or the paid share of wrong predictions; with mode="max" the
               share of correct ones
    public     rows (x, y), or a dataset of such pairs, that the claim need not protect: nobody's
               who is in the training data. They are evaluated without noise
    paid       the share of a measuring step's budget, in (0, 1), that goes to the noisy number of
               correct predictions in its batch; its gradient gets 1/√(1−paid) times the noise. For
               classes alone
    every      measure at every so many steps; patience counts these measurements

    `values` are the metrics so far, by step: paid for or public, so that they may be shown.
    """

    def __init__(
        self,
        scheduler: ReduceLROnPlateau,
        *,
        public: Any = None,
        paid: float | None = None,
        every: int = 1,
    ) -> None:
        if not isinstance(scheduler, ReduceLROnPlateau):
            raise InputError(
                "a ReduceLROnPlateau",
                name="scheduler",
                value=type(scheduler).__name__,
                remedy="Others need no metric: give them to fit(lr_scheduler=…) as they are.",
            )
        if (public is None) == (paid is None):
            raise InputError(
                "exactly one of public=(x, y) and paid=0.1",
                name="the metric",
                value="neither" if paid is None else "both",
                remedy="A metric of private rows that nobody pays for is never followed.",
            )
        if paid is not None:
            paid = _validate.real("paid", paid, at_least=1e-6, at_most=1 - 1e-6)
        self.scheduler, self.public, self.paid = scheduler, public, paid
        self.every = _validate.count("every", every)
        self.values: dict[int, float] = {}
        self._correct, self._counted = 0, -1

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer whose learning rate is set."""
        return self.scheduler.optimizer

    def share(self, step: int) -> float:
        """What step t = 1, 2, … sets aside of its budget for the metric, in [0, 1)."""
        return self.paid if self.paid is not None and step % self.every == 0 else 0.0

    def begin(self, private: PrivateGradients, loss: Loss, data: Any) -> None:
        """Try the metric out, before anything is paid, and have the steps set its price aside."""
        if self.paid is not None and private.group.world > 1:
            raise InputError(
                "a public metric where several ranks train",
                name="OnPlateau",
                value=f"paid={self.paid:g}",
                remedy="Each rank sees its share of a batch alone: OnPlateau(…, public=(x, y)).",
            )
        with private.engine.unrecorded():
            self.try_out(private.engine.model, loss, data)
        self._correct, self._counted = 0, -1  # an earlier run may have ended within a step
        private.set_aside = self.share

    def try_out(self, model: nn.Module, loss: Loss, data: Any) -> None:
        """Refuse what would fail once steps have been paid for, and public rows that are not."""
        if self.public is not None and _same(self.public, data):
            raise InputError(
                "other rows than the training data",
                name="public",
                value="the training data",
                remedy="Their loss is private. Pay for a metric: OnPlateau(scheduler, paid=0.1).",
            )
        name, rows = ("data", data) if self.public is None else ("public", self.public)
        try:
            found = evaluate(model, rows, loss, at_most=2)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                "rows that the model and the loss take",
                name=name,
                value="others",
                remedy=str(error),
            ) from error
        if found.accuracy is None and (self.paid is not None or self.scheduler.mode == "max"):
            raise InputError(
                "scores of classes, and labels that are whole numbers",
                name="what a share of correct predictions is computed from",
                value="something else",
                remedy='With mode="min" and public rows the mean loss is followed.',
            )

    def count(self, step: int, outputs: Tensor, targets: Tensor, rows: int | None = None) -> None:
        """Add a part of the batch of a step to its number of correct predictions.

        rows  how many of its rows, the first ones, were drawn; all of them unless given
        """
        if self.paid is None:
            return
        if step != self._counted:  # each row is counted in one number alone
            self._correct, self._counted = 0, step
        if not is_class_score(outputs, targets):
            raise InputError(
                "scores of classes, and labels that are whole numbers",
                name="the outputs and targets",
                value=(tuple(outputs.shape), targets.dtype),
            )
        right = outputs.detach().argmax(dim=1) == targets
        self._correct += int(right[:rows].sum())

    def after_step(self, private: PrivateGradients, loss: Loss) -> None:
        """Measure and step the scheduler, where it is time to."""
        correct = self._correct if self._counted == private.step - 1 else 0
        self._correct = 0
        if private.step % self.every:
            return
        if self.paid is None:
            metric = private.group.agree(lambda: self._public_metric(private, loss))
        else:
            right = private.release_number(correct)
            metric = right if self.scheduler.mode == "max" else 1 - right
        self.values[private.step] = metric
        self.scheduler.step(metric)

    def _public_metric(self, private: PrivateGradients, loss: Loss) -> float:
        with private.engine.unrecorded():
            found = evaluate(private.engine.model, self.public, loss)
        return found.loss if self.scheduler.mode == "min" else found.accuracy or 0.0

    def without_improvement(self, step: int) -> None:
        """Step the scheduler as if the metric had not improved at step t = 1, 2, …"""
        if step % self.every == 0:
            self.scheduler.step(0.0)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state, and the metrics so far."""
        return {"scheduler": self.scheduler.state_dict(), "values": dict(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.scheduler.load_state_dict(state["scheduler"])
        self.values = dict(state["values"])


def _same(public: Any, data: Any) -> bool:
    """Whether these are the training data: one object, or the same numbers."""
    if public is data:
        return True
    first, second = arrays_of(public), arrays_of(data)
    if first is None or second is None or not first or not second:
        return False
    ours, theirs = torch.as_tensor(first[0]), torch.as_tensor(second[0])
    return ours.shape == theirs.shape and bool(torch.equal(ours, theirs.to(ours)))
