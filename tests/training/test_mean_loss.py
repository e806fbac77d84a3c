"""The losses behind a mean: what PyTorch's reductions are made of, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from diminuendo.errors import UsageError
from diminuendo.training.criteria import CRITERIA
from diminuendo.training.mean_loss import Tracked, track
from diminuendo.training.reduced import Reduced

N, K = 7, 5


class Taken:
    """Stands for a private step: keeps what `backward` handed on."""

    def __init__(self) -> None:
        self.reduced: Reduced | None = None

    def __call__(self, reduced: Reduced) -> None:
        self.reduced = reduced


def outputs(*shape: int) -> tuple[Tensor, Any, Taken]:
    """Leaves, tracked outputs computed from them, and who takes the step."""
    generator = torch.Generator().manual_seed(sum(shape))
    leaf = torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()
    taken = Taken()
    return leaf, track(leaf * 1.0, taken), taken


def labels(*shape: int, top: int = K) -> Tensor:
    return torch.randint(0, top, shape, generator=torch.Generator().manual_seed(1))


def signs(*shape: int) -> Tensor:
    return labels(*shape, top=2).double() * 2 - 1


Case = tuple[Callable[..., Any], Callable[[Any], tuple[Any, ...]], dict[str, Any]]
CASES: dict[str, Case] = {
    "cross_entropy": (functional.cross_entropy, lambda o: (o, labels(N)), {}),
    "cross_entropy smoothed": (
        functional.cross_entropy,
        lambda o: (o, labels(N)),
        {"label_smoothing": 0.1},
    ),
    "cross_entropy of probabilities": (
        functional.cross_entropy,
        lambda o: (o, torch.full((N, K), 1 / K, dtype=torch.float64)),
        {},
    ),
    "nll_loss": (functional.nll_loss, lambda o: (o.log_softmax(1), labels(N)), {}),
    "mse_loss": (functional.mse_loss, lambda o: (o, torch.ones_like(o)), {}),
    "l1_loss": (functional.l1_loss, lambda o: (o, torch.ones_like(o)), {}),
    "smooth_l1_loss": (functional.smooth_l1_loss, lambda o: (o, torch.ones_like(o)), {}),
    "huber_loss": (functional.huber_loss, lambda o: (o, torch.ones_like(o)), {}),
    "binary_cross_entropy": (
        functional.binary_cross_entropy,
        lambda o: (o.sigmoid(), labels(N, K, top=2).double()),
        {},
    ),
    "binary_cross_entropy weighted": (
        functional.binary_cross_entropy,
        lambda o: (o.sigmoid(), labels(N, K, top=2).double()),
        {"weight": torch.arange(1.0, K + 1, dtype=torch.float64)},
    ),
    "binary_cross_entropy_with_logits": (
        functional.binary_cross_entropy_with_logits,
        lambda o: (o, labels(N, K, top=2).double()),
        {"pos_weight": torch.arange(1.0, K + 1, dtype=torch.float64)},
    ),
    "kl_div": (
        functional.kl_div,
        lambda o: (o.log_softmax(1), torch.full((N, K), 1 / K, dtype=torch.float64)),
        {"reduction": "batchmean"},
    ),
    "poisson_nll_loss": (functional.poisson_nll_loss, lambda o: (o, torch.ones_like(o)), {}),
    "gaussian_nll_loss": (
        functional.gaussian_nll_loss,
        lambda o: (o, torch.ones_like(o), torch.full_like(o, 0.5)),
        {},
    ),
    "soft_margin_loss": (functional.soft_margin_loss, lambda o: (o, signs(N, K)), {}),
    "hinge_embedding_loss": (functional.hinge_embedding_loss, lambda o: (o, signs(N, K)), {}),
    "margin_ranking_loss": (
        functional.margin_ranking_loss,
        lambda o: (o[:, 0], o[:, 1], signs(N)),
        {},
    ),
    "cosine_embedding_loss": (
        functional.cosine_embedding_loss,
        lambda o: (o, torch.ones_like(o), signs(N)),
        {},
    ),
    "multi_margin_loss": (functional.multi_margin_loss, lambda o: (o, labels(N)), {}),
    "multilabel_margin_loss": (
        functional.multilabel_margin_loss,
        lambda o: (o, labels(N, K)),
        {},
    ),
    "multilabel_soft_margin_loss": (
        functional.multilabel_soft_margin_loss,
        lambda o: (o, labels(N, K, top=2).double()),
        {},
    ),
    "triplet_margin_loss": (
        functional.triplet_margin_loss,
        lambda o: (o, torch.ones_like(o), torch.zeros_like(o)),
        {},
    ),
}


def test_every_criterion_has_a_case() -> None:
    assert {case[0] for case in CASES.values()} == set(CRITERIA)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", CASES)
def test_the_losses_add_up_to_what_pytorch_gives(name: str, reduction: str) -> None:
    criterion, arguments, options = CASES[name]
    leaf, out, taken = outputs(N, K)
    named = {"reduction": reduction, **options}
    loss = criterion(*arguments(out), **named)
    loss.backward()
    assert taken.reduced is not None
    losses = taken.reduced.losses
    assert losses.shape == (N,)
    plain = criterion(*arguments(leaf), **named)
    whole = losses.mean() if taken.reduced.kind == "mean" else losses.sum()
    torch.testing.assert_close(whole, plain)
    torch.testing.assert_close(loss.detach(), plain.detach())
    torch.testing.assert_close(
        torch.autograd.grad(whole, leaf)[0], torch.autograd.grad(plain, leaf)[0]
    )
    rows = torch.autograd.grad(criterion(*arguments(leaf), **named), leaf)[0]
    assert rows.shape == (N, K)  # row i of the gradient is example i's alone
    for i in (0, N - 1):
        fresh, again, other = outputs(N, K)
        criterion(*arguments(again), **named).backward()
        assert other.reduced is not None
        (single,) = torch.autograd.grad(other.reduced.losses[i], fresh)
        assert single[[j for j in range(N) if j != i]].abs().max() == 0


@pytest.mark.parametrize(
    ("reduce", "kind", "factor"),
    [
        (lambda x: x.mean(), "mean", 1.0),
        (lambda x: x.mean(dim=0), "mean", 1.0),
        (lambda x: torch.mean(x), "mean", 1.0),
        (lambda x: x.mean().mean(), "mean", 1.0),
        (lambda x: x.sum(), "sum", 1.0),
        (lambda x: x.sum() / len(x), "mean", 1.0),
        (lambda x: x.sum() / 4, "sum", 0.25),
        (lambda x: x.sum() / N, "sum", 1 / N),
        (lambda x: x.sum() / N + x.mean(), "mean", 2.0),
        (lambda x: 2 * x.mean(), "mean", 2.0),
        (lambda x: x.mean() / 2, "mean", 0.5),
        (lambda x: -x.mean(), "mean", -1.0),
        (lambda x: 1 - x.mean(), "mean", -1.0),
        (lambda x: x.mean() - 1, "mean", 1.0),
        (lambda x: 3 + x.mean(), "mean", 1.0),
        (lambda x: x.mean() + 0.5 * x.mean(), "mean", 1.5),
        (lambda x: x.mean() - 0.5 * x.mean(), "mean", 0.5),
        (lambda x: sum([x.mean(), x.mean()]), "mean", 2.0),
    ],
)
def test_arithmetic_on_a_mean_is_done_on_the_losses(
    reduce: Callable[[Tensor], Any], kind: str, factor: float
) -> None:
    leaf, out, taken = outputs(N)
    reduce(out).backward()
    assert taken.reduced is not None
    reduced = taken.reduced.as_kind("mean" if kind == "mean" else "sum")
    assert reduced is not None
    assert reduced.kind == kind
    torch.testing.assert_close(
        torch.autograd.grad(reduced.losses.sum(), leaf)[0], torch.full_like(leaf, factor)
    )


def test_a_sum_over_a_constant_stays_a_sum_whatever_the_batch() -> None:
    """A divisor that happens to be the number of examples may be either."""
    for size in (N, N + 1):
        leaf, out, taken = outputs(size)
        (2 * (out.sum() / N) + out.sum() / N).backward()
        assert taken.reduced is not None
        given = taken.reduced.as_kind("sum")
        assert given is not None
        assert given.numbers == (1 / N, 2.0, 1 / N)
        (gradient,) = torch.autograd.grad(given.losses.sum(), leaf, retain_graph=True)
        torch.testing.assert_close(gradient, torch.full_like(leaf, 3 / N))
        mean = taken.reduced.as_kind("mean")
        assert (mean is None) == (size != N)
        if mean is not None:
            assert mean.numbers == (2.0,)
            torch.testing.assert_close(mean.losses, 3 * leaf)


def test_a_loss_that_is_added_to_in_place_is_followed() -> None:
    leaf, out, taken = outputs(N)
    loss = out.mean()
    loss += 2 * out.square().mean()
    loss /= 2
    loss.backward()
    assert taken.reduced is not None
    torch.testing.assert_close(taken.reduced.losses, (leaf + 2 * leaf.square()) / 2)
    assert taken.reduced.numbers == (2.0, 0.5)


def test_numbers_by_which_a_loss_was_multiplied_are_kept() -> None:
    _, out, taken = outputs(N)
    (out.mean() * 3 / 4).backward()
    assert taken.reduced is not None
    assert taken.reduced.numbers == (3.0, 0.25)


def test_ignored_targets_do_not_let_others_weigh_more() -> None:
    """The mean of a row is over its own terms, whatever others ignore and however far they pad."""
    target = labels(N, 4)
    target[0, 1:] = -100
    _, out, taken = outputs(N, K, 4)
    loss: Any = functional.cross_entropy(out, target)
    loss.backward()
    assert taken.reduced is not None
    alone = [functional.cross_entropy(out.detach()[i : i + 1], target[i : i + 1]) for i in range(N)]
    torch.testing.assert_close(taken.reduced.losses.detach(), torch.stack(alone))


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda o: functional.cross_entropy(o, labels(N), weight=torch.ones(K).double()), "weight"),
        (lambda o: o.mean().square(), "plain mean"),
        (lambda o: o.mean() * torch.tensor(2.0), "plain mean"),
        (lambda o: o.mean() * o.mean(), "no mean"),
        (lambda o: o.mean() + o.square().sum(), "no mean"),
        (lambda o: o.mean() + torch.ones((), requires_grad=True), "no mean"),
        (lambda o: o.mean().mul_(torch.tensor(2.0)), "no mean"),
        (lambda o: o.mean().exp_(), "in place"),
        (lambda o: o.max(), "plain mean"),
        (lambda o: o.std(), "plain mean"),
        (lambda o: o.mean(dim=0).mean(), None),
        (lambda o: o, "plain mean"),
        (lambda o: 2 / o.mean(), "plain mean"),
        (lambda o: o.mean() / 0, "no mean"),
        (lambda o: o.mean() * float("nan"), "no mean"),
    ],
)
def test_what_is_no_mean_over_examples_is_refused(
    loss: Callable[[Tensor], Any], why: str | None
) -> None:
    _, out, taken = outputs(N, K)
    if why is None:  # rows that are no examples: their number tells
        loss(out).backward()
        assert taken.reduced is not None
        assert taken.reduced.losses.shape == (K,)
        return
    made = loss(out)
    with pytest.raises(UsageError, match=why):
        made.backward()
    assert taken.reduced is None


def test_old_names_of_a_reduction_are_refused() -> None:
    _, out, taken = outputs(N, K)
    with pytest.warns(UserWarning, match="deprecated"):
        loss: Any = functional.mse_loss(out, torch.ones(N, K), reduce=True)
    with pytest.raises(UsageError, match="reduction="):
        loss.backward()
    assert taken.reduced is None


def test_the_loss_of_one_example_needs_no_rows() -> None:
    leaf, out, taken = outputs(1)
    for loss in (functional.mse_loss(out.squeeze(), torch.ones(()).double()), out.squeeze().mean()):
        loss.backward()
        assert taken.reduced is not None
        assert taken.reduced.losses.shape == (1,)
        taken.reduced = None
    assert leaf.grad is None


def test_numbers_of_numpy_are_numbers() -> None:
    _, out, taken = outputs(N)
    (out.mean() * np.float32(0.5)).backward()
    assert taken.reduced is not None
    assert taken.reduced.numbers == (0.5,)


def test_arguments_of_backward_are_refused() -> None:
    _, out, taken = outputs(N)
    out.mean().backward(retain_graph=True)
    assert taken.reduced is not None
    for named in ({"gradient": torch.tensor(2.0)}, {"create_graph": True}, {"inputs": [out]}):
        with pytest.raises(UsageError, match="retain_graph"):
            out.mean().backward(**named)


def test_two_private_models_do_not_share_a_loss() -> None:
    _, one, _ = outputs(N)
    _, other, taken = outputs(N)
    with pytest.raises(UsageError, match="two private models"):
        (one * other).mean().backward()
    assert taken.reduced is None


def test_what_has_no_gradient_is_a_plain_tensor() -> None:
    _, out, _ = outputs(N, K)
    loss = nn.CrossEntropyLoss()(out, labels(N))
    assert isinstance(loss, Tracked)
    for plain in (out.detach(), out.argmax(1), loss.detach(), loss.data, out.shape[0]):
        assert not isinstance(plain, Tracked)
    assert f"{loss:.3f}" == f"{loss.item():.3f}"
    assert out.detach().numpy().shape == (N, K)
    with torch.no_grad():
        assert not isinstance(out * 2, Tracked)


def test_structures_of_outputs_are_kept() -> None:
    leaf, _, taken = outputs(N)
    marked = track({"logits": leaf * 1, "n": 3, "rest": (leaf * 2, None)}, taken)
    assert isinstance(marked["logits"], Tracked)
    assert isinstance(marked["rest"][0], Tracked)
    assert marked["n"] == 3
    assert marked["rest"][1] is None


@pytest.mark.parametrize(
    "loss",
    [
        lambda out, y: functional.mse_loss(out, y),
        lambda out, y: functional.l1_loss(out, y, reduction="none").mean(),
        lambda out, y: ((out - y) ** 2).mean(),
        lambda out, y: ((y - out) ** 2).mean(),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_labels_are_not_spread_over_all_examples(loss: Callable[[Any, Tensor], Any]) -> None:
    _, out, _ = outputs(N, 1)
    with pytest.raises(UsageError, match="labels of all others"):
        loss(out, torch.arange(float(N)))
    _, out, taken = outputs(N, 1)
    loss(out, torch.arange(float(N)).unsqueeze(1)).backward()
    assert taken.reduced is not None
