"""Reports to the service: batches, rounds, no loss, and time limits."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any

import httpx
import pytest

import tinkex
from tinkex import testing
from tinkex._client.runtime import APIFuture, TaskGroup, runtime
from tinkex.errors import (
    APIConnectionError,
    APITimeoutError,
    ClientClosedError,
    InvalidInputError,
    WrongThreadError,
)
from tinkex.telemetry import bus
from tinkex.telemetry.events import HttpRequestStop, OperationException
from tinkex.telemetry.reporter import Limits, Reporter

from ..client.helpers import (
    CREATE_SAMPLER,
    HEARTBEAT,
    SAMPLE,
    STEP,
    answer_samples,
    failed,
    new_sampler,
    new_trainer,
    run_script,
    sample,
    sampled,
    until,
)
from ..scripted import Answer, FakeClock, Hang, Raw, Reply, Request, ScriptedServer, promise

TELEMETRY = "POST /api/v1/telemetry"
ACCEPTED = Answer({"status": "accepted"})


class Service:
    """Accepts batches, or fails with the given errors, one per attempt."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.down: Exception | None = None
        self.attempts: list[str] = []
        self.deadlines: list[float | None] = []
        self.batches: list[Any] = []

    async def ship(self, batch: Any, key: str, deadline: float | None) -> None:
        self.attempts.append(key)
        self.deadlines.append(deadline)
        if self.down is not None or self.failures:
            raise self.down or self.failures.pop(0)
        self.batches.append(batch)

    @property
    def names(self) -> list[str]:
        return [
            getattr(event, "event_name", event.event)
            for batch in self.batches
            for event in batch.events
        ]


@pytest.fixture
def taker() -> Service:
    return Service()


@pytest.fixture
def reporter(taker: Service, clock: FakeClock) -> Iterator[Callable[..., Reporter]]:
    group, made = TaskGroup(), []

    def make(**limits: Any) -> Reporter:
        def spawn(work: Any) -> APIFuture[Any]:
            return runtime().submit(work, APIFuture(), group)

        made.append(Reporter(taker.ship, spawn, clock, Limits(**limits)))
        made[-1].session_id = "s-1"
        return made[-1]

    yield make
    for each in made:
        each.capture()
    runtime().post(group.close, ClientClosedError("the test is over"))


def logged(server: ScriptedServer) -> list[dict[str, Any]]:
    return [event for request in server.asked(TELEMETRY) for event in request.json["events"]]


# -- batches and rounds --------------------------------------------------------------------------


def test_events_are_sent_in_the_next_round(reporter, taker, clock):
    made = reporter()
    assert made.log("one", {"a": 1})
    assert made.log("two", severity="warning")
    until(lambda: clock.sleeping == 1)
    assert taker.batches == []
    clock.advance(10)
    until(lambda: made.pending == 0)
    (batch,) = taker.batches
    first, second = batch.events
    assert (first.event_name, first.event_data, first.severity) == ("one", {"a": 1}, "INFO")
    assert (second.event_name, second.severity) == ("two", "WARNING")
    assert [event.event_session_index for event in batch.events] == [0, 1]
    assert first.event_id != second.event_id
    assert first.timestamp.tzinfo is not None


def test_no_task_runs_while_the_queue_is_empty(reporter, taker, clock):
    made = reporter()
    assert clock.sleeping == 0
    for round_number in range(3):
        made.log(f"event {round_number}")
        until(lambda: clock.sleeping == 1)
        clock.advance(10)
        until(lambda: made.pending == 0)
    until(lambda: not made._running)
    assert len(taker.batches) == 3


def test_full_batch_is_sent_at_once(reporter, taker, clock):
    made = reporter(threshold=5, batch=2)
    for number in range(5):
        made.log(str(number))
    until(lambda: made.pending == 0)
    assert [len(batch.events) for batch in taker.batches] == [2, 2, 1]
    assert taker.names == ["0", "1", "2", "3", "4"]
    assert clock.now == 1000.0


