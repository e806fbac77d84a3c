"""A LightningModule, unchanged, trained by private gradients: `PrivateStrategy`.

    strategy = PrivateStrategy(plan)
    trainer = Trainer(strategy=strategy, accelerator="cpu", max_epochs=-1)
    trainer.fit(module, DataLoader(dataset, batch_size=64))
    strategy.result                                  # how it ended and what it spent

The dataset and the collate function are the DataLoader's; the sampler is the plan's. Its
`batch_size` is the most examples that are held at once. An epoch is as many steps as draw every
example once on average, and the run ends with the plan or the budget.

`training_step` may return one loss for each example, of shape (N,), or a mean that can be taken
apart exactly: a loss with `reduction="mean"`, `.mean()`, sums of these and multiples by numbers.
Anything else is refused before the first step is paid.

What the claim covers: the model after every step, with everything that is computed from it. What
`training_step` and other hooks of training log is computed from private rows, and is dropped. Not
covered, and charged to nobody: validation metrics on private rows, and choices made by them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diminuendo import _extras
from diminuendo.errors import InputError, UsageError
from diminuendo.planning import Plan, PlanWarning, mismatch
from diminuendo.spending import Spending

_NEEDED = {"extra": "lightning", "purpose": "PrivateStrategy"}
with _extras.needed("torch", **_NEEDED), _extras.needed("lightning", **_NEEDED):
    import torch
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.utilities.types import LRSchedulerConfig
    from torch import Tensor
    from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
    from torch.utils.data import default_collate as plain_collate

    from diminuendo.adapters._lightning_options import check_trainer
    from diminuendo.adapters._mean_losses import losses_of_step
    from diminuendo.adapters._stepping import (
        LossesOf,
        MapStyle,
        Steps,
        how_it_ended,
        rows_in,
        set_secret_randomness,
    )
    from diminuendo.training import Journal, PrivateGradients, Result, follow_plan
    from diminuendo.training.guard import check_scheduler, check_seed, check_unit
    from diminuendo.training.learning_rates import planned_by
    from diminuendo.training.mean_loss import Reductions
    from diminuendo.training.mechanism import NoiseName
    from diminuendo.training.progress import EpsilonSoFar
    from diminuendo.training.step import ClipRule

STATE = "diminuendo"
"""The private part of a checkpoint, under this key."""


class PrivateStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """A strategy for one device whose every optimizer step is a step of a plan.

    plan       steps, noise multipliers, clip norm and sampling rate
    journal    a file that knows across a crash which steps may have been released; with it, or
               with a ledger, `trainer.fit(..., ckpt_path=…)` goes on from a checkpoint
    spending   who pays: `ledger.pay("patients", plan, data=…)`; the plan's own budget unless given
    clip, noise, seed, groups
               as in `diminuendo.training.fit`
    validation_data_is_public
               True states that validation has no private rows; only then may its metrics choose
               the model or the end (`EarlyStopping`, `ModelCheckpoint(monitor=…)`)
    reveal_training_metrics
               lets what training logs through, which the claim does not cover
    """

    def __init__(
        self,
        plan: Plan,
        *,
        journal: str | Path | None = None,
        spending: Spending | None = None,
        clip: ClipRule | None = None,
        noise: NoiseName = "exact",
        seed: int | None = None,
        groups: Any = None,
        device: Any = "cpu",
        validation_data_is_public: bool = False,
        reveal_training_metrics: bool = False,
    ) -> None:
        super().__init__(device)
        if not isinstance(plan, Plan):
            raise InputError("a Plan", name="plan", value=plan)
        check_seed(seed, spending)
        self.plan, self.result = plan, None
        self._given: dict[str, Any] = {
            "spending": spending, "clip": clip, "noise": noise, "seed": seed
        }  # fmt: skip
        self._journal, self._groups = journal, groups
        self._public, self._reveal = validation_data_is_public, reveal_training_metrics
        self._private: PrivateGradients | None = None
        self._trainer: Any = None
        self._loader: Any = None
        self._saved: Mapping[str, Any] | None = None
        self._batches: Iterator[Any] = iter(())
        self._gradients: list[Tensor | None] = []
        self._dropped: set[str] = set()

    result: Result | None
    """How the last `fit` ended and what it spent; None before."""

    # Everything that can be refused is, before anything is paid

    def setup(self, trainer: Trainer) -> None:
        """Refuse what would break the claim, then set up as any strategy does."""
        self._trainer = trainer
        if trainer.state.fn == "fit":
            check_trainer(trainer, self.lightning_module, public=self._public)
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._check_optimizers()

    def _check_optimizers(self) -> None:
        if len(self.optimizers) != 1:
            raise InputError("1", name="the number of optimizers", value=len(self.optimizers))

    def process_dataloader(self, dataloader: Any) -> Any:
        """The plan's steps in place of the batches of the training loader."""
        if self._trainer is None or self._trainer.state.stage != "train":
            return dataloader
        if not isinstance(dataloader, DataLoader) or dataloader.batch_size is None:
            raise InputError(
                "one DataLoader with a batch_size",
                name="the training data",
                value=type(dataloader).__name__,
                remedy="Several loaders, and batches that a dataset makes itself, cannot be "
                "Poisson-sampled.",
            )
        if not isinstance(dataloader.sampler, (RandomSampler, SequentialSampler)):
            raise InputError(
                "left out",
                name="the DataLoader's sampler",
                value=type(dataloader.sampler).__name__,
                remedy="The claim is for the plan's own sampler.",
            )
        if self._loader not in (None, dataloader):
            raise InputError("one DataLoader", name="the training data", value="several")
        self._loader = dataloader
        return self._steps()

    def _steps(self) -> Steps:
        return Steps(self.plan, lambda: next(self._batches, None), self._stop)

    def _stop(self) -> None:
        self._trainer.should_stop = True

    def on_train_start(self) -> None:
        """Attach to the module and open the budget; the optimizer is there, the state loaded."""
        super().on_train_start()
        self.result = None
        private = self._private = self._attach()
        self._drop_logs(True)
        if self._saved is None:
            private.begin()
        else:
            private.load_state_dict(self._saved)
        if private.step >= self.plan.steps:
            raise UsageError(
                "Every step of this plan has been spent, as its journal or ledger says: nothing is "
                "trained. Another run needs another journal and pays again."
            )
        set_secret_randomness(private)
        self._epsilon = EpsilonSoFar(self.plan) if private.private else None
        loader = self._loader
        dataset = loader.dataset
        if loader.collate_fn is not plain_collate:
            dataset = MapStyle(dataset)
        self._batches = private.batches(
            dataset,
            groups=self._groups,
            workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            collate=loader.collate_fn,
        )

    def _attach(self) -> PrivateGradients:
        if self._loader is None:
            raise UsageError("PrivateStrategy saw no DataLoader for training.")
        journal = None if self._journal is None else Journal(self._journal, self.plan)
        private = PrivateGradients(
            LossesOf(self.lightning_module, self._losses),
            self.plan,
            micro_batch=self._loader.batch_size,
            journal=journal,
            **self._given,
        )
        try:
            private.guard.check_optimizer(self.optimizers[0])
            check_unit(private.spending, grouped=self._groups is not None)
            self._follow_plan(private)
        except BaseException:
            private.close()
            raise
        return private

    def _follow_plan(self, private: PrivateGradients) -> None:
        """The plan's learning rates; schedulers of the module are compared with them."""
        if not self.lr_scheduler_configs:
            scheduler = follow_plan(self.optimizers[0], self.plan)
            if scheduler is not None:
                config = LRSchedulerConfig(scheduler, interval="step")
                self.lr_scheduler_configs.append(config)
        else:
            config = self.lr_scheduler_configs[0]
            check_scheduler(config.scheduler, self.optimizers[0])
            length = len(self._steps()) if config.interval == "epoch" else 1
            length *= config.frequency
            rates = planned_by(config.scheduler, math.ceil(self.plan.steps / length))
            cost = mismatch(self.plan, np.repeat(rates, length)[: self.plan.steps])
            if cost is not None:
                warnings.warn(str(cost), PlanWarning, stacklevel=2)
        if private.watch is not None:
            private.watch.stop()

    # One step

    def training_step(self, batch: Any, *rest: Any) -> Tensor:
        """All micro-batches of one private step; returns its loss if that is to be revealed."""
        private = self._started()
        before, total, count = private.step, 0.0, 0
        while True:
            rows = rows_in(batch)
            if rows == 0:
                losses = torch.zeros(0, device=self.root_device)
            else:
                losses = private.engine.model(batch, *rest)
            private.backward(losses)
            total, count = total + float(losses.detach().sum()), count + len(losses)
            if private.step > before:
                break
            batch = self._on_device(next(self._batches))
        self._gradients = [parameter.grad for parameter in private.engine.parameters]
        mean = total / count if count and self._reveal else math.nan
        return torch.tensor(mean, device=self.root_device)

    def _on_device(self, batch: Any) -> Any:
        """What Lightning does to the first micro-batch itself."""
        batch = self.precision_plugin.convert_input(batch)
        batch = self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.batch_to_device(batch, dataloader_idx=0)

    def _losses(self, batch: Any, *rest: Any) -> Tensor:
        """The forward pass that the engine watches: the module's whole training step."""
        with self.precision_plugin.train_step_context(), Reductions():
            returned = self.lightning_module.training_step(batch, *rest)
        return losses_of_step(returned)

    def _drop_logs(self, drop: bool) -> None:
        """From now on what hooks of training log is dropped, too: an epoch's mean loss, say."""
        module = self.lightning_module
        if drop and not self._reveal:
            object.__setattr__(module, "log", self._log)
        elif module is not None and "log" in vars(module):
            object.__delattr__(module, "log")

    def _log(self, name: str, *args: Any, **kwargs: Any) -> None:
        """`log` of the module while it is trained: what validation logs is let through."""
        module = self.lightning_module
        if self._trainer.validating:
            type(module).log(module, name, *args, **kwargs)
        elif name not in self._dropped:
            self._dropped.add(name)
            warnings.warn(
                f"Training logs {name!r}, which is computed from private rows: it is dropped. "
                "reveal_training_metrics=True lets it through, and the claim does not cover it.",
                stacklevel=3,
            )

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """The private gradient to p.grad: Lightning has set it to None since."""
        module = self.lightning_module
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        parameters = self._started().engine.parameters
        for parameter, gradient in zip(parameters, self._gradients, strict=True):
            parameter.grad = gradient
        self._gradients = []
        after: Tensor = self.precision_plugin.post_backward(loss, module)
        self._log_public()
        return after

    def _log_public(self) -> None:
        """σ and ε so far: both are fixed by the plan."""
        private = self._started()
        values = {"noise_multiplier": float(self.plan.sigmas[private.step - 1])}
        if self._epsilon is not None:
            values["epsilon"] = self._epsilon(private.step)
        for logger in self._trainer.loggers:
            if self._trainer.global_step % self._trainer.log_every_n_steps == 0:
                logger.log_metrics(values, step=private.step)

    # Checkpoints, and the end

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """The private part with the rest; then the journal knows that it is on disk."""
        private = self._private
        if private is not None:
            checkpoint[STATE] = private.state_dict()
        super().save_checkpoint(checkpoint, *args, **kwargs)
        if private is not None and private.journal is not None:
            private.journal.saved(private.step)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """A checkpoint; in `fit` it must have a private part."""
        checkpoint: dict[str, Any] = super().load_checkpoint(*args, **kwargs)
        module = self.lightning_module  # checkpoints are loaded before setup
        if module is None or module.trainer.state.fn != "fit":
            return checkpoint
        if STATE not in checkpoint:
            raise InputError(
                "a checkpoint that PrivateStrategy wrote",
                name="ckpt_path",
                value=str(args[0]) if args else None,
            )
        self._saved = checkpoint[STATE]
        return checkpoint

    def on_train_end(self) -> None:
        """State how the run ended, and close the budget."""
        private = self._started()
        private.verify()
        self.result = how_it_ended(private, "Trainer stopped before the plan's last step")
        private.spending.close(self.result.status)
        super().on_train_end()

    def on_exception(self, exception: BaseException) -> None:
        """A clean end of what was not asked for; what was granted stays spent."""
        if self._private is not None and self.result is None:
            self._private.spending.close(type(exception).__name__)
        super().on_exception(exception)

    def teardown(self) -> None:
        """Give the module its own forward back."""
        self._drop_logs(False)
        if self._private is not None:
            self._private.close()
            self._private = None
        self._saved = self._loader = None
        super().teardown()

    def _started(self) -> PrivateGradients:
        if self._private is None:
            raise UsageError("PrivateStrategy takes steps within trainer.fit only.")
        return self._private
