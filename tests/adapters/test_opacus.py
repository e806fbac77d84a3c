"""Opacus' interface: loops of its kind run unchanged, and take exactly the private steps."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import diminuendo as dim
from diminuendo.adapters.opacus import BatchMemoryManager, PrivacyEngine
from diminuendo.errors import BudgetRefused, InputError, UsageError
from diminuendo.training import Flat, PrivateGradients
from diminuendo.training.clipping import EngineError

N, D, CLASSES = 120, 6, 3
pytestmark = pytest.mark.filterwarnings("ignore:With noise_generator")


def data(seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, D, generator=generator)
    y = (x[:, :CLASSES] + 0.3 * torch.randn(N, CLASSES, generator=generator)).argmax(1)
    return TensorDataset(x, y)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seed_of(seed: int = 5) -> int:
    """What the adapter draws from a generator that was given."""
    return int(torch.randint(2**49, (1,), generator=generator(seed)))


def made(batch: int = 20, **options: Any) -> Any:
    """A PrivacyEngine, and what it returned."""
    model = network()
    engine = PrivacyEngine()
    given: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **options}
    make: Any = engine.make_private
    if "target_epsilon" in given:
        del given["noise_multiplier"]
        make = engine.make_private_with_epsilon
    parts = make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data(), batch_size=batch),
        **given,
    )
    return engine, *parts


def train(model: Any, optimizer: Any, loader: Any, criterion: Any = None) -> int:
    """An epoch of the usual loop; returns how many batches it saw."""
    model.train()
    criterion = criterion or nn.CrossEntropyLoss()
    batches = 0
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        batches += 1
    return batches


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# The same steps as one's own loop takes, bit for bit


def own_loop(plan: dim.Plan, clip: float = 1.0) -> Tensor:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = PrivateGradients(model, plan, clip=Flat(clip), seed=seed_of())
    each = nn.CrossEntropyLoss(reduction="none")
    for x, y in private.batches(data()):
        private.backward(each(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return parameters(model)


def test_a_mean_loss_takes_the_steps_of_one_s_own_loop() -> None:
    engine, model, optimizer, loader = made(
        target_epsilon=3.0, target_delta=1e-5, epochs=2, noise_generator=generator()
    )
    assert engine.run is not None
    assert train(model, optimizer, loader) == train(model, optimizer, loader) == 6
    assert torch.equal(parameters(model), own_loop(engine.run.plan))


def mean_of_squares(out: Tensor, y: Tensor) -> Tensor:
    return (out - functional.one_hot(y, CLASSES)).square().mean()


def sum_over_length(out: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(out, y, reduction="sum") / len(out)


def likelihood(out: Tensor, y: Tensor) -> Tensor:
    return functional.nll_loss(out.log_softmax(dim=1), y)


@pytest.mark.parametrize(
    ("criterion", "each"),
    [
        (mean_of_squares, lambda o, y: (o - functional.one_hot(y, CLASSES)).square().mean(1)),
        (sum_over_length, nn.CrossEntropyLoss(reduction="none")),
        (likelihood, lambda o, y: functional.nll_loss(o.log_softmax(1), y, reduction="none")),
        (
            lambda o, y: 2 * likelihood(o, y),
            lambda o, y: 2 * nn.CrossEntropyLoss(reduction="none")(o, y),
        ),
    ],
)
def test_other_losses_take_the_same_steps(criterion: Any, each: Any) -> None:
    engine, model, optimizer, loader = made(noise_generator=generator())
    train(model, optimizer, loader, criterion)
    reference = network()
    by = torch.optim.SGD(reference.parameters(), lr=0.5)
    assert engine.run is not None
    with_same_noise = PrivateGradients(
        reference,
        engine.run.plan,
        spending=type(engine.run.private.spending)(engine.run.plan.budget),
        policy=lambda released: 1.0,
        seed=seed_of(),
    )
    for x, y in with_same_noise.batches(data()):
        with_same_noise.backward(each(reference(x), y))
        by.step()
        if with_same_noise.step == len(loader):
            break
    torch.testing.assert_close(parameters(model), parameters(reference))


def test_a_full_batch_step_is_opacus_step() -> None:
    """With hardly any noise both libraries' first step is the clipped mean gradient."""
    engine, model, optimizer, loader = made(batch=N, noise_multiplier=1e-3, max_grad_norm=0.1)
    train(model, optimizer, loader)
    theirs = network()
    with opacus_quiet():
        from opacus import PrivacyEngine as Opacus

        parts = Opacus().make_private(
            module=theirs,
            optimizer=torch.optim.SGD(theirs.parameters(), lr=0.5),
            data_loader=DataLoader(data(), batch_size=N),
            noise_multiplier=1e-3,
            max_grad_norm=0.1,
        )
        train(*parts)
    assert len(engine.accountant) == 1
    assert not torch.equal(parameters(model), parameters(network()))
    torch.testing.assert_close(parameters(model), parameters(theirs), atol=5e-6, rtol=0)


