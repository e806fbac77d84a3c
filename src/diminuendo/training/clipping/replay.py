"""Any other operation where a tensor made of parameters meets the batch: repeat it by example.

The operation alone is repeated, not the module it is in, with the rows of one example at a time
(all at once, by ``vmap``); where that is not what it did in the batch, it is repeated as it was,
once for each example, with the gradients of all other examples set to zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.lift import MetPiece, scattered
from diminuendo.training.clipping.marks import Made, Operation, tensors
from diminuendo.training.clipping.rows import Rows
from diminuendo.training.clipping.rules import follow

if TYPE_CHECKING:
    from diminuendo.training.clipping.watch import Watch

# What PyTorch's functions raise where the rows of one example are not an input they can take.
_ALONE = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


class OperationPiece(MetPiece):
    """An operation that is replayed for the gradients of what is made of parameters."""

    eager = False

    def __init__(
        self,
        path: str,
        func: Callable[..., Any],
        leaves: list[Any],
        spec: Any,
        targets: dict[int, Made],
        rows: dict[int, Rows],
    ) -> None:
        examples = next(iter(rows.values())).examples
        super().__init__(path, list(targets.values()), examples)
        self.func, self.spec = func, spec
        self.targets, self.rows = sorted(targets), rows
        self.leaves = [
            self._kept(leaf, k in targets) if isinstance(leaf, Tensor) else leaf
            for k, leaf in enumerate(leaves)
        ]
        device = next(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))
        self.autocast = (
            device,
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
        )
        self.outs: list[tuple[torch.Size, Rows]] = []
        self.seen: list[tuple[Tensor, int]] = []

    def _kept(self, leaf: Tensor, made: bool) -> Tensor:
        if not made:
            return self.save(leaf)
        if not isinstance(leaf, nn.Parameter):
            self.save(leaf)  # it is read again
        return self.hold(leaf)

    def _call(self, made: Sequence[Tensor], batch: dict[int, Tensor]) -> list[Tensor]:
        leaves = list(self.leaves)
        for k, leaf in batch.items():
            leaves[k] = leaf
        for k, leaf in zip(self.targets, made, strict=True):
            leaves[k] = leaf
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        device, enabled, dtype = self.autocast
        with torch.autocast(device, dtype, enabled):
            result = self.func(*args, **kwargs)
        return [out for out in tensors(result, 2) if _differentiable(out)]

    def by_example(self, position: int, grad: Tensor) -> Tensor:
        return self.outs[position][1].grouped(grad).flatten(1)

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        if all(grad is None for grad in grads):
            return False
        wanted = [k for k, grad in enumerate(grads) if grad is not None]
        weights = [grad for grad in grads if grad is not None]
        made = [self.leaves[k].detach() for k in self.targets]
        with torch.enable_grad():
            values = self._by_blocks(made, wanted, weights)
            if values is None:
                values = self._by_masks(made, wanted, weights)
        for k, value in zip(self.targets, values, strict=True):
            self.take(self.leaves[k], value.detach())
        self.leaves, self.seen = [], []
        return True

    def _by_blocks(
        self, made: list[Tensor], wanted: list[int], weights: list[Tensor]
    ) -> list[Tensor] | None:
        """All examples at once, each with its own rows of the batch; None where the operation
        on an example alone is not what it was in the batch."""
        places = [*self.rows.values(), *(self.outs[k][1] for k in wanted)]
        owner = next((rows.owner for rows in places if rows.owner is not None), None)
        if owner is not None and any(rows.owner is not owner for rows in places):
            return None
        count = self.examples if owner is None else owner.numel()

        def cut(tensor: Tensor, rows: Rows) -> Tensor:
            front = tensor.movedim(rows.dim, 0)
            return front.reshape(count, len(front) // max(1, count), *front.shape[1:])

        keys = list(self.rows)

        def pull(batch: list[Tensor], weights: list[Tensor]) -> tuple[Any, list[Tensor]]:
            rows = {
                k: part.movedim(0, self.rows[k].dim) for k, part in zip(keys, batch, strict=True)
            }

            def forward(*made: Tensor) -> tuple[Tensor, ...]:
                outs = self._call(made, rows)
                return tuple(outs[k].movedim(self.outs[k][1].dim, 0) for k in wanted)

            pulled: Any = torch.func.vjp(forward, *made)
            outs, back = pulled
            return back(tuple(w.to(o.dtype) for w, o in zip(weights, outs, strict=True))), list(
                outs
            )

        try:
            if not all(rows.fits(self.leaves[k]) for k, rows in self.rows.items()):
                return None
            batch = [cut(self.leaves[k], rows) for k, rows in self.rows.items()]
            pieces = [cut(w, self.outs[k][1]) for k, w in zip(wanted, weights, strict=True)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                values, outs = torch.func.vmap(pull)(batch, pieces)
        except _ALONE:
            return None
        for k, out in zip(wanted, outs, strict=True):
            seen, version = self.seen[k]
            if not _repeats(out, cut(seen, self.outs[k][1]), seen._version != version):
                return None
        if owner is None:
            return list(values)
        folded = Rows(self.examples, 0, owner)
        return [folded.summed(value) for value in values]

    def _by_masks(
        self, made: list[Tensor], wanted: list[int], weights: list[Tensor]
    ) -> list[Tensor]:
        """One example after the other: the operation as it was, with the gradients of the
        outputs of all other examples set to zero."""
        leaves = [part.requires_grad_() for part in made]
        outs = self._call(leaves, {k: self.leaves[k] for k in self.rows})
        for k in wanted:
            seen, version = self.seen[k]
            if not _repeats(outs[k], seen, seen._version != version):
                raise EngineError(
                    f"the operation {getattr(self.func, '__name__', self.func)!s} on {self.path} "
                    "gives another result when it is repeated, so it is random (dropout within "
                    "an attention on learned tokens, for example); set its dropout to 0"
                )
        parts = [
            scattered(weight, self.outs[k][1], self.outs[k][1].dim)
            for k, weight in zip(wanted, weights, strict=True)
        ]
        each = [self._pulled(outs, leaves, wanted, parts, i) for i in range(self.examples)]
        if not all(bool(grad.isfinite().all()) for grads in each for grad in grads):
            # Zero times infinity: numbers of one example that are not finite reach all the others.
            each = []
            for i in range(self.examples):
                alone = {k: _of_one(self.leaves[k], rows, i) for k, rows in self.rows.items()}
                outs = self._call(leaves, alone)
                each.append(self._pulled(outs, leaves, wanted, parts, i))
        return [torch.stack(column) for column in zip(*each, strict=True)]

    def _pulled(
        self,
        outs: list[Tensor],
        leaves: list[Tensor],
        wanted: list[int],
        parts: list[Tensor],
        example: int,
    ) -> list[Tensor]:
        """The gradients that the outputs of one example give."""
        grads = torch.autograd.grad(
            [outs[k] for k in wanted],
            leaves,
            [part[example].to(outs[k].dtype) for k, part in zip(wanted, parts, strict=True)],
            retain_graph=True,
            allow_unused=True,
        )
        return [
            torch.zeros_like(leaf) if grad is None else grad.to_dense() if grad.is_sparse else grad
            for grad, leaf in zip(grads, leaves, strict=True)
        ]


def _of_one(leaf: Tensor, rows: Rows, example: int) -> Tensor:
    """The tensor with this example's rows in the places of all others."""
    if not rows.fits(leaf):
        return leaf
    size = leaf.shape[rows.dim]
    own = (rows.owners(size).to(leaf.device) == example).nonzero().squeeze(1)
    if not len(own):
        return torch.zeros_like(leaf)
    places = own[torch.arange(size, device=leaf.device) % len(own)]
    places[own] = own
    return leaf.index_select(rows.dim, places)


