"""``nn.MultiheadAttention``, seen batch first, written with linear maps that the engine can see.

The input projections are linear maps on the query, key and value; the output projection is the
module's own ``out_proj``, a Linear like any other. For self-attention the three input
projections are one map; otherwise ``in_proj_weight`` is three blocks of rows, whose gradients do
not overlap, so their squared norms add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo.training.clipping.errors import EngineError, place
from diminuendo.training.clipping.layers.linear import LinearPiece, linear
from diminuendo.training.clipping.rounding import above, row_norm
from diminuendo.training.clipping.sums import Term
from diminuendo.training.clipping.tape import Kind, Piece, Report, Tape


class StackedPiece(Piece):
    """Several linear maps whose weights (and biases) are blocks of rows of one parameter."""

    def __init__(
        self,
        path: str,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        blocks: list[LinearPiece],
    ) -> None:
        super().__init__(path, (weight, bias), blocks[0].examples)
        self.weight, self.bias, self.blocks = weight, bias, blocks

    def check(self) -> None:
        for block in self.blocks:
            block.check()

    def receive(self, grads: Sequence[Tensor | None]) -> bool:
        example = next((grad for grad in grads if grad is not None), None)
        if example is None:
            return False
        for block, grad in zip(self.blocks, grads, strict=True):
            if grad is None:
                rows = block.examples * _tokens(block)
                grad = example.new_zeros(rows, example.shape[-1])
            block.receive([grad])
        self.tokens = max(block.tokens for block in self.blocks)
        return True

    def measure(self, wanted: set[int]) -> list[Report]:
        result = []
        for block in self.blocks:
            parts = ((self.weight, block.weight), (self.bias, block.bias))
            todo = {id(part) for whole, part in parts if id(whole) in wanted}
            for report in block.measure(todo):
                whole = self.weight if report.key == id(block.weight) else self.bias
                result.append(_measured(id(whole), report))
        return result

    def weighted_sum(self, param: nn.Parameter, factors: Tensor) -> Tensor:
        return torch.cat(
            [block.weighted_sum(self._part(block, param), factors) for block in self.blocks]
        )

    def terms(self, param: nn.Parameter, factors: Tensor) -> list[tuple[slice, Term]]:
        rows, result = param.shape[0] // len(self.blocks), []
        for position, block in enumerate(self.blocks):
            ((_, term),) = block.terms(self._part(block, param), factors)
            result.append((slice(position * rows, (position + 1) * rows), term))
        return result

    def bulk(self, param: nn.Parameter) -> Tensor:
        parts = [block.bulk(self._part(block, param)) for block in self.blocks]
        return sum(parts[1:], parts[0]) * above(len(parts))

    def instantiate(self, param: nn.Parameter) -> Tensor:
        return torch.cat([block.instantiate(self._part(block, param)) for block in self.blocks], 1)

    def purge(self, keep: Tensor) -> None:
        for block in self.blocks:
            block.purge(keep)

    def release(self) -> None:
        for block in self.blocks:
            block.release()

    def _part(self, block: LinearPiece, param: nn.Parameter) -> nn.Parameter:
        part = block.weight if param is self.weight else block.bias
        assert part is not None
        return part


def _measured(key: int, report: Report) -> Report:
    """The report of a block: its rows are only a part of the parameter's, so only norms."""
    if report.kind is Kind.ROWS:
        return Report(key, Kind.NORM, row_norm(report.value))
    return report._replace(key=key)


def _tokens(block: LinearPiece) -> int:
    assert block.inputs is not None
    return block.inputs.numel() // (block.examples * block.inputs.shape[-1])


def handled(module: nn.MultiheadAttention) -> bool:
    """Whether this is a variant that is written out here."""
    return module.bias_k is None and module.bias_v is None