@contextmanager
def opacus_quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.slow
def test_both_libraries_learn_the_same_at_the_same_budget() -> None:
    """Handwritten digits at (3, 1e-5), five networks each, all seeded: accuracies are close."""
    from sklearn.datasets import load_digits

    x, y = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    x = x.float() / 16
    train_data = TensorDataset(x[:1500], y[:1500])

    def accuracy(engine: Any, seed: int, **options: Any) -> float:
        torch.manual_seed(seed)
        model: Any = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(train_data, batch_size=100),
            target_epsilon=3.0,
            target_delta=1e-5,
            epochs=10,
            max_grad_norm=1.0,
            noise_generator=generator(seed),
            **options,
        )
        for _ in range(10):
            train(model, optimizer, loader)
        assert 2.9 < engine.get_epsilon(1e-5) <= 3.0
        with torch.no_grad():
            return float((model(x[1500:]).argmax(1) == y[1500:]).float().mean())

    with opacus_quiet():
        from opacus import PrivacyEngine as Opacus

        theirs = np.mean([accuracy(Opacus(), seed) for seed in range(5)])
    ours = np.mean([accuracy(PrivacyEngine(), seed) for seed in range(5)])
    fading = np.mean([accuracy(PrivacyEngine(), seed, schedule="optimal") for seed in range(5)])
    print(f"accuracy: Opacus {theirs:.3f}, uniform {ours:.3f}, optimal {fading:.3f}")
    assert theirs > 0.7
    assert abs(ours - theirs) < 0.03
    assert fading > theirs - 0.03


# Loops written as Opacus' examples are


class SmallPictures(Dataset[tuple[Tensor, int]]):
    """A map-style dataset of pictures with labels."""

    def __init__(self, size: int, channels: int, side: int) -> None:
        generator = torch.Generator().manual_seed(channels)
        self.labels = torch.randint(0, 10, (size,), generator=generator)
        noise = torch.randn(size, channels, side, side, generator=generator)
        self.pictures = noise + self.labels.view(-1, 1, 1, 1) / 3

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.pictures[index], int(self.labels[index])


