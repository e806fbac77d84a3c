"""One loss per example for the heads of `transformers` models.

A model of `transformers` returns the mean over all labels of a batch, in which examples are mixed.
Here each example gets the mean over its own labels: for a batch of one example this is the model's
own loss, which `check_own` compares before anything is paid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diminuendo.errors import InputError

IGNORED = -100
"""The label of a token that does not count, everywhere in transformers."""

HeadLoss = Callable[[Any, Mapping[str, Any]], Tensor]
"""From a model's outputs, and the inputs with the labels, to one loss for each example."""

_OFF = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 5e-2


def _logits(outputs: Any) -> Tensor:
    logits: Tensor = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
    return logits


def _mean_over_tokens(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The mean over the labels of each example that are not ignored; 0 where all are."""
    losses = F.cross_entropy(
        logits.transpose(1, -1),
        labels,
        reduction="none",
        ignore_index=IGNORED,
        label_smoothing=smoothing,
    )
    counted = (labels != IGNORED).flatten(1).sum(1)
    return losses.flatten(1).sum(1) / counted.clamp(min=1)


def tokens(smoothing: float) -> HeadLoss:
    """A class for each token: token classification, masked and conditional generation."""

    def loss(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        return _mean_over_tokens(_logits(outputs), inputs["labels"], smoothing)

    return loss


def next_token(smoothing: float) -> HeadLoss:
    """Each token predicts the next one: causal language models."""

    def loss(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        logits = _logits(outputs)[:, :-1]
        return _mean_over_tokens(logits, inputs["labels"][:, 1:], smoothing)

    return loss


def whole(smoothing: float, regression: bool = False) -> HeadLoss:
    """A class, several classes or numbers for each example, as the labels' type and shape say.

    regression  whether several numbers are values to come close to, rather than classes
    """

    def loss(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        logits, labels = _logits(outputs), inputs["labels"]
        if not labels.is_floating_point():
            return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        if smoothing:
            raise InputError(
                "0 where labels are not classes", name="label_smoothing_factor", value=smoothing
            )
        if logits.shape[1] > 1 and not regression:
            entry = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        else:
            entry = F.mse_loss(logits, labels.view_as(logits), reduction="none")
        return entry.mean(1)

    return loss


def span(smoothing: float) -> HeadLoss:
    """Where an answer begins and ends: question answering. A place beyond the text is ignored."""

    def loss(outputs: Any, inputs: Mapping[str, Any]) -> Tensor:
        ends = []
        for logits, place in (
            (outputs["start_logits"], inputs["start_positions"]),
            (outputs["end_logits"], inputs["end_positions"]),
        ):
            width = logits.shape[1]
            known = torch.where(place.view(-1).clamp(0, width) == width, IGNORED, place.view(-1))
            ends.append(F.cross_entropy(logits, known, reduction="none", label_smoothing=smoothing))
        return (ends[0] + ends[1]) / 2

    return loss


_HEADS: dict[str, Callable[[float], HeadLoss]] = {
    "ForCausalLM": next_token,
    "LMHeadModel": next_token,
    "ForMaskedLM": tokens,
    "ForTokenClassification": tokens,
    "ForConditionalGeneration": tokens,
    "ForQuestionAnswering": span,
    "ForSequenceClassification": whole,
    "ForImageClassification": whole,
    "ForAudioClassification": whole,
    "ForVideoClassification": whole,
}


def base_of(model: nn.Module) -> nn.Module:
    """The model of transformers within a model of peft, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def for_head(model: nn.Module, smoothing: float) -> HeadLoss:
    """The loss of the model's head, by the name of its class."""
    base = base_of(model)
    names = [kind.__name__ for kind in type(base).__mro__]
    for ending, make in _HEADS.items():
        if any(name.endswith(ending) for name in names):
            problem = getattr(getattr(base, "config", None), "problem_type", None)
            if make is whole and problem == "regression":
                return whole(smoothing, regression=True)
            return make(smoothing)
    raise InputError(
        f"one whose name ends in {', '.join(_HEADS)}",
        name="the class of the model",
        value=names[0],
        remedy="For another head give loss=, a function of the model's outputs and the inputs that "
        "returns one loss for each example.",
    )


def check_own(
    model: nn.Module, loss: HeadLoss, inputs: Mapping[str, Any], without: Mapping[str, Any]
) -> None:
    """For a batch of one example the loss must be the model's own; raises where it is not.

    `without` are the inputs without labels. A model that gives no loss cannot be compared.
    """
    with torch.no_grad():
        given = model(**inputs)
        own = given.get("loss") if hasattr(given, "get") else None
        if own is None or not bool(torch.isfinite(own)):
            return
        mine = loss(model(**without), inputs)
    scale = _OFF.get(own.dtype, _COARSE)
    if torch.is_autocast_enabled(own.device.type):
        scale = _COARSE
    if mine.shape != (1,) or bool((mine[0] - own).abs() > scale * own.abs().clamp(min=1.0)):
        raise InputError(
            "the model's own where the batch is one example",
            name="the loss of an example",
            value="another",
            remedy="This model adds something to the loss of its head, or weighs it: give loss=, "
            "a function of the model's outputs and the inputs that returns one loss for each "
            "example.",
        )
