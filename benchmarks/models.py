"""Time and memory of a private gradient beside the plain one, on models of transformers.

    python benchmarks/models.py                    # on a GPU where there is one
    python benchmarks/models.py --models gpt2 --rounds 20 --no-opacus

BERT-base, GPT-2, ViT-B/16 and a decoder of 218 million parameters shaped like Llama, with random
weights, in bfloat16 autocast; all parameters trained, or LoRA of rank 8 on the attention. Eager
steps are gradients alone; recorded ones, on a GPU, are whole steps with the update by SGD. One kind
of step after the other, each warmed up; times are medians, ratios those of medians to the plain
eager step, peaks those of the device, first steps included. Without a GPU the models are small and
only show that everything runs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import diminuendo as dim
from diminuendo.training import PrivateGradients
from diminuendo.training.clipping import Engine, Flat

Loss = Callable[[nn.Module], Tensor]
WARM = 6


def bert(small: bool, device: str) -> tuple[nn.Module, Loss]:
    """A sequence classifier on 32 texts of 128 tokens."""
    from transformers import BertConfig, BertForSequenceClassification

    options = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = BertConfig(num_labels=2, **(options if small else {}))
    model = BertForSequenceClassification(config).to(device)
    ids = torch.randint(5, 1000, (4, 16) if small else (32, 128), device=device)
    labels = torch.arange(len(ids), device=device) % 2
    return model, lambda m: F.cross_entropy(m(input_ids=ids).logits, labels, reduction="none")


def _next_token(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids).logits[:, :-1]
    each = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return each.view(len(ids), -1).mean(1)


def gpt2(small: bool, device: str) -> tuple[nn.Module, Loss]:
    """A language model on 16 texts of 256 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    options = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000}
    config = GPT2Config(use_cache=False, **(options if small else {}))
    model = GPT2LMHeadModel(config).to(device)
    ids = torch.randint(5, 1000, (4, 16) if small else (16, 256), device=device)
    return model, lambda m: _next_token(m, ids)


def vit(small: bool, device: str) -> tuple[nn.Module, Loss]:
    """An image classifier on 32 images of 224 x 224."""
    from transformers import ViTConfig, ViTForImageClassification

    options = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    options |= {"intermediate_size": 128, "image_size": 32, "patch_size": 8}
    config = ViTConfig(num_labels=10, **(options if small else {}))
    model = ViTForImageClassification(config).to(device)
    side = config.image_size
    x = torch.randn(4 if small else 32, 3, side, side, device=device)
    labels = torch.arange(len(x), device=device) % 10
    return model, lambda m: F.cross_entropy(m(pixel_values=x).logits, labels, reduction="none")


def llama(small: bool, device: str) -> tuple[nn.Module, Loss]:
    """A decoder on 8 texts of 512 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = 64 if small else 1024
    config = LlamaConfig(
        vocab_size=1000 if small else 32000,
        hidden_size=size,
        intermediate_size=size * 11 // 4,
        num_hidden_layers=2 if small else 12,
        num_attention_heads=size // 64 if not small else 4,
        num_key_value_heads=size // 64 if not small else 4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    ids = torch.randint(5, 1000, (4, 16) if small else (8, 512), device=device)
    return model, lambda m: _next_token(m, ids)


MODELS = {"bert": bert, "gpt2": gpt2, "vit": vit, "llama": llama}
ATTENTION = ("query", "value", "q_proj", "v_proj", "c_attn")


class LoRA(nn.Module):
    """A frozen projection and a trained product of two thin matrices beside it."""

    def __init__(self, base: Any, rank: int = 8) -> None:
        super().__init__()
        rows, cols = base.weight.shape
        if isinstance(base, nn.Linear):
            rows, cols = cols, rows
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(rows, rank, bias=False), nn.Linear(rank, cols, bias=False)
        self.to(base.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + self.up(self.down(x))
        return adapted


def with_lora(model: nn.Module) -> nn.Module:
    """All parameters frozen but those of LoRA on the attention's projections."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in ATTENTION and hasattr(child, "weight"):
                setattr(module, name, LoRA(child))
    return model


