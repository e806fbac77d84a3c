"""Rounds of Flower as steps of a plan: clients are clipped, drawn and paid for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="make test-adapters has flwr")

from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAdam, FedAvg, FedProx, Krum

import diminuendo as dim
from diminuendo import Budget, BudgetRefused, InputError, Ledger, UsageError
from diminuendo.adapters.flower import PrivateStrategy
from diminuendo.planning import Plan

CLIENTS, SIZE = 12, 5
TaskIdentity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
Client = Callable[[int, Message], Any]

logging.getLogger("flwr").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def _within_a_run() -> Iterator[None]:
    """Messages of Flower are made within a run."""
    for name in ("_run_id", "_task_id", "_node_id"):
        setattr(TaskIdentity, name, 1)
    yield
    for name in ("_run_id", "_task_id", "_node_id"):
        setattr(TaskIdentity, name, None)


def planned(steps: int = 3, rate: float = 0.5, clip: float = 1.0, epsilon: float = 8.0) -> Plan:
    return dim.plan(
        Budget(epsilon=epsilon, delta=1e-5), examples=CLIENTS, parameters=SIZE, steps=steps,
        sampling_rate=rate, gamma=0.98, clip=clip,
    )  # fmt: skip


def start_arrays() -> ArrayRecord:
    return ArrayRecord(
        {
            "w": Array(np.zeros(SIZE, dtype=np.float32)),
            "counter": Array(np.array([7], dtype=np.int64)),
        }
    )


def answer(message: Message, update: Any, **metrics: float) -> Message:
    arrays = message.content["arrays"]
    moved = np.asarray(arrays["w"].numpy() + update)
    record = ArrayRecord({"w": Array(moved), "counter": Array(np.array([99]))})
    content = {"arrays": record, "metrics": MetricRecord({"num-examples": 5, **metrics})}
    return Message(content=RecordDict(content), reply_to=message)


class InProcess(Grid):  # type: ignore[misc]
    """A grid without a network: every message is answered at once."""

    def __init__(self, client: Client, nodes: int = CLIENTS) -> None:
        self.client, self.nodes = client, list(range(1, nodes + 1))
        self.asked: list[list[int]] = []

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        del timeout
        replies = []
        self.asked.append([])
        for message in messages:
            node = message.metadata.dst_node_id
            self.asked[-1].append(node)
            replies += self.client(node, message)
        return replies

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *_: Any, **__: Any) -> Any: ...
    def push_messages(self, messages: Any) -> Any: ...
    def pull_messages(self, message_ids: Any) -> Any: ...


def ones(_: int, message: Message) -> list[Message]:
    return [answer(message, np.ones(SIZE, dtype=np.float32) / SIZE**0.5, train_loss=0.5)]


def run(strategy: PrivateStrategy, client: Client = ones, **more: Any) -> tuple[Any, InProcess]:
    grid = InProcess(client, more.pop("nodes", CLIENTS))
    return strategy.start(grid=grid, initial_arrays=start_arrays(), **more), grid


class Zero:
    """No noise, to see the sum."""

    def add_noise(self, total: torch.Tensor, **_: Any) -> torch.Tensor:
        return total


def quiet(strategy: PrivateStrategy) -> PrivateStrategy:
    strategy._noise = Zero()  # type: ignore[assignment]
    return strategy


def test_the_sum_of_clipped_updates_over_the_expected_number() -> None:
    def client(node: int, message: Message) -> list[Message]:
        return [answer(message, (3.0 if node % 2 else 0.1) * np.eye(SIZE)[0])]

    strategy = quiet(PrivateStrategy(FedAvg(), planned(steps=1), seed=1))
    result, grid = run(strategy, client)
    drawn = grid.asked[0]
    assert 0 < len(drawn) < CLIENTS
    total = sum(1.0 if node % 2 else 0.1 for node in drawn)
    assert result.arrays["w"].numpy()[0] == pytest.approx(total / 6, rel=1e-4)
    assert not result.arrays["w"].numpy()[1:].any()
    assert result.arrays["counter"].numpy().tolist() == [7]  # what is not a number stays


@pytest.mark.parametrize(
    "bad",
    [
        lambda message: [],
        lambda message: [Message(error=Error(code=1, reason="died"), reply_to=message)],
        lambda message: [answer(message, np.full(SIZE, np.nan))],
        lambda message: [answer(message, np.full(SIZE, np.inf))],
        lambda message: [answer(message, np.ones((2, SIZE)))],
        lambda message: [Message(content=RecordDict(), reply_to=message)],
        lambda message: [answer(message, np.ones(SIZE)), answer(message, 9 * np.ones(SIZE))],
    ],
    ids=["silent", "error", "nan", "inf", "shape", "empty", "twice"],
)  # fmt: skip
def test_a_client_that_fails_counts_as_zero_and_none_counts_twice(bad: Any) -> None:
    unit = np.ones(SIZE) / SIZE**0.5

    def client(node: int, message: Message) -> list[Message]:
        return bad(message) if node == 1 else [answer(message, unit)]

    plan = planned(steps=1, rate=1.0)
    result, _ = run(quiet(PrivateStrategy(FedAvg(), plan)), client)
    moved = result.arrays["w"].numpy()
    twice = len(bad(Message(RecordDict({"arrays": start_arrays()}), 1, "train"))) == 2
    assert moved == pytest.approx(unit * (12 if twice else 11) / 12, rel=1e-4)


def test_no_update_is_longer_than_the_clip_norm() -> None:
    strategy = PrivateStrategy(FedAvg(), planned(clip=0.7))
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(40, dtype=torch.float64)
    exact = [0] * 40
    for scale in (1e-12, 1e-3, 0.5, 0.7, 1.0, 1e10, 1e150, 1e200):
        update = torch.randn(40, generator=generator, dtype=torch.float64) * scale
        clipped = strategy.clipped(update)
        units = [int(part / strategy._spacing) for part in clipped.tolist()]
        assert sum(unit**2 for unit in units) * strategy._spacing**2 <= 0.7**2
        total += clipped
        exact = [a + b for a, b in zip(exact, units, strict=True)]
    assert [part * strategy._spacing for part in exact] == total.tolist()  # to the last bit


def test_rounds_add_up_and_types_stay() -> None:
    def client(_: int, message: Message) -> list[Message]:
        assert message.content["arrays"]["w"].numpy().dtype == np.float32
        assert message.content["arrays"]["counter"].numpy().dtype == np.int64
        return ones(_, message)

    result, _ = run(quiet(PrivateStrategy(FedAvg(), planned(steps=4, rate=1.0))), client)
    assert result.arrays["w"].numpy() == pytest.approx(4 * np.ones(SIZE) / SIZE**0.5, rel=1e-3)


def test_failures_are_said_in_the_servers_log(caplog: pytest.LogCaptureFixture) -> None:
    def client(node: int, message: Message) -> list[Message]:
        return [] if node < 3 else [answer(message, np.full(SIZE, np.nan))]

    with caplog.at_level(logging.WARNING, "flwr"):
        logging.getLogger("flwr").addHandler(caplog.handler)
        try:
            run(PrivateStrategy(FedAvg(), planned(steps=1, rate=1.0)), client)
        finally:
            logging.getLogger("flwr").removeHandler(caplog.handler)
    assert "2 of 12 clients did not answer, and 10 added nothing" in caplog.text


def test_noise_is_the_plans_and_metrics_of_clients_are_dropped() -> None:
    plan = planned(steps=40, epsilon=2)
    strategy = PrivateStrategy(FedAvg(), plan)
    result, grid = run(strategy)
    assert strategy.result is not None
    assert (strategy.result.status, strategy.result.steps) == ("done", 40)
    assert (strategy.result.epsilon, strategy.result.unit) == (plan.epsilon, "client")
    assert len(grid.asked) == 80  # a round asks for training and for evaluation
    assert not any(grid.asked[1::2])
    metrics = result.train_metrics_clientapp
    assert all(set(metrics[t]) == {"noise-multiplier", "epsilon"} for t in range(1, 41))
    assert metrics[40]["epsilon"] == plan.epsilon
    assert [metrics[t]["noise-multiplier"] for t in range(1, 41)] == plan.sigmas.tolist()
    assert not result.evaluate_metrics_clientapp
    # What the noise adds up to in five coordinates: χ² with 5 degrees of freedom, whose
    # 1 − 10⁻⁷ quantile is 41.1; the clients add at most 40 · 12 / 6 in each.
    deviation = float(np.sqrt((plan.sigmas**2).sum()) / 6)
    mean = sum(map(len, grid.asked)) / 6 / SIZE**0.5
    off = (result.arrays["w"].numpy() - mean) / deviation
    assert 1e-3 < (off**2).sum() < 42


def test_each_client_is_drawn_with_the_plans_rate() -> None:
    plan = planned(steps=300, rate=0.25, epsilon=30)
    _, grid = run(PrivateStrategy(FedAvg(), plan))
    sizes = [len(asked) for asked in grid.asked[::2]]
    counts = np.bincount(np.concatenate(grid.asked[::2]).astype(int), minlength=13)[1:]
    # Binomial(300, ¼) leaves 75 ± 45 with probability below 3e-9; sizes differ.
    assert (abs(counts - 75) < 45).all()
    assert min(sizes) != max(sizes)
    assert 0 in sizes  # and an empty draw is still a round: (3/4)^12 = 0.03 in each of 300
    assert len(sizes) == 300


def test_server_optimizers_and_configurations_are_post_processing() -> None:
    seen = []

    def client(_: int, message: Message) -> list[Message]:
        seen.append(message.content["config"]["proximal-mu"])
        return ones(_, message)

    run(PrivateStrategy(FedProx(proximal_mu=0.3), planned()), client)
    assert set(seen) == {0.3}
    adam = PrivateStrategy(FedAdam(eta=0.1), planned(rate=1.0))
    result, _ = run(adam)
    assert 0 < np.abs(result.arrays["w"].numpy()).max() < 1
    inner = FedAvg(fraction_train=0.5)
    run(PrivateStrategy(inner, planned()))
    assert inner.fraction_train == 0.5


def test_a_ledger_is_asked_and_a_refusal_stops_the_rounds(tmp_path: Path) -> None:
    plan = planned(rate=1.0)
    with Ledger(str(tmp_path / "l.sqlite")) as ledger:
        ledger.create("rows", plan.budget)
        ledger.create("clients", plan.budget, unit="client")
        with pytest.raises(InputError, match="client"):
            PrivateStrategy(FedAvg(), plan, spending=ledger.pay("rows", plan))
        with pytest.raises(InputError, match="seed"):
            PrivateStrategy(FedAvg(), plan, spending=ledger.pay("clients", plan), seed=1)
        strategy = PrivateStrategy(FedAvg(), plan, spending=ledger.pay("clients", plan))
        run(strategy)
        assert strategy.result is not None
        assert strategy.result.ledger["budget"] == "clients"
        assert [entry.status for entry in ledger.runs("clients")] == ["closed"]
        again = PrivateStrategy(FedAvg(), plan, spending=ledger.pay("clients", plan))
        grid = InProcess(ones)
        with pytest.raises(BudgetRefused):
            again.start(grid=grid, initial_arrays=start_arrays())
        assert not grid.asked


def test_the_budget_is_charged_before_anything_is_released() -> None:
    strategy = PrivateStrategy(FedAvg(), planned(steps=2))
    order: list[str] = []
    request, add = strategy.spending.request, strategy._noise.add_noise

    class Watched:
        def add_noise(self, total: torch.Tensor, **more: Any) -> torch.Tensor:
            order.append("noise")
            return add(total, **more)

    def asked(event: Any) -> None:
        order.append("request")
        request(event)

    strategy.spending.request = asked  # type: ignore[method-assign]
    strategy._noise = Watched()  # type: ignore[assignment]
    run(strategy)
    assert order == ["request", "noise"] * 2


def test_fewer_rounds_more_rounds_and_a_crash(tmp_path: Path) -> None:
    strategy = PrivateStrategy(FedAvg(), planned(5))
    run(strategy, num_rounds=2)
    assert strategy.result is not None
    assert (strategy.result.status, strategy.result.steps) == ("interrupted", 2)
    result, _ = run(strategy, num_rounds=100)
    assert len(result.train_metrics_clientapp) == 3
    with pytest.raises(UsageError, match="Every round"):
        run(strategy)

    journal = tmp_path / "journal.json"

    def dies(_: int, message: Message) -> list[Message]:
        if message.content["config"]["server-round"] == 3:
            raise KeyboardInterrupt
        return ones(_, message)

    plan = planned(5, rate=1.0)
    with pytest.raises(KeyboardInterrupt):
        run(PrivateStrategy(FedAvg(), plan, journal=journal), dies)
    on = PrivateStrategy(FedAvg(), plan, journal=journal)
    result, _ = run(on)
    assert len(result.train_metrics_clientapp) == 3
    assert on.result is not None
    assert (on.result.steps, on.result.lost) == (5, 2)
    assert sum(event.count for event in on.result.events) == 5


def test_who_is_not_connected_counts_as_zero() -> None:
    plan = planned(steps=1, rate=1.0)
    result, _ = run(quiet(PrivateStrategy(FedAvg(), plan, wait_for=4)), nodes=6)
    assert result.arrays["w"].numpy() == pytest.approx(np.ones(SIZE) / SIZE**0.5 / 2, rel=1e-4)
    with pytest.raises(InputError, match="13"):
        run(PrivateStrategy(FedAvg(), plan), nodes=13)
    with pytest.raises(InputError, match="wait_for"):
        PrivateStrategy(FedAvg(), plan, wait_for=13)


def test_strategies_that_choose_for_themselves_are_refused() -> None:
    class Own(FedAvg):  # type: ignore[misc]
        def configure_train(self, *args: Any) -> list[Message]:
            return list(super().configure_train(*args)) * 2

    with pytest.raises(UsageError, match="other clients"):
        run(PrivateStrategy(Own(), planned(rate=1.0)))
    for given in (None, 3, Krum):
        with pytest.raises(InputError, match="strategy"):
            PrivateStrategy(given, planned())
    with pytest.raises(InputError, match="plan"):
        PrivateStrategy(FedAvg(), None)  # type: ignore[arg-type]


def test_what_clients_report_on_request() -> None:
    def client(_: int, message: Message) -> list[Message]:
        if message.metadata.message_type.startswith("train"):
            return ones(_, message)
        metrics = MetricRecord({"num-examples": 2, "accuracy": 0.5})
        return [Message(content=RecordDict({"metrics": metrics}), reply_to=message)]

    result, _ = run(PrivateStrategy(FedAvg(), planned(), reveal_client_metrics=True), client)
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == 0.5


@pytest.mark.skipif(
    pytest.importorskip("importlib.util").find_spec("ray") is None,
    reason="make test-adapters has ray, which Flower's simulation needs",
)
def test_in_flowers_simulation(tmp_path: Path) -> None:
    from flwr.simulation import run_simulation

    client_app = ClientApp()

    @client_app.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        node = int(context.node_config["partition-id"])
        if node == 3:
            raise RuntimeError("this client always fails")
        arrays = message.content["arrays"]
        moved = ArrayRecord({"w": Array(arrays["w"].numpy() + np.float32(node))})
        content = {"arrays": moved, "metrics": MetricRecord({"num-examples": node + 1})}
        return Message(content=RecordDict(content), reply_to=message)

    server_app = ServerApp()
    plan = planned(steps=2)

    @server_app.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        del context
        strategy = PrivateStrategy(FedAvg(), plan)
        arrays = ArrayRecord({"w": Array(np.zeros(SIZE, dtype=np.float32))})
        result = strategy.start(grid=grid, initial_arrays=arrays, train_config=ConfigRecord())
        assert strategy.result is not None
        text = f"{strategy.result.status} {strategy.result.steps} {strategy.result.epsilon}"
        (tmp_path / "result").write_text(text)
        np.save(tmp_path / "w.npy", result.arrays["w"].numpy())

    run_simulation(
        server_app=server_app,
        client_app=client_app,
        num_supernodes=CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0}},
    )
    status, steps, epsilon = (tmp_path / "result").read_text().split()
    assert (status, int(steps), float(epsilon)) == ("done", 2, plan.epsilon)
    assert np.isfinite(np.load(tmp_path / "w.npy")).all()
