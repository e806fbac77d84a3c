"""Private steps that are recorded once as a CUDA graph and then replayed.

    take = private.captured(lambda x, y: loss_fn(model(x), y), optimizer)
    for x, y in private.batches(data):
        take(x, y)                         # losses, clip, sum, noise, divide, update

On a GPU the host needs longer to launch a step's operations than the GPU to carry them out. A
recording launches them all at once. What changes from step to step (rows, how many of them are
examples, noise and its key, learning rates) is read from the device's memory, so that one recording
serves every step with rows of one shape.

A step is asked for before it is launched, as ever. The first two uses of a shape, and its 4th, 8th,
16th, … run operation by operation, and there the guard and the probe look at what they always look
at. So does every step where nothing can be recorded: on a CPU, with several ranks, or where the
model makes the host wait for a result. `Captured.why_not` then says why.
"""

from __future__ import annotations

import contextlib
import struct
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from diminuendo.errors import DiminuendoError, InputError, UsageError
from diminuendo.training.clipping.errors import EngineError
from diminuendo.training.mechanism import device
from diminuendo.training.mechanism.device import ORDER_BYTES, VECTORS_KEY, DeviceSum
from diminuendo.training.mechanism.kernels import pinned
from diminuendo.training.sampling import Part
from diminuendo.training.updates import Update

if TYPE_CHECKING:
    from diminuendo.training.step import PrivateGradients

Losses = Callable[..., Tensor]
"""From a batch to one loss per example."""

EAGER_USES = 2
"""Uses of a shape that run operation by operation before it is recorded."""
_WORD = 8
# Recordings kept: shapes of batches, modes of modules, clips.
_MOST = 8


class EagerStep(UserWarning):
    """Steps on a GPU that could not be recorded; they give the same results and take longer."""


class _Recording(NamedTuple):
    """A graph, the memory that it reads rows from, and what it leaves behind."""

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    losses: Tensor | None
    gradients: list[Tensor]
    use: Hashable


