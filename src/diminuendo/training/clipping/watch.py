"""Watches the operations of a forward pass for what depends on the examples and what does not.

While the model runs, every tensor is one of three: it depends on the batch (and ``Rows`` says
where its examples are), it is made of trainable parameters alone (``Made``), or it is a constant.
Tensors made of parameters keep an ordinary autograd graph; where one of them meets a tensor of the
batch, :mod:`~diminuendo.training.clipping.meet` takes over. The layers that the engine has code
for are not watched inside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from diminuendo.training.clipping import twins
from diminuendo.training.clipping.choosing import ordered
from diminuendo.training.clipping.errors import EngineError, refuse_nested
from diminuendo.training.clipping.lift import lift
from diminuendo.training.clipping.marks import (
    EXPANDING,
    FACTORIES,
    KNOWN,
    TEMPLATES,
    Made,
    Operation,
    operation,
    tensors,
)
from diminuendo.training.clipping.meet import meet
from diminuendo.training.clipping.probe import nodes
from diminuendo.training.clipping.rows import (
    TAG,
    Copies,
    One,
    Pieces,
    Rows,
    guess,
    seen_from,
    settled,
)
from diminuendo.training.clipping.rules import RULES, follow

if TYPE_CHECKING:
    from diminuendo.training.clipping.tape import Tape


class Watch(TorchFunctionMode):
    """The mode under which a model with an engine runs."""

    def __init__(self, tape: Tape, made: dict[int, Made]) -> None:
        super().__init__()
        self.tape, self.made = tape, made
        self.examples = 0
        self.busy = False
        self.doubted = False

    def begin(self, inputs: Sequence[Tensor], examples: int, several: int = 0) -> None:
        """Mark the inputs of the model: those with one row for each example, and those whose
        ``several`` rows are as many for each example."""
        self.examples, self.doubted = examples, False
        for leaf in inputs:
            if leaf.dim() == 0 or isinstance(leaf, nn.Parameter):
                continue
            if leaf.shape[0] == examples:
                setattr(leaf, TAG, Rows(examples))
            elif leaf.is_floating_point() or leaf.is_complex() or leaf.shape[0] == several:
                setattr(leaf, TAG, Pieces(examples))

    def rows_of(self, leaf: Tensor) -> Rows | None:
        """Where the tensor holds examples, if it does."""
        tag = getattr(leaf, TAG, None)
        if tag is None and leaf.requires_grad and id(leaf) not in self.made:
            if not self.examples or self._foreign(leaf):
                return None
            return guess(leaf, self.examples)
        return tag if isinstance(tag, Rows) else None

    def made_of(self, leaf: Tensor) -> Made | None:
        """What parameters the tensor is made of, if it is."""
        tag = getattr(leaf, TAG, None)
        if tag is None and leaf.requires_grad:
            return self.made.get(id(leaf))
        return tag if isinstance(tag, Made) else None

    def _foreign(self, leaf: Tensor) -> bool:
        """Whether the tensor is a constant that was made a parameter just now, or comes of such.

        What goes into a function of the user's own is not seen, so what comes out is not known.
        """
        if isinstance(leaf, nn.Parameter):
            return True
        found = list(nodes(leaf))
        ends = [node.variable for node in found if hasattr(node, "variable")]
        return (
            bool(ends)
            and all(isinstance(end, nn.Parameter) and id(end) not in self.made for end in ends)
            and not any(isinstance(node, BackwardCFunction) for node in found)
        )

    def has_rows(self, leaf: Tensor, dim: int) -> bool:
        """Whether index i along ``dim`` is example i."""
        rows = self.settle(leaf)
        return (
            rows is not None
            and rows.dim == dim
            and rows.owner is None
            and leaf.dim() > dim
            and leaf.shape[dim] == rows.examples
        )

    def settle(self, leaf: Tensor) -> Rows | None:
        """Where the tensor holds examples, without an index where none is needed."""
        rows = self.rows_of(leaf)
        if rows is not None and rows.owner is not None:
            rows = settled(rows, leaf)
            setattr(leaf, TAG, rows)
        return rows

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        op = KNOWN.get(func) or operation(func)
        if op.ignored or not self.examples:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        doubted = False
        source: Tensor | None = None
        rows: Rows | None = None
        made: list[Made] = []
        for leaf in _leaves(args, kwargs):
            tag = getattr(leaf, TAG, None)
            if tag is None:
                if not leaf.requires_grad:
                    continue
                tag = self.made.get(id(leaf))
                if tag is None and self._foreign(leaf):
                    continue
                tag = tag or guess(leaf, self.examples)
            if self.doubted and not doubted:
                doubted = twins.twin(leaf) is not None
            if isinstance(tag, Made):
                made.append(tag)
            elif rows is None or _better(leaf, tag, source, rows):
                source, rows = leaf, tag
        if doubted:
            better = twins.aligned(op, args, kwargs, _leaves(args, kwargs))
            if better is not None:
                return self.__torch_function__(func, types, *better)
        copies = False
        if made and type(rows) is Copies and source is not None:
            copies = not source.requires_grad
            rows = Rows(rows.examples, rows.dim, rows.owner)
        if op.name in TEMPLATES and rows is not None and self.rows_of(args[0]) is None:
            source = rows = None
        if made and rows is not None and self._picks(op, args, kwargs, rows):
            source = rows = None
        given = self._otherwise(op, args, kwargs, copies) if copies or doubted else None
        if made and torch.is_grad_enabled():
            self.busy = True
            if rows is not None and source is not None:
                refuse_nested([source])
                if type(rows) is Pieces and not rows.fits(source):
                    self._refuse_pieces(source, made[0])
                result = meet(self, func, op, args, kwargs, source, rows)
            else:
                return self._of_parameters(func, op, args, kwargs, made)
        else:
            result = func(*args, **kwargs)
        if rows is not None and source is not None:
            self.mark(op, args, kwargs, source, rows, result)
            if given is not None:
                if copies:
                    again = self._of_parameters(func, op, *given, made)
                else:
                    again = self.__torch_function__(func, types, *given)
                if op.inplace:
                    result, again = args[0], given[0][0]
                self._doubt(result, again)
        elif op.name in EXPANDING and isinstance(result, Tensor) and self._spreads(args, result):
            setattr(result, TAG, Copies(self.examples))
        return result

    def _otherwise(
        self, op: Operation, args: Sequence[Any], kwargs: dict[str, Any], copies: bool
    ) -> tuple[Sequence[Any], dict[str, Any]] | None:
        """What to do the operation on once more, for its twin."""
        if not torch.is_grad_enabled() or not twins.repeats(op):
            return None
        if not copies:
            return twins.swapped(args, kwargs, _leaves(args, kwargs))
        return ((args[0].clone(), *args[1:]) if op.inplace else args), kwargs

    def _picks(
        self, op: Operation, args: Sequence[Any], kwargs: dict[str, Any], rows: Rows
    ) -> bool:
        """Whether parameters are picked by numbers that belong to the whole batch.

        A model may loop over the experts that any example was routed to: ``weights[expert]`` is
        then made of parameters alone, whatever made it be looked at. So are positions that are
        read off a learned table for the pieces of all pictures together.
        """
        if op.name == "grid_sample":
            return self.made_of(args[0]) is not None and not any(
                leaf.requires_grad for leaf in _leaves(args[1:], kwargs)
            )
        picking = op.name in ("__getitem__", "select", "index_select")
        if not picking or rows.dim >= 0 or self.rows_of(args[0]):
            return False
        return all(
            leaf.dim() == 0 and not leaf.is_floating_point()
            for leaf in _leaves(args[1:], kwargs)
            if self.rows_of(leaf) is not None
        )

    def _refuse_pieces(self, source: Tensor, made: Made) -> None:
        raise EngineError(
            f"{self.tape.title(made)} meets an input (shape {tuple(source.shape)}) that does not "
            f"have the same number of rows for each of {self.examples} examples, so whether an "
            "example's rows reach another's loss cannot be told; give every example as many rows "
            "(pad, or use pictures of one size), call the model with the input that has one row "
            "for each example first, or keep it in the model by register_buffer if it is a "
            "constant"
        )

    def mark(
        self,
        op: Operation,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        source: Tensor,
        rows: Rows,
        result: Any,
    ) -> None:
        """Say where the results of an operation on a tensor of the batch hold its examples."""
        if op.name in FACTORIES:
            return
        if op.rule is None and not op.inplace and isinstance(result, Tensor):
            dim = rows.dim
            if 0 <= dim < result.dim() == source.dim() and (
                result.shape[dim] == source.shape[dim] and type(rows) is Rows
            ):
                setattr(result, TAG, rows)
                return
        outs = [result] if isinstance(result, Tensor) else list(tensors(result, 2))
        sorting = op.name in ("sort", "topk") and type(rows) is not One
        if sorting and dimension(args, kwargs, op.name, source) == rows.dim:
            for out in outs:
                setattr(out, TAG, ordered(rows, source, outs[-1]))
            return
        for nr, out in enumerate(outs):
            if out is source:
                continue
            found = follow(op.rule, args, kwargs, source, rows, out, nr)
            if type(rows) is not Copies or found.regular(out):
                setattr(out, TAG, found)
        if op.inplace and args and isinstance(args[0], Tensor):
            self._written(op, args, kwargs, source, rows)

    def _written(
        self, op: Operation, args: Sequence[Any], kwargs: Any, source: Tensor, rows: Rows
    ) -> None:
        """Something of the batch was written on a tensor, and on what it is a view of."""
        target = args[0]
        known = getattr(target, TAG, None)
        if not isinstance(known, Rows) or (type(known) is Copies and target.requires_grad):
            rule = op.rule or RULES["copy_"]
            setattr(target, TAG, rule(args, kwargs, source, rows, target, 0))
        base = target._base
        if base is not None and not isinstance(getattr(base, TAG, None), Rows):
            setattr(base, TAG, seen_from(target, getattr(target, TAG), base))

    def _spreads(self, args: Sequence[Any], result: Tensor) -> bool:
        """Whether something without examples was repeated once for each of them."""
        first = args[0]
        return (
            self.examples > 1
            and isinstance(first, Tensor)
            and result.dim() > 0
            and result.shape[0] == self.examples
            and (first.dim() < result.dim() or first.shape[0] == 1)
        )

    def _of_parameters(
        self,
        func: Callable[..., Any],
        op: Operation,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        made: list[Made],
    ) -> Any:
        """An operation without the batch: plain autograd, and a mark on what comes out."""
        result = func(*args, **kwargs)
        params = made[0].params
        for other in made[1:]:
            if other.params is not params:
                params = {**params, **other.params}
        if isinstance(result, Tensor) and op.name in EXPANDING and self._spreads(args, result):
            whole, rest = args[0], result.shape[1:]
            copied = op.name in ("repeat", "tile")
            if not copied or whole.shape in (rest, (1, *rest)):
                spread = lift(self, whole, result.shape, Rows(self.examples))
                if copied:
                    spread = spread.contiguous()
                    setattr(spread, TAG, Rows(self.examples))
                setattr(result, TAG, Made(params, (op.name, (*args, kwargs))))
                self._doubt(spread, result)
                return spread
        if op.inplace and isinstance(args[0], Tensor):
            self._overwritten(args[0], params)
            return result
        for out in tensors(result, 2):
            if out.requires_grad and not isinstance(out, nn.Parameter):
                setattr(out, TAG, Made(params, (op.name, (*args, kwargs))))
        return result

    def _doubt(self, result: Any, again: Any) -> None:
        """What was taken for the batch's may be made of parameters alone, as in ``again``."""
        self.doubted = True
        for out, twin in zip(tensors(result, 2), tensors(again, 2), strict=True):
            tag = getattr(twin, TAG, None)
            pure = isinstance(tag, Rows) or (isinstance(tag, Made) and self._pure(twin))
            if pure and isinstance(getattr(out, TAG, None), Rows):
                twins.remember(out, twin)

    def _pure(self, tensor: Tensor) -> bool:
        """Whether gradients of the tensor go to parameters and nowhere else."""
        ends = [node.variable for node in nodes(tensor) if hasattr(node, "variable")]
        return all(id(end) in self.made for end in ends)

    def _overwritten(self, target: Tensor, params: dict[int, nn.Parameter]) -> None:
        """Parameters were written on a constant, or on what was made of others before."""
        for out in (target, target._base):
            if out is not None and out.requires_grad and not isinstance(out, nn.Parameter):
                before = getattr(out, TAG, None)
                known = before.params if isinstance(before, Made) else {}
                setattr(out, TAG, Made({**known, **params}))


