"""Which options of `transformers.TrainingArguments` a private run can have."""

from __future__ import annotations

import copy
from typing import Any

from transformers import TrainingArguments

from diminuendo.errors import InputError
from diminuendo.planning import Plan

_REFUSED: tuple[tuple[str, Any, str], ...] = (
    ("fp16", False, "Its loss scale is not the plan's: use bf16, or neither."),
    ("deepspeed", None, "Train on one device, or with PrivateGradients in a loop of your own."),
    ("auto_find_batch_size", False, "It would take a step again after an error."),
    ("train_sampling_strategy", "random", "The plan's own sampler draws the examples."),
    ("dataloader_drop_last", False, "Every example that is drawn takes part."),
    ("include_num_input_tokens_seen", "no", "Numbers of private tokens are paid by nobody."),
    ("skip_memory_metrics", True, "They depend on the private examples that were drawn."),
    ("use_liger_kernel", False, "The engine cannot see an example's gradient in its kernels."),
    ("torch_compile", False, "Not together with Trainer yet."),
    ("neftune_noise_alpha", None, "Not supported."),
    ("debug", [], "It prints values that are computed from private rows."),
)
BY_METRICS = (
    "It chooses the model by metrics that nobody pays for, unless they are computed on public "
    "rows: say so with eval_data_is_public=True, or leave it out."
)


def checked(args: TrainingArguments, plan: Plan, public: bool) -> TrainingArguments:
    """A copy of the arguments in which the plan's values stand; raises on what breaks the claim."""
    for name, wanted, remedy in _REFUSED:
        value = getattr(args, name, wanted)
        if value != wanted and not (wanted in (None, []) and not value):
            raise InputError(f"{wanted!r}", name=name, value=value, remedy=remedy)
    if args.world_size > 1 or args.n_gpu > 1 or args.fsdp:
        raise InputError(
            "one",
            name="the number of devices",
            value=max(args.world_size, args.n_gpu),
            remedy="DataParallel, DDP and FSDP reduce plain gradients. Show one device "
            "(CUDA_VISIBLE_DEVICES=0), or write the loop with PrivateGradients, which knows ranks.",
        )
    if any(word in str(args.optim).lower() for word in ("lomo", "layerwise")):
        raise InputError(
            "one that steps after the whole gradient",
            name="optim",
            value=str(args.optim),
            remedy="It would use gradients before they are private.",
        )
    best = args.load_best_model_at_end or args.save_strategy == "best"
    plateau = args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    if (best or plateau) and not public:
        name = "load_best_model_at_end" if best else "lr_scheduler_type"
        raise InputError("left out", name=name, value=getattr(args, name), remedy=BY_METRICS)
    if args.max_steps not in (-1, plan.steps):
        raise InputError(
            f"the plan's ({plan.steps}), or left out", name="max_steps", value=args.max_steps
        )
    drawn = float(plan.rates.max()) * plan.examples
    parts = args.gradient_accumulation_steps
    if parts > 1 and round(drawn) != parts * args.per_device_train_batch_size:
        raise InputError(
            f"1, or such that the expected batch ({drawn:g}) is it times "
            f"per_device_train_batch_size ({args.per_device_train_batch_size})",
            name="gradient_accumulation_steps",
            value=parts,
            remedy="A sample comes in as many micro-batches as it needs.",
        )
    args = copy.copy(args)
    args.max_steps, args.gradient_accumulation_steps = plan.steps, 1
    args.max_grad_norm, args.ignore_data_skip = 0.0, True
    return args
