"""What `make_private` hands out: model, optimiser and loader that act like the given ones."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from diminuendo import _validate
from diminuendo.adapters.opacus.run import Run, checked_sigma
from diminuendo.errors import InputError, UsageError
from diminuendo.training import Flat


class PrivateModule(nn.Module):
    """The model with marked outputs; `_module` is the model itself, as in Opacus."""

    def __init__(self, module: nn.Module, run: Run) -> None:
        super().__init__()
        self._module = module
        self.__dict__["run"] = run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs. While a batch of the private loader is at work, they are marked.

        An empty draw is not shown to the model, which may not take it: a row of zeros tells the
        shape of the outputs.
        """
        run: Run = self.__dict__["run"]
        if not run.recording:
            return self._module(*args, **kwargs)
        if run.empty:
            given, named = tree_map(_one_row, (args, kwargs))
            with run.private.engine.unrecorded(), torch.no_grad():
                outputs = self._module(*given, **named)
            return run.outputs(tree_map(_no_row, outputs))
        return run.outputs(self._module(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_module"), name)

    def to_standard_module(self) -> nn.Module:
        """The model itself, detached from the engine: after training."""
        self.__dict__["run"].close()
        return self._module

    def forbid_grad_accumulation(self) -> None:
        """Nothing to do: every batch is a step, or a part of one."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy is the model alone: it has no part in the private training."""
        return copy.deepcopy(self._module, memo)


class PrivateHooks:
    """What `wrap_model=False` hands out: the model's outputs are marked by a hook."""

    def __init__(self, module: nn.Module, run: Run) -> None:
        self._module, self.run = module, run

        def mark(module: nn.Module, args: Any, outputs: Any) -> Any:
            del module, args
            return run.outputs(outputs) if run.recording else outputs

        self._handle = module.register_forward_hook(mark)

    def cleanup(self) -> None:
        """Take the hook away, and end the run."""
        self._handle.remove()
        self.run.close()


def _one_row(part: Any) -> Any:
    empty = isinstance(part, Tensor) and part.dim() > 0 and part.shape[0] == 0
    return part.new_zeros((1, *part.shape[1:])) if empty else part


def _no_row(part: Any) -> Any:
    if not isinstance(part, Tensor) or part.dim() == 0 or not part.is_floating_point():
        return part
    return part[:0].requires_grad_()


class PrivateOptimizer(torch.optim.Optimizer):
    """The optimiser, stepping by private gradients alone; `original_optimizer` is the given one."""

    def __init__(self, optimizer: torch.optim.Optimizer, run: Run) -> None:
        self.original_optimizer, self.run = optimizer, run

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step by the gradient that `loss.backward()` released; does nothing within a batch that
        is split, and refuses any other gradient."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        return self.original_optimizer.step() if self.run.take_gradient() else None

    def backward(self, losses: Tensor) -> None:
        """One loss per example, shape (N,): for losses that cannot be followed to their mean."""
        self.run.backward(losses)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients."""
        self.original_optimizer.zero_grad(set_to_none)

    @property
    def noise_multiplier(self) -> float:
        """σ of the next step. May be set where no plan fixes it, as noise schedulers do."""
        return self.run.next_sigma

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        sigma = checked_sigma(value)
        if self.run.sigma is None:
            raise UsageError(
                "make_private_with_epsilon planned the noise of every step. Say schedule= there; "
                "a noise scheduler goes with make_private."
            )
        self.run.sigma = lambda step: sigma  # noqa: ARG005

    @property
    def max_grad_norm(self) -> Any:
        """The clip norm, or those of all layers. May be set where there is one."""
        clip = self.run.clip
        return clip.bound if isinstance(clip, Flat) else clip.bounds

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        if not isinstance(self.run.clip, Flat):
            raise UsageError("Clip norms of layers are fixed when make_private is called.")
        self.run.clip = Flat(_validate.positive("max_grad_norm", value))

    @property
    def expected_batch_size(self) -> float:
        """Examples × sampling rate: the public number by which sums are divided."""
        return self.run.expected_batch

    # The rest is the given optimiser's own.

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The given optimiser's."""
        return self.original_optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.original_optimizer.param_groups = groups

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The given optimiser's."""
        return self.original_optimizer.state

    @state.setter
    def state(self, state: defaultdict[Tensor, Any]) -> None:
        self.original_optimizer.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The given optimiser's."""
        return self.original_optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.original_optimizer.defaults = defaults

    def state_dict(self) -> dict[str, Any]:
        """The given optimiser's."""
        return self.original_optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Into the given optimiser."""
        self.original_optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: its gradients would not be private."""
        del param_group
        raise UsageError("Give the optimizer all parameters before make_private.")

    def __repr__(self) -> str:
        return f"PrivateOptimizer({self.original_optimizer!r})"


class PrivateLoader:
    """Batches of the plan's own Poisson sampler: an epoch has as many steps as the given loader
    has batches. Empty draws are batches, too."""

    def __init__(self, run: Run) -> None:
        self.run, self.original = run, run.loader

    def __iter__(self) -> Iterator[Any]:
        return self.run.batches()

    def __len__(self) -> int:
        return self.run.epoch

    @property
    def sample_rate(self) -> float:
        """The probability with which a step draws an example, in (0, 1]."""
        return float(self.run.plan.rates[0])

    @property
    def dataset(self) -> Any:
        """The given loader's."""
        return self.original.dataset

    @property
    def batch_sampler(self) -> Any:
        """Not to be had: the claim is for the sample that is drawn here."""
        raise UsageError(
            "Batches of the private loader cannot be drawn or split by somebody else. To split "
            "them write: from diminuendo.adapters.opacus import BatchMemoryManager."
        )

    sampler = batch_sampler

    def __getattr__(self, name: str) -> Any:
        if name in ("run", "original"):
            raise AttributeError(name)
        return getattr(self.original, name)


class PrivateCriterion:
    """A criterion with one loss per example behind its mean: what `grad_sample_mode="ghost"`
    hands out. For any criterion that has a `reduction`."""

    def __init__(self, criterion: Any, run: Run) -> None:
        self._given = criterion
        self._each = copy.copy(criterion)
        if not hasattr(criterion, "reduction"):
            raise InputError(
                'one with a reduction, as nn.CrossEntropyLoss(reduction="mean") has',
                name="criterion",
                value=criterion,
            )
        self._each.reduction = "none"
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """The mean (or sum, by `loss_reduction`) over examples of the mean of each one's terms."""
        terms: Tensor = self._each(*args, **kwargs)
        losses = terms.flatten(1).mean(1) if terms.dim() > 1 else terms
        whole: Tensor = getattr(losses, self._run.reduction)()
        return whole

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._given, name)


class BatchMemoryManager:
    """Batches in parts of at most `max_physical_batch_size` examples, within a `with` block.

    `loss.backward()` adds a part to the sum, and `optimizer.step()` does nothing until the batch is
    whole: the loop stays as it is.
    """

    def __init__(
        self,
        *,
        data_loader: PrivateLoader,
        max_physical_batch_size: int,
        optimizer: PrivateOptimizer,
    ) -> None:
        kinds = (
            ("data_loader", data_loader, PrivateLoader),
            ("optimizer", optimizer, PrivateOptimizer),
        )
        for name, value, kind in kinds:
            if not isinstance(value, kind):
                raise InputError(
                    "the one that make_private returned", name=name, value=type(value).__name__
                )
        if optimizer.run is not data_loader.run:
            raise InputError(
                "of the same make_private as data_loader", name="optimizer", value=optimizer
            )
        self._loader = data_loader
        self._limit = _validate.count("max_physical_batch_size", max_physical_batch_size)

    def __enter__(self) -> PrivateLoader:
        self._loader.run.split(self._limit)
        return self._loader

    def __exit__(self, *error: object) -> None:
        self._loader.run.split(None)


def given_parts(
    module: nn.Module, optimizer: torch.optim.Optimizer, loader: Any
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Model, optimiser and loader without what an earlier `make_private` put around them; its run
    on this model ends."""
    if isinstance(module, PrivateModule):
        module = module.to_standard_module()
    if isinstance(optimizer, PrivateOptimizer):
        optimizer = optimizer.original_optimizer
    if isinstance(loader, PrivateLoader):
        loader = loader.original
    return module, optimizer, loader
