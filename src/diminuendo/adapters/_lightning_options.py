"""Which options of Lightning's `Trainer` a private run can have."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from diminuendo.errors import InputError

_PRECISIONS = ("32-true", "64-true", "bf16-mixed")
_SEARCHES = ("LearningRateFinder", "BatchSizeFinder", "GradientAccumulationScheduler")


def check_trainer(trainer: Any, module: Any, *, public: bool) -> None:
    """Raise on what would break the claim; `public` states that validation has no private rows."""
    for name, value, wanted, remedy in (
        ("devices", trainer.num_devices * trainer.num_nodes, 1,
         "For several ranks use PrivateGradients in a loop of your own."),
        ("accumulate_grad_batches", trainer.accumulate_grad_batches, 1,
         "A sample comes in micro-batches of the DataLoader's batch_size, summed privately."),
        ("gradient_clip_val", trainer.gradient_clip_val or None, None,
         "The plan's clip norm bounds each example's gradient."),
        ("overfit_batches", trainer.overfit_batches, 0, "The plan's own sampler draws."),
        ("automatic_optimization", module.automatic_optimization, True,
         "For a loop of your own use PrivateGradients."),
        ("detect_anomaly", getattr(trainer, "_detect_anomaly", False), False,
         "It prints what depends on private rows."),
    ):  # fmt: skip
        if value != wanted:
            raise InputError(f"{wanted!r}", name=name, value=value, remedy=remedy)
    precision = str(trainer.strategy.precision_plugin.precision)
    if precision not in _PRECISIONS:
        raise InputError(f"one of {_PRECISIONS}", name="precision", value=precision)
    for callback in trainer.callbacks:
        name = type(callback).__name__
        if name in _SEARCHES:
            raise InputError(
                "left out",
                name="a callback",
                value=name,
                remedy="It takes steps, or chooses, by private losses that nobody pays for.",
            )
        chooses = isinstance(callback, EarlyStopping) or (
            isinstance(callback, ModelCheckpoint) and callback.monitor
        )
        if chooses and not public:
            raise InputError(
                "left out",
                name="a callback that chooses by a metric",
                value=name,
                remedy="Nobody pays for metrics, unless they are computed on public rows: say "
                "so with validation_data_is_public=True, or leave it out.",
            )
