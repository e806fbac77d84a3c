"""What a person takes along from the page: Python, Opacus and a run file, as text.

Numbers are written so that they read back bit for bit. Every script is run in the tests.
"""

from __future__ import annotations

import json
from typing import Any

from diminuendo.page.settings import Settings
from diminuendo.planning import Plan


def scripts(settings: Settings, made: Plan) -> dict[str, str]:
    """The texts by file name; plan.json, which is long, is asked for by itself."""
    return {
        "train.py": python(settings),
        "opacus_train.py": opacus(made),
        "run.toml": run_file(settings),
    }


def python(settings: Settings) -> str:
    """The same plan, and a training loop by it."""
    relation = "" if settings.relation == "add-remove" else f', relation="{settings.relation}"'
    budget = f"dim.Budget(epsilon={settings.epsilon!r}, delta={settings.delta!r}{relation})"
    arguments = "".join(
        f"    {name}={_python(value)},\n" for name, value in settings.plan_arguments().items()
    )
    return f"""\
import diminuendo as dim
from diminuendo.training import fit

plan = dim.plan(
    {budget},
{arguments})
print(plan)

# model: your torch.nn.Module; data: your (x, y); one loss for each example
result = fit(model, data, plan, loss=loss, lr=0.1, folder="run")
"""


def opacus(made: Plan) -> str:
    """The plan's noise in an Opacus loop, from plan.json beside the script."""
    follow = ""
    if made.lr is not None:
        follow = (
            '# The noise was planned for these learning rates: use plan["lr"][t], up to a common\n'
            "# factor, as the learning rate of step t.\n"
        )
    return f"""\
import json

from opacus import PrivacyEngine
from opacus.schedulers import LambdaNoise
from torch.utils.data import DataLoader

with open("plan.json") as file:
    plan = json.load(file)
rate, sigmas = plan["sampling_rate"], plan["sigmas"]
assert len(dataset) == plan["examples"]

# Opacus samples at 1/len(loader), which must not be more often than was accounted for.
loader = DataLoader(dataset, batch_size=max(1, int(rate * len(dataset))))
assert 1 / len(loader) <= rate
model, optimizer, loader = PrivacyEngine().make_private(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    noise_multiplier=1.0,  # times what LambdaNoise says
    max_grad_norm=plan["clip"],
)
noise = LambdaNoise(optimizer, noise_lambda=lambda t: sigmas[min(t, len(sigmas) - 1)])
{follow}steps = 0
while steps < len(sigmas):
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        noise.step()
        steps += 1
        if steps == len(sigmas):
            break
# epsilon of these steps, certified by diminuendo: {made.epsilon!r} at delta = {made.budget.delta!r}
"""


def run_file(settings: Settings) -> str:
    """What `diminuendo train run.toml` takes."""
    relation = "" if settings.relation == "add-remove" else f'relation = "{settings.relation}"\n'
    arguments = "".join(
        f"{name} = {_toml(value)}\n" for name, value in settings.plan_arguments().items()
    )
    return f"""\
# diminuendo train run.toml
[model]
factory = "mymodels:network"  # module:function that returns the nn.Module
[data]
path = "train.npz"  # arrays x and y
[budget]
epsilon = {settings.epsilon!r}
delta = {_toml(settings.delta)}
{relation}[plan]
{arguments}[training]
loss = "torch.nn:CrossEntropyLoss"
lr = 0.1
[output]
folder = "run"
"""


def _python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _toml(value: Any) -> str:
    """Python's numbers, strings and lists as TOML writes them."""
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(value) if isinstance(value, str) else repr(value)
