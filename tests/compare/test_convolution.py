"""The small convolutional network: the engine's clipped sums against autograd, and refusals."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import diminuendo as dim
from diminuendo.budget import Budget
from diminuendo.cli import main
from diminuendo.compare import cifar, clips, convolution, data, scattering
from diminuendo.compare.convolution import Convolutional
from diminuendo.compare.data import TASKS, Pool
from diminuendo.compare.methods import METHODS
from diminuendo.compare.private import Private
from diminuendo.compare.scaled import scaled_gradient
from diminuendo.compare.table import Bench, Cell, Effort, cells, model_of

BUDGET = Budget(epsilon=3.0, delta=1e-5)
Image = tuple[int, int, int]


def rows(image: Image, examples: int, replicas: int = 2, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(replicas, examples, math.prod(image), generator=generator)
    x = torch.cat([x / x.norm(dim=2, keepdim=True), torch.ones(replicas, examples, 1)], dim=2)
    return x, torch.randint(classes, (replicas, examples), generator=generator)


def starts(model: Convolutional, replicas: int = 2) -> Tensor:
    return model.start([torch.Generator().manual_seed(seed) for seed in range(replicas)])


def by_autograd(
    model: Convolutional, theta: Tensor, x: Tensor, y: Tensor, rule: clips.Rule
) -> list[Tensor]:
    """One replica's clipped gradients, an example at a time, through a network of its own."""
    network = convolution._network(model.image, model.classes)
    torch.nn.utils.vector_to_parameters(theta, network.parameters())
    found = []
    for row, label in zip(x, y, strict=True):
        image = row[:-1].view(1, *model.image) * math.prod(model.image) ** 0.5
        loss = torch.nn.functional.cross_entropy(network(image), label[None])
        whole = torch.autograd.grad(loss, list(network.parameters()))
        layers = [
            torch.cat([weights.flatten(), intercept])
            for weights, intercept in zip(whole[::2], whole[1::2], strict=True)
        ]
        factors = rule.factors([layer.norm().view(1, 1) for layer in layers])
        parts = zip(factors, layers, strict=True)
        found.append(torch.cat([factor.squeeze() * layer for factor, layer in parts]))
    return found


