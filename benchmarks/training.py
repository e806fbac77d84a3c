"""Time and memory of private training steps beside plain ones, and beside Opacus' four modes.

    python benchmarks/training.py                  # on the CPU; on a GPU where there is one
    python benchmarks/training.py --workloads AD --rounds 100 --no-opacus
    python benchmarks/training.py --before 3       # as in a training loop, not one step in turn
    python benchmarks/training.py --whole          # whole steps and memory alone

Every round times each variant once, in a rotating order, in one process; the ratios are medians
over rounds of (variant / plain in the same round), with the quartiles beside them. On a GPU, where
TF32 is allowed and K runs in bfloat16, a time is that of several steps launched one after the
other, as in training, where the host does not wait between steps; and whole steps are compared
twice: with the plain step run eagerly, and with the plain step recorded as a CUDA graph, as private
steps are.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import diminuendo as dim
from diminuendo.training import PrivateGradients
from diminuendo.training.clipping import Engine, Flat
from diminuendo.training.mechanism import ExactNoise, NoiseName
from diminuendo.training.mechanism.keys import Keys

Step = Callable[[], object]


class Block(nn.Module):
    """A residual block with group normalisation."""

    def __init__(self, cin: int, cout: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(8, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, cout)
        same = stride == 1 and cin == cout
        self.skip = nn.Identity() if same else nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.skip(x))


class Transformer(nn.Module):
    """Embedding, encoder layers, mean over tokens, classification head."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.head(self.encoder(self.embed(tokens)).mean(1))
        return scores


class Decoder(nn.Module):
    """Shaped like Llama: rotary attention, gated units, no biases; the mean loss of a text."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(DecoderLayer(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x))[:, :-1]
        each = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return each.view(len(tokens), -1).float().mean(1)


class DecoderLayer(nn.Module):
    """Attention and a gated network, each after a normalisation."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (part(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv)
        out = F.scaled_dot_product_attention(_turned(q), _turned(k), v, is_causal=True)
        x = x + self.o(out.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]

    @property
    def qkv(self) -> tuple[nn.Module, nn.Module, nn.Module]:
        return self.q, self.k, self.v


def _turned(x: Tensor) -> Tensor:
    """Rotary positions."""
    half = x.shape[3] // 2
    speed = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.outer(torch.arange(x.shape[2], device=x.device), speed)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), 3)


def residual(cin: int, stages: list[tuple[int, int]]) -> nn.Module:
    """A residual network of blocks (channels, stride); E is WideResNet-16-4's layout."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, cin, 3, 1, 1, bias=False),
        nn.GroupNorm(8, cin),
        nn.ReLU(),
    ]
    for cout, stride in stages:
        layers.append(Block(cin, cout, stride))
        cin = cout
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 10))


def workload(name: str, device: str = "cpu") -> tuple[nn.Module, Tensor, Tensor]:
    """Model, inputs and labels."""
    torch.manual_seed(0)
    model: nn.Module
    if name == "A":
        model = nn.Sequential(nn.Linear(60, 1000), nn.ReLU(), nn.Linear(1000, 10))
        x = torch.randn(1000, 60)
    elif name == "B":
        model = nn.Sequential(
            nn.Conv2d(1, 16, 8, 2, 3),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Conv2d(16, 32, 4, 2),
            nn.ReLU(),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.Linear(512, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )
        x = torch.randn(256, 1, 28, 28)
    elif name == "C":
        model = residual(16, [(16, 1)] * 3 + [(32, 2), (32, 1), (32, 1), (64, 2), (64, 1), (64, 1)])
        x = torch.randn(64, 3, 32, 32)
    elif name == "D":
        model = Transformer(1000, 128, 4, 2)
        x = torch.randint(0, 1000, (64, 64))
    elif name == "E":
        model = residual(16, [(64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)])
        x = torch.randn(512, 3, 32, 32)
    elif name == "F":
        model = Transformer(8000, 512, 8, 6)
        x = torch.randint(0, 8000, (64, 128))
    else:
        model = Decoder(32000, 1024, 16, 12, 2816)
        x = torch.randint(0, 32000, (16, 256))
    y = torch.randint(0, 10, (x.shape[0],))
    return model.to(device), x.to(device), y.to(device)


def losses_of(name: str, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One loss for each example."""
    if name != "K":
        return F.cross_entropy(model(x), y, reduction="none")
    with torch.autocast(x.device.type, torch.bfloat16):
        losses: Tensor = model(x)
    return losses


def plain_step(name: str, device: str, update: bool = False) -> Step:
    model, x, y = workload(name, device)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimiser.zero_grad()
        losses_of(name, model, x, y).mean().backward()
        if update:
            optimiser.step()

    return step


