from __future__ import annotations

import threading

import pytest

from tinkex.errors import APIStatusError, ClientClosedError, NotFoundError
from tinkex.recovery import RecoveryError, RecoveryExecutor, RecoveryMonitor, RecoveryPolicy
from tinkex.telemetry.events import RecoveryDetected, RecoveryEvent, RecoveryPollError

from ..client.helpers import LOAD, until
from ..scripted import Answer
from .scripts import ASK, ENABLED, NEW, PATH, RUN, answer_restoring, run


@pytest.fixture
def monitor():
    with RecoveryMonitor(RecoveryExecutor()) as monitor:
        yield monitor
    assert monitor.runs == ()


def poll(server, clock, count):
    """Advance the clock by thirty seconds at a time until the run has been requested `count` times."""
    for number in range(1, count + 1):
        server.wait_for(ASK, number)
        if number < count:
            until(lambda: clock.sleeping == 1)
            clock.advance(30)


def test_a_healthy_run_is_not_restored(server, service, clock, monitor):
    answer_restoring(server)
    server.on(ASK, run(corrupted=False))
    future = monitor.monitor_run(RUN, service(), policy=ENABLED)
    poll(server, clock, 3)
    assert monitor.runs == (RUN,)
    assert server.asked(LOAD) == []
    assert not future.done()


def test_corrupted_run_is_restored_and_no_longer_watched(server, service, clock, monitor, heard):
    answer_restoring(server)
    server.on(ASK, run(corrupted=False), run())
    events = heard(RecoveryEvent)
    future = monitor.monitor_run(RUN, service(), policy=ENABLED, metadata={"why": "test"})
    poll(server, clock, 2)
    assert future.result(10).checkpoint == PATH
    assert monitor.runs == ()
    detected = events[0]
    assert isinstance(detected, RecoveryDetected)
    assert (detected.run_id, detected.checkpoint) == (RUN, PATH)
    assert {event.metadata["why"] for event in events} == {"test"}
    assert [event.name for event in events][-1] == "tinkex.recovery.completed"
    assert len(server.asked(ASK)) == 2  # the executor reuses the monitor's answer


def test_failed_poll_emits_an_event_and_watching_continues(server, service, clock, monitor, heard):
    answer_restoring(server)
    server.on(ASK, Answer({"detail": "who are you?"}, 401), run())
    events = heard(RecoveryPollError)
    future = monitor.monitor_run(RUN, service(), policy=ENABLED)
    poll(server, clock, 2)
    assert future.result(10).run_id == RUN
    (event,) = events
    assert isinstance(event.error, APIStatusError)
    assert event.run_id == RUN


def test_poll_interval_comes_from_the_policy(server, service, clock, monitor):
    server.on(ASK, run(corrupted=False))
    policy = RecoveryPolicy(enabled=True, poll_interval=3.0)
    monitor.monitor_run(RUN, service(), policy=policy)
    server.wait_for(ASK, 3)
    assert set(clock.slept) == {3.0}


def test_watching_can_be_stopped(server, service, clock, monitor):
    server.on(ASK, run(corrupted=False))
    future = monitor.monitor_run(RUN, service(), policy=ENABLED)
    server.wait_for(ASK)
    until(lambda: clock.sleeping == 1)
    assert monitor.stop_monitoring(RUN)
    assert not monitor.stop_monitoring(RUN)
    assert future.cancelled()
    assert monitor.runs == ()


def test_a_run_is_watched_once(server, service, clock, monitor):
    server.on(ASK, run(corrupted=False))
    client = service()
    future = monitor.monitor_run(RUN, client, policy=ENABLED)
    assert monitor.monitor_run(RUN, client, policy=ENABLED) is future


@pytest.fixture
def restoring(server, service, monitor):
    """A corrupted run that is being restored: its client and its future."""
    answer_restoring(server)
    hold = threading.Event()
    server.on(ASK, run())
    server.on(LOAD, Answer({"path": PATH, "model_id": NEW}, wait_for=hold))
    client = service()
    future = monitor.monitor_run(RUN, client, policy=ENABLED)
    server.wait_for(LOAD)
    yield client, future
    hold.set()


def test_a_run_that_is_being_restored_is_not_restored_twice(monitor, restoring):
    client, future = restoring
    assert monitor.monitor_run(RUN, client, policy=ENABLED) is future


def test_restore_in_progress_can_be_stopped(monitor, restoring):
    _, future = restoring
    assert monitor.runs == (RUN,)
    assert monitor.stop_monitoring(RUN)
    assert future.cancelled()
    until(lambda: monitor._executor.pending == ())


def test_nothing_is_watched_unless_recovery_is_enabled(server, service, monitor):
    with pytest.raises(RecoveryError) as error:
        monitor.monitor_run(RUN, service())
    assert error.value.reason == "recovery_disabled"
    assert server.requests == []


def test_watching_ends_with_the_client(server, service, monitor):
    server.on(ASK, run(corrupted=False))
    client = service(recovery=ENABLED)
    future = monitor.monitor_run(RUN, client)
    server.wait_for(ASK)
    client.close().result(10)
    with pytest.raises(ClientClosedError):
        future.result(10)
    with pytest.raises(ClientClosedError):
        monitor.monitor_run(RUN, client)
    assert monitor.runs == ()


def test_run_that_does_not_exist_is_no_longer_watched(server, service, clock, monitor, heard):
    server.on(ASK, Answer({"detail": "no such run"}, 404))
    events = heard(RecoveryPollError)
    policy = RecoveryPolicy(enabled=True, poll_interval=3.0)
    with pytest.raises(NotFoundError, match="no such run"):
        monitor.monitor_run(RUN, service(), policy=policy).result(10)
    assert len(server.asked(ASK)) == len(events) == 3  # the first may have come from a proxy
    assert monitor.runs == ()


def test_one_404_does_not_end_the_watch(server, service, clock, monitor):
    answer_restoring(server)
    missing = Answer({"detail": "no such run"}, 404)
    server.on(ASK, missing, missing, run(corrupted=False), missing, missing, run())
    policy = RecoveryPolicy(enabled=True, poll_interval=3.0)
    assert monitor.monitor_run(RUN, service(), policy=policy).result(10).checkpoint == PATH