def test_full_queue_drops_events_and_warns_once(reporter, taker, caplog):
    made = reporter(queue=3, threshold=100)
    assert [made.log(str(number)) for number in range(5)] == [True, True, True, False, False]
    assert caplog.text.count("new events are dropped") == 1
    assert made.wait_until_drained()
    assert taker.names == ["0", "1", "2"]
    assert made.log("there is room again")
    assert made.wait_until_drained()
    (*_, last) = [event for batch in taker.batches for event in batch.events]
    assert last.event_session_index == 3  # dropped events get no index


def test_flush_sends_at_once_and_can_wait(reporter, taker):
    made = reporter()
    made.log("one")
    assert made.flush()
    until(lambda: made.pending == 0)
    made.log("two")
    assert made.flush(wait=True)
    assert taker.names == ["one", "two"]
    assert made.flush(wait=True)  # nothing to do


def test_values_are_converted_to_json(reporter, taker):
    class Colour(Enum):
        RED = "red"

    made = reporter()
    circle: list[Any] = []
    circle.append(circle)
    made.log(
        "odd",
        {
            "number": float("nan"),
            "colour": Colour.RED,
            "error": ValueError("no"),
            "set": {1},
            3: (1, None, True),
            "object": Limits(),
            "circle": circle,
        },
    )
    assert made.wait_until_drained()
    data = taker.batches[0].events[0].event_data
    assert data | {"circle": 0} == {
        "number": "nan",
        "colour": "red",
        "error": "ValueError: no",
        "set": [1],
        "3": [1, None, True],
        "object": str(Limits()),
        "circle": 0,
    }


def test_unknown_severity_is_refused(reporter):
    with pytest.raises(InvalidInputError, match="severity"):
        reporter().log("x", severity="loud")


# -- failures -------------------------------------------------------------------------------------


def test_no_event_is_lost_when_the_service_fails(reporter, taker, clock):
    taker.failures = [APIConnectionError(), APITimeoutError(), tinkex.InternalServerError("oops")]
    made = reporter(batch=2)
    for number in range(5):
        made.log(str(number))
    assert made.wait_until_drained()
    assert taker.names == ["0", "1", "2", "3", "4"]
    assert clock.slept == [1.0, 2.0, 4.0]
    # All attempts of a batch have one key, so that a service can detect a repeated batch.
    assert len(set(taker.attempts[:4])) == 1
    assert len(set(taker.attempts)) == 3


def test_round_ends_after_its_retries_and_the_next_continues(reporter, taker, clock):
    taker.down = APIConnectionError()
    made = reporter()
    made.log("one")
    for rounds in (1, 2):
        until(lambda: clock.sleeping == 1)
        clock.advance(10)
        until(lambda expected=4 * rounds: len(taker.attempts) == expected)  # type: ignore[misc]
    taker.down = None
    made.log("two")
    until(lambda: clock.sleeping == 1)
    clock.advance(10)
    until(lambda: made.pending == 0)
    assert taker.names == ["one", "two"]


def test_send_attempt_has_a_deadline_and_retries_have_a_delay(reporter, taker, clock):
    made = reporter(request=3.0, retry_delay=2.0)
    taker.failures = [APIConnectionError()]
    made.log("one")
    assert made.wait_until_drained(4.0)
    assert taker.deadlines == [1003.0, 1004.0]  # the second is the deadline of the drain
    assert clock.slept == [2.0]


def test_drain_stops_at_its_time_limit(reporter, taker, clock):
    taker.down = APIConnectionError()
    made = reporter()
    made.log("one")
    assert made.wait_until_drained() is False
    assert 1020.0 < clock.now <= 1030.0
    assert made.pending == 1
    began = clock.now
    assert made.wait_until_drained(3.0) is False
    assert began < clock.now <= began + 3.0
    began = clock.now
    assert made.stop() is False
    assert began < clock.now <= began + 5.0