class ConvNet(nn.Module):
    """Two convolutions and two layers, with functions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 8, 2, padding=3)
        self.conv2 = nn.Conv2d(4, 8, 4, 2)
        self.fc1 = nn.Linear(8 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2, 1)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2, 1)
        x = functional.relu(self.fc1(x.view(-1, 8 * 4 * 4)))
        out: Tensor = self.fc2(x)
        return out

    def name(self) -> str:
        return "ConvNet"


def test_a_loop_like_the_mnist_example(capsys: pytest.CaptureFixture[str]) -> None:
    """Several runs, each with an engine of its own, and the loader of the last handed on."""
    device = torch.device("cpu")
    train_loader: Any = DataLoader(SmallPictures(90, 1, 28), batch_size=30)
    test_loader = DataLoader(SmallPictures(20, 1, 28), batch_size=10, shuffle=True)
    for _ in range(2):
        module = ConvNet().to(device)
        sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0)
        privacy_engine = PrivacyEngine(secure_mode=False)
        model, optimizer, train_loader = privacy_engine.make_private(
            module=module,
            optimizer=sgd,
            data_loader=train_loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        for epoch in range(1, 3):
            model.train()
            criterion = nn.CrossEntropyLoss()
            losses = []
            for _batch_idx, (x, y) in enumerate(train_loader):
                x, y = x.to(device), y.to(device)
                optimizer.zero_grad()
                output = model(x)
                loss = criterion(output, y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            epsilon = privacy_engine.accountant.get_epsilon(delta=1e-5)
            print(f"epoch {epoch} loss {np.mean(losses):.6f} ε = {epsilon:.2f}")
        model.eval()
        with torch.no_grad():
            for x, y in test_loader:
                output = model(x)
                predicted = output.argmax(dim=1, keepdim=True)
                assert predicted.eq(y.view_as(predicted)).sum().item() <= len(y)
        assert len(privacy_engine.accountant) == 6
        assert model.name() == "ConvNet"
        assert next(iter(model.state_dict())) == "_module.conv1.weight"
    assert capsys.readouterr().out.count("ε = ") == 4


def test_a_loop_like_the_cifar_example(tmp_path: Path) -> None:
    """Momentum, a learning rate that the loop sets, accuracies on the way, its own checkpoints."""
    model: Any = nn.Sequential(
        nn.Conv2d(3, 8, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(kernel_size=2, stride=2),
        nn.Conv2d(8, 16, kernel_size=3, stride=1, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(start_dim=1, end_dim=-1),
        nn.Linear(16, 10, bias=True),
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0)
    layers = len([p for p in model.parameters() if p.requires_grad])
    privacy_engine = PrivacyEngine(secure_mode=True)
    model, optimizer, loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(SmallPictures(64, 3, 8), batch_size=16, num_workers=1),
        noise_multiplier=1.5,
        max_grad_norm=[10.0 / np.sqrt(layers)] * layers,
        clipping="per_layer",
        grad_sample_mode="hooks",
    )
    spent = []
    for epoch in range(1, 3):
        for group in optimizer.param_groups:
            group["lr"] = float(0.1 * 0.5 * (1 + np.cos(np.pi * epoch / 3)))
        model.train()
        criterion = nn.CrossEntropyLoss()
        losses, accuracies = [], []
        for i, (images, target) in enumerate(loader):
            output = model(images)
            loss = criterion(output, target)
            predictions = np.argmax(output.detach().cpu().numpy(), axis=1)
            if len(target):
                accuracies.append((predictions == target.detach().cpu().numpy()).mean())
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if i % 2 == 0:
                spent.append(privacy_engine.get_epsilon(delta=1e-5))
        state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, tmp_path / "checkpoint.tar")
    assert spent == sorted(spent)
    assert len(privacy_engine.accountant) == 8
    saved = torch.load(tmp_path / "checkpoint.tar")
    assert torch.equal(saved["state_dict"]["_module.0.weight"], model._module[0].weight)
    assert privacy_engine.run is not None
    assert privacy_engine.run.clip.sensitivity == pytest.approx(10.0)


def test_ghost_mode_returns_a_criterion() -> None:
    weights = torch.tensor([1.0, 2.0, 3.0])
    engine, model, optimizer, criterion, loader = made(
        grad_sample_mode="ghost",
        criterion=nn.CrossEntropyLoss(weight=weights),
        noise_generator=generator(),
    )
    assert train(model, optimizer, loader, criterion) == 6
    assert len(engine.accountant) == 6

    def weighted(out: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(out, y, weight=weights, reduction="none").mean()

    _, same, by, batches = made(noise_generator=generator())
    train(same, by, batches, weighted)
    assert torch.equal(parameters(model), parameters(same))


def test_without_a_wrapper_the_given_model_is_trained() -> None:
    model = network()
    engine = PrivacyEngine()
    hooks, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(data(), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        wrap_model=False,
        noise_generator=generator(),
    )
    assert train(model, optimizer, loader) == 6
    hooks.cleanup()
    assert type(model(data()[:2][0])) is Tensor
    _, wrapped, by, batches = made(noise_generator=generator())
    train(wrapped, by, batches)
    assert torch.equal(parameters(model), parameters(wrapped))


# What is claimed


@pytest.mark.parametrize("schedule", ["uniform", "optimal"])
def test_a_target_is_met_and_not_passed(schedule: str) -> None:
    engine, model, optimizer, loader = made(
        target_epsilon=2.0, target_delta=1e-5, epochs=3, schedule=schedule
    )
    assert engine.get_epsilon(1e-5) == 0
    sigmas = []
    for _ in range(3):
        sigmas.append(optimizer.noise_multiplier)
        train(model, optimizer, loader)
    assert 1.995 < engine.get_epsilon(1e-5) <= 2.0
    assert (len(set(sigmas)) == 1) == (schedule == "uniform")
    before = parameters(model)
    with pytest.raises(BudgetRefused, match="18 steps"):
        train(model, optimizer, loader)
    assert torch.equal(parameters(model), before)
    assert len(engine.accountant) == 18


def test_the_noise_is_opacus_noise_at_the_same_target() -> None:
    with opacus_quiet():
        from opacus.accountants.utils import get_noise_multiplier

        theirs = get_noise_multiplier(
            target_epsilon=2.0, target_delta=1e-5, sample_rate=1 / 6, epochs=3, accountant="prv"
        )
    _, _, optimizer, _ = made(target_epsilon=2.0, target_delta=1e-5, epochs=3)
    assert optimizer.noise_multiplier == pytest.approx(theirs, rel=0.02)


def test_every_step_is_charged_before_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, model, optimizer, loader = made()
    assert engine.run is not None
    private = engine.run.private
    monkeypatch.setattr(private.mechanism, "begin", lambda **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer, loader)
    assert len(engine.accountant) == 1
    assert all(p.grad is None for p in model.parameters())


def test_an_epoch_has_empty_draws_and_divides_by_the_expected_batch() -> None:
    """Rate 1/120: most draws are empty or of one example, and each is a step with noise."""
    engine, model, optimizer, loader = made(batch=1, noise_multiplier=0.5)
    sizes = []
    model.train()
    for x, y in loader:
        sizes.append(len(x))
        before = parameters(model)
        nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        assert not torch.equal(parameters(model), before)
    assert len(sizes) == len(loader) == len(engine.accountant) == 120
    assert 0 in sizes
    assert optimizer.expected_batch_size == 1.0
    assert loader.sample_rate == 1 / 120


def test_noise_is_sigma_times_the_clip_norm_over_the_expected_batch() -> None:
    """On an empty draw the gradient is noise alone: 10,000 numbers a step, and the same seed."""
    model = nn.Linear(D, 10_000 // D, bias=False)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data(), batch_size=2),
        noise_multiplier=0.7,
        max_grad_norm=3.0,
        noise_generator=generator(),
    )
    noise = []
    for x, _ in loader:
        private(x).mean().backward()
        if len(x) == 0:
            noise.append(model.weight.grad)
        optimizer.step()
    deviation = torch.stack([part for part in noise if part is not None]).std()
    assert float(deviation) == pytest.approx(0.7 * 3.0 / 2, rel=0.05)


def test_before_make_private() -> None:
    with pytest.raises(UsageError, match="make_private comes first"):
        PrivacyEngine().save_checkpoint(path="run.pt", module=network())


@pytest.mark.parametrize("seeded", [False, True])
def test_nobody_knows_what_dropout_drops(seeded: bool) -> None:
    """A seed that stands in the script would tell: masks go by an example's place in the batch."""
    states = []
    for _ in range(2):
        *_, loader = made(noise_generator=generator() if seeded else None)
        torch.manual_seed(0)
        next(iter(loader))
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1]) == seeded


