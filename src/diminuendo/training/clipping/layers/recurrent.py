"""``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``, seen batch first, unrolled over time.

Every step is ``P_t = x_t W_ih^T + b_ih`` and ``R_t = h_{t-1} W_hh^T + b_hh`` followed by the
gates. Both are linear maps over the time axis: ``(W_ih, b_ih)`` with inputs x and the gradients
of P, ``(W_hh, b_hh)`` with the states h_{t-1} and the gradients of R. The unrolled loop runs in
Python, so it is slower than the fused kernels of a plain forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo.training.clipping.errors import EngineError, place
from diminuendo.training.clipping.layers.linear import LinearPiece, linear
from diminuendo.training.clipping.tape import Tape, trained


class HiddenPiece(LinearPiece):
    """The state-to-state map, applied once at each time step."""

    def __init__(
        self,
        path: str,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        states: list[Tensor],
    ) -> None:
        super().__init__(path, None, bias, states[0])
        self.weight = weight
        self.params = tuple(param for param in (weight, bias) if param is not None)
        self.states = states

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        example = next((grad for grad in grads if grad is not None), None)
        if example is None:
            return False
        if self.weight is not None:
            self.inputs = torch.stack(self.states, 1)
        self.states = []
        zero = torch.zeros_like(example)
        return super().receive([torch.stack([zero if g is None else g for g in grads], 1)])


def handled(module: nn.RNNBase) -> bool:
    """Whether this is a variant that is written out here."""
    known = type(module).forward in (nn.RNN.forward, nn.LSTM.forward, nn.GRU.forward)
    return known and not module.proj_size and "forward" not in module.__dict__


def _rnn(p: Tensor, r: Tensor, h: Tensor, c: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    del h
    return (F.relu(p + r) if relu else torch.tanh(p + r)), c


def _lstm(p: Tensor, r: Tensor, h: Tensor, c: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    del h, relu
    i, f, g, o = (p + r).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(p: Tensor, r: Tensor, h: Tensor, c: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
    del relu
    (p_r, p_z, p_n), (r_r, r_z, r_n) = p.chunk(3, 1), r.chunk(3, 1)
    z = torch.sigmoid(p_z + r_z)
    n = torch.tanh(p_n + torch.sigmoid(p_r + r_r) * r_n)
    return n + z * (h - n), c


_CELLS = {"RNN_TANH": _rnn, "RNN_RELU": _rnn, "LSTM": _lstm, "GRU": _gru}


class _Unrolled:
    """One recurrent module, unrolled."""

    def __init__(self, module: nn.RNNBase, tape: Tape, path: str) -> None:
        self.module, self.tape, self.path = module, tape, path
        self.cell = _CELLS[module.mode]
        self.relu = module.mode == "RNN_RELU"

    def run(self, x: Tensor, h0: Tensor, c0: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs ``(N, T, D h)`` and the last states ``(L D, N, h)``."""
        module = self.module
        directions = 2 if module.bidirectional else 1
        hs, cs = [], []
        for layer in range(module.num_layers):
            outs = []
            for direction in range(directions):
                position = layer * directions + direction
                suffix = f"_l{layer}" + ("_reverse" if direction else "")
                out, h, c = self._direction(x, h0[position], c0[position], suffix, bool(direction))
                outs.append(out)
                hs.append(h)
                cs.append(c)
            x = torch.cat(outs, 2) if directions == 2 else outs[0]
            if module.dropout and layer + 1 < module.num_layers:
                x = F.dropout(x, module.dropout, module.training)
        return x, torch.stack(hs), torch.stack(cs)

    def _direction(
        self, x: Tensor, h: Tensor, c: Tensor, suffix: str, backwards: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        tape = self.tape
        w_ih, b_ih = self._pair("ih", suffix)
        w_hh, b_hh = self._pair("hh", suffix)
        if trained(w_ih) is not None or trained(b_ih) is not None:
            p = linear(tape, self.path, x, w_ih, b_ih)
        else:
            p = F.linear(x, w_ih, b_ih)
        steps = list(p.unbind(1))
        own_weight, own_bias = trained(w_hh), trained(b_hh)
        weight, bias = w_hh.detach(), None if b_hh is None else b_hh.detach()
        states, watched, outs = [], [], []
        for step in reversed(steps) if backwards else steps:
            r = F.linear(h, weight, bias)
            if own_weight is not None or own_bias is not None:
                r = tape.attach(r)
                watched.append(r)
                states.append(h.detach())
            h, c = self.cell(step, r, h, c, self.relu)
            outs.append(h)
        if watched:
            tape.watch(HiddenPiece(self.path, own_weight, own_bias, states), *watched)
        if backwards:
            outs.reverse()
        return torch.stack(outs, 1), h, c

    def _pair(self, kind: str, suffix: str) -> tuple[nn.Parameter, nn.Parameter | None]:
        weight: nn.Parameter = getattr(self.module, f"weight_{kind}{suffix}")
        bias: nn.Parameter | None = None
        if self.module.bias:
            bias = getattr(self.module, f"bias_{kind}{suffix}")
        return weight, bias


def forward_of(module: nn.RNNBase, tape: Tape, path: str) -> Callable[..., Any]:
    """The forward that replaces ``module.forward`` while the engine is attached."""
    unrolled = _Unrolled(module, tape, path)
    original: Callable[..., Any] = type(module).forward
    two_states = module.mode == "LSTM"

    def forward(self: nn.RNNBase, input: Any, hx: Any = None) -> Any:
        if self is not module or not tape.recording():
            return original(self, input, hx)
        if not isinstance(input, Tensor) or input.dim() != 3:
            shape = tuple(input.shape) if isinstance(input, Tensor) else type(input).__name__
            raise EngineError(
                f"{place(path)} got {shape}; expected a tensor (examples, time, "
                f"{module.input_size}): pad sequences instead of packing them and mask the padded "
                "steps in the loss"
            )
        if input.shape[0] == 0 or input.shape[1] == 0:
            return original(self, input, hx)
        if hx is None:
            count = module.num_layers * (2 if module.bidirectional else 1)
            h0 = input.new_zeros(count, input.shape[0], module.hidden_size)
            c0 = h0
        else:
            h0, c0 = hx if two_states else (hx, hx)
        out, h, c = unrolled.run(input, h0, c0)
        return out, ((h, c) if two_states else h)

    return forward