def test_drain_interrupts_the_pause_of_a_round(reporter, taker):
    clock = FakeClock(long=1.0)  # every pause lasts until it is interrupted
    taker.failures = [APIConnectionError()] * 2
    made = reporter(threshold=1)
    made._clock = clock
    made.log("one")
    until(lambda: len(taker.attempts) == 1)
    until(lambda: clock.sleeping >= 1)
    draining = made._spawn(made.drain(30.0))
    until(lambda: len(taker.attempts) == 2)  # the interrupted round made one more attempt and ended
    until(lambda: made.pending == 0)
    assert draining.result() is True


def test_batch_refused_for_good_is_dropped(reporter, taker):
    taker.failures = [tinkex.NotFoundError("no telemetry here")]
    made = reporter(batch=1)
    made.log("one")
    made.log("two")
    assert made.wait_until_drained()
    assert taker.names == ["two"]


def test_hanging_service_delays_drain_at_most_by_its_limit(server, service):
    server.on(TELEMETRY, Hang())
    client = service(telemetry_enabled=True)
    new_sampler(client)
    assert client.get_telemetry().wait_until_drained(0.1) is False
    server.on(TELEMETRY, ACCEPTED)


def test_jitter_is_at_most_a_tenth(reporter, taker):
    clock = FakeClock(chance=1.0)
    taker.failures = [APIConnectionError()] * 2
    made = reporter()
    made._clock = clock
    made.log("one")
    assert made.wait_until_drained()
    assert clock.slept == pytest.approx([1.1, 2.2])


def test_waiting_on_the_clients_own_thread_is_refused(reporter):
    made = reporter()
    made.log("one")

    async def wait() -> bool:
        return bool(made.wait_until_drained())

    with pytest.raises(WrongThreadError):
        made._spawn(wait()).result()


# -- exceptions ----------------------------------------------------------------------------------


def test_an_exception_is_reported_with_its_traceback_and_without_keys(reporter, taker):
    made = reporter()
    with pytest.raises(RuntimeError) as broken:
        raise RuntimeError("broken with tml-secret-key")
    assert made.log_exception(broken.value)
    assert made.wait_until_drained()
    (event,) = taker.batches[0].events
    assert (event.event, event.severity) == ("UNHANDLED_EXCEPTION", "ERROR")
    assert (event.error_type, event.error_message) == (
        "RuntimeError",
        "broken with [REDACTED]",
    )
    assert "test_reporter.py" in event.traceback
    assert "tml-secret" not in event.traceback


def test_exception_is_sent_at_once(reporter, taker):
    made = reporter()
    made.log("one")
    assert made.log_exception(RuntimeError("broken"))
    until(lambda: made.pending == 0)
    assert taker.names == ["one", "UNHANDLED_EXCEPTION"]


def test_user_error_is_reported_as_a_warning(reporter, taker):
    made = reporter()
    try:
        raise RuntimeError("my loop failed") from tinkex.BadRequestError(
            "bad loss", body={"detail": "bad loss"}
        )
    except RuntimeError as error:
        made.log_exception(error)
    assert made.wait_until_drained()
    (event,) = taker.batches[0].events
    assert (event.event_name, event.severity) == ("user_error", "WARNING")
    assert event.event_data["error_type"] == "BadRequestError"
    assert event.event_data["status_code"] == 400
    assert event.event_data["body"] == {"detail": "bad loss"}


def test_user_error_of_another_library_can_have_any_attributes(reporter, taker):
    class Foreign(Exception):
        __slots__ = ()
        __hash__ = None  # type: ignore[assignment]
        status_code = 404

    made = reporter()
    assert made.log_exception(Foreign("no"))
    assert made.flush(wait=True)
    assert taker.names == ["user_error"]


