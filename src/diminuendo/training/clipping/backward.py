"""One backward pass from the losses to the layers' outputs, and to nothing else.

Parameters get no gradient: where one would, it reaches the loss in a way that nobody watches, and
that is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.clipping.tape import Piece, Tape
from diminuendo.training.clipping.watch import Root


class Backward:
    """Backward passes of one model, whose layers leave their pieces on ``tape``."""

    def __init__(
        self, tape: Tape, root: Root, names: Sequence[str], parameters: Sequence[nn.Parameter]
    ) -> None:
        self._tape, self._root = tape, root
        self._names, self._parameters = names, parameters
        self._ones = torch.ones(0)

    def run(
        self,
        losses: Tensor,
        arrive: Callable[[Piece], None],
        weights: Tensor | None = None,
        keep: bool = False,
    ) -> None:
        """Differentiate the sum of the losses, each times its weight (1 unless given).

        ``arrive`` is told of a piece when an output's gradient reaches it; ``keep`` keeps the graph
        for another pass. The ``.grad`` of parameters stays what it was.
        """
        weights = self._ones_like(losses) if weights is None else weights
        arrived: list[Piece] = []

        def note(piece: Piece) -> None:
            arrived.append(piece)
            arrive(piece)

        params = self._parameters
        stash = [param.grad for param in params]
        for param, grad in zip(params, stash, strict=True):
            if grad is not None:
                param.grad = None
        try:
            with self._tape.running(note), self._root.again(losses.shape[0]):
                _run(losses, weights, keep)
            reached = [param.grad is not None for param in params]
        finally:
            for param, grad in zip(params, stash, strict=True):
                if grad is not None or param.grad is not None:
                    param.grad = grad
        if any(reached):
            self._refuse_direct_use(self._names[reached.index(True)], bool(arrived))

    def _ones_like(self, losses: Tensor) -> Tensor:
        """Ones, made anew only if the last ones do not fit or somebody wrote on them.

        A recording has its own: those of other batches may be gone when it is replayed.
        """
        if losses.is_cuda and torch.cuda.is_current_stream_capturing():
            return torch.ones_like(losses)
        ones = self._ones
        if (
            ones.shape != losses.shape
            or ones.dtype != losses.dtype
            or ones.device != losses.device
            or ones._version
        ):
            ones = self._ones = torch.ones_like(losses)
        return ones

    def _refuse_direct_use(self, name: str, recorded: bool) -> None:
        if not recorded:
            raise EngineError(
                f"parameter '{name}' reaches the loss, but the forward pass was not recorded: run "
                "model(x) after Engine(model), outside of torch.func's transformations, and use "
                "parameters by PyTorch's own operations, not by a torch.autograd.Function (as "
                "peft's LoHa does); each forward pass needs its own clipped_sum"
            )
        raise EngineError(
            f"parameter '{name}' reaches the loss outside the model's forward (for example as a "
            "penalty on weights, or in a part of the model that is called on its own), or through "
            "a function that PyTorch does not let be watched (a torch.autograd.Function, a "
            "compiled one, torch.func.vmap, or a checkpoint with use_reentrant=True that returns "
            "something made of parameters alone), where its per-example gradient cannot be seen; "
            "do it within the model's forward, with PyTorch's own operations and checkpoints with "
            "use_reentrant=False"
        )


def _run(losses: Tensor, weights: Tensor, keep: bool) -> None:
    """``torch.autograd.backward`` without its checks of shapes, which take a tenth of a small
    step: the graph may be kept, nothing is differentiated twice, every leaf is served."""
    autograd = torch.autograd.Variable._execution_engine
    autograd.run_backward((losses,), (weights,), keep, False, (), True, True)
