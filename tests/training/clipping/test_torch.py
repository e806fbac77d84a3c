"""PyTorch's private entry points that the engine calls: this names the one that moved.

Run with a newer PyTorch before anything else, it says what to look at.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

PRIVATE = {
    "torch.autograd.Variable._execution_engine.run_backward": "the backward pass itself",
    "torch._vmap_internals._vmap": "gradients of all examples through the parameters' own graph",
    "torch._C.DisableTorchFunction": "layers with code of their own are not watched inside",
    "torch._foreach_add_": "sums of many parameters in one kernel",
    "torch.ops.aten._unsafe_view.default": "an output's own place in the graph",
    "torch.ops.aten.convolution_backward": "weight gradients of convolutions",
    "torch.ops.aten.embedding_dense_backward": "weight gradients of embeddings",
    "torch.Tensor._version": "changes in place are noticed",
    "torch.Tensor._is_view": "changes in place are noticed",
    "torch.Tensor._base": "changes in place are noticed",
    "torch.compiler.disable": "layers between compiled parts",
    "torch.compiler.is_compiling": "layers between compiled parts",
    "torch.nn.modules.conv._ConvNd._conv_forward": "convolutions with padding modes",
    "torch.nn.utils.parametrizations._SpectralNorm": "refused",
    "torch.nn.utils.spectral_norm.SpectralNorm": "refused",
    "torch.nn.utils.weight_norm.WeightNorm": "weights computed in a hook",
    "torch.func.vjp": "operations that are repeated",
    "torch.func.vmap": "operations that are repeated",
}


@pytest.mark.parametrize("name", PRIVATE)
def test_still_there(name: str) -> None:
    value: object = torch
    for part in name.split(".")[1:]:
        if not hasattr(value, part):
            if value is torch.nn.utils:  # a function hides the module of the same name
                value = __import__(f"torch.nn.utils.{part}", fromlist=["_"])
                continue
            pytest.fail(f"{name} is gone from torch {torch.__version__}: {PRIVATE[name]}")
        found = getattr(value, part)
        if inspect.isfunction(found) and value is torch.nn.utils:
            found = __import__(f"torch.nn.utils.{part}", fromlist=["_"])
        value = found


def test_a_node_lets_itself_be_hooked_from_both_sides() -> None:
    """Gradients arrive by prehooks, and stop where a hook returns None."""
    x = torch.ones(3, requires_grad=True)
    out = x * 2
    seen: list[Tensor] = []
    assert out.grad_fn is not None

    def stop(grads: tuple[Tensor, ...]) -> tuple[None]:
        seen.append(grads[0])
        return (None,)

    out.grad_fn.register_prehook(stop)
    out.sum().backward()
    assert len(seen) == 1
    assert x.grad is None
    weight = torch.ones(1, 2, requires_grad=True)
    normed = torch.group_norm(torch.randn(1, 2, 4), 1, weight[0], None)
    assert normed.grad_fn is not None
    sent: list[int] = []
    normed.grad_fn.register_hook(lambda inputs, _: sent.append(len(inputs)))
    normed.sum().backward()
    assert sent == [3], "a group norm sends gradients to (input, weight, bias)"


def test_a_mode_sees_operations_and_tensors_carry_marks() -> None:
    names: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            del types
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x, weight = torch.randn(2, 3), nn.Parameter(torch.randn(4, 3))
    x._mark = 1  # type: ignore[attr-defined]
    with Mode():
        nn.functional.linear(x, weight) + weight[:, 0]
        with torch._C.DisableTorchFunction():
            x.exp()
    assert names == ["linear", "__getitem__", "add"]
    (y,) = _pytree.tree_leaves([x])
    assert y._mark == 1


def test_gradients_of_many_examples_in_one_call() -> None:
    weight = torch.randn(3, requires_grad=True)
    rows, out = torch.randn(5, 3), weight.sin()
    run = torch.autograd.Variable._execution_engine.run_backward

    def pull(row: Tensor) -> tuple[Tensor, ...]:
        return run((out,), (row,), True, False, (weight,), True, False)

    (found,) = torch._vmap_internals._vmap(pull, 0, 0, allow_none_pass_through=True)(rows)
    assert torch.allclose(found, rows * weight.detach().cos())