def recorded_plain_step(name: str) -> Step:
    """The plain step with its update as a CUDA graph."""
    step = plain_step(name, "cuda", True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay() -> None:
        graph.replay()

    replay.keeps = step  # type: ignore[attr-defined]
    return replay


def recorded_step(name: str, noise: NoiseName) -> Step:
    """The whole private step, recorded and replayed."""
    model, x, y = workload(name, "cuda")
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    private = PrivateGradients(model, uniform_plan(len(x)), noise=noise)
    take = private.captured(lambda x, y: losses_of(name, model, x, y), optimiser)
    for _ in range(6):
        take(x, y)
    if take.why_not is not None:
        print(f"{name}  not recorded: {take.why_not}")

    def step() -> None:
        take(x, y)

    return step


def private_step(name: str, device: str, update: bool = False, noise: NoiseName = "exact") -> Step:
    """The clipped sum alone; with `update`, the whole of PrivateGradients and the optimiser."""
    model, x, y = workload(name, device)
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    if update:
        return whole_step(name, model, x, y, optimiser, noise)
    engine, clip = Engine(model), Flat(1.0)

    def step() -> None:
        optimiser.zero_grad()
        result = engine.clipped_sum(losses_of(name, model, x, y), clip)
        for param, total in zip(engine.parameters, result.sums, strict=True):
            param.grad = total

    return step


def uniform_plan(examples: int) -> dim.Plan:
    """Full batches, more steps than anybody measures."""
    return dim.plan(
        dim.Budget(epsilon=1, delta=1e-5),
        examples=examples,
        parameters=1,
        steps=100_000,
        schedule="uniform",
    )


def whole_step(
    name: str,
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    optimiser: torch.optim.Optimizer,
    noise: NoiseName,
) -> Step:
    """Draw, request, clip, sum, noise, divide, update."""
    private = PrivateGradients(model, uniform_plan(len(x)), noise=noise)
    batches = private.batches((x, y))

    def step() -> None:
        x, y = next(batches)
        private.backward(losses_of(name, model, x, y))
        optimiser.step()
        optimiser.zero_grad()

    return step


def noise_step(name: str, device: str) -> Step:
    """The noise of a step, added to a sum of zeros."""
    size = sum(parameter.numel() for parameter in workload(name)[0].parameters())
    source, steps = ExactNoise(Keys.make()), itertools.count()

    def step() -> None:
        zeros = torch.zeros(size, dtype=torch.float64, device=device)
        source.add_noise(zeros, noise_std=1.0, sensitivity=1.0, step=next(steps))

    return step


def opacus_step(name: str, mode: str, device: str) -> Step:
    """The gradient as opacus computes it: per-sample gradients, norms, clip, sum."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleExpandedWeights
    from opacus.grad_sample import GradSampleModuleFastGradientClipping as Ghost
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.validators import ModuleValidator

    model, x, y = workload(name, device)
    model = ModuleValidator.fix(model).train()
    common = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": x.shape[0]}
    if mode == "ghost":
        wrapped = Ghost(model, max_grad_norm=1.0, use_ghost_clipping=True)
        inner = torch.optim.SGD(wrapped.parameters(), lr=1e-3)
        ghost = DPOptimizerFastGradientClipping(inner, **common)
        criterion = DPLossFastGradientClipping(wrapped, ghost, nn.CrossEntropyLoss())

        def ghost_step() -> None:
            ghost.zero_grad()
            criterion(wrapped(x), y).backward()

        return ghost_step
    if mode == "ew":
        sampled = GradSampleModuleExpandedWeights(model)
    else:
        sampled = GradSampleModule(model, force_functorch=mode == "functorch")
    optimiser = DPOptimizer(torch.optim.SGD(sampled.parameters(), lr=1e-3), **common)

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(sampled(x), y).backward()
        optimiser.clip_and_accumulate()

    return step


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compare(
    steps: dict[str, Step], rounds: int, device: str, before: int = 0
) -> dict[str, list[float]]:
    """Seconds of a step of each variant in each round, after so many of the same variant, which
    leave the caches and the cores as a training loop finds them."""
    for step in steps.values():
        for _ in range(4):
            step()
    row = 1 if device == "cpu" else _row(next(iter(steps.values())))
    seconds: dict[str, list[float]] = {key: [] for key in steps}
    order = list(steps)
    gc.collect()
    for _ in range(rounds):
        order = order[1:] + order[:1]
        for key in order:
            for _ in range(before):
                steps[key]()
            _sync(device)
            start = time.perf_counter()
            for _ in range(row):
                steps[key]()
            _sync(device)
            seconds[key].append((time.perf_counter() - start) / row)
    return seconds


def _row(step: Step) -> int:
    """How many steps in a row take 20 ms on a GPU, and three at least."""
    _sync("cuda")
    start = time.perf_counter()
    step()
    _sync("cuda")
    return max(3, math.ceil(0.02 / (time.perf_counter() - start)))


def report(name: str, seconds: dict[str, list[float]], base: str) -> None:
    plain = seconds[base]
    print(f"{name}  {base:<18} {statistics.median(plain) * 1e3:9.3f} ms")
    for key, values in seconds.items():
        if key == base:
            continue
        ratios = sorted(v / p for v, p in zip(values, plain, strict=True))
        low, mid, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name}  {key:<18} {statistics.median(values) * 1e3:9.3f} ms   ratio {mid:6.3f}"
            f"   (quartiles {low:.3f} .. {high:.3f}; of the minima "
            f"{min(values) / min(plain):.3f})",
            flush=True,
        )


def memory(name: str, kind: str) -> None:
    """Peak resident memory of a process that only runs one kind of whole step, in MiB.

    From /proc, since getrusage carries the parent's peak over into a child.
    """
    step = (plain_step if kind == "plain" else private_step)(name, "cpu", True)
    for _ in range(10):
        step()
    status = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024)


def gpu_memory(name: str) -> None:
    """Peak device memory of each kind of whole step, recorded."""
    peaks = {}
    kinds: dict[str, Callable[[], Step]] = {
        "plain": lambda: recorded_plain_step(name),
        "fast": lambda: recorded_step(name, "fast"),
        "exact": lambda: recorded_step(name, "exact"),
    }
    for kind, make in kinds.items():
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # else what is measured first pays for all
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step = make()
        for _ in range(3):
            step()
        peaks[kind] = (torch.cuda.max_memory_allocated() - before) / 2**20
        del step
    print(
        f"{name}  peak device MiB, recorded: "
        + ", ".join(f"{kind} {peak:.0f}" for kind, peak in peaks.items())
        + f"; ratio fast {peaks['fast'] / peaks['plain']:.3f}, "
        f"exact {peaks['exact'] / peaks['plain']:.3f}"
    )


def cpu_memory(name: str) -> None:
    peaks = {
        kind: float(subprocess.check_output([sys.executable, __file__, "--measure", name, kind]))
        for kind in ("plain", "private")
    }
    print(
        f"{name}  peak resident MiB: plain {peaks['plain']:.0f}, private {peaks['private']:.0f}, "
        f"ratio {peaks['private'] / peaks['plain']:.3f}"
    )


def bench(name: str, device: str, rounds: int, opacus: bool, before: int) -> None:
    steps = {"plain": plain_step(name, device), "private": private_step(name, device)}
    for mode in ("hooks", "functorch", "ew", "ghost") if opacus else ():
        try:
            step = opacus_step(name, mode, device)
            step()
            steps[f"opacus {mode}"] = step
        except Exception as error:  # a peer that cannot run a workload is reported as such
            print(f"{name}  opacus {mode}: fails ({type(error).__name__}: {error})"[:150])
    report(name, compare(steps, rounds, device, before), "plain")


def bench_whole(name: str, device: str, rounds: int, before: int) -> None:
    updates = {
        "plain+SGD": plain_step(name, device, True),
        "private, whole": private_step(name, device, True),
        "private, fast noise": private_step(name, device, True, "fast"),
        "exact noise alone": noise_step(name, device),
    }
    if device == "cuda":
        del updates["private, whole"], updates["private, fast noise"]
        updates |= {
            "plain, recorded": recorded_plain_step(name),
            "private, recorded": recorded_step(name, "exact"),
            "fast, recorded": recorded_step(name, "fast"),
        }
    seconds = compare(updates, rounds, device, before)
    report(name, seconds, "plain+SGD")
    if device == "cuda":
        recorded = ("plain, recorded", "private, recorded", "fast, recorded")
        report(name, {key: seconds[key] for key in recorded}, "plain, recorded")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", default="")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--before", type=int, default=0, help="untimed steps before each timed one")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-opacus", action="store_true")
    parser.add_argument("--whole", action="store_true", help="whole steps and memory alone")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", nargs=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    warnings.simplefilter("ignore")
    if options.measure:
        memory(*options.measure)
        return
    precision = (
        "TF32 on, K in bfloat16" if options.device == "cuda" else "float32 (TF32 is for GPUs)"
    )
    print(
        f"PyTorch {torch.__version__} on {options.device}, {options.threads} threads, {precision}; "
        "ratios are to the plain step run eagerly"
    )
    for name in options.workloads or ("AEFK" if options.device == "cuda" else "ABCD"):
        memory_of = gpu_memory if options.device == "cuda" else cpu_memory
        memory_of(name)  # before there is anything else
        if not options.whole:
            bench(name, options.device, options.rounds, not options.no_opacus, options.before)
        bench_whole(name, options.device, options.rounds, options.before)


if __name__ == "__main__":
    main()