def test_fatal_exception_is_sent_and_ends_the_report(reporter, taker, clock, caplog):
    caplog.set_level(logging.INFO)
    made = reporter()
    made.opened("s-1", owner=True)
    clock.now += 3725.5
    assert made.log_fatal_exception(RuntimeError("broken"))
    assert taker.names == ["SESSION_START", "UNHANDLED_EXCEPTION", "SESSION_END"]
    assert taker.batches[-1].events[-1].duration == "1:02:05.500000"
    assert "s-1" in caplog.text
    assert made.stop()
    assert taker.names.count("SESSION_END") == 1


def test_fatal_exception_waits_at_most_for_the_limit(reporter, taker, clock):
    taker.down = APIConnectionError()
    made = reporter()
    made.opened("s-1", owner=True)
    assert made.log_fatal_exception(RuntimeError("broken"), timeout=7.0) is False
    assert clock.now <= 1007.0


# -- as part of a client -------------------------------------------------------------------------


@pytest.fixture
def reporting(
    server: ScriptedServer, service: Callable[..., tinkex.ServiceClient]
) -> tinkex.ServiceClient:
    server.on(TELEMETRY, ACCEPTED)
    return service(telemetry_enabled=True)


def test_telemetry_can_be_disabled(service, monkeypatch):
    client = service()  # the fixture disables telemetry by default
    assert not client.get_telemetry()
    assert not new_sampler(client).get_telemetry()
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    assert not tinkex.ServiceClient(api_key="tml-x").get_telemetry()


def test_disabled_reporter_accepts_calls_and_sends_nothing(server, service):
    client = service()
    new_sampler(client)
    reporter = client.get_telemetry()
    assert reporter.log("hello") is False
    assert reporter.log_exception(ValueError("no")) is False
    assert reporter.log_fatal_exception(ValueError("no")) is False
    reporter.capture(HttpRequestStop)
    assert reporter.flush(wait=True)
    assert reporter.wait_until_drained()
    assert reporter.stop()
    with pytest.raises(ZeroDivisionError), tinkex.telemetry.capture_exceptions(reporter):
        _ = 1 / 0
    client.close().result()
    assert server.asked(TELEMETRY) == []


def test_events_logged_before_the_session_opens_belong_to_it(server, reporting, clock):
    reporter = reporting.get_telemetry()
    assert reporter.log("early")
    clock.advance(60)
    new_sampler(reporting)
    assert reporter.log("late")
    reporting.close().result()
    assert {request.json["session_id"] for request in server.asked(TELEMETRY)} == {"s-1"}
    told = [
        (event["event_session_index"], event.get("event_name", event["event"]))
        for event in logged(server)
    ]
    assert told == [(0, "SESSION_START"), (1, "early"), (2, "late"), (3, "SESSION_END")]


def test_the_call_that_opens_the_session_is_reported_when_it_fails(server, reporting):
    server.on(CREATE_SAMPLER, Answer({"detail": "no such model"}, 404))
    with pytest.raises(tinkex.NotFoundError):
        new_sampler(reporting)
    reporting.close().result()
    start, failure, end = logged(server)
    assert (start["event"], end["event"]) == ("SESSION_START", "SESSION_END")
    assert (failure["event_name"], failure["severity"]) == ("user_error", "WARNING")
    about = failure["event_data"]
    assert (about["operation"], about["status_code"]) == ("create_sampling_session", 404)
    assert about["message"].startswith("no such model")


def test_a_failure_of_the_service_is_reported_as_an_error(server, reporting):
    server.on(CREATE_SAMPLER, Answer({"detail": "torn", "category": "server"}, 400))
    with pytest.raises(tinkex.BadRequestError):
        new_sampler(reporting)
    server.on(STEP, promise("r-1"))
    server.on_future("r-1", failed("torn", "server"))
    with pytest.raises(tinkex.RequestFailedError):
        new_trainer(reporting).optim_step().result()
    reporting.close().result()
    failure = logged(server)[-2]
    assert (failure["event_name"], failure["severity"]) == ("tinkex.operation.exception", "ERROR")


