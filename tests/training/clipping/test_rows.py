"""Where a tensor's examples are after an operation is what replacing an example shows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from diminuendo.training.clipping.rows import TAG, Rows
from diminuendo.training.clipping.tape import Tape
from diminuendo.training.clipping.watch import Watch

# Sizes that say nothing about which dimension is which, and some that do.
SHAPES = ((3, 3, 3), (4, 4, 4), (3, 4, 5), (4, 3, 3), (3, 3, 4), (3, 4, 3), (5, 5, 5))


def buffer(x: Tensor) -> Tensor:
    """Zeros with every ``x[:, t]`` written at ``[t]``, the first dimension being time."""
    out = torch.zeros(x.shape[1], x.shape[0], x.shape[2])
    for t in range(x.shape[1]):
        out[t] = x[:, t]
    return out


def written_by_view(x: Tensor) -> Tensor:
    out = torch.zeros(x.shape[1], x.shape[0], x.shape[2])
    for t in range(x.shape[1]):
        out[t].add_(x[:, t])
    return out


def last_of_new(x: Tensor) -> Tensor:
    out = torch.zeros(*x.shape, 2)
    out[..., 0] = x
    return out


# Each, and the dimensions that it leaves to the examples.
OPERATIONS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "flatten first": (lambda x: x.flatten(0, 1), (0, 1, 2)),
    "flatten last": (lambda x: x.flatten(1, 2), (0, 1, 2)),
    "ravel": (lambda x: x.ravel(), (0, 1, 2)),
    "reshape": (lambda x: x.reshape(-1, x.shape[-1]), (0, 1, 2)),
    "and back": (lambda x: x.reshape(-1, x.shape[-1]).view(x.shape), (0, 1, 2)),
    "sum by axis": (lambda x: torch.sum(x, axis=-1), (0, 1)),  # type: ignore[call-overload]
    "norm": (lambda x: x.norm(2, 1), (0, 2)),
    "vector norm": (lambda x: torch.linalg.vector_norm(x, dim=2), (0, 1)),
    "quantile": (lambda x: x.quantile(0.3, 1), (0, 2)),
    "kthvalue": (lambda x: x.kthvalue(1, 0).values, (1, 2)),
    "std and mean": (lambda x: torch.std_mean(x, 2)[1], (0, 1)),
    "diagonal": (lambda x: x.diagonal(0, 1, 2), (0,)),
    "diagonal in front": (lambda x: x.diagonal(dim1=0, dim2=1), (2,)),
    "diag_embed": (lambda x: x.diag_embed(), (0, 1)),
    "unfold": (lambda x: x.unfold(1, 2, 1), (0, 2)),
    "unfold pictures": (lambda x: F.unfold(x[:, None], 2), (0,)),
    "fold": (lambda x: F.fold(x.repeat(1, 4, 1)[..., :1], (2, 2), 2), (0,)),
    "as_strided": (lambda x: x.as_strided((*x.shape[:2], 1), (*x.stride()[:2], 1)), (0, 1)),
    "narrow": (lambda x: x.narrow(1, 0, 2), (0, 1, 2)),
    "split": (lambda x: x.split(2)[-1], (0, 1, 2)),
    "split into one": (lambda x: x.split(x.shape[1] - 1, 1)[-1], (0, 1, 2)),
    "chunk": (lambda x: x.chunk(2, dim=1)[1], (0, 1, 2)),
    "tensor_split": (lambda x: x.tensor_split(2)[1], (0, 1, 2)),
    "split and joined": (lambda x: torch.cat(list(x.split(2))), (0, 1, 2)),
    "tile": (lambda x: x.tile((2, 1)), (0, 1, 2)),
    "vstack": (lambda x: torch.vstack([x, x]), (0, 1, 2)),
    "hstack": (lambda x: torch.hstack([x, x]), (0, 1, 2)),
    "dstack": (lambda x: torch.dstack([x, x]), (0, 1, 2)),
    "einsum, implicit": (lambda x: torch.einsum("cba,ad", x, torch.ones(x.shape[2], 3)), (0, 1)),
    "einsum, dots": (lambda x: torch.einsum("...c,dc->d...", x, torch.ones(4, x.shape[2])), (0, 1)),
    "einsum, letters behind dots": (lambda x: torch.einsum("...ab->...ba", x), (0, 1, 2)),
    "tensordot": (lambda x: torch.tensordot(torch.ones(4, x.shape[2]), x, ([1], [2])), (0, 1)),
    "times a vector": (lambda x: x @ torch.ones(x.shape[2]), (0, 1)),
    "a vector times": (lambda x: torch.ones(x.shape[1]) @ x, (0, 2)),
    "real from complex": (lambda x: torch.view_as_real(torch.complex(x, x)), (0, 1, 2)),
    "complex from real": (
        lambda x: torch.view_as_complex(x[..., None].expand(*x.shape, 2).contiguous()).abs(),
        (0, 1, 2),
    ),
    "distances": (lambda x: F.pairwise_distance(x, torch.zeros_like(x)), (0, 1)),
    "a table of one more dimension": (
        lambda x: torch.rand(x.shape[0], 9, 2)[:, (8 * x).long()],
        (0, 1, 2),
    ),
    "scattered in": (
        lambda x: torch.zeros(x.shape).select_scatter(x[:, 0], 1, 0),
        (0, 2),
    ),
    "added at indices": (
        lambda x: torch.zeros(x.shape[0], 2, x.shape[2]).index_add(
            1, torch.zeros(x.shape[1], dtype=torch.long), x
        ),
        (0, 2),
    ),
    "buffer with time in front": (buffer, (0, 2)),
    "written on views": (written_by_view, (0, 2)),
    "the last of a new dimension": (last_of_new, (0, 1, 2)),
}


def owners_seen(do: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> list[Tensor]:
    """For each example which entries of the result change with it."""
    before, seen = do(x), []
    for example in range(x.shape[dim]):
        other = x.clone()
        other.select(dim, example).mul_(0.5).add_(0.02)
        seen.append(do(other) != before)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", OPERATIONS)
def test_examples_are_where_they_are_said_to_be(name: str, shape: tuple[int, ...]) -> None:
    do, dims = OPERATIONS[name]
    for dim in dims:
        x = torch.rand(shape)
        torch.manual_seed(1)
        watch = Watch(Tape(), {})
        watch.examples = shape[dim]
        given = x.clone()
        setattr(given, TAG, Rows(shape[dim], dim))
        torch.manual_seed(1)
        with watch:
            out = do(given)
        rows = getattr(out, TAG)
        assert rows.fits(out), (dim, rows)
        owners = rows.owners(out.shape[rows.dim])

        def again(x: Tensor) -> Tensor:
            torch.manual_seed(1)
            return do(x)

        changes = owners_seen(again, x, dim)
        assert any(bool(change.any()) for change in changes)
        for example, change in enumerate(changes):
            there = change.movedim(rows.dim, 0).reshape(len(owners), -1).any(1)
            assert not bool((there & (owners != example)).any()), (dim, rows)