@pytest.mark.parametrize("image", [(5, 7, 7), (1, 28, 28)], ids=["channels", "pixels"])
@pytest.mark.parametrize(
    "rule",
    [clips.Flat(0.3), clips.Automatic(0.3), clips.PerSample(0.3, 0.2), clips.PerLayer(0.3)],
    ids=lambda rule: type(rule).__name__,
)
def test_clipped_sums_are_those_of_one_example_at_a_time(
    image: Image, rule: clips.Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In micro-batches of three, for two replicas, of all examples and of a sample."""
    monkeypatch.setattr(convolution, "_ROWS", 3)
    model = Convolutional(image, 3)
    theta, (x, y) = starts(model), rows(image, 8)
    drawn = torch.tensor([[1.0, 0, 1, 1, 0, 0, 1, 1], [0.0] * 8])
    hidden = Private(model, x, y, BUDGET, seeds=[1, 2])
    every, some = hidden.clipped(theta, rule), hidden.clipped(theta, rule, drawn)
    for r in range(2):
        alone = by_autograd(model, theta[r], x[r], y[r], rule)
        assert max(float(one.norm()) for one in alone) <= 0.3 * (1 + 1e-5)
        torch.testing.assert_close(every[r], torch.stack(alone).sum(0), atol=1e-5, rtol=1e-4)
        kept = torch.stack(alone) * drawn[r][:, None]
        torch.testing.assert_close(some[r], kept.sum(0), atol=1e-5, rtol=1e-4)
    assert not some[1].any(), "an empty sample"


def test_each_replica_has_its_own_clip_norm_and_norms() -> None:
    model = Convolutional((2, 6, 6), 3)
    theta, (x, y) = starts(model), rows((2, 6, 6), 5)
    hidden = Private(model, x, y, BUDGET, seeds=[1, 2])
    bounds = [0.1, 0.4]
    both = hidden.clipped(theta, clips.Flat(torch.tensor(bounds)))
    for r, bound in enumerate(bounds):
        alone = by_autograd(model, theta[r], x[r], y[r], clips.Flat(bound))
        torch.testing.assert_close(both[r], torch.stack(alone).sum(0), atol=1e-5, rtol=1e-4)
        whole = by_autograd(model, theta[r], x[r], y[r], clips.Flat(1e9))
        norms = torch.stack([one.norm() for one in whole])
        torch.testing.assert_close(hidden._norms(theta)[r].float(), norms, atol=0, rtol=1e-4)


def test_an_example_that_is_not_finite_adds_nothing() -> None:
    model = Convolutional((2, 6, 6), 3)
    theta, (x, y) = starts(model), rows((2, 6, 6), 5)
    rule = clips.Flat(0.3)
    spoilt = x.clone()
    spoilt[:, 2, 4] = math.nan
    found = Private(model, spoilt, y, BUDGET, seeds=[1, 2]).clipped(theta, rule)
    kept = [0, 1, 3, 4]
    clean = Private(model, x[:, kept], y[:, kept], BUDGET, seeds=[1, 2]).clipped(theta, rule)
    torch.testing.assert_close(found, clean, atol=1e-6, rtol=1e-5)


def test_all_rows_held_once_give_the_same_sums() -> None:
    model = Convolutional((2, 6, 6), 3)
    theta, (x, y) = starts(model), rows((2, 6, 6), 5)
    shared, labels = x[:1].expand(2, -1, -1), y[:1].expand(2, -1)
    one, other = (
        Private(model, held, labels, BUDGET, seeds=[1, 2]).clipped(theta, clips.Flat(0.3))
        for held in (shared, shared.contiguous())
    )
    assert torch.equal(one, other)


def test_methods_that_read_layers_are_left_out_and_refused() -> None:
    """They are those that would have to read what the network does not have."""
    model = Convolutional((2, 4, 4), 3)
    x, y = rows((2, 4, 4), 24)
    hidden = Private(model, x, y, Budget(epsilon=9.0, delta=1e-5), seeds=[1, 2])
    theta = hidden.start()
    with pytest.raises(dim.InputError, match="layer by layer"):
        scaled_gradient(hidden, theta, torch.zeros_like(theta), torch.ones_like(theta), 10.0)
    with pytest.raises(dim.InputError, match="layer by layer"):
        hidden.gradient(theta, clips.Flat(1.0), 10.0, anchor=theta)
    left_out = {k for k, one in METHODS.items() if one.trains("network") and not one.trains("cnn")}
    assert left_out == {"adadp", "adaclip", "learned-policy", "learned-schedule"}
    assert cells(["mnist"], ["cnn"], [80], [1.0], ["adaclip", "output"]) == []
    assert len(cells(["mnist"], ["cnn"], [80], [1.0], ["uniform"])) == 1


@pytest.mark.parametrize(("model", "method"), [("cnn", "adadp"), ("network", "output")])
def test_a_method_that_cannot_train_the_model_is_told_so(
    model: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    assert main(["compare", "--model", model, "--method", method, "--out", out]) == 2
    told = capsys.readouterr().err
    assert "--method" in told
    assert "--model linear" in told
    assert not Path(out).exists()


def test_features_that_are_no_images_are_refused() -> None:
    few = torch.ones(4, 3)
    pool = Pool(few, few[:, 0].long(), few, few[:, 0].long(), "made up")
    with pytest.raises(dim.InputError, match="no images"):
        model_of("cnn", pool, TASKS["adult"])


def test_a_cell_of_digits_is_tuned_and_learns() -> None:
    """On embedded digits, whose pools say how their features lie."""
    effort = Effort(trials=1, tuning_repeats=1, repeats=2)
    entry = Bench(effort).run(Cell("mnist", "cnn", 1000, 1000.0, "uniform-momentum"))
    assert entry.mean.mean > 0.5
    assert entry.epsilon_claimed <= 1000


def test_pools_say_how_their_features_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for pool in (TASKS["mnist"].load(None), TASKS["mnist"].auxiliary(0)):
        assert pool.image == pool.to("meta").image == (1, 8, 8)
    assert TASKS["fashion"].auxiliary(0).image == (1, 14, 14)
    assert TASKS["adult"].auxiliary(0).image is None

    def images(folder: Path | None, key: str) -> tuple[Path, cifar.Cifar]:
        del folder
        shape = (4, 3, 32, 32) if key == "cifar10" else (4, 1, 28, 28)
        few = np.random.default_rng(3).integers(0, 256, size=shape).astype(np.uint8)
        few.setflags(write=False)  # as they are read from a file
        labels = np.array([0, 1, 2, 3], dtype=np.uint8)
        return tmp_path, cifar.Cifar(few, labels, few[:2], labels[:2])

    def features(images: np.ndarray, folder: Path) -> Tensor:
        del folder
        return torch.ones(len(images), math.prod(scattering.image(images))).half()

    monkeypatch.setattr(data, "_images", images)
    monkeypatch.setattr(scattering, "features", features)
    monkeypatch.setattr(scattering, "_map", lambda other, size: torch.eye(other.shape[1], size))
    expected = {
        "mnist-images": (1, 28, 28),
        "fashion-images": (1, 28, 28),
        "mnist-scattering": (81, 7, 7),
        "cifar10-scattering": (243, 8, 8),
    }
    for key, image in expected.items():
        pool = TASKS[key].load(tmp_path)
        assert pool.image == image
        assert pool.features == math.prod(image) + 1
        assert float(pool.x.norm(dim=1).max()) <= 1
    other = TASKS["mnist-images"].auxiliary(0, tmp_path)
    assert other.source.startswith("fashion")
    assert TASKS["mnist-whitened"].load(tmp_path).image is None, "directions are no pixels"