def use_and_drop_a_client() -> None:
    client = tinkex.ServiceClient(
        base_url="http://127.0.0.1:9", api_key="tml-x", telemetry_enabled=True, max_retries=0
    )
    with pytest.raises(APIConnectionError):
        client.get_server_capabilities()
    assert bus.wants(OperationException)


def test_client_dropped_before_its_session_opens_unsubscribes(quiet_bus):
    use_and_drop_a_client()

    def is_forgotten() -> bool:
        gc.collect()
        return not bus.wants(OperationException)

    until(is_forgotten)


def test_all_clients_of_a_session_share_its_reporter(reporting):
    reporter = reporting.get_telemetry()
    assert isinstance(reporter, Reporter)
    assert new_sampler(reporting).get_telemetry() is reporter
    assert new_trainer(reporting).get_telemetry() is reporter
    assert reporting.create_rest_client().get_telemetry() is reporter


def test_session_reports_its_start_and_end(server, reporting):
    new_sampler(reporting)
    reporting.close().result()
    (request,) = server.asked(TELEMETRY)
    assert request.json["session_id"] == "s-1"
    assert request.json["platform"]
    assert len(request.json["process_uuid"]) == 32
    start, end = request.json["events"]
    assert (start["event"], end["event"]) == ("SESSION_START", "SESSION_END")
    assert end["duration"] == "0:00:00"
    assert datetime.fromisoformat(start["timestamp"]).tzinfo is not None
    assert reporting.get_telemetry().log("too late") is False


def test_a_client_that_opened_no_session_reports_nothing(server, reporting):
    server.on("GET /api/v1/get_server_capabilities", Answer({"supported_models": []}))
    reporting.get_server_capabilities()
    reporting.close().result()
    assert server.asked(TELEMETRY) == []


def test_events_logged_without_a_session_are_sent(server, reporting):
    assert reporting.get_telemetry().log("hello")
    reporting.close().result()
    (request,) = server.asked(TELEMETRY)
    assert request.json["session_id"].startswith("sessionless-")
    assert [event["event_name"] for event in request.json["events"]] == ["hello"]


def test_a_script_that_opens_no_session_reports_at_its_end(server):
    server.on(TELEMETRY, ACCEPTED)
    run_script(
        "import tinkex\n"
        f"client = tinkex.ServiceClient(base_url={server.url!r}, api_key='tml-test')\n"
        "assert client.get_telemetry().log('hello')\n"
    )
    (request,) = server.asked(TELEMETRY)
    assert [event["event_name"] for event in request.json["events"]] == ["hello"]


def test_the_first_calls_of_many_threads_are_reported_once(server, reporting):
    server.on(CREATE_SAMPLER, Answer({"detail": "no such model"}, 404))

    def refused(_: int) -> None:
        with pytest.raises(tinkex.NotFoundError):
            new_sampler(reporting)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(refused, range(8)))
    reporting.close().result()
    named = [event for event in logged(server) if event["event"] == "GENERIC_EVENT"]
    assert len(named) == 8


def test_only_failures_of_the_own_session_are_reported(server, reporting, service):
    paused = {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "busy"}
    server.on(STEP, promise("r-1"))
    server.on_future("r-1", Answer(paused), failed("no", "user"))
    answer_samples(server)
    other = service()
    other.holder.session_id = "s-2"
    trainer, stranger = new_trainer(reporting), new_trainer(other)
    new_sampler(reporting).sample(tinkex.ModelInput.from_ints([1])).result()
    for each in (trainer, stranger):
        with pytest.raises(tinkex.RequestFailedError):
            each.optim_step().result()
    reporting.close().result()
    start, queue, failure, end = logged(server)
    assert (start["event"], end["event"]) == ("SESSION_START", "SESSION_END")
    assert (queue["event_name"], queue["severity"]) == ("tinkex.queue.state_change", "INFO")
    metadata = queue["event_data"]["metadata"]
    assert (metadata["queue_state"], metadata["queue_state_reason"]) == ("paused_capacity", "busy")
    assert "session_id" not in metadata
    assert (failure["event_name"], failure["severity"]) == ("user_error", "WARNING")
    assert failure["event_data"]["message"] == "no"
    assert failure["event_data"]["operation"] == "optim_step"


