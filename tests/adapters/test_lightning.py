"""A LightningModule that nobody changed takes a plan's steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="make test-adapters has lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateFinder, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import diminuendo as dim
from diminuendo import Budget, BudgetRefused, InputError, Ledger, UsageError
from diminuendo.adapters.lightning import PrivateStrategy
from diminuendo.planning import Plan, PlanWarning
from diminuendo.training import PrivateGradients

ROWS, FEATURES = 24, 4


class Module(pl.LightningModule):  # type: ignore[misc]
    """As written by somebody who never heard of privacy."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 6), nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self.second(self.first(x).relu()), y)
        self.log("train_loss", loss, prog_bar=batch_idx < 0)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.second(self.first(x).relu()), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def dataset(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, FEATURES, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def planned(steps: int = 4, rate: float = 0.5, examples: int = ROWS, **more: Any) -> Plan:
    return dim.plan(
        Budget(epsilon=8, delta=1e-5), examples=examples, parameters=51, steps=steps,
        sampling_rate=rate, gamma=0.98, clip=1.0, **more,
    )  # fmt: skip


def trainer(folder: Path, strategy: PrivateStrategy, **more: Any) -> Any:
    usual: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": -1,
        "accelerator": "cpu",
    }
    return pl.Trainer(strategy=strategy, default_root_dir=folder, **{**usual, **more})


def loader(size: int = 8, **more: Any) -> Any:
    return DataLoader(more.pop("data", None) or dataset(), batch_size=size, **more)


