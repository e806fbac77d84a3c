"""`transformers.Trainer` with private gradients: `PrivateTrainer`.

    trainer = PrivateTrainer(model, args, train_dataset=…, plan=plan, data_collator=…)
    trainer.train()
    trainer.result                                   # how it ended and what it spent

The plan says how many steps there are, how much noise each gets, and at which rate examples are
drawn; the arguments of `Trainer` say the rest. One optimizer step of `Trainer` is one private
step: its Poisson sample comes in micro-batches of at most `per_device_train_batch_size`.

What the claim covers: the model after every step, with everything that is computed from it. Not
covered, and charged to nobody: metrics on private rows (`evaluate`, `predict`), and choices made
by them. The training loss, token counts and floating-point operations are computed from private
rows, too: they are neither logged nor written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diminuendo import _extras
from diminuendo.errors import InputError, UsageError
from diminuendo.planning import Plan
from diminuendo.spending import Spending

_NEEDED = {"extra": "huggingface", "purpose": "PrivateTrainer"}
with _extras.needed("torch", **_NEEDED), _extras.needed("transformers", **_NEEDED):
    import torch
    from torch import Tensor
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from diminuendo.adapters import _head_losses as heads
    from diminuendo.adapters._stepping import (
        LossesOf,
        MapStyle,
        Steps,
        how_it_ended,
        rows_in,
        set_secret_randomness,
    )
    from diminuendo.adapters._trainer_options import BY_METRICS, checked
    from diminuendo.training import Journal, PrivateGradients, Result, follow_plan
    from diminuendo.training.checkpoint import write_tensors
    from diminuendo.training.guard import check_scheduler, check_seed, check_unit
    from diminuendo.training.learning_rates import PlannedRates
    from diminuendo.training.mechanism import NoiseName
    from diminuendo.training.progress import EpsilonSoFar
    from diminuendo.training.step import ClipRule

STATE = "private.pt"
"""The private part of a checkpoint, in its folder."""

_TRIED_ALONE = 256


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """`transformers.Trainer` whose every optimizer step is a step of a plan.

    plan       steps, noise multipliers, clip norm and sampling rate; `max_steps` of the arguments
               is the plan's, and `num_train_epochs` is not looked at. An epoch is as many steps as
               draw every example once on average
    loss       one loss for each example from the model's outputs and the inputs (with labels);
               that of the model's head unless given, the mean over each example's own labels
    spending   who pays: `ledger.pay("patients", plan, data=…)`; the plan's own budget unless given
    clip, noise, seed, groups
               as in `diminuendo.training.fit`
    eval_data_is_public
               True states that `eval_dataset` has no private rows; only then may metrics choose
               the model or the end (`load_best_model_at_end`, early stopping)
    reveal_training_loss
               logs the mean loss of the batches, which the claim does not cover

    All other arguments are those of `Trainer`. `max_grad_norm` is not applied: the plan's clip norm
    bounds each example's gradient. Learning rates are the plan's times `learning_rate`; another
    `lr_scheduler_type` than Trainer's default "linear", a warm-up or a scheduler of one's own is
    taken as it is, with a PlanWarning where it differs from the plan.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        *,
        plan: Plan,
        loss: heads.HeadLoss | None = None,
        spending: Spending | None = None,
        clip: ClipRule | None = None,
        noise: NoiseName = "exact",
        seed: int | None = None,
        groups: Any = None,
        eval_data_is_public: bool = False,
        reveal_training_loss: bool = False,
        **trainer: Any,
    ) -> None:
        if not isinstance(plan, Plan):
            raise InputError("a Plan", name="plan", value=plan)
        check_seed(seed, spending)
        args = checked(args or TrainingArguments("tmp_trainer"), plan, eval_data_is_public)
        if trainer.get("compute_loss_func") is not None:
            raise InputError(
                "left out",
                name="compute_loss_func",
                value=trainer["compute_loss_func"],
                remedy="It gives one loss for a whole batch. Give loss=, which returns one loss "
                "for each example.",
            )
        super().__init__(model, args, **trainer)
        self.plan, self.result = plan, None
        self._own_loss, self._reveal = loss, reveal_training_loss
        self._public = eval_data_is_public
        self._given: dict[str, Any] = {
            "spending": spending,
            "clip": clip,
            "noise": noise,
            "seed": seed,
        }
        self._groups = groups
        self._private: PrivateGradients | None = None
        self._resume_from: str | None = None
        self._batches: Iterator[Any] = iter(())
        self._check_callbacks()

    result: Result | None
    """How the last `train()` ended and what it spent; None before."""
    lr_scheduler: Any

    def train(self, resume_from_checkpoint: str | bool | None = None, **more: Any) -> Any:
        """Train by the plan; `resume_from_checkpoint` goes on from a checkpoint of this class.

        Steps that may have been released after the checkpoint stay spent and are not taken again.
        Returns Trainer's own output, whose training loss is NaN unless it is to be revealed.
        """
        if more.get("trial") is not None:
            raise UsageError("A search over private runs is not supported: each of them costs.")
        self._check_callbacks()
        if resume_from_checkpoint is True:
            last = get_last_checkpoint(self.args.output_dir)
            if last is None:
                raise InputError("a folder with a checkpoint", name="output_dir", value=last)
            resume_from_checkpoint = last
        self._resume_from = str(resume_from_checkpoint) if resume_from_checkpoint else None
        if self._resume_from is not None and not (Path(self._resume_from) / STATE).exists():
            raise InputError(
                f"a checkpoint that PrivateTrainer wrote (with {STATE} in it)",
                name="resume_from_checkpoint",
                value=self._resume_from,
            )
        try:
            output = super().train(self._resume_from, **more)
            private = self._started()
            self.result = how_it_ended(private, "Trainer stopped before the plan's last step")
            private.verify()
            private.spending.close(self.result.status)
        except BaseException as error:
            if self._private is not None:
                self._private.spending.close(type(error).__name__)
            raise
        finally:
            if self._private is not None:
                self._private.close()
                self._private = None
        loss = output.training_loss if self._reveal else math.nan
        return output._replace(training_loss=loss, metrics=self._paid(output.metrics))

    # The plan's steps in place of Trainer's batches

    def get_train_dataloader(self) -> Any:
        """The plan's steps, each with the first micro-batch of its sample."""
        if not hasattr(self.train_dataset, "__len__") or not hasattr(
            self.train_dataset, "__getitem__"
        ):
            raise InputError(
                "a map-style dataset, with a length",
                name="train_dataset",
                value=type(self.train_dataset).__name__,
                remedy="An iterable dataset cannot be Poisson-sampled.",
            )
        return Steps(self.plan, lambda: next(self._batches, None), self._stop)

    def _stop(self) -> None:
        self.control.should_training_stop = True

    def _prepare_for_training(self, max_steps: int, dataloader: Any, resume: Any) -> Any:
        prepared = super()._prepare_for_training(max_steps, dataloader, resume)
        private = self._private = self._attach()
        if self._resume_from is None:
            private.begin()
        else:
            path = Path(self._resume_from) / STATE
            private.load_state_dict(torch.load(path, weights_only=True, map_location="cpu"))
        if private.step >= self.plan.steps:
            raise UsageError(
                f"Every step of this plan has been spent in {self.args.output_dir}: nothing is "
                "trained. Another run needs another output_dir and pays again."
            )
        if isinstance(self.lr_scheduler, PlannedRates):
            self.lr_scheduler.catch_up(private.step)
        self.state.global_step = private.step
        self._epsilon = EpsilonSoFar(self.plan) if private.private else None
        set_secret_randomness(private)
        self._batches = private.batches(
            MapStyle(self.train_dataset),
            groups=self._groups,
            workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
            collate=_AsDict(self._collator()),
        )
        return prepared

    def _attach(self) -> PrivateGradients:
        """Everything that can be refused is, here, before anything is paid."""
        if len(self.train_dataset) != self.plan.examples and self._groups is None:
            raise InputError(
                f"the plan's examples ({self.plan.examples})",
                name="the size of train_dataset",
                value=len(self.train_dataset),
                remedy="Plan for this dataset.",
            )
        smoothing = self.args.label_smoothing_factor
        self._loss = self._own_loss or heads.for_head(self.model, smoothing)
        self._shapes: dict[str, torch.Size] | None = None
        self._compared = self._own_loss is not None or smoothing > 0
        collate = _AsDict(self._collator())
        for i in range(min(_TRIED_ALONE, len(self.train_dataset))):
            self._check_shapes(collate([self.train_dataset[i]]))
        journal = Journal(self._folder() / "journal.json", self.plan, every=self._reserved())
        whole = LossesOf(self.model, self._losses)
        private = PrivateGradients(
            whole,
            self.plan,
            micro_batch=self.args.per_device_train_batch_size,
            journal=journal,
            **self._given,
        )
        try:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
            private.guard.check_optimizer(optimizer)
            check_unit(private.spending, grouped=self._groups is not None)
            if private.watch is not None:
                private.watch.stop()  # create_scheduler has said what there was to say
        except BaseException:
            private.close()
            raise
        return private

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The plan's learning rates; another scheduler that was chosen is compared with them."""
        optimizer = optimizer or self.optimizer
        plain = getattr(optimizer, "optimizer", optimizer)
        chosen = self.lr_scheduler
        if chosen is None and self._chose_scheduler(num_training_steps):
            chosen = super().create_scheduler(num_training_steps, plain)
        if chosen is not None:
            check_scheduler(chosen, plain)
        follows = follow_plan(plain, self.plan, chosen)
        if follows is None:
            follows = PlannedRates(plain, [1.0])
        self._created_lr_scheduler = self.lr_scheduler is not follows or chosen is None
        self.lr_scheduler = follows
        return follows

    def _chose_scheduler(self, steps: int) -> bool:
        kind, warm_up = self.args.lr_scheduler_type, self.args.get_warmup_steps(steps)
        return bool(kind != "linear" or warm_up > 0)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """One step: the number of labels in its sample is private, and not counted."""
        del num_batches, device
        return [batch for batch in [next(epoch_iterator, None)] if batch is not None], None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """All micro-batches of one private step; returns its loss if that is to be revealed."""
        del num_items_in_batch
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        private = self._started()
        before, total, count = private.step, 0.0, 0
        while True:
            losses = self._losses_of(inputs)
            private.backward(losses)
            total, count = total + float(losses.detach().sum()), count + len(losses)
            if private.step > before:
                break
            inputs = next(self._batches)
        mean = total / count if count and self._reveal else 0.0
        return torch.tensor(mean, device=self.args.device)

    def _losses_of(self, batch: dict[str, Any]) -> Tensor:
        if rows_in(batch) == 0:
            return torch.zeros(0, device=self.args.device)
        self._check_shapes(batch)
        inputs = self._prepare_inputs(batch)
        engine = self._started().engine
        if not self._compared:
            self._compare(inputs)
        whole: Tensor = engine.model(**inputs)
        return whole

    def _losses(self, **inputs: Any) -> Tensor:
        """The forward pass that the engine watches."""
        with self.compute_loss_context_manager():
            outputs = self.model(**self._without_labels(inputs))
        return self._loss(outputs, inputs)

    def _without_labels(self, inputs: dict[str, Any]) -> dict[str, Any]:
        if self._own_loss is not None:
            return inputs
        names = {"labels", "start_positions", "end_positions"}
        rest = {name: part for name, part in inputs.items() if name not in names}
        shift = getattr(heads.base_of(self.model), "prepare_decoder_input_ids_from_labels", None)
        if shift is not None and "decoder_input_ids" not in rest:
            rest["decoder_input_ids"] = shift(labels=inputs["labels"])
        return rest

    def _compare(self, inputs: dict[str, Any]) -> None:
        """Once: whether the head's loss is the model's own."""
        first = {
            name: part[:1] if isinstance(part, Tensor) else part for name, part in inputs.items()
        }
        self.model.eval()
        try:
            with self._started().engine.unrecorded(), self.compute_loss_context_manager():
                heads.check_own(self.model, self._loss, first, self._without_labels(first))
        finally:
            self.model.train()
        self._compared = True

    def _check_shapes(self, batch: dict[str, Any]) -> None:
        """All batches have one width: else the longest example would change all others' rows."""
        shapes = {name: part.shape[1:] for name, part in batch.items() if isinstance(part, Tensor)}
        if not shapes:
            raise InputError(
                "tensors",
                name="what data_collator gives",
                value=sorted(batch),
                remedy="remove_unused_columns=False keeps columns that the model's forward does "
                "not name.",
            )
        if self._shapes is None:
            self._shapes = shapes
        if shapes != self._shapes:
            raise InputError(
                "of one shape for all examples",
                name="what data_collator gives",
                value="of several",
                remedy="Padding to the longest example of a batch lets one example change the "
                'others: pad all of them to one length (tokenizer(..., padding="max_length", '
                "truncation=True, max_length=…)).",
            )

    def _collator(self) -> Any:
        return self._get_collator_with_removed_columns(self.data_collator, description="training")

    # What is logged and saved

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Trainer's log without what nobody paid for, with σ and ε so far."""
        logs = self._paid(logs)
        private = self._private
        if private is not None and private.step and "learning_rate" in logs:
            logs["noise_multiplier"] = float(self.plan.sigmas[private.step - 1])
            if self._epsilon is not None:
                logs["epsilon"] = self._epsilon(private.step)
        super().log(logs, start_time)

    def _paid(self, logs: dict[str, float]) -> dict[str, float]:
        unpaid = {"total_flos"} if self._reveal else {"loss", "train_loss", "total_flos"}
        return {name: value for name, value in logs.items() if name not in unpaid}

    def floating_point_ops(self, inputs: Any) -> int:
        """0: how many there are depends on the private sample."""
        del inputs
        return 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """The private part first: a checkpoint without it cannot be gone on from."""
        private = self._private
        if private is None or self.args.save_only_model:
            super()._save_checkpoint(model, trial)
            return
        folder = self._folder() / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        write_tensors(folder / STATE, private.state_dict())
        super()._save_checkpoint(model, trial)
        assert private.journal is not None
        private.journal.saved(private.step)

    def _save_rng_state(self, output_dir: str) -> None:
        """Nothing: whoever knows the generators' state knows the masks of dropout."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Nothing: random numbers are secret, and drawn anew."""

    def _started(self) -> PrivateGradients:
        if self._private is None:
            raise UsageError("PrivateTrainer takes steps within train() only.")
        return self._private

    def _folder(self) -> Path:
        folder = Path(self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _reserved(self) -> int:
        """How many steps are reserved at a time, and may be lost by a crash."""
        by_steps = self.args.save_strategy == "steps" and self.args.save_steps >= 1
        return max(1, min(50, int(self.args.save_steps))) if by_steps else 50

    def _check_callbacks(self) -> None:
        stopping = [EarlyStoppingCallback] if not self._public else []
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, tuple(stopping)):
                name = type(callback).__name__
                raise InputError("left out", name="a callback", value=name, remedy=BY_METRICS)

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Refused: every trial is a run, and its score is computed from private rows."""
        raise UsageError(
            "A search over private runs pays for each of them, and for its scores. Choose on "
            "public or synthetic data (dim.tune), or pay for the choice (diminuendo.tuning)."
        )


class _AsDict:
    """A collator whose batches are plain dicts, so that an empty one can be made."""

    def __init__(self, collate: Any) -> None:
        self._collate = collate

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        return dict(self._collate(examples))