class Captured:
    """Takes private steps; see the module's text. Made by `PrivateGradients.captured`."""

    def __init__(
        self,
        private: PrivateGradients,
        losses: Losses,
        optimizer: torch.optim.Optimizer,
        why_not: str | None = None,
    ) -> None:
        if not callable(losses):
            raise InputError(
                "a function of a batch that gives one loss per example",
                name="losses",
                value=losses,
                remedy="lambda x, y: loss_fn(model(x), y), say.",
            )
        private.guard.check_optimizer(optimizer)
        self._private, self._losses, self._optimizer = private, losses, optimizer
        self.why_not = why_not or _reason(private)
        """Why steps are not recorded; None where they are."""
        self._update = Update(optimizer)
        self._uses: Counter[Hashable] = Counter()
        self._eagerly, self._tries_out = True, False
        self._recordings: dict[Hashable, _Recording] = {}
        self._finish: _Recording | None = None
        self._modules = list(private.engine.model.modules())
        self._held = [*private.engine.model.parameters(), *private.engine.model.buffers()]
        self._order = b""
        self._given: dict[int, tuple[Tensor, int]] = {}
        self._memory: Tensor | None = None
        self._parts_sum: DeviceSum | None = None
        self._gradient: Tensor | None = None
        """What all recordings release into: no other memory of a recording outlives a step."""
        self._pool: Any = None
        private.engine.static = self.why_not is None
        if self.why_not is None:
            optimizer.register_load_state_dict_post_hook(_forgetting(self))

    def __call__(self, *batch: Any) -> Tensor:
        """Take one step, or one part of it, and return its losses without history.

        The tensor is written over by the next step.
        """
        with self._private.alone:
            return self._take(batch)

    def _take(self, batch: tuple[Any, ...]) -> Tensor:
        private = self._private
        if self.why_not is not None:
            return self._step_by_step(batch)
        if self._update.recordable and not self._update.unchanged:
            self._update.recordable = False
            self._forget()
        if private._part is None and private.sampler.rate(private.step) < 1:
            return self._step_by_step(batch)  # refused there: nobody drew this batch
        part = private._part or private._own_part()
        leaves, form = _flat(batch)
        key = self._key(part, leaves, form)
        if part.first:
            self._decide(key, part)
        if self._eagerly:
            if self._tries_out:
                self._try_out(batch)
            return self._step_by_step(batch)
        recording = self._recordings.get(key)
        if recording is None:
            recording = self._try_to_record(part, leaves, form)
            if recording is None and not part.first:
                private._abandon()
                raise UsageError(
                    f"Part {part.place + 1} of this batch cannot be recorded ({self.why_not}), and "
                    "the parts before it were. The step stays spent, and nothing of it is "
                    "released. Draw the next batch: from there on, steps run operation by "
                    "operation."
                )
            if recording is None:
                return self._step_by_step(batch)
            if len(self._recordings) >= _MOST:
                self._recordings.pop(next(iter(self._recordings)))
            self._recordings[key] = recording
        return self._replay(recording, part, leaves)

    def _decide(self, key: Hashable, part: Part) -> None:
        """Whether all parts of this step run operation by operation, by the shape of the first.

        Parts of other sizes than in steps before would be recorded in the middle of a step, before
        the guard has seen them: such steps are never recorded.
        """
        if (part.size if part.drawn is None else part.drawn) > 1:
            self._uses[key] += 1
        uses, sampler = self._uses[key], self._private.sampler
        alike = sampler.buckets is not None and len(sampler.buckets.sizes) == 1
        known = part.parts == 1 or alike or sampler.rate(part.step) == 1
        self._eagerly = not known or uses <= EAGER_USES or uses & (uses - 1) == 0
        self._tries_out = known and uses == EAGER_USES

    # Step by step

    def _step_by_step(self, batch: tuple[Any, ...]) -> Tensor:
        """The same step, operation by operation."""
        private, before = self._private, self._private.step
        if private._part is None:
            private.guard.watch(private.plan.examples)
        losses = self._losses(*batch)
        private.backward(losses)
        if private.step > before:
            if self.why_not is None and self._update.recordable:
                self._update.prepare()  # the kernels of a replay, so that its numbers are the same
                self._update.apply(self._update.sent_rates(losses.device))
                self._update.count()
            else:
                self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return losses.detach()

    def _try_out(self, batch: tuple[Any, ...]) -> None:
        """Take a clipped sum of which nothing is released, on the way that will be recorded.

        The model may go another way while it is recorded: the probe looks at that one, too. Then
        it is seen whether the host waits for a result: to find that out while recording would leave
        PyTorch's generators unusable. What fails here runs operation by operation.
        """
        private = self._private
        engine, where = private.engine, private.engine.parameters[0].device
        state, before = torch.cuda.get_rng_state(where), torch.cuda.get_sync_debug_mode()
        waiting, probing = private._part, engine.probing
        engine.probing = False
        why = None
        leaves, form = _flat(batch)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            try:
                with as_recorded():
                    losses = self._losses(*_whole(_copied(leaves), form))
                if probing and len(losses) > 1:
                    engine.probe(losses)
                del losses
                rows = _whole(_copied(leaves), form)
                torch.cuda.set_sync_debug_mode("error")
                with as_recorded():
                    losses = self._losses(*rows)
                engine.clipped_sum(losses, private._clip_of(private.step))
            except EngineError as error:
                why = f"the way that the model goes while it is recorded is refused: {error}"
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                why = (
                    "the model or the loss makes the host wait for a result of the GPU (by .item(),"
                    " a branch on values, or an operation whose result has a size that depends on "
                    "them)"
                )
            finally:
                torch.cuda.set_sync_debug_mode(before)
                torch.cuda.set_rng_state(state, where)
                engine.probing, private._part = probing, waiting
        if why is not None:
            self._give_up(why)

    def _give_up(self, why: str) -> None:
        self.why_not = why
        self._private.engine.static = False
        self._forget()
        warnings.warn(
            f"Steps run operation by operation, with the same results, since {why}.",
            EagerStep,
            stacklevel=5,
        )

    def _forget(self) -> None:
        """Recordings read memory that is not the optimizer's or the model's any more."""
        self._recordings.clear()
        self._finish = None

    # Recording

    def _key(self, part: Part, leaves: list[Any], form: Any) -> Hashable:
        """What a recording is good for: shapes, modes of the modules, where the parameters are."""
        shapes = tuple(
            [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        )
        private = self._private
        return (
            shapes,
            form,
            part.parts,
            part.drawn is None,
            private._clip_of(private.step),
            tuple([module.training for module in self._modules]),
            tuple([held.data_ptr() for held in self._held]),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        )

    def _try_to_record(self, part: Part, leaves: list[Any], form: Any) -> _Recording | None:
        where = self._private.engine.parameters[0].device
        state = torch.cuda.get_rng_state(where)
        try:
            return self._record(part, leaves, form)
        except DiminuendoError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:
            torch.cuda.synchronize()
            _renew_generator(where, state)
            for parameter in self._private.engine.parameters:
                parameter.grad = None  # memory that nothing was written to
            self._give_up(f"they could not be recorded ({str(error).splitlines()[0][:200]})")
            return None

    def _record(self, part: Part, leaves: list[Any], form: Any) -> _Recording:
        private = self._private
        where = private.engine.parameters[0].device
        if self._memory is None:
            words = ORDER_BYTES // _WORD + 1 + len(self._optimizer.param_groups)
            self._memory = torch.zeros(words, dtype=torch.int64, device=where)
            self._pool = torch.cuda.graph_pool_handle()
        static = [
            torch.empty_like(leaf, device=where) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        inputs = [leaf for leaf in static if isinstance(leaf, Tensor)]
        for leaf, given in zip(inputs, _tensors(leaves), strict=True):
            leaf.copy_(given)
        order = self._memory[: ORDER_BYTES // _WORD]
        count = self._memory[ORDER_BYTES // _WORD]
        mask = None
        self._update.prepare()
        graph = torch.cuda.CUDAGraph()
        engine, probing, took = private.engine, private.engine.probing, private._part
        total = private.mechanism.recorded_sum(order)
        if part.parts > 1:
            total = self._parts_sum = self._parts_sum or total
            total.buffers(part.parts)
        if private._certified:
            self._gradient = total.lie_in(self._gradient)
        private.guard.watch(part.size)
        private.released = () if private.policy is None else private.released
        engine.probing = False
        engine.draw_with(order[VECTORS_KEY // _WORD :])
        torch.clear_autocast_cache()  # a recording is to make its own casts, and keep them
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                if part.drawn is not None:
                    mask = torch.arange(part.size, device=where) < count
                # rows that are not sent anew are not to be written on: a copy of them may be
                sent_once = part.drawn is None and part.parts == 1
                rows = _copied(static) if sent_once else static
                losses = self._losses(*_whole(rows, form))
                engine.check_losses(losses)
                private.guard.check(losses, part.size)
                found = engine.clipped_sum(
                    losses,
                    private._clip_of(private.step),
                    total.buffers(part.parts),
                    certify=private._certified,
                    share=1 / part.parts,
                    real=mask,
                    places=total.places(part.parts),
                )
                private.guard.refuse_writes()
                shown = losses.detach()
                gradients: list[Tensor] = []
                if part.parts == 1:
                    total.take(found.sums)
                    gradients = self._finish_in(total)
            if part.parts > 1 and self._finish is None:
                self._finish = self._record_finish(total)
        finally:
            torch.clear_autocast_cache()
            engine.probing = probing
            engine.draw_with(None)
            private._part = took
        return _Recording(graph, inputs, shown, gradients, engine.use_of(losses))

    def _record_finish(self, total: DeviceSum) -> _Recording:
        """What comes after the last of several parts."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            gradients = self._finish_in(total)
        return _Recording(graph, [], None, gradients, None)

    def _finish_in(self, total: DeviceSum) -> list[Tensor]:
        """Release and update, while recording; the gradient."""
        assert self._memory is not None
        gradients = total.release()
        self._private._hand_on(gradients)
        if self._update.recordable:
            self._update.apply(self._rates(self._memory))
            self._optimizer.zero_grad(set_to_none=True)
        return gradients

    def _rates(self, memory: Tensor) -> list[Tensor]:
        """The learning rates of the optimizer's groups in the device's memory."""
        return list(memory[ORDER_BYTES // _WORD + 1 :].view(torch.float64).float().unbind())

    # Replaying

    def _replay(self, recording: _Recording, part: Part, leaves: list[Any]) -> Tensor:
        private = self._private
        private.begin()
        private._part = None
        order = private._open_recorded(part)
        with private._or_abandon():
            self._send(recording, part, leaves, order)
            if part.first and part.parts > 1:
                assert self._parts_sum is not None
                self._parts_sum.clear()
            recording.graph.replay()
            private.engine.count_use(recording.use)
            private._parts_taken += 1
            if part.last:
                last = recording if part.parts == 1 else self._finish
                assert last is not None
                if part.parts > 1:
                    last.graph.replay()
                self._end(last)
        if part.last:
            private._open = None
        assert recording.losses is not None
        return recording.losses

    def _send(
        self, recording: _Recording, part: Part, leaves: list[Any], order: bytes | None
    ) -> None:
        """Rows, their number, and with the first part what the step's release needs."""
        for static, given in zip(recording.inputs, _tensors(leaves), strict=True):
            if part.drawn is not None or part.parts > 1 or not self._is_there(static, given):
                static.copy_(given if given.is_cuda else pinned(given), non_blocking=True)
        assert self._memory is not None
        drawn = part.size if part.drawn is None else part.drawn
        after = struct.pack(f"<q{len(self._optimizer.param_groups)}d", drawn, *self._update.rates())
        self._order = order or self._order
        content = torch.frombuffer(bytearray(self._order + after), dtype=torch.int64)
        self._memory.copy_(pinned(content), non_blocking=True)

    def _is_there(self, static: Tensor, given: Tensor) -> bool:
        """Whether these very rows were copied there before: a full batch is the same every time."""
        now = (given, given._version)
        known = self._given.get(static.data_ptr())
        self._given[static.data_ptr()] = now
        return known is not None and known[0] is given and known[1] == now[1]

    def _end(self, recording: _Recording) -> None:
        """The step is over on the host, too."""
        private = self._private
        if private.watch is not None:
            private.watch.look(self._optimizer, private.step + 1)
        private._taken(recording.gradients, watched=False)
        if self._update.recordable:
            self._update.count()
        else:
            private._hand_on(recording.gradients)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)


@contextlib.contextmanager
def as_recorded() -> Iterator[None]:
    """Models that ask PyTorch whether they are being recorded are told so: transformers' decoders
    look at values on the host otherwise, to choose a kind of mask."""
    asked = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = asked


def _forgetting(captured: Captured) -> Callable[[torch.optim.Optimizer], None]:
    """For an optimizer that loads a state, and with it other tensors than were recorded."""
    own = weakref.ref(captured)

    def loaded(_: torch.optim.Optimizer) -> None:
        there = own()
        if there is not None:
            there._forget()

    return loaded


def _flat(batch: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The leaves of a batch, and its form: of tensors alone, their number."""
    if all(isinstance(part, Tensor) for part in batch):
        return list(batch), len(batch)
    leaves, form = _pytree.tree_flatten(batch)
    return leaves, form


def _copied(leaves: list[Any]) -> list[Any]:
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _whole(leaves: list[Any], form: Any) -> Any:
    return leaves if isinstance(form, int) else _pytree.tree_unflatten(leaves, form)


def _renew_generator(where: torch.device, state: Tensor) -> None:
    """Give the device a generator that knows nothing of a recording that failed."""
    fresh = torch.Generator(where)
    fresh.set_state(state)
    index = torch.cuda.current_device() if where.index is None else where.index
    torch.cuda.default_generators[index].graphsafe_set_state(fresh.graphsafe_get_state())


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _reason(private: PrivateGradients) -> str | None:
    """Why steps of this model cannot be recorded at all."""
    parameters = private.engine.parameters
    if not parameters[0].is_cuda:
        return "the model is not on a GPU"
    if not device.serves(parameters, private.mechanism.noise):
        return "Triton, which comes with PyTorch for CUDA, is not there"
    if private.group.world > 1:
        return "several ranks share a step"
    if private.sampler.buckets is None and min(private.plan.rates.tolist()) < 1:
        return "sampled batches have other sizes in every step: PrivateGradients(..., pad=True)"
    return None