def _leaves(args: Sequence[Any], kwargs: dict[str, Any] | None) -> list[Tensor]:
    """The tensors among the arguments, found as fast as may be."""
    leaves = []
    for part in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(part, Tensor):
            leaves.append(part)
        elif isinstance(part, (list, tuple, dict)):
            leaves += tensors(part, 4)
    return leaves


def _counted(inputs: Sequence[Tensor]) -> tuple[int, int]:
    """The number of examples, the first dimension of the first input, and that of inputs of whole
    numbers with several rows for each, if there are any.

    Unless no other input has it and several have another, token numbers among them: the first is
    then taken for pictures in pieces, whose number varies from example to example; but for one
    picture for each example if the others have several texts for each, as in a search for objects
    by their names. A wrong choice is refused later, since there is one loss for each example.
    """
    held = [leaf for leaf in inputs if leaf.dim() and not isinstance(leaf, nn.Parameter)]
    sizes = [leaf.shape[0] for leaf in held]
    if not sizes or sizes[0] == 0 or sizes.count(sizes[0]) > 1:
        return (sizes[0] if sizes else 0), 0
    for leaf in held[1:]:
        size = leaf.shape[0]
        whole = leaf.dim() > 1 and not leaf.is_floating_point() and not leaf.is_complex()
        if whole and sizes.count(size) > 1:
            several = size > sizes[0] and size % sizes[0] == 0
            return (sizes[0], size) if several else (size, 0)
    return sizes[0], 0


