"""Fine-tune a small transformer with LoRA under differential privacy, without downloads.

Sentences of made-up words stand for private records: each is about one of two subjects, and the
model learns which. A small BERT is made from a configuration and first trained on public sentences
without privacy, as a pretrained model would have been; LoRA then learns from the private ones.

    pip install 'diminuendo[huggingface]' peft
    python examples/fine_tune.py
"""

from __future__ import annotations

import argparse
from typing import Any

import peft
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import diminuendo as dim
from diminuendo.adapters.huggingface import PrivateTrainer
from diminuendo.report.text import rounded_up

WORDS, LENGTH, PUBLIC, PRIVATE, TEST = 60, 12, 600, 2000, 500
SHIFT = 12
"""By how much private sentences use other words than public ones."""
BUDGET = dim.Budget(epsilon=3, delta=1e-5)


def sentences(number: int, shift: int, generator: torch.Generator) -> list[dict[str, Any]]:
    """Sentences whose words lean to the first or the second half of a vocabulary."""
    labels = torch.randint(0, 2, (number,), generator=generator)
    own = torch.randint(0, WORDS // 4, (number, LENGTH), generator=generator)
    any_word = torch.randint(0, WORDS, (number, LENGTH), generator=generator)
    told = torch.rand(number, LENGTH, generator=generator) < 0.35
    words = torch.where(told, (own + labels[:, None] * WORDS // 2 + shift) % WORDS, any_word)
    return [{"input_ids": x, "labels": int(y)} for x, y in zip(words, labels, strict=True)]


def accuracy(given: Any) -> dict[str, float]:
    """How many sentences are told apart."""
    return {"accuracy": float((given.predictions.argmax(1) == given.label_ids).mean())}


def arguments(folder: str, **more: Any) -> TrainingArguments:
    """What both trainings share."""
    usual: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "logging_steps": 20}
    return TrainingArguments(folder, save_strategy="no", use_cpu=True, **{**usual, **more})


def main(steps: int = 60, folder: str = "out/fine_tune") -> float:
    """Accuracy on test sentences after private fine-tuning, in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    model = BertForSequenceClassification(config)
    public = sentences(PUBLIC, 0, generator)
    Trainer(
        model,
        arguments(f"{folder}/public", learning_rate=1e-3, num_train_epochs=3),
        train_dataset=public,
    ).train()

    private, test = (sentences(number, SHIFT, generator) for number in (PRIVATE, TEST))
    lora = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["query", "value"])
    model = peft.get_peft_model(model, lora)
    plan = dim.plan(
        BUDGET,
        examples=PRIVATE,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        clip=0.5,
        steps=steps,
        sampling_rate=0.1,
        gamma=0.97,
    )
    trainer = PrivateTrainer(
        model,
        arguments(f"{folder}/private", learning_rate=1e-2, per_device_train_batch_size=64),
        plan=plan,
        train_dataset=private,
        eval_dataset=test,
        compute_metrics=accuracy,
    )
    before = trainer.evaluate()["eval_accuracy"]
    trainer.train()
    after = float(trainer.evaluate()["eval_accuracy"])
    assert trainer.result is not None
    print(f"accuracy {before:.3f} → {after:.3f}, epsilon {rounded_up(trainer.result.epsilon)}")
    print(f"at delta {trainer.result.delta:g}, {trainer.result.status}: {trainer.result.reason}")
    return after


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="out/fine_tune")
    given = parser.parse_args()
    main(given.steps, given.out)
