"""Training metrics for other tools: what is forwarded, at which step, and what happens when a tool fails."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest

import tinkex
from tinkex import telemetry
from tinkex.errors import ConfigError
from tinkex.telemetry import bus
from tinkex.telemetry.events import (
    MetricsLogged,
    OperationException,
    OperationStart,
    TrainingPass,
    TrainingStep,
)
from tinkex.telemetry.forwarding import Forwarder, Sink

from ..client.helpers import datum

Points = list[tuple[int, dict[str, float]]]


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.points: Points = []

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        self.points.append((step, dict(metrics)))


def start(number: int, operation: str, model: str = "m-1") -> None:
    bus.emit(OperationStart(number, operation, 0.0, metadata={"model_id": model}))


def passed(number: int, metrics: Mapping[str, float], operation: str = "forward_backward") -> None:
    whose = {"model_id": "m-1"}
    bus.emit(TrainingPass(number, operation, 1.0, 1, 1, None, metrics, metadata=whose))


def stepped(number: int, metrics: Mapping[str, float], model: str = "m-1") -> None:
    bus.emit(TrainingStep(number, "optim_step", 1.0, metrics, metadata={"model_id": model}))


def logged(step: int, metrics: Mapping[str, float]) -> None:
    bus.emit(MetricsLogged(step, metrics, metadata={"model_id": "m-1"}))


# -- what is forwarded -----------------------------------------------------------------------------


def test_metrics_of_passes_steps_and_the_log_of_a_real_service_are_forwarded(tinkex_fake):
    client = tinkex_fake.client(telemetry_enabled=False)
    trainer = client.create_lora_training_client(tinkex_fake.base_model, rank=4)
    sink, expected = Kept(), []
    with telemetry.to_sink(sink):
        for step in (1, 2):
            both = trainer.forward_backward([datum(1, 2, 3)], "cross_entropy").result()
            updated = trainer.optim_step(tinkex.AdamParams(learning_rate=0.1)).result()
            trainer.log(step, {"reward": step / 2}).result()
            expected += [
                (step, both.metrics),
                (step, updated.metrics),
                (step, {"reward": step / 2}),
            ]
        seen = trainer.forward([datum(1, 2, 3)], "cross_entropy").result()
    expected.append((2, {f"forward/{name}": value for name, value in seen.metrics.items()}))
    assert "loss:sum" in expected[0][1]
    assert sink.points == [(step, metrics) for step, metrics in expected if metrics]
    client.close()


def test_a_late_result_belongs_to_the_step_of_its_call():
    sink = Kept()
    with telemetry.to_sink(sink):
        start(1, "forward_backward")
        start(2, "optim_step")
        start(3, "forward_backward")
        stepped(2, {"grad_norm": 1.0})
        passed(3, {"loss:sum": 3.0})
        passed(1, {"loss:sum": 4.0})
    assert sink.points == [(1, {"grad_norm": 1.0}), (2, {"loss:sum": 3.0}), (1, {"loss:sum": 4.0})]


def test_other_models_have_steps_and_names_of_their_own():
    sink = Kept()
    with telemetry.to_sink(sink, done=10):
        start(1, "optim_step")
        start(2, "optim_step", "m-2")
        stepped(2, {"grad_norm": 2.0}, "m-2")
        stepped(1, {"grad_norm": 1.0})
    assert sink.points == [(11, {"m-2/grad_norm": 2.0}), (11, {"grad_norm": 1.0})]


def test_calls_before_the_block_failed_calls_and_empty_metrics_are_not_forwarded():
    sink = Kept()
    with telemetry.to_sink(sink) as forwarder:
        stepped(1, {"grad_norm": 1.0})
        start(2, "forward_backward")
        bus.emit(OperationException(2, "forward_backward", 1.0, ValueError()))
        start(3, "optim_step")
        stepped(3, {})
        start(4, "save_state")
        assert not forwarder._calls
    stepped(3, {"grad_norm": 1.0})
    assert sink.points == []


# -- tools that fail or are slow -------------------------------------------------------------------


def test_a_sink_that_fails_is_logged_once_without_keys_and_gets_the_next_metrics(caplog):
    kept = Kept()

    def failing(step: int, metrics: Mapping[str, float]) -> None:
        if step < 3:
            raise OSError("no answer for tml-secretsecretsecret")
        kept(step, metrics)

    with caplog.at_level(logging.WARNING, "tinkex"), telemetry.to_sink(failing):
        for step in (1, 2, 3):
            logged(step, {"a": 1.0})
    assert kept.points == [(3, {"a": 1.0})]
    (message,) = [record.message for record in caplog.records]
    assert "OSError: no answer" in message
    assert "secretsecret" not in message


def test_the_client_does_not_wait_for_a_slow_sink_and_the_block_does():
    may_go, kept = threading.Event(), Kept()

    def slow(step: int, metrics: Mapping[str, float]) -> None:
        assert may_go.wait(60)
        kept(step, metrics)

    with telemetry.to_sink(slow):
        for step in range(100):
            logged(step, {"a": 1.0})
        assert kept.points == []
        may_go.set()
    assert [step for step, _ in kept.points] == list(range(100))


def test_metrics_beyond_the_limit_of_the_queue_are_dropped_with_one_warning(caplog):
    may_go, taken, kept = threading.Event(), threading.Event(), Kept()

    @contextmanager
    def opened() -> Iterator[Sink]:
        def slow(step: int, metrics: Mapping[str, float]) -> None:
            taken.set()
            assert may_go.wait(60)
            kept(step, metrics)

        yield slow

    with caplog.at_level(logging.WARNING, "tinkex"), Forwarder(opened, "slow", most_waiting=2):
        logged(0, {"a": 1.0})
        assert taken.wait(60)
        for step in range(1, 6):
            logged(step, {"a": 1.0})
        may_go.set()
    assert [step for step, _ in kept.points] == [0, 1, 2]
    assert ["dropped" in record.message for record in caplog.records] == [True]


def test_the_end_of_the_block_does_not_wait_forever(caplog):
    may_go, closed = threading.Event(), []

    @contextmanager
    def opened() -> Iterator[Sink]:
        yield lambda step, metrics: may_go.wait(60)
        closed.append(True)

    with (
        caplog.at_level(logging.WARNING, "tinkex"),
        Forwarder(opened, "stuck", flush_timeout=0.01) as forwarder,
    ):
        thread = forwarder._thread
        logged(1, {"a": 1.0})
    assert "too slow" in caplog.text
    assert not closed  # still in use
    may_go.set()
    assert thread is not None
    thread.join()


def test_a_tool_that_cannot_be_closed_does_not_fail_training(caplog):
    @contextmanager
    def opened() -> Iterator[Sink]:
        yield Kept()
        raise OSError("disk full")

    with caplog.at_level(logging.WARNING, "tinkex"), Forwarder(opened, "tool"):
        pass
    assert "could not be closed: OSError: disk full" in caplog.text


def test_a_tool_that_cannot_be_opened_fails_at_once_and_leaves_no_subscription():
    @contextmanager
    def opened() -> Iterator[Sink]:
        raise OSError("no login")
        yield

    with pytest.raises(OSError, match="no login"):
        Forwarder(opened, "tool").attach()
    assert not bus.wants(MetricsLogged)


def test_a_forwarder_can_be_attached_again():
    sink = Kept()
    forwarder = telemetry.to_sink(sink)
    for step in (1, 2):
        forwarder.attach()
        assert forwarder.attach() is forwarder
        logged(step, {"a": 1.0})
        forwarder.detach()
        forwarder.detach()
    assert [step for step, _ in sink.points] == [1, 2]


# -- the tools, as their documentation describes them ----------------------------------------------


Calls = list[tuple[Any, ...]]


def recorded(calls: Calls, name: str, result: object = None) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        calls.append((name, args, options))
        return result

    return call


class Recorded:
    """Stands for a run or a writer of a tool: records its calls, and how its block ended."""

    def __init__(self, *fields: str) -> None:
        self.calls: Calls = []
        self.info = SimpleNamespace(run_id="r-1")
        for name in fields:
            setattr(self, name, recorded(self.calls, name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.calls.append(("exit", kind))


@pytest.fixture
def installed(monkeypatch):
    def install(name: str, **members: Any) -> None:
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)

    return install


def test_wandb_gets_the_step_as_a_metric_because_it_drops_lower_steps(installed):
    run = Recorded("log", "define_metric")
    asked: Calls = []
    installed("wandb", run=None, init=recorded(asked, "init", run))

    def failing_loop() -> None:
        with telemetry.to_wandb("cats", name="first"):
            logged(7, {"reward": 0.5})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_loop()
    assert asked == [("init", (), {"project": "cats", "name": "first"})]
    assert run.calls == [
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", ({"reward": 0.5, "step": 7},), {}),
        ("exit", ZeroDivisionError),  # wandb marks the run as failed
    ]


def test_active_run_of_wandb_is_used_and_stays_open(installed):
    run = Recorded("log", "define_metric")
    installed("wandb", run=run)
    with telemetry.to_wandb():
        logged(7, {"reward": 0.5})
    assert [call[0] for call in run.calls] == ["define_metric", "log"]


def test_trackio_gets_metrics_by_step_and_its_run_is_finished(installed):
    run = Recorded("log", "finish")
    asked: Calls = []
    installed("trackio", init=recorded(asked, "init", run))
    with telemetry.to_trackio("cats", name="first"):
        logged(7, {"reward": 0.5})
    assert asked == [("init", (), {"project": "cats", "name": "first"})]
    assert run.calls == [("log", ({"reward": 0.5},), {"step": 7}), ("finish", (), {})]


@pytest.mark.parametrize("active", [False, True])
def test_mlflow_gets_metrics_of_its_run_with_names_it_allows(installed, active):
    run = Recorded()
    calls: Calls = []
    installed(
        "mlflow",
        active_run=lambda: run if active else None,
        set_experiment=recorded(calls, "set_experiment"),
        start_run=recorded(calls, "start_run", run),
        log_metrics=recorded(calls, "log_metrics"),
    )
    with telemetry.to_mlflow("cats", run_name="first"):
        logged(7, {"loss:sum": 0.5, "a/b c.d-e": 1.0})
    opened = [("set_experiment", ("cats",), {}), ("start_run", (), {"run_name": "first"})]
    metrics = {"loss_sum": 0.5, "a/b c.d-e": 1.0}
    written = ("log_metrics", (metrics,), {"step": 7, "run_id": "r-1"})
    assert calls == [*([] if active else opened), written]
    assert run.calls == ([] if active else [("exit", None)])


def test_tensorboard_gets_scalars_and_is_flushed_and_closed(installed, tmp_path):
    writer = Recorded("add_scalar", "flush", "close")
    asked: Calls = []
    installed("tensorboard")
    installed("tensorboard.summary", Writer=recorded(asked, "Writer", writer))
    with telemetry.to_tensorboard(tmp_path):
        logged(7, {"a": 1.0, "b": 2.0})
    assert asked == [("Writer", (str(tmp_path),), {})]
    assert writer.calls == [
        ("add_scalar", ("a", 1.0, 7), {}),
        ("add_scalar", ("b", 2.0, 7), {}),
        ("flush", (), {}),
        ("close", (), {}),
    ]


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow", "tensorboard"])
def test_a_missing_library_is_an_error_that_says_what_to_install(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}$"):
        getattr(telemetry, f"to_{name}")("cats")