def test_a_model_that_takes_no_empty_batch() -> None:
    class Picky(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 0:
                raise ValueError("no rows")
            return super().forward(x)

    model = Picky(D, CLASSES)
    engine = PrivacyEngine()
    parts = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(), batch_size=1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert train(*parts) == 120


def test_sums_are_not_divided() -> None:
    results = []
    for reduction in ("mean", "sum"):
        model = network()
        private, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1 / 20 if reduction == "sum" else 1.0),
            data_loader=DataLoader(data(), batch_size=20),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            loss_reduction=reduction,
            noise_generator=generator(),
        )
        train(private, optimizer, loader, nn.CrossEntropyLoss(reduction=reduction))
        results.append(parameters(model))
    torch.testing.assert_close(*results)


def test_a_sum_over_a_constant_that_some_batch_has() -> None:
    """Batches of 20 rows, and others, with a loss that is a sum over 20."""
    engine, model, optimizer, loader = made(loss_reduction="sum")
    sizes = set()

    def criterion(out: Tensor, y: Tensor) -> Tensor:
        sizes.add(len(out))
        return nn.functional.cross_entropy(out, y, reduction="sum") / 20

    while 20 not in sizes:  # one in ten
        train(model, optimizer, loader, criterion)
    assert len(engine.accountant) % 6 == 0


def test_a_split_batch_is_the_same_step() -> None:
    _, whole, by, batches = made(noise_generator=generator())
    train(whole, by, batches)
    engine, model, optimizer, loader = made(noise_generator=generator())
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=7, optimizer=optimizer
    ) as parts:
        assert train(model, optimizer, parts) > len(loader)
    assert len(engine.accountant) == 6
    torch.testing.assert_close(parameters(model), parameters(whole), atol=1e-5, rtol=1e-4)
    assert train(model, optimizer, loader) == 6


def test_a_split_that_rounding_could_not_pay_for_is_refused() -> None:
    *_, optimizer, loader = made(target_epsilon=2.0, target_delta=1e-10, epochs=30)
    with (
        pytest.raises(InputError, match="max_physical_batch_size"),
        BatchMemoryManager(data_loader=loader, max_physical_batch_size=1, optimizer=optimizer),
    ):
        pass


def test_opacus_own_splitting_is_refused_with_the_line_to_write() -> None:
    with opacus_quiet():
        from opacus.utils.batch_memory_manager import BatchMemoryManager as Theirs
    _, _, optimizer, loader = made()
    with (
        pytest.raises(UsageError, match="import BatchMemoryManager"),
        Theirs(data_loader=loader, max_physical_batch_size=4, optimizer=optimizer),
    ):
        pass


# Schedules


def test_schedule_of_make_private() -> None:
    engine, model, optimizer, loader = made(schedule=lambda t: 2.0 if t < 4 else 1.0)
    train(model, optimizer, loader)
    assert engine.accountant.history == [(2.0, 1 / 6, 3), (1.0, 1 / 6, 3)]
    engine, model, optimizer, loader = made(schedule=[3.0, 2.0])
    train(model, optimizer, loader)
    assert engine.accountant.history == [(3.0, 1 / 6, 1), (2.0, 1 / 6, 5)]
    sigmas = np.repeat([3.0, 2.0], [1, 5])
    assert engine.get_epsilon(1e-5) == pytest.approx(dim.epsilon(sigmas, 1e-5, 1 / 6), rel=1e-6)