def parameters(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


class StopAfter(Callback):  # type: ignore[misc]
    """Ends a run after so many steps: by asking, or by dying."""

    def __init__(self, step: int, error: type[BaseException] | None = None) -> None:
        self.step, self.error = step, error

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            if self.error is not None:
                raise self.error("the machine died")
            trainer.should_stop = True


@pytest.mark.parametrize("size", [3, 64])
def test_it_takes_the_steps_of_a_loop_of_ones_own(size: int, tmp_path: Path) -> None:
    modules = [Module(), Module()]
    modules[1].load_state_dict(modules[0].state_dict())
    plan = planned()
    strategy = PrivateStrategy(plan, seed=3)
    with pytest.warns(UserWarning, match="train_loss"):
        trainer(tmp_path, strategy).fit(modules[0], loader(size))
    assert strategy.result is not None
    assert (strategy.result.status, strategy.result.steps) == ("done", 4)
    model = nn.Sequential(modules[1].first, nn.ReLU(), modules[1].second)
    private = PrivateGradients(model, plan, seed=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in private.batches(dataset()):
        private.backward(F.cross_entropy(model(x), y, reduction="none"))
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(parameters(modules[0]), parameters(modules[1]), atol=1e-6)


def test_what_training_step_logs_is_dropped_unless_revealed(tmp_path: Path) -> None:
    for reveal in (False, True):
        strategy = PrivateStrategy(planned(), reveal_training_metrics=reveal)
        run = trainer(tmp_path, strategy)
        run.fit(Module(), loader(), loader())
        assert ("train_loss" in run.callback_metrics) == reveal
        assert "val_loss" in run.callback_metrics
        assert strategy.result is not None
        assert strategy.result.epsilon == planned().epsilon


def test_what_hooks_of_training_log_is_dropped_too(tmp_path: Path) -> None:
    class Remembers(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.last = super().training_step(batch, batch_idx)
            return self.last

        def on_train_batch_end(self, *_: Any) -> None:
            self.log("of_batch", self.last.detach().mean())

        def on_train_epoch_end(self) -> None:
            self.log_dict({"of_epoch": self.last.detach().mean()})

    module = Remembers()
    for reveal in (False, True):
        run = trainer(tmp_path, PrivateStrategy(planned(), reveal_training_metrics=reveal))
        run.fit(module, loader(), loader())
        names = {"train_loss", "of_batch", "of_epoch"}
        assert names & set(run.callback_metrics) == (names if reveal else set())
        assert "val_loss" in run.callback_metrics
        assert "log" not in vars(module)


def test_losses_that_cannot_be_taken_apart_are_refused_unpaid(tmp_path: Path) -> None:
    class Rooted(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx).sqrt()

    class Mixing(Module):
        def training_step(self, batch: Any, _: int) -> Any:
            x, y = batch
            return F.cross_entropy(self.second(self.first(x - x.mean(0)).relu()), y)

    class Half(Module):
        def training_step(self, batch: Any, _: int) -> Any:
            return self.first(batch[0])[:3].mean()

    plan = planned(rate=1.0)
    with Ledger(str(tmp_path / "l.sqlite")) as ledger:
        ledger.create("b", plan.budget)
        for module, words in (
            (Rooted(), "one loss per example"),
            (Mixing(), "whatever the other"),
            (Half(), "one for each"),
        ):
            strategy = PrivateStrategy(plan, spending=ledger.pay("b", plan))
            with pytest.raises(InputError, match=words):
                trainer(tmp_path, strategy).fit(module, loader())
            assert ledger.status("b").spent == 0
        each = PrivateStrategy(plan, spending=ledger.pay("b", plan))

        class Each(Module):
            def training_step(self, batch: Any) -> Any:  # type: ignore[override]
                x, y = batch
                return F.cross_entropy(self.second(self.first(x)), y, reduction="none")

        trainer(tmp_path, each).fit(Each(), loader())
        assert each.result is not None
        assert each.result.ledger["budget"] == "b"
        assert 0.99 < ledger.status("b").spent <= 1
        again = PrivateStrategy(plan, spending=ledger.pay("b", plan))
        with pytest.raises(BudgetRefused):
            trainer(tmp_path, again).fit(Each(), loader())


def test_options_that_break_the_claim_are_refused(tmp_path: Path) -> None:
    for more, words in (
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches"),
        ({"gradient_clip_val": 1.0}, "clip norm"),
        ({"overfit_batches": 1}, "overfit_batches"),
        ({"precision": "16-true"}, "precision"),
        ({"callbacks": [EarlyStopping("val_loss")]}, "validation_data_is_public"),
        ({"callbacks": [LearningRateFinder()]}, "LearningRateFinder"),
        (
            {"callbacks": [ModelCheckpoint(monitor="val_loss")], "enable_checkpointing": True},
            "validation_data_is_public",
        ),
    ):
        with pytest.raises(InputError, match=words):
            trainer(tmp_path, PrivateStrategy(planned()), **more).fit(Module(), loader(), loader())
    manual = Module()
    manual.automatic_optimization = False
    with pytest.raises(InputError, match="automatic_optimization"):
        trainer(tmp_path, PrivateStrategy(planned())).fit(manual, loader())
    weighted = WeightedRandomSampler([1.0] * ROWS, ROWS)
    for data, words in (
        (loader(sampler=weighted), "sampler"),
        ([loader(), loader()], "one DataLoader"),
        (loader(data=dataset(7)), "7"),
    ):
        with pytest.raises(InputError, match=words):
            trainer(tmp_path, PrivateStrategy(planned())).fit(Module(), data)
    public = PrivateStrategy(planned(), validation_data_is_public=True)
    stopping = [EarlyStopping("val_loss", patience=100)]
    trainer(tmp_path, public, callbacks=stopping).fit(Module(), loader(), loader())
    assert public.result is not None
    assert public.result.status == "done"


def test_a_stopped_run_goes_on_where_it_was(tmp_path: Path) -> None:
    whole, parts = Module(), Module()
    parts.load_state_dict(whole.state_dict())
    plan = planned(6)
    trainer(tmp_path, PrivateStrategy(plan, seed=3)).fit(whole, loader())
    first, second = PrivateStrategy(plan, seed=3), PrivateStrategy(plan, seed=3)
    saving = ModelCheckpoint(tmp_path, "three", every_n_train_steps=3)
    trainer(
        tmp_path, first, callbacks=[StopAfter(3), saving], enable_checkpointing=True
    ).fit(parts, loader())  # fmt: skip
    assert first.result is not None
    assert (first.result.status, first.result.steps) == ("interrupted", 3)
    resumed = Module()
    path = tmp_path / "three.ckpt"
    trainer(tmp_path, second).fit(resumed, loader(), ckpt_path=path, weights_only=False)
    assert second.result is not None
    assert (second.result.steps, second.result.lost) == (6, 0)
    assert torch.allclose(parameters(whole), parameters(resumed), atol=1e-6)


def test_a_crash_never_releases_a_step_twice(tmp_path: Path) -> None:
    plan = planned(8)
    journal = tmp_path / "journal.json"

    def saving(*more: Any) -> dict[str, Any]:
        every = ModelCheckpoint(tmp_path, "last", every_n_train_steps=3, save_top_k=-1)
        return {"callbacks": [every, *more], "enable_checkpointing": True}

    died = trainer(
        tmp_path, PrivateStrategy(plan, journal=journal), **saving(StopAfter(5, OSError))
    )
    with pytest.raises(OSError, match="died"):
        died.fit(Module(), loader())
    with pytest.raises(UsageError, match="Nobody knows"):
        trainer(tmp_path, PrivateStrategy(plan)).fit(
            Module(), loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=False
        )
    on = PrivateStrategy(plan, journal=journal)
    trainer(tmp_path, on).fit(
        Module(), loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=False
    )
    assert on.result is not None
    assert (on.result.steps, on.result.lost) == (8, 2)
    assert sum(event.count for event in on.result.events) == 8
    with pytest.raises(UsageError, match="Every step"):
        trainer(tmp_path, PrivateStrategy(plan, journal=journal)).fit(Module(), loader())


def test_learning_rates_are_the_plans(tmp_path: Path) -> None:
    class Rates(Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.used: list[float] = []

        def on_before_optimizer_step(self, _: Any, __: Any, optimizer: Any) -> None:
            self.used.append(optimizer.param_groups[0]["lr"])

    class Falling(Module):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    seen = Rates()
    falling = planned(lr=[1.0, 0.5, 0.25, 0.125])
    trainer(tmp_path, PrivateStrategy(falling), callbacks=[seen]).fit(Module(), loader())
    assert seen.used == pytest.approx([0.1, 0.05, 0.025, 0.0125])
    with pytest.warns(PlanWarning, match="learning rate"):
        trainer(tmp_path, PrivateStrategy(planned())).fit(Falling(), loader())


def test_masks_and_empty_draws(tmp_path: Path) -> None:
    states = []

    class Look(Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *_: Any) -> None:
            states.append(torch.get_rng_state())

    plan = planned(steps=12, rate=0.2, examples=3)
    for _ in range(2):
        pl.seed_everything(1, verbose=False)
        strategy = PrivateStrategy(plan)
        trainer(tmp_path, strategy, callbacks=[Look()]).fit(Module(), loader(data=dataset(3)))
        assert strategy.result is not None
        assert strategy.result.steps == 12
    assert not torch.equal(states[0], states[12])


def test_collate_functions_and_prediction(tmp_path: Path) -> None:
    def named(examples: list[Any]) -> dict[str, Tensor]:
        return {
            "x": torch.stack([x for x, _ in examples]),
            "y": torch.stack([y for _, y in examples]),
        }

    class Named(Module):
        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return super().training_step((batch["x"], batch["y"]), 0)

        def predict_step(self, batch: Any) -> Any:
            return self.first(batch[0])

    strategy = PrivateStrategy(planned())
    run = trainer(tmp_path, strategy)
    module = Named()
    run.fit(module, loader(collate_fn=named))
    assert strategy.result is not None
    assert len(run.predict(module, loader())) == 3
    with pytest.raises(UsageError, match=r"trainer\.fit"):
        strategy.training_step(None)