def test_cancelled_operation_is_not_reported(server, reporting):
    server.on(SAMPLE, Hang())
    future = sample(new_sampler(reporting))
    server.wait_for(SAMPLE)
    future.cancel()
    reporting.close().result()
    assert [event["event"] for event in logged(server)] == ["SESSION_START", "SESSION_END"]


def test_other_events_can_be_captured_except_those_of_telemetry_itself(server, reporting):
    answer_samples(server)
    sampler = new_sampler(reporting)
    reporter = reporting.get_telemetry()
    reporter.capture(HttpRequestStop)
    sample(sampler).result()
    assert reporter.wait_until_drained()
    assert reporter.wait_until_drained()
    reporting.close().result()
    forwarded = [event for event in logged(server) if event["event"] == "GENERIC_EVENT"]
    paths = {event["event_data"]["metadata"]["path"] for event in forwarded}
    assert "/api/v1/asample" in paths
    assert "/api/v1/telemetry" not in paths


def test_service_without_telemetry_route_causes_no_error(server, service):
    client = service(telemetry_enabled=True)  # nothing is scripted: 404
    new_sampler(client)
    client.close().result()
    assert len(server.asked(TELEMETRY)) == 1


FAULTS: dict[str, list[Reply]] = {
    "5xx": [Answer({}, 500), Answer({}, 503)],
    "a broken connection": [Raw(), Raw(b"HTTP/1.1 200 OK\r\n")],
    "too many requests": [Answer({}, 429)],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_accepted_event_is_lost_after(fault, server, reporting):
    server.on(TELEMETRY, *FAULTS[fault], ACCEPTED)
    new_sampler(reporting)
    reporter = reporting.get_telemetry()
    accepted = sum(reporter.log(f"event {number}") for number in range(250))
    assert reporter.wait_until_drained()
    reporting.close().result()
    good = server.asked(TELEMETRY)[len(FAULTS[fault]) :]
    events = [event for request in good for event in request.json["events"]]
    assert [event["event_session_index"] for event in events] == list(range(accepted + 2))
    assert max(len(request.json["events"]) for request in good) == 100


def test_unreachable_service_delays_closing_at_most_by_the_limit(server, reporting, clock):
    new_sampler(reporting)
    server.on(TELEMETRY, Raw())
    server.on("POST /api/v1/sessions/s-1/finish", Raw())
    began = clock.now
    reporting.close().result()
    assert (
        clock.now - began <= 2 * 5.0
    )  # both limits use one clock, which moves only while sleeping


def test_an_exception_that_leaves_the_with_block_is_reported(server, service):
    server.on(TELEMETRY, ACCEPTED)
    server.on(SAMPLE, Answer({"detail": "bad prompt"}, 422))

    def script(error: Exception | None) -> None:
        with service(telemetry_enabled=True) as client:
            sampler = new_sampler(client)
            if error is not None:
                raise error
            sample(sampler).result()

    with pytest.raises(tinkex.UnprocessableEntityError):
        script(None)
    events = logged(server)
    assert [event.get("event_name", event["event"]) for event in events] == [
        "SESSION_START",
        "user_error",
        "SESSION_END",
    ]
    with pytest.raises(ZeroDivisionError):
        script(ZeroDivisionError())  # not reported: it did not pass through tinkex
    assert [event["event"] for event in logged(server)[3:]] == ["SESSION_START", "SESSION_END"]


def test_heartbeats_are_not_reported(server, reporting, clock):
    new_sampler(reporting)
    until(lambda: clock.sleeping == 3)  # heartbeat, configuration, report
    clock.advance(10)
    server.wait_for(HEARTBEAT)
    server.wait_for(TELEMETRY)
    assert [event["event"] for event in logged(server)] == ["SESSION_START"]


SCRIPT = """
import sys, tinkex
client = tinkex.ServiceClient(base_url={url!r}, api_key="tml-test")
sampler = client.create_sampling_client(base_model="some/model")
client.get_telemetry().log("here")
"""


def test_a_script_that_forgets_to_close_still_reports(server):
    server.on(TELEMETRY, ACCEPTED)
    run_script(SCRIPT.format(url=server.url))
    names = [event.get("event_name", event["event"]) for event in logged(server)]
    assert names == ["SESSION_START", "here", "SESSION_END"]


def test_uncaught_exception_through_tinkex_is_reported(server):
    server.on(TELEMETRY, ACCEPTED)
    crash = """
import threading
import io
sys.stderr = io.StringIO()
def thread():
    sampler.sample("no prompt")
worker = threading.Thread(target=thread)
worker.start()
worker.join()
try:
    1 / 0
except ZeroDivisionError as error:
    try:
        sampler.sample("no prompt")
    except tinkex.InvalidInputError as again:
        sys.excepthook(type(again), again, again.__traceback__)
    sys.excepthook(type(error), error, error.__traceback__)
"""
    run_script(SCRIPT.format(url=server.url) + crash)
    events = logged(server)
    assert [event.get("event_name", event["event"]) for event in events] == [
        "SESSION_START",
        "here",
        *["user_error"] * 2,
        "SESSION_END",
    ]
    assert events[2]["event_data"]["error_type"] == "InvalidInputError"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_reports_for_itself(server):
    server.on(TELEMETRY, ACCEPTED)
    fork = """
import os, warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded")
child = os.fork()
if child == 0:
    client.get_telemetry().log("child")
    client.get_telemetry().wait_until_drained()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
client.close().result()
"""
    run_script(SCRIPT.format(url=server.url) + fork)
    by_process: dict[str, list[str]] = {}
    for request in server.asked(TELEMETRY):
        assert request.json["session_id"] == "s-1"
        names = [event.get("event_name", event["event"]) for event in request.json["events"]]
        by_process.setdefault(request.json["process_uuid"], []).extend(names)
    assert sorted(by_process.values()) == [["SESSION_START", "here", "SESSION_END"], ["child"]]


# -- with the real service -----------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """What happens to a report: the answer it gets, and whether the service receives it anyway."""

    reply: Reply
    arrives: bool = False


class Unreliable(ScriptedServer):
    """A proxy between client and service: forwards requests and applies one of `faults` to each report."""

    def __init__(self) -> None:
        super().__init__()
        self.target: str | None = None
        self.faults: deque[Fault] = deque()
        self._http = httpx.Client(trust_env=False)

    def stop(self) -> None:
        super().stop()
        self._http.close()

    def reply_to(self, request: Request) -> Reply:
        report = f"{request.method} {request.path}" == TELEMETRY
        fault = self.faults.popleft() if report and self.faults else None
        if self.target is None:
            return Raw()
        if fault is not None and not fault.arrives:
            return fault.reply
        names = ("content-type", "x-api-key", "x-idempotency-key")
        answer = self._http.request(
            request.method,
            f"{self.target}{request.path}",
            params=dict(request.query),
            headers={name: request.headers[name] for name in names if name in request.headers},
            content=request.body,
        )
        return Answer(answer.content, answer.status_code) if fault is None else fault.reply


def reported(running: testing.RunningService, reporter: Reporter) -> list[dict[str, Any]]:
    """The events of a session in the service's list."""
    answer = httpx.get(
        f"{running.url}/local/telemetry",
        params={"session_id": reporter.session_id, "limit": 1000},
        headers={"x-api-key": running.api_key},
        trust_env=False,
    )
    return [entry["event"] for entry in answer.json()["events"]]


def test_local_service_lists_the_reported_events(tinkex_fake):
    client = tinkex_fake.client()
    training = client.create_lora_training_client(tinkex_fake.base_model, rank=4)
    reporter = training.get_telemetry()
    assert reporter is not None
    reporter.log("checkpoint reached", {"step": 3})
    assert reporter.wait_until_drained()
    asked = {"session_id": reporter.session_id, "limit": 2}
    found = client.http.get("/local/telemetry", query=asked).result()
    assert found["cursor"] == {"offset": 0, "limit": 2, "total_count": 2}
    client.close().result()
    start, own, end = reported(tinkex_fake, reporter)
    assert (start["event"], end["event"]) == ("SESSION_START", "SESSION_END")
    assert (own["event_name"], own["event_data"]) == ("checkpoint reached", {"step": 3})


def test_accepted_events_arrive_exactly_once_despite_faults_and_a_restart(tmp_path, clock):
    def log(reporter: Reporter, phase: str) -> None:
        assert all(reporter.log(f"{phase} {number}") for number in range(60))

    with Unreliable() as between:
        with testing.service("fake", data_dir=tmp_path) as running:
            between.target = running.url
            client = tinkex.ServiceClient(
                base_url=between.url, api_key=running.api_key, clock=clock
            )
            client.create_sampling_client(base_model=running.base_model)
            reporter = client.get_telemetry()
            assert reporter is not None
            # Only the test triggers sending: automatic rounds would move the clock.
            reporter.limits = Limits(batch=25, threshold=1000)
            log(reporter, "through errors")
            between.faults += [
                Fault(Answer({}, 500)),
                Fault(Answer({}, 503), arrives=True),
                Fault(Raw(), arrives=True),
                Fault(Answer({}, 429)),
            ]
            assert reporter.wait_until_drained()
            log(reporter, "through a timeout")
            between.faults.append(Fault(Hang(), arrives=True))
            assert reporter.wait_until_drained(0.1) is False
            between.target = None
        log(reporter, "while it is gone")
        began = clock.now
        assert reporter.wait_until_drained() is False
        assert clock.now - began <= Limits().drain
        assert reporter.pending >= 60
        with testing.service("fake", data_dir=tmp_path) as running:
            between.target = running.url
            assert reporter.wait_until_drained()
            assert reporter.pending == 0
            client.close().result()
            indexes = [event["event_session_index"] for event in reported(running, reporter)]
    assert indexes == list(range(1 + 3 * 60 + 1))


def test_reporter_gives_up_an_unreachable_service_within_its_limits(clock):
    server = ScriptedServer()
    with server:
        server.on(TELEMETRY, ACCEPTED)
        client = tinkex.ServiceClient(base_url=server.url, api_key="tml-test", clock=clock)
        new_sampler(client)
        reporter = client.get_telemetry()
        assert reporter is not None
    # From here on the connection is refused.
    reporter.log("to nobody")
    began = clock.now
    assert reporter.wait_until_drained() is False
    assert clock.now - began <= Limits().drain
    began = clock.now
    assert reporter.stop() is False
    assert clock.now - began <= Limits().stop
    assert reporter.pending == 3
    client.close().result()


def test_limits_are_as_documented():
    assert dataclasses.asdict(Limits()) == {
        "queue": 10_000,
        "batch": 100,
        "threshold": 100,
        "interval": 10.0,
        "retries": 3,
        "retry_delay": 1.0,
        "request": 5.0,
        "drain": 30.0,
        "stop": 5.0,
    }


def test_sampler_can_be_created_while_telemetry_hangs(server, service):
    server.on(TELEMETRY, Hang())
    server.on(SAMPLE, sampled(7))
    client = service(telemetry_enabled=True)
    client.get_telemetry().limits = Limits(threshold=1)
    sampler = new_sampler(client)
    server.wait_for(TELEMETRY)
    assert sample(sampler).result().sequences[0].tokens == [7]
    assert len(server.asked(CREATE_SAMPLER)) == 1
    server.on(TELEMETRY, ACCEPTED)