def test_opacus_schedulers_work_on_the_optimizer() -> None:
    with opacus_quiet():
        from opacus.schedulers import ExponentialGradClip, ExponentialNoise
    engine, model, optimizer, loader = made()
    noise = ExponentialNoise(optimizer, gamma=0.5)
    clip = ExponentialGradClip(optimizer, gamma=0.1)
    train(model, optimizer, loader)
    noise.step()
    clip.step()
    train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 1 / 6, 6), (0.5, 1 / 6, 6)]
    assert optimizer.max_grad_norm == pytest.approx(0.1)
    *_, optimizer, _ = made(target_epsilon=2.0, target_delta=1e-5, epochs=1)
    with pytest.raises(UsageError, match="planned the noise"):
        ExponentialNoise(optimizer, gamma=0.5)


def test_a_plan_that_was_made_elsewhere() -> None:
    options: dict[str, Any] = {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 2}
    plan = dim.plan(
        (2.0, 9e-6),
        examples=N,
        parameters=83,
        clip=1.0,
        steps=12,
        sampling_rate=1 / 6,
        schedule="exponential",
    )
    engine, model, optimizer, loader = made(schedule=plan, **options)
    train(model, optimizer, loader)
    train(model, optimizer, loader)
    assert engine.get_epsilon(1e-5) <= 2.0
    with pytest.raises(InputError, match="steps"):
        made(schedule=plan, **{**options, "epochs": 3})
    with pytest.raises(InputError, match="budget"):
        made(schedule=plan, **{**options, "target_epsilon": 1.9})


# What is refused, before anything is charged

PENALTY = [torch.ones(2, requires_grad=True)]


def test_a_factor_that_follows_the_batch_is_refused() -> None:
    # Two draws of one size in a row have one factor: the seed makes the first two differ.
    engine, model, optimizer, loader = made(noise_generator=generator())
    with pytest.raises(UsageError, match="learning rate instead"):
        train(model, optimizer, loader, lambda o, y: nn.CrossEntropyLoss()(o, y) * len(o) / 20)
    assert len(engine.accountant) == 1


@pytest.mark.parametrize(
    ("criterion", "error"),
    [
        (nn.CrossEntropyLoss(weight=torch.ones(CLASSES)), UsageError),
        (nn.CrossEntropyLoss(reduction="sum"), UsageError),
        (lambda o, y: o.mean(0).square().mean(), (InputError, UsageError)),
        (lambda o, y: nn.CrossEntropyLoss()(o[:-1], y[:-1]), InputError),
        (lambda o, y: ((o - o.mean(0)) ** 2).mean(), ValueError),
        (lambda o, y: nn.CrossEntropyLoss()(o, y) + sum(p.sum() for p in PENALTY), UsageError),
    ],
)
def test_losses_that_cannot_be_covered(criterion: Any, error: Any) -> None:
    engine, model, optimizer, loader = made()
    before = parameters(model)
    with pytest.raises(error):
        train(model, optimizer, loader, criterion)
    assert len(engine.accountant) == 0
    assert torch.equal(parameters(model), before)


@pytest.mark.parametrize(
    "criterion",
    [
        lambda o, y: o.mean(0).square().mean(),
        lambda o, y: (o.softmax(0) * y.float()).sum(0).mean(),
        lambda o, y: nn.CrossEntropyLoss()(o.T, y),
        lambda o, y: torch.stack([nn.CrossEntropyLoss()(o, y)] * CLASSES).mean(),
    ],
)
def test_sizes_that_coincide_do_not_make_rows_of_examples(criterion: Any) -> None:
    """As many examples as classes: a loss per class has the right number of losses."""
    x, y = data()[:CLASSES]
    model = network()
    engine = PrivacyEngine()
    parts = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=CLASSES),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    with pytest.raises((InputError, EngineError)):
        train(parts[0], parts[1], parts[2], criterion)
    assert len(engine.accountant) == 0


