"""A Trainer of transformers whose steps are a plan's: the same gradients, nothing unpaid."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="make test-adapters has transformers")

import transformers as hf
from torch.nn import functional as F

import diminuendo as dim
from diminuendo import Budget, BudgetRefused, InputError, Ledger, UsageError
from diminuendo.adapters import _head_losses as heads
from diminuendo.adapters.huggingface import PrivateTrainer
from diminuendo.planning import Plan, PlanWarning
from diminuendo.training import PrivateGradients

WIDTH, WORDS = 6, 20
SMALL = {
    "vocab_size": WORDS,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": WIDTH,
}
GPT = {"vocab_size": WORDS, "n_positions": WIDTH, "n_embd": 8, "n_layer": 1, "n_head": 2}


def bert(**more: Any) -> Any:
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForSequenceClassification(hf.BertConfig(**SMALL, **{**still, **more}))


def rows(number: int = 24) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(2, WORDS, (number, WIDTH), generator=generator)
    return [{"input_ids": row, "labels": int(row[0] % 2)} for row in drawn]


def planned(model: Any, examples: int = 24, steps: int = 4, rate: float = 0.5, **more: Any) -> Plan:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    budget = Budget(epsilon=8, delta=1e-5)
    return dim.plan(
        budget, examples=examples, parameters=trained, steps=steps, sampling_rate=rate,
        gamma=0.98, clip=1.0, **more,
    )  # fmt: skip


def arguments(folder: Path, **more: Any) -> Any:
    usual = {
        "per_device_train_batch_size": 8,
        "learning_rate": 0.1,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return hf.TrainingArguments(str(folder), **{**usual, **more})


def trainer(folder: Path, model: Any, plan: Plan, data: Any = None, **more: Any) -> PrivateTrainer:
    own = {k: more.pop(k) for k in list(more) if k in hf.TrainingArguments.__dataclass_fields__}
    if "seed" in own:
        more["seed"] = own.pop("seed")
    args = arguments(folder, **own)
    return PrivateTrainer(model, args, plan=plan, train_dataset=data or rows(), **more)


def parameters(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class StopAfter(hf.TrainerCallback):  # type: ignore[misc]
    """Ends a run after so many steps: by asking, or by dying."""

    def __init__(self, step: int, error: type[BaseException] | None = None) -> None:
        self.step, self.error = step, error

    def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
        if state.global_step == self.step:
            if self.error is not None:
                raise self.error("the machine died")
            control.should_training_stop = True


def test_it_takes_the_steps_of_a_loop_of_ones_own(tmp_path: Path) -> None:
    models = [bert(), bert()]
    models[1].load_state_dict(models[0].state_dict())
    plan = planned(models[0])
    result = trainer(tmp_path, models[0], plan, seed=3).train()
    assert result.global_step == plan.steps
    data = rows()
    ids = torch.stack([row["input_ids"] for row in data])
    labels = torch.tensor([row["labels"] for row in data])
    private = PrivateGradients(models[1], plan, seed=3, micro_batch=8)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.1)
    models[1].train()
    for x, y in private.batches((ids, labels)):
        private.backward(F.cross_entropy(models[1](input_ids=x).logits, y, reduction="none"))
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(parameters(models[0]), parameters(models[1]), atol=1e-5)


def test_micro_batches_make_one_private_step(tmp_path: Path) -> None:
    trained = []
    for number, size in enumerate((3, 64)):
        torch.manual_seed(5)
        model = bert()
        run = trainer(
            tmp_path / str(number), model, planned(model), seed=3, per_device_train_batch_size=size
        )
        run.train()
        assert run.result is not None
        assert (run.result.steps, run.result.status) == (4, "done")
        trained.append(parameters(model))
    assert torch.allclose(trained[0], trained[1], atol=1e-5)


def test_accumulation_must_be_the_plans(tmp_path: Path) -> None:
    model = bert()
    plan = planned(model)  # 12 expected examples
    run = trainer(
        tmp_path, model, plan, per_device_train_batch_size=4, gradient_accumulation_steps=3
    )
    assert run.train().global_step == plan.steps
    with pytest.raises(InputError, match="gradient_accumulation_steps"):
        trainer(tmp_path, model, plan, gradient_accumulation_steps=3)


def test_nothing_unpaid_is_logged_or_saved(tmp_path: Path) -> None:
    model = bert()
    plan = planned(model)
    run = trainer(tmp_path, model, plan, save_strategy="steps", save_steps=2)
    output = run.train()
    assert math.isnan(output.training_loss)
    assert not {"train_loss", "total_flos"} & set(output.metrics)
    logged = {name for entry in run.state.log_history for name in entry}
    assert not {"loss", "train_loss", "total_flos"} & logged
    assert {"noise_multiplier", "epsilon", "learning_rate"} <= logged
    epsilons = [entry["epsilon"] for entry in run.state.log_history if "epsilon" in entry]
    assert epsilons[-1] == plan.epsilon
    assert epsilons == sorted(epsilons)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["total_flos"] == 0
    assert not any("loss" in entry for entry in state["log_history"])
    assert not list(tmp_path.rglob("rng_state*"))
    assert run.result is not None
    assert (run.result.epsilon, run.result.private) == (plan.epsilon, True)
    shown = trainer(tmp_path / "shown", bert(), plan, reveal_training_loss=True)
    assert 0 < shown.train().training_loss < 10


def _inputs(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, WORDS, (5, WIDTH)), **more}


def _tokens() -> torch.Tensor:
    labels = torch.randint(0, 3, (5, WIDTH))
    labels[0, 2:] = heads.IGNORED
    labels[3, 0] = heads.IGNORED
    return labels


def _case(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    config = hf.BertConfig(**SMALL, num_labels=3)
    t5 = hf.T5Config(
        vocab_size=WORDS, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    places = {
        "start_positions": torch.arange(5) % 4,
        "end_positions": torch.tensor([1, 2, 3, 0, 5]),
    }
    made = {
        "classes": lambda: (
            hf.BertForSequenceClassification(config), _inputs(labels=torch.arange(5) % 3)
        ),
        "regression": lambda: (
            hf.BertForSequenceClassification(hf.BertConfig(**SMALL, num_labels=1)),
            _inputs(labels=torch.randn(5)),
        ),
        "several classes": lambda: (
            hf.BertForSequenceClassification(config),
            _inputs(labels=(torch.rand(5, 3) > 0.5).float()),
        ),
        "tokens": lambda: (hf.BertForTokenClassification(config), _inputs(labels=_tokens())),
        "masked": lambda: (hf.BertForMaskedLM(config), _inputs(labels=_tokens())),
        "causal": lambda: (hf.GPT2LMHeadModel(hf.GPT2Config(**GPT)), _inputs(labels=_tokens())),
        "answers": lambda: (
            hf.BertForQuestionAnswering(hf.BertConfig(**SMALL, num_labels=2)), _inputs(**places)
        ),
        "conditional": lambda: (hf.T5ForConditionalGeneration(t5), _inputs(labels=_tokens())),
    }  # fmt: skip
    return made[name]()


@pytest.mark.parametrize(
    "name",
    [
        "classes", "regression", "several classes", "tokens", "masked", "causal", "answers",
        "conditional",
    ],
)  # fmt: skip
def test_a_loss_for_each_example_is_the_models_own_for_it_alone(name: str, tmp_path: Path) -> None:
    model, inputs = _case(name)
    model.eval()
    run = trainer(tmp_path, model, planned(model))
    loss = heads.for_head(model, 0.0)
    with torch.no_grad():
        losses = loss(model(**run._without_labels(inputs)), inputs)
        for i in range(5):
            alone = {key: part[i : i + 1] for key, part in inputs.items()}
            assert torch.allclose(losses[i], model(**alone).loss, rtol=1e-4)
            heads.check_own(model, loss, alone, run._without_labels(alone))
    plan = planned(model, examples=5, steps=2, rate=1.0)
    data = [{key: part[i] for key, part in inputs.items()} for i in range(5)]
    assert trainer(tmp_path, model, plan, data).train().global_step == 2


def test_label_smoothing_is_that_of_transformers() -> None:
    model, inputs = _case("tokens")
    model.eval()
    smoothed = heads.for_head(model, 0.2)
    theirs = hf.trainer_pt_utils.LabelSmoother(epsilon=0.2)
    with torch.no_grad():
        outputs = model(input_ids=inputs["input_ids"])
        losses = smoothed(outputs, inputs)
        for i in range(5):
            wanted = theirs({"logits": outputs.logits[i : i + 1]}, inputs["labels"][i : i + 1])
            assert torch.allclose(losses[i], wanted, rtol=1e-4)


def test_another_head_and_another_loss(tmp_path: Path) -> None:
    plain = hf.BertModel(hf.BertConfig(**SMALL))
    plan = planned(plain)
    with pytest.raises(InputError, match=r"BertModel.*loss="):
        trainer(tmp_path, plain, plan).train()

    class Doubled(hf.BertForSequenceClassification):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            outputs = super().forward(*args, **kwargs)
            if outputs.loss is not None:
                outputs.loss = 2 * outputs.loss
            return outputs

    doubled = Doubled(hf.BertConfig(**SMALL))
    kept = {"remove_unused_columns": False}
    run = trainer(tmp_path / "a", doubled, planned(doubled), **kept)
    with pytest.raises(InputError, match="the model's own"):
        run.train()
    assert not (tmp_path / "a" / "journal.json").exists()  # nothing was reserved

    def twice(outputs: Any, inputs: Any) -> torch.Tensor:
        return 2 * F.cross_entropy(outputs.logits, inputs["labels"], reduction="none")

    own = trainer(tmp_path / "b", doubled, planned(doubled), loss=twice, **kept)
    assert own.train().global_step == 4


def test_a_loss_that_mixes_examples_is_refused_unpaid(tmp_path: Path) -> None:
    def centred(outputs: Any, inputs: Any) -> torch.Tensor:
        losses = F.cross_entropy(outputs.logits, inputs["labels"], reduction="none")
        return losses - losses.detach().mean()

    model = bert()
    plan = planned(model, rate=1.0)
    with Ledger(str(tmp_path / "l.sqlite")) as ledger:
        ledger.create("b", plan.budget)
        run = trainer(tmp_path, model, plan, loss=centred, spending=ledger.pay("b", plan))
        with pytest.raises(InputError, match="whatever the other examples"):
            run.train()
        assert ledger.runs("b")[0].status == "closed"
        assert ledger.status("b").spent == 0


def test_only_lora_is_trained(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="make test-adapters has peft")
    base = hf.GPT2LMHeadModel(hf.GPT2Config(**GPT))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"])
    model = peft.get_peft_model(base, config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    data = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in rows()]
    run = trainer(tmp_path, model, planned(model), data, save_strategy="steps", save_steps=4)
    run.train()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").exists()
    assert trainer(tmp_path, model, planned(model), data).evaluate(data[:8])["eval_loss"] > 0


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, parts = bert(), bert()
    parts.load_state_dict(whole.state_dict())
    start = {name: part.clone() for name, part in whole.state_dict().items()}
    plan = planned(whole, steps=6)
    often = {"save_strategy": "steps", "save_steps": 3, "seed": 3}
    trainer(tmp_path / "whole", whole, plan, **often).train()
    stopped = trainer(tmp_path / "parts", parts, plan, callbacks=[StopAfter(3)], **often)
    stopped.train()
    assert stopped.result is not None
    assert (stopped.result.status, stopped.result.steps) == ("interrupted", 3)
    parts.load_state_dict(start)
    resumed = trainer(tmp_path / "parts", parts, plan, **often)
    assert resumed.train(resume_from_checkpoint=True).global_step == 6
    assert resumed.result is not None
    assert (resumed.result.steps, resumed.result.lost) == (6, 0)
    assert torch.allclose(parameters(whole), parameters(parts), atol=1e-6)


def test_a_crash_never_releases_a_step_twice(tmp_path: Path) -> None:
    model = bert()
    plan = planned(model, steps=8, rate=1.0)
    often = {"save_strategy": "steps", "save_steps": 3}
    with Ledger(str(tmp_path / "l.sqlite")) as ledger:
        ledger.create("b", plan.budget)
        spending = ledger.pay("b", plan)
        died = trainer(
            tmp_path, model, plan, spending=spending, callbacks=[StopAfter(5, OSError)], **often
        )
        with pytest.raises(OSError, match="died"):
            died.train()
        assert spending.steps == 5
        again = trainer(tmp_path, bert(), plan, spending=ledger.pay("b", plan), **often)
        assert again.train(resume_from_checkpoint=True).global_step == 8
        assert again.result is not None
        assert (again.result.steps, again.result.lost) == (8, 2)
        assert 0.99 < ledger.status("b").spent <= 1
    free = trainer(tmp_path / "free", model, plan, callbacks=[StopAfter(5, OSError)], **often)
    with pytest.raises(OSError, match="died"):
        free.train()
    on = trainer(tmp_path / "free", model, plan, **often)
    assert on.train(resume_from_checkpoint=True).global_step == 8
    assert on.result is not None
    assert (on.result.steps, on.result.lost) == (8, 2)  # 4 and 5 were released before
    assert sum(event.count for event in on.result.events) == 8
    for place in (None, str(tmp_path / "free" / "checkpoint-3")):
        with pytest.raises(UsageError, match="Every step"):
            trainer(tmp_path / "free", bert(), plan, **often).train(place)


def test_a_ledger_pays_or_refuses_before_the_first_step(tmp_path: Path) -> None:
    model = bert()
    plan = planned(model, rate=1.0)
    before = parameters(model).clone()
    with Ledger(str(tmp_path / "l.sqlite")) as ledger:
        ledger.create("rich", Budget(epsilon=9, delta=1e-5))
        ledger.create("poor", Budget(epsilon=1, delta=1e-5))
        run = trainer(tmp_path / "poor", model, plan, spending=ledger.pay("poor", plan))
        with pytest.raises(BudgetRefused):
            run.train()
        assert torch.equal(parameters(model), before)
        run = trainer(tmp_path / "rich", model, plan, spending=ledger.pay("rich", plan))
        run.train()
        assert run.result is not None
        assert run.result.ledger["budget"] == "rich"
        assert [entry.status for entry in ledger.runs("rich")] == ["closed"]
        with pytest.raises(InputError, match="seed"):
            trainer(tmp_path, model, plan, spending=ledger.pay("rich", plan), seed=1)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("train_sampling_strategy", "group_by_length"),
        ("auto_find_batch_size", True),
        ("dataloader_drop_last", True),
        ("include_num_input_tokens_seen", "all"),
        ("skip_memory_metrics", False),
        ("max_steps", 7),
        ("lr_scheduler_type", "reduce_lr_on_plateau"),
        ("optim", "lomo"),
        ("debug", "underflow_overflow"),
    ],
)
def test_options_that_break_the_claim_are_refused(option: str, value: Any, tmp_path: Path) -> None:
    model = bert()
    more = {"eval_strategy": "steps"} if option == "lr_scheduler_type" else {}
    with pytest.raises(InputError, match=option):
        trainer(tmp_path, model, planned(model), eval_dataset=rows(4), **{option: value}, **more)


def test_metrics_choose_only_on_public_rows(tmp_path: Path) -> None:
    model = bert()
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "eval_dataset": rows(4),
    }
    with pytest.raises(InputError, match="eval_data_is_public"):
        trainer(tmp_path, model, planned(model), **best)
    with pytest.raises(InputError, match="EarlyStopping"):
        trainer(tmp_path, model, planned(model), callbacks=[hf.EarlyStoppingCallback()])
    with pytest.raises(UsageError, match="search"):
        trainer(tmp_path, model, planned(model)).hyperparameter_search()
    run = trainer(tmp_path, model, planned(model), eval_data_is_public=True, **best)
    assert run.train().global_step == 4
    assert "checkpoint-" in str(run.state.best_model_checkpoint)


def test_one_width_for_all_examples(tmp_path: Path) -> None:
    model = bert()
    uneven = [
        {"input_ids": row["input_ids"][: 3 + i % 3], "labels": 0} for i, row in enumerate(rows())
    ]
    with pytest.raises(InputError, match="max_length"):
        trainer(tmp_path, model, planned(model), uneven).train()
    with pytest.raises(InputError, match="24"):
        trainer(tmp_path, model, planned(model), rows(23)).train()


def test_learning_rates_are_the_plans(tmp_path: Path) -> None:
    model = bert()
    falling = planned(model, lr=[1.0, 0.5, 0.25, 0.125])
    run = trainer(tmp_path, model, falling)
    run.train()
    used = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
    assert used == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    with pytest.warns(PlanWarning, match="learning rate"):
        trainer(tmp_path / "cosine", model, planned(model), lr_scheduler_type="cosine").train()


def test_the_masks_of_dropout_are_secret(tmp_path: Path) -> None:
    states = []

    class Look(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            states.append(torch.get_rng_state())

    for name in "ab":
        model = bert(hidden_dropout_prob=0.1)
        trainer(tmp_path / name, model, planned(model, steps=1), callbacks=[Look()]).train()
    assert not torch.equal(*states)


@pytest.mark.parametrize("option", ["bf16", "gradient_checkpointing"])
def test_what_saves_memory_goes_on_working(option: str, tmp_path: Path) -> None:
    model = bert()
    before = parameters(model).clone()
    run = trainer(tmp_path, model, planned(model, steps=2), **{option: True})
    assert run.train().global_step == 2
    assert not torch.equal(parameters(model), before)


def test_workers_load_and_an_optimizer_is_given(tmp_path: Path) -> None:
    model = bert()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run = trainer(
        tmp_path, model, planned(model), optimizers=(optimizer, None), dataloader_num_workers=1
    )
    assert run.train().global_step == 4
    foreign = torch.optim.Adam(bert().parameters())
    with pytest.raises(InputError, match="optimizer"):
        trainer(tmp_path / "b", model, planned(model), optimizers=(foreign, None)).train()


def test_other_plans_and_checkpoints_are_told_apart(tmp_path: Path) -> None:
    model = bert()
    often = {"save_strategy": "steps", "save_steps": 2}
    trainer(tmp_path, model, planned(model), callbacks=[StopAfter(2)], **often).train()
    with pytest.raises(InputError, match="plan"):
        trainer(tmp_path, model, planned(model, steps=5), **often).train(True)
    with pytest.raises(InputError, match="plan"):
        trainer(tmp_path, model, planned(model, steps=5), **often).train()
    (tmp_path / "checkpoint-2" / "private.pt").unlink()
    with pytest.raises(InputError, match="PrivateTrainer wrote"):
        trainer(tmp_path, model, planned(model), **often).train(True)

    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(InputError, match="map-style"):
        PrivateTrainer(
            model, arguments(tmp_path), plan=planned(model), train_dataset=Endless()
        ).train()


def test_one_row_of_each_person(tmp_path: Path) -> None:
    model = bert()
    plan = planned(model, examples=8, rate=1.0)
    run = trainer(tmp_path, model, plan, groups=[i % 8 for i in range(24)])
    run.train()
    assert run.result is not None
    assert run.result.unit == "group"


def test_a_draw_may_be_empty(tmp_path: Path) -> None:
    model = bert()
    run = trainer(tmp_path, model, planned(model, examples=3, steps=12, rate=0.2), rows(3))
    assert run.train().global_step == 12


def test_evaluation_is_trainers_own(tmp_path: Path) -> None:
    model = bert()
    run = trainer(tmp_path, model, planned(model), eval_strategy="epoch", eval_dataset=rows(8))
    run.train()
    theirs = hf.Trainer(model, arguments(tmp_path), eval_dataset=rows(8)).evaluate()
    assert run.evaluate()["eval_loss"] == pytest.approx(theirs["eval_loss"])
    assert "eval_loss" in {name for entry in run.state.log_history for name in entry}
    assert run.predict(rows(8)).predictions.shape == (8, 2)
    with pytest.raises(UsageError, match=r"within train\(\)"):
        run.training_step(model, rows(1)[0])