def dimension(args: Sequence[Any], kwargs: dict[str, Any], name: str, like: Tensor) -> int:
    """The dimension along which ``sort`` or ``topk`` goes."""
    numbers = [part for part in args[1 if name == "sort" else 2 :] if type(part) is int]
    dim: int = kwargs.get("dim", numbers[0] if numbers else -1)
    return dim % max(1, like.dim())


def _better(leaf: Tensor, rows: Rows, source: Tensor | None, best: Rows) -> bool:
    """Whether to follow the examples of this argument rather than those of an earlier one."""
    if best.dim < 0 <= rows.dim:
        return True
    for weaker in (Pieces, Copies, One):
        if (type(best) is weaker) != (type(rows) is weaker):
            return type(best) is weaker
    return source is not None and rows.dim >= 0 and leaf.dim() > source.dim()


class Root:
    """The way into a model: what is called starts to be watched here.

    A model all of whose parameters belong to layers that the engine has code for is watched until
    a forward pass on inputs of that ``shape`` turned out to use them in no other way.
    """

    def __init__(self, tape: Tape, watch: Watch, always: bool) -> None:
        self.tape, self.watch, self.always = tape, watch, always
        self.shape: Hashable = None
        self.before: Callable[[Any, dict[str, Any]], None] | None = None
        self._plain: set[Hashable] = set()

    def around(self, model: nn.Module) -> Callable[..., Any]:
        """The forward to install on the model, around the one it has."""
        previous = model.__dict__.get("forward")
        original: Callable[..., Any] = type(model).forward

        def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if previous is not None and self is model:
                return previous(*args, **kwargs)
            return original(self, *args, **kwargs)

        watched = torch.compiler.disable(self._watched)  # type: ignore[no-untyped-call]

        @functools.wraps(original)  # whoever asks for the arguments gets the model's own
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self is not model or not root.tape.recording() or root.tape.watcher is not None:
                return call(self, *args, **kwargs)
            if torch.compiler.is_compiling():
                if not root.always:
                    return call(self, *args, **kwargs)
                return watched(call, self, args, kwargs)
            return root._watched(call, self, args, kwargs)

        root = self
        return forward

    def _watched(
        self, call: Callable[..., Any], model: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        if self.before is not None:
            with self.tape.pause():
                self.before(args, kwargs)
        inputs = list(tensors((args, kwargs)))
        examples, several = _counted(inputs)
        self.shape = tuple(
            tuple(0 if size == examples else size for size in leaf.shape) for leaf in inputs
        )
        if examples == 0 or (self.shape in self._plain and not self.always):
            return call(model, *args, **kwargs)
        self.watch.busy = False
        self.watch.begin(inputs, examples, several)
        with self._on():
            result = call(model, *args, **kwargs)
        if not self.watch.busy:
            self._plain.add(self.shape)
        return result

    @contextmanager
    def again(self, examples: int) -> Iterator[None]:
        """During a backward pass: parts of the forward pass may run again."""
        if self.shape in self._plain and not self.always:
            yield
            return
        self.watch.examples = examples
        with self._on():
            yield

    @contextmanager
    def _on(self) -> Iterator[None]:
        self.tape.watcher = self.watch
        try:
            with self.watch:
                yield
        finally:
            self.tape.watcher = None


def routed(module: nn.Module, forward: Callable[..., Any], tape: Tape) -> Callable[..., Any]:
    """The engine's ``forward`` of a layer where row i of its input is example i and its weights are
    parameters of the model; elsewhere the layer's own, whose operations are then watched."""
    original: Callable[..., Any] = type(module).forward
    several = isinstance(module, nn.MultiheadAttention)
    recurrent = isinstance(module, nn.RNNBase)
    axis = int(not getattr(module, "batch_first", True))
    weights = [(part, name) for part in module.modules() for name in _weights_of(part)]

    def computed() -> bool:
        """Whether a weight is no parameter now: pruned, or replaced by ``functional_call``."""
        held = (getattr(part, name, None) for part, name in weights)
        return any(
            isinstance(weight, Tensor) and id(weight) not in tape.names and weight.requires_grad
            for weight in held
        )

    def known(watch: Watch, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        inputs = _leaves(args, kwargs)
        if not inputs or not torch.is_grad_enabled():
            return False
        refuse_nested(inputs)
        first = inputs[:3] if several else inputs[:1]
        if watch.doubted and not several and not recurrent and twins.twin(inputs[0]) is not None:
            return False
        if not all(watch.has_rows(leaf, axis) for leaf in first):
            return False
        return len(inputs) == 1 or not any(watch.made_of(leaf) for leaf in inputs)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watch = tape.watcher
        if self is module and tape.recording() and computed():
            if watch is not None:
                watch.busy = True
            return original(self, *args, **kwargs)
        packed = recurrent and args and not isinstance(args[0], Tensor)
        if watch is None or self is not module or packed:
            return forward(self, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            if known(watch, args, kwargs):
                tape.watcher = None
                try:
                    result = forward(self, *args, **kwargs)
                finally:
                    tape.watcher = watch
                rows = Rows(watch.examples, axis)
                if isinstance(result, Tensor):
                    setattr(result, TAG, rows)
                    return result
                for nr, out in enumerate(tensors(result, 2)):
                    setattr(out, TAG, Rows(watch.examples, int(recurrent)) if nr else rows)
                return result
        watch.busy = True
        return original(self, *args, **kwargs)

    return call


def _weights_of(part: nn.Module) -> set[str]:
    """The attributes that a layer may read its weights from."""
    named = {
        *part._parameters,
        *getattr(part, "parametrizations", ()),
        *getattr(part, "_flat_weights_names", ()),
    }
    pruned = {name.removesuffix("_orig") for name in named}  # what pruning makes of the original
    return pruned | {"weight", "bias"}
