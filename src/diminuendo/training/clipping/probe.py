"""A test that every row of every gradient the engine uses belongs to one example.

The losses are weighted by random numbers r_i and taken backwards, and once more without weights.
A gradient row that belongs to example i, and to nobody else, is then exactly r_i times what it was.
The r_i are powers of two with random signs, so that a healthy model scales without any rounding,
and what leaks from an example of large r_i into a row of small r_i is magnified.

What it cannot see: examples that mix before the first trainable parameter is used (in a frozen
part, or in how the inputs were prepared); rows whose gradient is zero or close to underflow at the
time, which is why the engine probes again at the 2nd, 4th, 8th, ... use of a shape; what has no
gradient, such as a choice that the model makes for the whole batch; and a model that mixes only
for some data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from diminuendo.training.clipping.contract import upcast
from diminuendo.training.clipping.errors import MixedExamples
from diminuendo.training.clipping.tape import Piece

# What two backward passes may differ by relative to a row, by the coarsest precision involved.
_LOOSE = {
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
    torch.float32: 1e-3,
    torch.complex64: 1e-3,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-2,
}
# Weights are 2^-e to 2^e; half precision has little room.
_EXPONENT = {torch.float64: 8, torch.float32: 8, torch.bfloat16: 6, torch.float16: 3}


def nodes(losses: Tensor) -> Iterator[Any]:
    """The nodes of the graph behind ``losses``, each once; those of leaves have a ``variable``."""
    waiting, seen = [losses.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [source for source, _ in node.next_functions]
        yield node


def weights(losses: Tensor, lowest: torch.dtype) -> Tensor:
    """Powers of two with signs in random order, all different as far as there are enough."""
    span, count = _EXPONENT.get(lowest, 3), losses.shape[0]
    powers = 2.0 ** torch.arange(-span, span + 1, device="cpu")
    values = torch.cat([powers, -powers])
    rounds = -(-count // len(values))
    generator = torch.Generator()  # its own: the user's random numbers stay as they are
    generator.seed()
    size = len(values)
    orders = [torch.randperm(size, generator=generator, device="cpu") for _ in range(rounds)]
    return values[torch.cat(orders)[:count]].to(losses.device, losses.dtype)


class Sketch:
    """What remains of one backward pass: two random projections and the norm of every row."""

    def __init__(self, examples: int) -> None:
        self.examples = examples
        self.rows: list[tuple[str, Tensor, Tensor, torch.dtype]] = []
        self.sizes: set[int] = set()
        self._waiting: list[Piece] = []
        self._noise: dict[torch.device, Tensor] = {}

    def arrive(self, piece: Piece) -> None:
        """Take the gradients of a piece, once all that can arrive have."""
        if len(piece.arrived) > 1:
            if not any(piece is other for other in self._waiting):
                self._waiting.append(piece)
            return
        self._take(piece)

    def finish(self) -> None:
        """Take the pieces that waited for several gradients."""
        for piece in self._waiting:
            self._take(piece)
        self._waiting = []

    def _take(self, piece: Piece) -> None:
        piece.check_examples(self.examples)
        for position, grad in enumerate(piece.arrived):
            if grad is None:
                continue
            self.sizes.update(grad.shape)
            flat = upcast(piece.by_example(position, grad))
            noise = self._vectors(flat)
            self.rows.append(
                (piece.path, flat @ noise, torch.linalg.vector_norm(flat, dim=1), grad.dtype)
            )
        piece.arrived = [None] * len(piece.arrived)

    def _vectors(self, like: Tensor) -> Tensor:
        length, known = like.shape[1], self._noise.get(like.device)
        if known is None or known.shape[0] < length:
            generator = torch.Generator(like.device).manual_seed(0)
            self._noise[like.device] = known = torch.randn(
                max(length, 1 << 12), 2, generator=generator, device=like.device
            )
        return known[:length].to(like.dtype)


def compare(plain: Sketch, weighted: Sketch, ratio: Tensor) -> None:
    """Raise :class:`MixedExamples` unless every row scaled by its own weight.

    Kernels whose order of additions changes from call to call differ by roundings of the coarsest
    type that any row has, whatever the others have. Rows near underflow lose digits when they are
    scaled, and tell nothing.
    """
    dtypes = {row[3] for row in plain.rows}
    loose = max([_LOOSE.get(dtype, 5e-2) for dtype in dtypes], default=0.0)
    by_order = zip(plain.rows, weighted.rows, strict=False)
    if len(plain.rows) != len(weighted.rows):
        raise MixedExamples("(unknown)", "the backward pass took another way with other weights")
    for (path, first, norm, _), (other, second, second_norm, _) in by_order:
        if path != other or first.shape != second.shape:
            raise MixedExamples(path, "the backward pass took another way with other weights")
        scale = ratio.to(first.device, first.dtype).unsqueeze(1)
        back = second / scale
        size = torch.maximum(norm, second_norm / scale.squeeze(1).abs()).unsqueeze(1)
        off = ((back - first).abs() > loose * size) & (size > _faintest(dtypes))
        if bool((off & back.isfinite() & first.isfinite()).any()):
            raise MixedExamples(
                path, "the gradient of one example changes with the weight of another one's loss"
            )


def _faintest(dtypes: set[torch.dtype]) -> float:
    """Norms of rows up to this may consist of numbers that underflow."""
    return max(
        float(torch.finfo(dtype).tiny) * (2.0**32 if dtype is not torch.float16 else 8.0)
        for dtype in dtypes
    )


def probe(run: Callable[[Tensor, Sketch], None], losses: Tensor, lowest: torch.dtype) -> set[int]:
    """Run both backward passes (``run(weights, sketch)``) and compare; the sizes that were seen."""
    plain, weighted = Sketch(losses.shape[0]), Sketch(losses.shape[0])
    ratio = weights(losses, lowest)
    run(torch.ones_like(losses), plain)
    run(ratio.clone(), weighted)  # a hook may write on it
    compare(plain, weighted, ratio)
    return plain.sizes