@contextlib.contextmanager
def prepared(kind: str, model: nn.Module, loss: Loss, device: str) -> Iterator[Callable[[], None]]:
    """One step of a kind: the gradient, without the optimiser's update."""

    def losses(model: nn.Module = model) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return loss(model).float()

    params = [param for param in model.parameters() if param.requires_grad]

    def clear() -> None:
        for param in params:
            param.grad = None

    if kind == "plain":

        def plain() -> None:
            clear()
            losses().mean().backward()

        yield plain
        clear()
        return
    if kind == "private":
        with Engine(model) as engine:

            def private() -> None:
                clear()
                for param, total in zip(
                    params, engine.clipped_sum(losses(), Flat(1.0)).sums, strict=True
                ):
                    param.grad = total

            yield private
        clear()
        return
    if kind.startswith("recorded"):
        with recorded(kind, model, losses, params) as step:
            yield step
        clear()
        return
    from opacus.grad_sample import GradSampleModule
    from opacus.grad_sample import GradSampleModuleFastGradientClipping as Ghost
    from opacus.optimizers import DPOptimizer

    common = {"batch_first": True, "loss_reduction": "sum"}
    wrapped = (
        Ghost(model, **common) if kind == "opacus ghost" else GradSampleModule(model, **common)
    )
    optimiser = DPOptimizer(
        torch.optim.SGD(params, lr=0.0), noise_multiplier=0.0, max_grad_norm=1.0,
        expected_batch_size=1, loss_reduction="sum",
    )  # fmt: skip

    def opacus() -> None:
        optimiser.zero_grad()
        each = losses(wrapped)
        if kind == "opacus ghost":
            wrapped.disable_hooks()
            wrapped.enable_hooks()
            each.sum().backward(retain_graph=True)
            factors = wrapped.get_clipping_coef()
            wrapped.disable_hooks()
            clear()
            (each * factors).sum().backward()
            wrapped.enable_hooks()
        else:
            each.sum().backward()
            optimiser.clip_and_accumulate()

    try:
        yield opacus
    finally:
        wrapped.remove_hooks()
        wrapped._clean_up_attributes() if hasattr(wrapped, "_clean_up_attributes") else None
        clear()


@contextlib.contextmanager
def recorded(
    kind: str, model: nn.Module, losses: Callable[[], Tensor], params: list[nn.Parameter]
) -> Iterator[Callable[[], None]]:
    """A whole step that is replayed: plain, or private with exact or fast noise."""
    optimizer = torch.optim.SGD(params, lr=1e-6)
    if kind == "recorded plain":

        def step() -> None:
            optimizer.zero_grad()
            losses().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        yield graph.replay
        return
    with torch.no_grad():
        examples = len(losses())
    plan = dim.plan(
        dim.Budget(epsilon=1, delta=1e-5), examples=examples, parameters=1, steps=100_000,
        schedule="uniform",
    )  # fmt: skip
    private = PrivateGradients(model, plan, noise="fast" if kind == "recorded fast" else "exact")
    take = private.captured(losses, optimizer)

    def taken() -> None:
        take()
        if take.why_not is not None:
            raise RuntimeError(f"not recorded: {take.why_not}")

    try:
        yield taken
    finally:
        private.close()


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_of(step: Callable[[], None], device: str) -> float:
    """Wall-clock seconds of one step, the device's work included."""
    _sync(device)
    start = time.perf_counter()
    step()
    _sync(device)
    return time.perf_counter() - start


def _forget_peak(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> float:
    """MiB that the device held at most."""
    return torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0


def measure(name: str, lora: bool, kinds: list[str], rounds: int, device: str) -> None:
    """One line for each kind of step."""
    torch.manual_seed(0)
    model, loss = MODELS[name](device != "cuda", device)
    model = (with_lora(model) if lora else model).train()
    title = f"{name}{' + LoRA' if lora else ''}"
    plain_seconds = plain_peak = 0.0
    for kind in kinds:
        _forget_peak(device)
        try:
            with prepared(kind, model, loss, device) as step:
                for _ in range(WARM):
                    step()
                peak = _peak(device)
                times = [seconds_of(step, device) for _ in range(rounds)]
        except Exception as error:  # a contender that does not run is a result
            print(f"{title:<14} {kind:<14} {type(error).__name__}: {str(error)[:90]}", flush=True)
            gc.collect()
            continue
        middle = statistics.median(times)
        if kind == "plain":
            plain_seconds, plain_peak = middle, peak
        ratio = middle / plain_seconds
        more = f"{peak:9.0f} MiB  x{peak / plain_peak:5.2f}" if plain_peak else ""
        print(f"{title:<14} {kind:<14} {middle * 1e3:9.1f} ms  x{ratio:5.2f}  {more}", flush=True)


def _torchvision_of_another_torch() -> None:
    """Let transformers' vision models be imported beside a torchvision without its own kernels,
    such as PyPI's beside a torch for the CPU: they use none of them."""
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
    except ImportError:
        pass


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-opacus", action="store_true")
    chosen = parser.parse_args()
    missing = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{' and '.join(missing)} not installed: pip install -e '.[models]'")
        return
    _torchvision_of_another_torch()
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    kinds = ["plain", "private"]
    if device == "cuda":
        kinds += ["recorded plain", "recorded fast", "recorded exact"]
    if not chosen.no_opacus and importlib.util.find_spec("opacus") is not None:
        kinds += ["opacus hooks", "opacus ghost"]
    for name in chosen.models:
        for lora in (False, True):
            measure(name, lora, kinds, chosen.rounds, device)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