def _as_bias(mask: Tensor, like: Tensor) -> Tensor:
    """A boolean mask (True: do not attend) as an additive one."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


def _merge_masks(
    attn_mask: Tensor | None, padding: Tensor | None, query: Tensor, heads: int
) -> Tensor | None:
    """Both masks as one additive mask that broadcasts to ``(N, heads, T, S)``."""
    merged = None
    if attn_mask is not None:
        merged = _as_bias(attn_mask, query)
        if merged.dim() == 3:
            merged = merged.view(query.shape[0], heads, *merged.shape[1:])
        else:
            merged = merged.view(1, 1, *merged.shape)
    if padding is not None:
        columns = _as_bias(padding, query)[:, None, None, :]
        merged = columns if merged is None else merged + columns
    return merged


class _Projector:
    """The input projections of one attention module."""

    def __init__(self, module: nn.MultiheadAttention, tape: Tape, path: str) -> None:
        self.module, self.tape, self.path = module, tape, path

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        module = self.module
        if module._qkv_same_embed_dim and query is key and key is value:
            weight, bias = module.in_proj_weight, module.in_proj_bias
            if not (weight.requires_grad or (bias is not None and bias.requires_grad)):
                return list(F.linear(query, weight, bias).chunk(3, -1))
            return list(linear(self.tape, self.path, query, weight, bias).chunk(3, -1))
        weights: list[Tensor]
        if module._qkv_same_embed_dim:
            weights = list(module.in_proj_weight.detach().chunk(3))
        else:
            weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
        biases: list[Tensor | None] = [None, None, None]
        if module.in_proj_bias is not None:
            biases = list(module.in_proj_bias.detach().chunk(3))
        outs, blocks, watched = [], [], []
        for x, part, part_bias in zip((query, key, value), weights, biases, strict=True):
            owner = module.in_proj_weight if module._qkv_same_embed_dim else part
            out, piece = self._linear(x, part, part_bias, owner, module.in_proj_bias)
            outs.append(out.view(*x.shape[:-1], -1))
            if piece is not None:
                blocks.append(piece)
                watched.append(out)
        if blocks:
            self.tape.watch(self._stack(blocks), *watched)
        return outs

    def _linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        owner: Tensor,
        bias_owner: Tensor | None,
    ) -> tuple[Tensor, LinearPiece | None]:
        flat = x.reshape(-1, x.shape[-1])
        out = F.linear(flat, weight.detach(), None if bias is None else bias.detach())
        train_weight = owner.requires_grad
        train_bias = bias_owner is not None and bias_owner.requires_grad
        if not (train_weight or train_bias):
            return out, None
        out = self.tape.attach(out)
        own_weight = _parameter(weight) if train_weight else None
        own_bias = _parameter(bias) if train_bias and bias is not None else None
        piece = LinearPiece(self.path, own_weight, own_bias, x)
        if piece.inputs is None:
            piece.inputs = x.detach()  # its shape stands in for a missing gradient
        return out, piece

    def _stack(self, blocks: list[LinearPiece]) -> StackedPiece:
        module = self.module
        bias = module.in_proj_bias
        trained_bias = bias if bias is not None and bias.requires_grad else None
        if module._qkv_same_embed_dim:
            weight = module.in_proj_weight if module.in_proj_weight.requires_grad else None
            return StackedPiece(self.path, weight, trained_bias, blocks)
        return SeparatePiece(self.path, trained_bias, blocks)


class SeparatePiece(StackedPiece):
    """Projections with weights of their own, and biases that are blocks of one parameter."""

    def __init__(self, path: str, bias: nn.Parameter | None, blocks: list[LinearPiece]) -> None:
        super().__init__(path, None, bias, blocks)
        weights = tuple(block.weight for block in blocks if block.weight is not None)
        self.params = weights + self.params

    def measure(self, wanted: set[int]) -> list[Report]:
        result = []
        for block in self.blocks:
            parts = ((block.weight, block.weight), (self.bias, block.bias))
            todo = {id(part) for whole, part in parts if id(whole) in wanted}
            for report in block.measure(todo):
                whole = report.key if report.key == id(block.weight) else id(self.bias)
                result.append(_measured(whole, report))
        return result

    def weighted_sum(self, param: nn.Parameter, factors: Tensor) -> Tensor:
        for block in self.blocks:
            if block.weight is param:
                return block.weighted_sum(param, factors)
        return super().weighted_sum(param, factors)

    def terms(self, param: nn.Parameter, factors: Tensor) -> list[tuple[slice, Term]]:
        for block in self.blocks:
            if block.weight is param:
                return block.terms(param, factors)
        return super().terms(param, factors)

    def bulk(self, param: nn.Parameter) -> Tensor:
        for block in self.blocks:
            if block.weight is param:
                return block.bulk(param)
        return super().bulk(param)

    def instantiate(self, param: nn.Parameter) -> Tensor:
        for block in self.blocks:
            if block.weight is param:
                return block.instantiate(param)
        return super().instantiate(param)


def _parameter(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor, requires_grad=False)


def forward_of(
    module: nn.MultiheadAttention, tape: Tape, path: str
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The forward that replaces ``module.forward`` while the engine is attached."""
    project = _Projector(module, tape, path)

    def forward(
        self: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self is not module or not tape.recording() or query.shape[0] == 0:
            return nn.MultiheadAttention.forward(
                self,
                query,
                key,
                value,
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
        if query.dim() != 3 or key.dim() != 3 or value.dim() != 3:
            raise EngineError(
                f"{place(path)} got a query of shape {tuple(query.shape)}; expected (examples, "
                f"tokens, {module.embed_dim}): add the example dimension"
            )
        if is_causal and attn_mask is None:
            raise EngineError(f"{place(path)}: is_causal=True needs attn_mask as well")
        heads = module.num_heads
        q, k, v = (
            part.view(*part.shape[:2], heads, -1).transpose(1, 2)
            for part in project(query, key, value)
        )
        causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if causal else _merge_masks(attn_mask, key_padding_mask, q, heads)
        if module.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            mask = None if mask is None else F.pad(mask, (0, 1))
        dropout = module.dropout if module.training else 0.0
        scores = None
        if need_weights:
            scores = torch.matmul(q * (1.0 / math.sqrt(q.shape[-1])), k.mT)
            scores = torch.softmax(scores if mask is None else scores + mask, -1)
            scores = F.dropout(scores, dropout) if dropout else scores
            mixed = torch.matmul(scores, v)
            scores = scores.mean(1) if average_attn_weights else scores
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        return module.out_proj(mixed.transpose(1, 2).flatten(2)), scores

    return forward