def _differentiable(out: Any) -> bool:
    return isinstance(out, Tensor) and (out.is_floating_point() or out.is_complex())


def _repeats(out: Tensor, seen: Tensor, changed: bool) -> bool:
    """Whether ``out`` is what was seen, as far as that was not written over since."""
    if out.shape != seen.shape or changed:
        return out.shape == seen.shape
    loose = 5e-2 if out.dtype in (torch.float16, torch.bfloat16) else 1e-4
    return torch.allclose(out, seen.to(out.dtype), loose, loose, True)


def replayed(
    watch: Watch,
    func: Callable[..., Any],
    op: Operation,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    source: Tensor,
    rows: Rows,
) -> Any:
    """The result of an operation that will be repeated for the gradients of each example."""
    leaves, spec = pytree.tree_flatten((tuple(args), kwargs))
    targets, places, fixed = {}, {}, list(leaves)
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            made = watch.made_of(leaf)
            if made is not None:
                targets[k], fixed[k] = made, leaf.detach()
            elif (place := watch.settle(leaf)) is not None:
                places[k] = place
    path = watch.tape.title(next(iter(targets.values())))
    if op.inplace:
        raise EngineError(
            f"{path} takes part in '{op.name}_', which writes on a tensor of the batch; use the "
            "operation that returns a new tensor"
        )
    piece = OperationPiece(path, func, leaves, spec, targets, places)
    args, kwargs = pytree.tree_unflatten(fixed, spec)
    result = func(*args, **kwargs)
    parts, form = pytree.tree_flatten(result)
    several = sum(_differentiable(out) for out in parts) > 1
    watched: list[Tensor] = []
    for k, out in enumerate(parts):
        if _differentiable(out):
            place = follow(op.rule, args, kwargs, source, rows, out, len(watched))
            piece.outs.append((out.shape, place))
            out = watch.tape.attach(out)
            # One output may be made of another: only what comes from outside counts for that one.
            parts[k] = torch.ops.aten._unsafe_view.default(out, out.shape) if several else out
            # An alias counts its changes by itself, so what is handed on is what is looked at.
            piece.seen.append((parts[k].detach(), parts[k]._version))
            watched.append(parts[k])
    if watched:
        watch.tape.watch(piece, *watched)
    return pytree.tree_unflatten(parts, form)