def test_models_of_several_outputs_and_losses_of_several_terms() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.one, self.two = nn.Linear(D, 5), nn.Linear(5, CLASSES), nn.Linear(5, 1)

        def forward(self, x: Tensor) -> dict[str, Any]:
            inside = self.body(x).tanh()
            return {"labels": self.one(inside), "more": (self.two(inside), "text")}

    def criterion(out: dict[str, Any], y: Tensor) -> Tensor:
        # Without a dimension where one example was drawn.
        second = functional.mse_loss(out["more"][0].squeeze(), y.float().squeeze())
        return functional.cross_entropy(out["labels"], y) + 0.5 * second

    model = Heads()
    engine = PrivacyEngine()
    parts = engine.make_private(
        module=model,
        optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(data(), batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert train(parts[0], parts[1], parts[2], criterion) == len(engine.accountant) == 60


def test_a_scaled_loss_is_refused() -> None:
    engine, model, optimizer, loader = made()
    with pytest.raises(UsageError, match="no mean"):
        train(
            model, optimizer, loader, lambda o, y: nn.CrossEntropyLoss()(o, y) * torch.tensor(8.0)
        )
    assert len(engine.accountant) == 0


def test_a_step_without_a_private_gradient_is_refused() -> None:
    engine, model, optimizer, loader = made()
    with pytest.raises(UsageError, match=r"after loss\.backward"):
        optimizer.step()
    for x, y in loader:
        loss = nn.CrossEntropyLoss()(model(x).as_subclass(Tensor), y)
        with pytest.raises(EngineError, match="outside the engine"):
            loss.backward()  # the marks of the private model were lost on the way
        with pytest.raises(UsageError, match=r"optimizer\.backward"):
            optimizer.step()
        each = nn.CrossEntropyLoss(reduction="none")(model(x).as_subclass(Tensor), y)
        optimizer.backward(each)
        optimizer.step()
        break
    assert len(engine.accountant) == 1


def test_a_gradient_that_somebody_put_there_is_refused() -> None:
    _, model, optimizer, loader = made()
    for x, y in loader:
        nn.CrossEntropyLoss()(model(x), y).backward()
        first = next(model.parameters())
        first.grad = torch.zeros_like(first)
        with pytest.raises(UsageError, match="not the private gradient"):
            optimizer.step()
        break


def test_a_batch_is_used_once_and_comes_from_the_private_loader() -> None:
    engine, model, optimizer, loader = made()
    x, y = data()[:20]
    with pytest.raises(UsageError, match="from elsewhere"):
        nn.CrossEntropyLoss()(model(x), y).backward()
    for x, y in loader:
        nn.CrossEntropyLoss()(model(x), y).backward()
        with pytest.raises(UsageError, match="used before"):
            nn.CrossEntropyLoss()(model(x), y).backward()
        optimizer.step()
        break
    assert len(engine.accountant) == 1


def test_a_skipped_batch_is_noticed() -> None:
    _, _, _, loader = made()
    with pytest.raises(UsageError, match="backward was not called"):
        for _ in loader:
            pass


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"poisson_sampling": False}, "poisson_sampling"),
        ({"batch_first": False}, "batch_first"),
        ({"clipping": "adaptive"}, "clipping"),
        ({"grad_sample_mode": "no_op"}, "grad_sample_mode"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"max_grad_norm": [1.0], "clipping": "per_layer"}, "max_grad_norm"),
        ({"loss_reduction": "none"}, "loss_reduction"),
        ({"schedule": "optimal"}, "schedule"),
        ({"ledger": "ledger.sqlite"}, "budget"),
        ({"target_epsilon": 0.0, "target_delta": 1e-5, "epochs": 1}, "epsilon"),
        ({"target_epsilon": 1.0, "target_delta": 0.0, "epochs": 1}, "target_delta"),
        ({"target_epsilon": 1.0, "target_delta": 1e-5, "epochs": 0}, "epochs"),
    ],
)
def test_bad_arguments(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InputError, match=name):
        made(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 20, "sampler": SubsetRandomSampler(range(40))},
        {"batch_size": 20, "sampler": WeightedRandomSampler([1.0] * N, N)},
        {"batch_size": 20, "sampler": RandomSampler(range(N), num_samples=40)},
        {"batch_size": 20, "sampler": RandomSampler(range(N), replacement=True)},
        {"batch_sampler": [[0, 1], [2, 3]]},
        {"batch_size": None},
    ],
)
def test_a_loader_that_draws_something_else(options: dict[str, Any]) -> None:
    """Its dataset would be trained on as a whole, held-out rows included."""
    with pytest.raises(InputError, match="Subset"):
        PrivacyEngine().make_private(
            module=(model := network()),
            optimizer=torch.optim.SGD(model.parameters(), lr=1),
            data_loader=DataLoader(data(), **options),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_a_loader_without_batches() -> None:
    with pytest.raises(InputError, match="drop_last"):
        PrivacyEngine().make_private(
            module=(model := network()),
            optimizer=torch.optim.SGD(model.parameters(), lr=1),
            data_loader=DataLoader(data(), batch_size=2 * N, drop_last=True),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_what_opacus_made_private_is_not_made_so_again() -> None:
    options: dict[str, Any] = {
        "data_loader": DataLoader(data(), batch_size=20),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    with opacus_quiet():
        from opacus import PrivacyEngine as Opacus

        module = network()
        sgd = torch.optim.SGD(module.parameters(), lr=1)
        wrapped, stepping, _ = Opacus().make_private(module=module, optimizer=sgd, **options)
    with pytest.raises(InputError, match=r"module\._module"):
        PrivacyEngine().make_private(module=wrapped, optimizer=sgd, **options)
    with pytest.raises(InputError, match=r"optimizer\.original_optimizer"):
        PrivacyEngine().make_private(module=network(), optimizer=stepping, **options)


def test_a_part_of_a_dataset_shuffled() -> None:
    model = network()
    engine = PrivacyEngine()
    part: Any = Subset(data(), range(0, N, 2))
    parts = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1),
        data_loader=DataLoader(part, batch_size=20, shuffle=True),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert train(*parts) == 3
    assert engine.run is not None
    assert engine.run.plan.examples == 60


def test_what_is_warned_about() -> None:
    model = network()
    options: dict[str, Any] = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
    }
    loader = DataLoader(data(), batch_size=20, worker_init_fn=print)
    with pytest.warns(UserWarning, match="worker_init_fn"):
        PrivacyEngine().make_private(data_loader=loader, **options)[0].to_standard_module()
    with pytest.warns(UserWarning, match="NOT private") as caught:
        PrivacyEngine().make_private(
            data_loader=DataLoader(data(), batch_size=20), noise_generator=generator(), **options
        )
    assert caught[0].filename == __file__


def test_a_forgotten_training_mode_is_named() -> None:
    engine, model, _, loader = made()
    model.eval()
    x, y = next(iter(loader))
    loss = nn.CrossEntropyLoss()(model(x), y)
    with pytest.raises(EngineError, match=r"model\.train\(\)"):
        loss.backward()
    assert len(engine.accountant) == 0


def test_layers_that_mix_examples() -> None:
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16, 2))
    engine = PrivacyEngine()
    assert not engine.is_compatible(module=model)
    with pytest.raises(InputError, match="get_compatible_module"):
        engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1),
            data_loader=DataLoader(data(), batch_size=20),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
    with opacus_quiet():
        fixed = PrivacyEngine.get_compatible_module(model)
    assert engine.is_compatible(module=fixed)


