"""Subscriptions, delivery of events, and failing handlers."""

from __future__ import annotations

import os
import threading

import pytest

from tinkex.telemetry import bus
from tinkex.telemetry.events import (
    Event,
    FutureFailure,
    FutureTimeout,
    HttpEvent,
    HttpRequestException,
    HttpRequestStart,
    HttpRequestStop,
    QueueStateChange,
    Throttled,
)

pytestmark = pytest.mark.usefixtures("paused_loop")

PAUSED = QueueStateChange("r-1", "paused_capacity", "busy", metadata={"session_id": "s-1"})
STOP = HttpRequestStop(1, "GET", "/x", "session", "http://x", 0.5, 200, "ok", 0)


def test_handler_gets_the_events_it_subscribed_to(heard):
    queue, requests = heard(QueueStateChange), heard(HttpRequestStop, HttpRequestException)
    bus.emit(PAUSED)
    bus.emit(STOP)
    bus.emit(Throttled(1.0, "slow"))
    assert queue == [PAUSED]
    assert requests == [STOP]


def test_subscription_to_a_base_class_includes_derived_events(heard):
    http, failures, everything = heard(HttpEvent), heard(FutureFailure), heard()
    timeout = FutureTimeout("r-1", "Sample", 1.0, 3, None, "unknown", "APITimeoutError")
    for event in (PAUSED, STOP, timeout):
        bus.emit(event)
    assert http == [STOP]
    assert failures == [timeout]
    assert everything == [PAUSED, STOP, timeout]


def test_wants_is_true_only_for_subscribed_events(heard):
    assert not bus.wants(Event)
    heard(HttpRequestException)
    assert bus.wants(HttpRequestException)
    assert bus.wants(HttpEvent)  # a derived class has a subscriber
    assert bus.wants(Event)
    assert not bus.wants(HttpRequestStart)
    assert not bus.wants(QueueStateChange)


def test_detached_handler_gets_no_events_and_detaches_only_once():
    events: list[Event] = []
    number = bus.attach(events.append, QueueStateChange)
    other = bus.attach(events.append, QueueStateChange)
    assert bus.detach(number)
    bus.emit(PAUSED)
    assert events == [PAUSED]
    assert not bus.detach(number)
    assert bus.detach(other)
    assert not bus.wants(QueueStateChange)


def test_failing_handler_is_logged_once_and_does_not_affect_others(heard, caplog):
    def broken(event: Event) -> None:
        raise RuntimeError("my own trouble")

    number = bus.attach(broken)
    after = heard()
    bus.emit(PAUSED)
    bus.emit(STOP)
    bus.detach(number)
    assert after == [PAUSED, STOP]
    (record,) = caplog.records
    assert "broken" in record.message
    assert "my own trouble" in caplog.text


def test_a_handler_may_detach_itself_while_it_is_called():
    heard_by: list[str] = []

    def once(event: Event) -> None:
        heard_by.append("once")
        bus.detach(numbers[0])

    numbers = [bus.attach(once), bus.attach(lambda _: heard_by.append("always"))]
    bus.emit(PAUSED)
    bus.emit(PAUSED)
    bus.detach(numbers[1])
    assert heard_by == ["once", "always", "always"]


class Counter(bus.Collector):
    kinds = (HttpRequestStop,)
    counted = 0

    def count(self, kind: type[Event], events: list[bus.Unmade]) -> None:
        self.counted += len(events)


def test_early_flush_of_one_collector_does_not_stop_another_from_counting():
    with Counter() as patient, Counter() as eager:
        for _ in range(5000):
            bus.emit(STOP)
            eager.flush()
        assert (patient.counted, eager.counted) == (5000, 5000)


def test_many_threads_attach_and_detach_while_events_are_emitted(heard):
    everything = heard()
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            bus.detach(bus.attach(lambda _: None, QueueStateChange))

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(500):
        bus.emit(PAUSED)
    stop.set()
    for thread in threads:
        thread.join()
    assert len(everything) == 500


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_locks_are_released_in_a_forked_child():
    held = bus.lock()
    with held:
        child = os.fork()
        if child == 0:
            os._exit(0 if held.acquire(blocking=False) else 1)
        assert os.waitpid(child, 0)[1] == 0
