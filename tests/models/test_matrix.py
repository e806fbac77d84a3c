"""Models from outside: exact beside one example at a time, or refused for the right reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from outside import CASES, Batch, Loss
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from diminuendo.training.captured import as_recorded
from diminuendo.training.clipping import Engine, EngineError, Flat, rows


def one_by_one(model: nn.Module, batch: Batch, loss: Loss) -> tuple[float, list[Tensor]]:
    """A clip bound that some examples exceed, and the clipped sums by plain autograd."""
    params = [param for param in model.parameters() if param.requires_grad]
    rows = []
    for i in range(len(next(iter(batch.values())))):
        model.zero_grad()
        loss(model, {name: value[i : i + 1] for name, value in batch.items()}).sum().backward()
        rows.append(
            [torch.zeros_like(p).double() if p.grad is None else p.grad.double() for p in params]
        )
        model.zero_grad()
    squares = [sum(float(g.square().sum()) for g in row) for row in rows]
    norms = torch.tensor(squares, dtype=torch.float64).sqrt()
    bound = float(norms.median())
    factors = (bound / norms).clamp(max=1.0)
    sums = [
        torch.stack([f * row[k] for f, row in zip(factors, rows, strict=True)]).sum(0)
        for k in range(len(params))
    ]
    return bound, sums


def along(model: nn.Module, batch: Batch, loss: Loss) -> float:
    """How far the sum of gradients is from differences of the loss, in a random direction."""
    with Engine(model) as engine:

        def total() -> Tensor:
            torch.manual_seed(3)
            return loss(model, batch)

        engine.probe_if_due(total())
        sums = engine.clipped_sum(total(), Flat(1e12)).sums
        ways = [torch.randn(param.shape, dtype=param.dtype) for param in engine.parameters]
        slope = sum(float((way * part).sum()) for way, part in zip(ways, sums, strict=True))
        values = []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                for param, way in zip(engine.parameters, ways, strict=True):
                    param.add_(way, alpha=step)
            values.append(float(total().sum()))
    return abs((values[0] - values[1]) / 2e-6 - slope) / abs(slope)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_exact_or_refused(name: str, results: dict[str, dict[str, str]]) -> None:
    case = CASES[name]
    model, batch, loss = case.make()
    if case.refused:
        with pytest.raises(EngineError, match=case.refused), Engine(model) as engine:
            engine.clipped_sum(loss(model, batch), Flat(1.0))
        results[name] = {"group": case.group, "result": "refused"}
        return
    if case.seeded:
        assert along(model, batch, loss) < 1e-5
        results[name] = {"group": case.group, "result": "exact"}
        return
    bound, expected = one_by_one(model, batch, loss)
    with Engine(model) as engine:
        sums = engine.clipped_sum(loss(model, batch), Flat(bound)).sums
    largest = max(float(part.abs().max()) for part in expected)
    off = max(
        float((a.double() - b).abs().max()) for a, b in zip(sums, expected, strict=True)
    ) / largest  # fmt: skip
    assert off <= case.tol
    within = "bfloat16's rounding" if case.tol > 1e-2 else f"{case.tol:.0e}"
    results[name] = {"group": case.group, "result": f"exact to {within}"}


class Looks(TorchDispatchMode):
    """Counts how often the host asks for a value or for a size that depends on values."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        self.count += func.name().partition(".")[0] in (
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::equal",
            "aten::masked_select",
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "GPT-2, N = T", "Llama", "Qwen 3", "ViT"])
def test_the_way_that_is_recorded_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host looks at no value in the forward pass, and the sum is exact on that way, too."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(rows, "readable", lambda _: not torch.cuda.is_current_stream_capturing())
    case = CASES[name]
    model, batch, loss = case.make()
    bound, expected = one_by_one(model, batch, loss)
    with Engine(model, probing=False) as engine:
        with as_recorded():
            engine.probe(loss(model, batch))
        with as_recorded(), Looks() as looks:
            losses = loss(model, batch)
        sums = engine.clipped_sum(losses, Flat(bound)).sums
    assert looks.count == 0
    largest = max(float(part.abs().max()) for part in expected)
    for a, b in zip(sums, expected, strict=True):
        assert float((a.double() - b).abs().max()) <= case.tol * largest