def test_an_optimizer_of_other_parameters() -> None:
    with pytest.raises(InputError, match="optimizer"):
        PrivacyEngine().make_private(
            module=network(),
            optimizer=torch.optim.SGD(network().parameters(), lr=1),
            data_loader=DataLoader(data(), batch_size=20),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_a_second_target_would_come_on_top() -> None:
    engine, model, optimizer, loader = made()
    train(model, optimizer, loader)
    with pytest.raises(InputError, match="on top of target_epsilon"):
        engine.make_private_with_epsilon(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            target_epsilon=1.0,
            target_delta=1e-5,
            epochs=1,
            max_grad_norm=1.0,
        )


@pytest.mark.slow
def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    code = """
import os, sys, warnings, torch
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[2])
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
from tests.adapters.test_opacus import generator, made, parameters, train
engine, *parts = made(batch=5, noise_generator=generator())
train(*parts)
torch.save((parameters(parts[0]), len(engine.accountant)), sys.argv[1] + os.environ.get("RANK", ""))
if "RANK" in os.environ:
    torch.distributed.barrier()
    os._exit(0)
"""
    file = tmp_path / "script.py"
    file.write_text(code)
    arguments = [str(file), str(tmp_path / "out"), str(Path(__file__).parents[2])]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command in ([sys.executable], run):
        subprocess.run([*command, *arguments], check=True, stderr=subprocess.DEVNULL, timeout=900)
    (alone, steps), *ranks = (torch.load(f"{tmp_path / 'out'}{rank}") for rank in ("", "0", "1"))
    for model, taken in ranks:
        torch.testing.assert_close(model, alone, atol=1e-5, rtol=1e-4)
        assert taken == steps == 24


# Budgets and checkpoints


def test_a_ledger_pays_and_refuses(tmp_path: Path) -> None:
    with dim.Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        ledger.create("patients", dim.Budget(epsilon=1.9, delta=1e-6), composition="renyi")
        engine, model, optimizer, loader = made(
            target_epsilon=1.5, target_delta=1e-6, epochs=1, ledger=ledger, budget="patients"
        )
        train(model, optimizer, loader)
        assert engine.get_epsilon(1e-6) <= 1.5
        _, model, optimizer, loader = made(
            target_epsilon=1.5, target_delta=1e-6, epochs=1, ledger=ledger, budget="patients"
        )
        before = parameters(model)
        with pytest.raises(BudgetRefused):
            train(model, optimizer, loader)
        assert torch.equal(parameters(model), before)


def test_steps_without_a_plan_are_paid_one_by_one(tmp_path: Path) -> None:
    with dim.Ledger(tmp_path / "ledger.sqlite", create=True) as ledger:
        ledger.create("patients", dim.Budget(epsilon=6, delta=1e-5), composition="renyi")
        engine, model, optimizer, loader = made(ledger=ledger, budget="patients")
        train(model, optimizer, loader)
        with pytest.raises(BudgetRefused, match="Too little is left"):
            train(model, optimizer, _forever(loader))
        assert 0 < engine.get_epsilon(1e-5) <= 6
        assert len(engine.accountant) > 3
        engine.close()
        (run,) = ledger.runs("patients")
        assert run.status == "closed"


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def test_a_run_that_nobody_ended_is_closed_with_the_process(tmp_path: Path) -> None:
    code = """
import sys, torch, diminuendo as dim
sys.path.insert(0, sys.argv[2])
from tests.adapters.test_opacus import made, train
ledger = dim.Ledger(sys.argv[1], create=True)
ledger.create("patients", dim.Budget(epsilon=9, delta=1e-5), composition="renyi")
engine, *parts = made(ledger=ledger, budget="patients")
train(*parts)
"""
    path = tmp_path / "ledger.sqlite"
    root = Path(__file__).parents[2]
    ran = subprocess.run(
        [sys.executable, "-c", code, str(path), str(root)], capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    with dim.Ledger(path) as ledger:
        (run,) = ledger.runs("patients")
        assert run.status == "closed"


def checkpointed(tmp_path: Path, **options: Any) -> tuple[PrivacyEngine, nn.Module, Any, Any, Path]:
    engine, model, optimizer, loader = made(**options)
    train(model, optimizer, loader)
    path = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(
        path=path, module=model, optimizer=optimizer, checkpoint_dict={"epoch": 1}
    )
    return engine, model, optimizer, loader, path


@pytest.mark.parametrize("target", [{}, {"target_epsilon": 2.0, "target_delta": 1e-5, "epochs": 4}])
def test_going_on_counts_what_was_released_since(target: dict[str, Any], tmp_path: Path) -> None:
    first, model, optimizer, loader, path = checkpointed(tmp_path, **target)
    saved = parameters(model)
    for x, y in loader:
        nn.CrossEntropyLoss()(model(x), y).backward()  # released, and then the process dies
        optimizer.step()
        break
    del first
    engine, model, optimizer, loader = made(**target)
    rest = engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
    assert rest["epoch"] == 1
    assert torch.equal(parameters(model), saved)
    assert len(engine.accountant) >= 7
    train(model, optimizer, loader)
    assert len(engine.accountant) >= 12
    if target:
        assert engine.get_epsilon(1e-5) <= 2.0


def test_what_rounding_may_cost_is_not_forgotten(tmp_path: Path) -> None:
    engine, model, optimizer, loader = made()
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as parts:
        train(model, optimizer, parts)
    path = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    again, model, optimizer, _ = made()
    again.load_checkpoint(path=path, module=model, optimizer=optimizer)
    assert again.accountant.delta_added == engine.accountant.delta_added > 0
    assert again.get_epsilon(1e-5) == engine.get_epsilon(1e-5)


def test_without_its_journal_a_checkpoint_is_not_gone_on_from(tmp_path: Path) -> None:
    *_, path = checkpointed(tmp_path)
    for journal in tmp_path.glob("*.journal"):
        journal.unlink()
    engine, model, optimizer, _ = made()
    with pytest.raises(InputError, match="journal"):
        engine.load_checkpoint(path=path, module=model, optimizer=optimizer)


def test_two_processes_do_not_both_go_on(tmp_path: Path) -> None:
    *_, path = checkpointed(tmp_path)
    results = []
    for _ in range(2):
        engine, model, optimizer, loader = made()
        engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
        results.append((engine, model, optimizer, loader))
    engine, model, optimizer, loader = results[0]
    with pytest.raises(UsageError, match="taken up again"):
        train(model, optimizer, loader)


def test_a_checkpoint_of_opacus_counts_as_spent(tmp_path: Path) -> None:
    with opacus_quiet():
        from opacus import PrivacyEngine as Opacus

        theirs = Opacus()
        module = network()
        parts = theirs.make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
            data_loader=DataLoader(data(), batch_size=20),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        train(*parts)
        theirs.save_checkpoint(path=tmp_path / "theirs.pt", module=parts[0], optimizer=parts[1])
    engine, model, optimizer, loader = made()
    engine.load_checkpoint(path=tmp_path / "theirs.pt", module=model, optimizer=optimizer)
    assert torch.equal(parameters(model), parameters(module))
    assert len(engine.accountant) == 6
    train(model, optimizer, loader)
    assert engine.accountant.history == [(1.0, 1 / 6, 6), (1.0, 1 / 6, 6)]
    engine, model, optimizer, _ = made(target_epsilon=2.0, target_delta=1e-5, epochs=1)
    with pytest.raises(InputError, match="on top of target_epsilon"):
        engine.load_checkpoint(path=tmp_path / "theirs.pt", module=model, optimizer=optimizer)
    assert torch.equal(parameters(model), parameters(network()))


def test_a_plain_gradient_on_top_of_the_private_one_is_refused() -> None:
    inner = nn.Linear(3, 2)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=inner,
        optimizer=torch.optim.SGD(inner.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=20),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for bx, by in loader:
        functional.cross_entropy(model(bx), by).backward()
        nn.utils.clip_grad_norm_(inner.parameters(), 0.1)  # post-processing
        optimizer.step()
        optimizer.zero_grad()
    for bx, by in loader:
        functional.cross_entropy(model(bx), by).backward()
        break
    functional.linear(bx, inner.weight).square().mean().backward()
    with pytest.raises(UsageError, match="not the private gradient"):
        optimizer.step()
    engine.close()
