"""A session with a service: opening, heartbeats, closing."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import tinkex
from tinkex import types
from tinkex._client.http1 import HTTP1Client
from tinkex._client.options import Timeout
from tinkex.errors import (
    APIConnectionError,
    AuthenticationError,
    ClientClosedError,
    InternalServerError,
    InvalidInputError,
)

from ..scripted import Answer, Hang, ScriptedServer, promise
from .helpers import (
    CONFIG,
    CREATE_MODEL,
    CREATE_SAMPLER,
    CREATE_SESSION,
    DYNAMIC,
    FINISH,
    HEARTBEAT,
    POLL,
    SAMPLE,
    STEP,
    answer_samples,
    answer_training,
    failed,
    flags,
    new_sampler,
    new_trainer,
    promise_by_seq,
    sample,
    until,
)

TELEMETRY = "POST /api/v1/telemetry"


def paths(server: ScriptedServer) -> list[str]:
    return [request.path.removeprefix("/api/v1/") for request in server.requests]


def wait_until_beating(server: ScriptedServer, clock: Any, beats: int) -> None:
    """Advance the clock in steps of 10 s until `beats` heartbeats have been sent."""
    for beat in range(len(server.asked(HEARTBEAT)), beats):
        until(lambda: clock.sleeping == 2)  # the heartbeat and the dynamic configuration
        clock.advance(10)
        server.wait_for(HEARTBEAT, beat + 1)


# -- opening -------------------------------------------------------------------------------------


def test_creating_client_sends_nothing(server, service):
    client = service()
    client.create_rest_client()
    assert client.holder.session_id is None
    assert server.requests == []


def test_first_call_fetches_flags_then_opens_session(server, service):
    client = service(user_metadata={"run": "7"}, project_id="p-1", display_name="mine", tags=["a"])
    new_sampler(client)
    assert paths(server)[:2] == ["client/config", "create_session"]
    assert server.asked(CREATE_SESSION)[0].json == {
        "tags": ["a"],
        "user_metadata": {"run": "7"},
        "sdk_version": server.asked(CONFIG)[0].json["sdk_version"],
        "project_id": "p-1",
        "display_name": "mine",
        "type": "create_session",
    }
    assert client.holder.session_id == "s-1"


def test_get_session_id_opens_session(server, service):
    client = service()
    assert client.holder.get_session_id() == client.holder.get_session_id() == "s-1"
    assert len(server.asked(CREATE_SESSION)) == 1


def test_a_call_that_needs_no_session_opens_none(server, service):
    server.on("GET /api/v1/get_server_capabilities", Answer({"supported_models": []}))
    service().get_server_capabilities()
    assert paths(server) == ["client/config", "get_server_capabilities"]


def test_concurrent_calls_open_one_session(server, service):
    held = threading.Event()
    server.on(CREATE_SESSION, Answer({"session_id": "s-1"}, wait_for=held))
    client = service()
    with ThreadPoolExecutor(8) as pool:
        made = [pool.submit(new_sampler, client) for _ in range(8)]
        server.wait_for(CREATE_SESSION)
        held.set()
        for each in made:
            each.result(10)
    assert len(server.asked(CONFIG)) == len(server.asked(CREATE_SESSION)) == 1
    numbers = [request.json["sampling_session_seq_id"] for request in server.asked(CREATE_SAMPLER)]
    assert sorted(numbers) == list(range(8))


def test_a_service_without_flags_is_used_with_the_defaults(server, service):
    server.on(CONFIG, Answer({"detail": "not found"}, 404))
    server.on(DYNAMIC, Answer({"detail": "not found"}, 404))
    client = service()
    new_sampler(client)
    assert client.holder.flags.fwdbwd_max_chunk_len == 1024


def test_unknown_flags_and_nulls_are_ignored(server, service):
    flags(server, brand_new_flag=1, sample_max_concurrent_requests=None, sample_no_retries=True)
    client = service()
    new_sampler(client)
    assert client.holder.flags.sample_max_concurrent_requests == 2000
    assert client.holder.flags.sample_no_retries


def test_flags_set_limits_on_bytes_in_flight(server, service):
    flags(
        server,
        sample_dispatch_bytes_semaphore_size=11,
        inflight_response_bytes_semaphore_size=12,
        fwdbwd_dispatch_bytes_semaphore_size=13,
    )
    client = service()
    new_sampler(client)
    assert client.holder.service.response_room.size == 12
    assert client.holder.service.training_room.size == 13
    assert client.holder.service.sample_budget._bytes.size == 11


def test_failed_open_is_retried_by_next_call(server, service):
    server.on(
        CREATE_SESSION,
        Answer({"detail": "key?"}, 401),
        Answer({}, 500),
        Answer({"session_id": "s-1"}),
    )
    client = service(max_retries=0)
    with pytest.raises(AuthenticationError):
        new_sampler(client)
    with pytest.raises(InternalServerError):
        new_sampler(client)
    answer_samples(server)
    assert sample(new_sampler(client)).result(10)
    assert len(server.asked(CONFIG)) == 1


def test_failed_flags_request_is_retried_by_next_call(server, service):
    server.on(CONFIG, Answer({}, 403), Answer({"sample_no_retries": True}))
    client = service()
    with pytest.raises(tinkex.PermissionDeniedError):
        new_sampler(client)
    new_sampler(client)
    assert client.holder.flags.sample_no_retries


def test_cancelled_caller_does_not_cancel_opening_for_others(server, service):
    held = threading.Event()
    server.on(CREATE_SESSION, Answer({"session_id": "s-1"}, wait_for=held))
    client = service()

    async def both() -> Any:
        impatient = asyncio.ensure_future(client.create_sampling_client_async(base_model="m"))
        patient = asyncio.ensure_future(client.create_sampling_client_async(base_model="m"))
        await asyncio.to_thread(server.wait_for, CREATE_SESSION)
        impatient.cancel()
        held.set()
        return await patient

    assert asyncio.run(both()).holder.session_id == "s-1"
    assert len(server.asked(CREATE_SESSION)) == 1


def test_messages_of_the_service_are_logged_at_their_level(server, service, caplog):
    caplog.set_level(logging.INFO, "tinkex")
    messages = {"info_message": "hello", "warning_message": "old", "error_message": "very old"}
    server.on(CREATE_SESSION, Answer({"session_id": "s-1", **messages}))
    new_sampler(service())
    logged = {(record.levelname, record.message) for record in caplog.records}
    assert {("INFO", "hello"), ("WARNING", "old"), ("ERROR", "very old")} <= logged


def test_two_clients_share_neither_session_nor_numbers(server, service):
    server.on(CREATE_SESSION, Answer({"session_id": "s-1"}), Answer({"session_id": "s-2"}))
    server.on("POST /api/v1/sessions/s-2/finish", Answer({}))
    first, second = service(), service()
    new_sampler(first)
    new_sampler(second)
    sent = [request.json for request in server.asked(CREATE_SAMPLER)]
    assert [(each["session_id"], each["sampling_session_seq_id"]) for each in sent] == [
        ("s-1", 0),
        ("s-2", 0),
    ]


def test_models_and_samplers_are_numbered_by_the_session(server, service):
    server.on(CREATE_MODEL, Answer({"model_id": "s-1:train:0"}))
    client = service()
    for _ in range(2):
        new_trainer(client)
        new_sampler(client)
    models = [request.json["model_seq_id"] for request in server.asked(CREATE_MODEL)]
    samplers = [request.json["sampling_session_seq_id"] for request in server.asked(CREATE_SAMPLER)]
    assert models == samplers == [0, 1]


def test_unknown_options_are_ignored_with_warning():
    with pytest.warns(FutureWarning, match="colour"):
        tinkex.ServiceClient(base_url="http://127.0.0.1:9", api_key="tml-test", colour="red")


def test_timeout_per_phase_is_ignored_with_warning(service):
    with pytest.warns(FutureWarning, match="timeout"):
        client = service(timeout=Timeout(60.0))
    assert client.config == service().config


def test_option_none_keeps_configured_value(server, service):
    config = tinkex.Config(base_url=server.url, api_key="tml-test", timeout=5)
    client = service(config=config, timeout=None, default_headers=None)
    assert client.config.timeout == 5


def test_default_headers_overrides_keep_other_headers(server, service, monkeypatch):
    monkeypatch.setenv("TINKEX_DEFAULT_HEADERS", '{"x-a": "1", "x-b": "1"}')
    new_sampler(service(default_headers_overrides={"X-B": "2"}))
    sent = server.requests[0].headers
    assert (sent["x-a"], sent["x-b"]) == ("1", "2")


def test_password_in_url_is_not_shown():
    client = tinkex.ServiceClient(base_url="http://u:secret@127.0.0.1:9", api_key="tml-test")
    assert "127.0.0.1:9" in repr(client)
    assert "secret" not in repr(client)


# -- polling raw requests ------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [False, True])
def test_promise_of_raw_request_can_be_polled(server, service, whole):
    server.on("POST /api/v1/made_up", promise("r-7"))
    server.on_future("r-7", Answer({"type": "try_again"}), Answer({"answer": 42}))
    client = service()
    promised = client.http.post("/api/v1/made_up", {}).result(10)
    polled = client.poll(promised if whole else promised["request_id"], request_type="MadeUp")
    assert polled.result(10) == {"answer": 42}
    assert [request.headers["x-tinker-request-type"] for request in server.asked(POLL)] == [
        "MadeUp",
        "MadeUp",
    ]


def test_poll_backoff_can_be_set_per_call(server, service, clock):
    server.on_future("r-7", Answer({}, 500), Answer({"answer": 42}))
    service().poll("r-7", poll_backoff=("exponential", 7.0, 7.0)).result(10)
    assert clock.slept == [7.0]


def test_a_poll_may_have_an_observer_of_its_queue_state(server, service):
    paused = {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "busy"}
    server.on_future("r-7", Answer(paused), Answer({"answer": 42}))
    seen: list[Any] = []
    service().poll("r-7", queue_state_observer=lambda *told: seen.append(told)).result(10)
    assert seen == [(types.QueueState.PAUSED_CAPACITY, "busy")]


def test_polling_failed_request_raises_error(server, service):
    server.on_future("r-7", failed("torn"))
    with pytest.raises(tinkex.RequestFailedError, match="torn"):
        service().poll("r-7").result(10)


@pytest.mark.parametrize("request_id", [7, {}, {"request_id": 7}, None])
def test_only_promise_can_be_polled(server, service, request_id):
    with pytest.raises(InvalidInputError):
        service().poll(request_id)
    assert server.requests == []


# -- heartbeats ----------------------------------------------------------------------------------


def test_open_session_sends_heartbeat_every_ten_seconds(server, service, clock):
    new_sampler(service())
    wait_until_beating(server, clock, 3)
    assert [request.json["session_id"] for request in server.asked(HEARTBEAT)] == ["s-1"] * 3


def test_heartbeat_stops_when_session_is_finished_elsewhere(server, service, clock, caplog):
    caplog.set_level(logging.INFO, "tinkex")
    server.on(HEARTBEAT, Answer({}), Answer({"detail": "finished"}, 410))
    client = service()
    new_sampler(client)
    wait_until_beating(server, clock, 4)
    until(lambda: "its heartbeat stops" in caplog.text)
    clock.advance(600)
    server.wait_for(DYNAMIC, 2)
    assert len(server.asked(HEARTBEAT)) == 4


def test_single_410_does_not_stop_heartbeat(server, service, clock):
    server.on(HEARTBEAT, Answer({}, 410), Answer({}, 410), Answer({}), Answer({}, 410))
    new_sampler(service())
    wait_until_beating(server, clock, 5)


def test_after_machine_slept_one_heartbeat_is_sent_at_once(server, service, clock):
    new_sampler(service())
    wait_until_beating(server, clock, 1)
    until(lambda: clock.sleeping == 2)
    clock.advance(9 * 3600)
    server.wait_for(HEARTBEAT, 2)
    until(lambda: clock.sleeping == 2)
    assert len(server.asked(HEARTBEAT)) == 2  # not the 3000 heartbeats missed during the sleep
    wait_until_beating(server, clock, 3)


@pytest.mark.parametrize("status", [401, 404, 500])
def test_heartbeats_continue_after_errors_and_warn_after_two_minutes(
    server, service, clock, caplog, status
):
    server.on(HEARTBEAT, Answer({"detail": "what?"}, status))
    new_sampler(service())
    wait_until_beating(server, clock, 11)
    assert "No heartbeat" not in caplog.text
    wait_until_beating(server, clock, 15)
    warnings = [record.message for record in caplog.records if "No heartbeat" in record.message]
    assert warnings[0].startswith("No heartbeat of session s-1 has succeeded for 120 s")
    assert "what?" in warnings[0]
    assert len(warnings) >= 2


def test_heartbeat_interval_and_warning_can_be_set(server, service, clock, caplog):
    server.on(HEARTBEAT, Answer({}, 500))
    new_sampler(service(heartbeat_interval=20, heartbeat_warning_after=40))
    for beat in (1, 2):
        until(lambda: clock.sleeping == 2)
        clock.advance(20)
        server.wait_for(HEARTBEAT, beat)
    until(lambda: "has succeeded for 40 s" in caplog.text)
    assert "for 20 s" not in caplog.text


def test_successful_heartbeat_resets_warning_time(server, service, clock, caplog):
    lost = Answer({}, 500)
    server.on(HEARTBEAT, *[lost] * 11, Answer({}), lost)
    new_sampler(service())
    wait_until_beating(server, clock, 23)  # the 24th comes 120 s after the one that succeeded
    assert "No heartbeat" not in caplog.text


@pytest.mark.parametrize(
    ("limit", "beats"),
    [
        ({"heartbeat_max_failures": 0}, 1),
        ({"heartbeat_max_failures": 2}, 3),
        ({"heartbeat_max_silence": 25}, 3),
    ],
)
def test_session_is_given_up_after_heartbeat_max_failures(
    server, service, clock, caplog, limit, beats
):
    server.on(HEARTBEAT, Answer({}, 401))
    server.on(SAMPLE, promise("s"))
    server.on_future("s", Hang())
    sampler = new_sampler(service(**limit))
    drawing = sample(sampler)
    wait_until_beating(server, clock, beats)
    until(lambda: "Session s-1 is given up" in caplog.text)
    for each in (drawing, sample(sampler)):  # running work, and later work
        with pytest.raises(APIConnectionError, match="given up") as caught:
            each.result(10)
        assert isinstance(caught.value.__cause__, AuthenticationError)
    clock.advance(600)
    server.wait_for(DYNAMIC, 2)
    assert len(server.asked(HEARTBEAT)) == beats


def test_successful_heartbeat_resets_failure_count(server, service, clock):
    failed = Answer({}, 500)
    server.on(HEARTBEAT, failed, Answer({}), failed, Answer({}), failed, Answer({}))
    new_sampler(service(heartbeat_max_failures=1))
    wait_until_beating(server, clock, 7)


@pytest.mark.parametrize("body", [b"", b"ok", b"null", b'{"type": "heartbeat"}'])
def test_body_of_heartbeat_answer_is_ignored(server, service, clock, body):
    server.on(HEARTBEAT, Answer(body))
    client = service(heartbeat_max_failures=0)
    new_sampler(client)
    wait_until_beating(server, clock, 2)
    assert client.holder._group.closed is None


class Moody(HTTP1Client):
    """A custom HTTP client that raises a different error for each heartbeat."""

    async def post(self, url: str, headers: Any, content: bytes | None = None) -> Any:
        response = await super().post(url, headers, content)
        if url.endswith("heartbeat"):
            raise ZeroDivisionError("an error of this library")
        return response


def test_error_of_custom_http_client_does_not_stop_heartbeat(server, service, clock, caplog):
    new_sampler(service(http_client=Moody))
    wait_until_beating(server, clock, 14)
    until(lambda: "an error of this library" in caplog.text)


@pytest.mark.parametrize("status", [402, 500])
def test_heartbeat_is_never_retried(server, service, clock, status):
    server.on(HEARTBEAT, Answer({}, status))
    new_sampler(service(max_retries=5))
    wait_until_beating(server, clock, 2)
    assert [request.headers["x-stainless-retry-count"] for request in server.asked(HEARTBEAT)] == [
        "0",
        "0",
    ]


def test_session_lives_while_any_client_uses_it(server, clock):
    options = {"api_key": "tml-test", "telemetry_enabled": False, "clock": clock}
    sampler = new_sampler(tinkex.ServiceClient(base_url=server.url, **options))
    gc.collect()
    wait_until_beating(server, clock, 2)
    sampler.holder.close().result(10)


@pytest.mark.parametrize("telemetry", [False, True])
@pytest.mark.parametrize("tokens", [False, True])
def test_garbage_collected_client_ends_heartbeat_and_connections(server, clock, telemetry, tokens):
    flags(server, pjwt_auth_enabled=tokens)
    server.on("POST /api/v1/auth/token", Answer({"jwt": "eyJ.eyJleHAiOjEwMDAwMH0.x"}))
    server.on(TELEMETRY, Answer({"status": "accepted"}))
    options = {"api_key": "tml-test", "telemetry_enabled": telemetry, "clock": clock}
    client = tinkex.ServiceClient(base_url=server.url, **options)
    session = weakref.ref(client.holder)
    new_sampler(client)
    del client
    until(lambda: clock.sleeping == 2 + telemetry + tokens)

    def is_gone() -> bool:
        gc.collect()
        return session() is None

    until(is_gone)
    clock.advance(10)
    until(lambda: server.open_connections == 0)
    assert server.asked(HEARTBEAT) == []
    told = [event["event"] for each in server.asked(TELEMETRY) for event in each.json["events"]]
    assert told == (["SESSION_START", "SESSION_END"] if telemetry else [])


# -- dynamic flags -------------------------------------------------------------------------------


def test_dynamic_configuration_is_fetched_at_its_refresh_interval(server, service, clock):
    server.on(
        DYNAMIC,
        Answer({"refresh_interval_sec": 1}),  # below the minimum of 10 s, so 10 s is used
        Answer({"sample_cancel_enabled": True, "refresh_interval_sec": 10}),
        Answer({}, 500),
        Answer({"sample_cancel_enabled": False}),
    )
    client = service()
    new_sampler(client)
    enabled = []
    for asked in range(1, 5):
        server.wait_for(DYNAMIC, asked)
        until(lambda: clock.sleeping == 2)
        enabled.append(client.holder.dynamic.sample_cancel_enabled)
        clock.advance(10)
    assert enabled == [False, True, True, False]


def test_missing_dynamic_configuration_is_requested_once(server, service, clock):
    server.on(DYNAMIC, Answer({}, 404))
    new_sampler(service())
    server.wait_for(DYNAMIC)
    for beat in range(1, 4):
        until(lambda: clock.sleeping == 1)
        clock.advance(1000)
        server.wait_for(HEARTBEAT, beat)
    assert len(server.asked(DYNAMIC)) == 1


# -- closing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ((), {"reason": {"type": "success"}}),
        (("errored", "nan"), {"reason": {"type": "errored"}, "detail": "nan"}),
        (("interrupted",), {"reason": {"type": "interrupted"}}),
    ],
)
def test_closing_sends_reason_to_service(server, service, arguments, sent):
    client = service()
    new_sampler(client)
    client.close(*arguments).result(10)
    assert [request.json for request in server.asked(FINISH)] == [sent]


def test_unknown_close_reason_is_refused(service):
    with pytest.raises(InvalidInputError, match="status"):
        service().close("bored")


def test_unused_client_closes_without_any_request(server, service):
    service().close().result(10)
    assert server.requests == []


def test_with_block_finishes_session_with_success(server, service):
    with service() as client:
        new_sampler(client)
    assert server.asked(FINISH)[0].json == {"reason": {"type": "success"}}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad"), "errored"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(0), "interrupted"),
        (SystemExit(3), "interrupted"),
    ],
)
def test_failed_with_block_finishes_session_as_errored_and_reraises(server, service, error, reason):
    def fail() -> None:
        with service() as client:
            new_sampler(client)
            raise error

    with pytest.raises(type(error)):
        fail()
    sent = server.asked(FINISH)[0].json
    assert sent["reason"] == {"type": reason}
    assert sent["detail"] == f"{type(error).__name__}: {error}"


def test_closing_twice_finishes_once(server, service):
    client = service()
    new_sampler(client)
    first, second = client.close("errored"), client.close()
    first.result(10)
    second.result(10)
    assert [request.json["reason"]["type"] for request in server.asked(FINISH)] == ["errored"]


def test_closing_from_many_threads_finishes_once(server, service):
    client = service()
    new_sampler(client)
    barrier = threading.Barrier(8)

    def close(_: int) -> None:
        barrier.wait(10)
        client.close().result(10)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(close, range(8)))
    assert len(server.asked(FINISH)) == 1


def test_running_work_fails_when_client_is_closed(server, service):
    answer_training(server)
    server.on(STEP, promise("step"))
    server.on_future("step", Hang())
    server.on(SAMPLE, Hang())
    client = service()
    trainer, sampler = new_trainer(client), new_sampler(client)
    waiting = [trainer.optim_step(), sample(sampler)]
    server.wait_for(POLL, 2)
    server.wait_for(SAMPLE)
    client.close().result(10)
    for each in waiting:
        with pytest.raises(ClientClosedError):
            each.result(10)


def test_a_closed_client_and_its_children_refuse_work(server, service):
    answer_training(server)
    client = service()
    trainer, sampler, rest = new_trainer(client), new_sampler(client), client.create_rest_client()
    client.close().result(10)
    sent = len(server.requests)
    for call in (
        lambda: new_trainer(client),
        lambda: new_sampler(client),
        client.get_server_capabilities,
        trainer.optim_step,
        trainer.get_info,
        lambda: sample(sampler),
        rest.list_sessions,
    ):
        with pytest.raises(ClientClosedError):
            call()
    assert len(server.requests) == sent


def test_closing_during_the_first_call_fails_that_call(server, service):
    server.on(CREATE_SESSION, Hang())
    client = service()
    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(new_sampler, client)
        server.wait_for(CREATE_SESSION)
        client.close().result(10)
        with pytest.raises(ClientClosedError):
            making.result(10)


def test_nothing_is_sent_after_closing(server, service, clock):
    server.on(DYNAMIC, Answer({"sample_cancel_enabled": True}))
    server.on(SAMPLE, promise_by_seq)
    client = service()
    sampler = new_sampler(client)
    for number in range(200):
        server.on_future(f"r-{number}", Hang())
    drawing = [sample(sampler) for _ in range(200)]
    server.wait_for(POLL, 200)
    client.close().result(10)
    sent = paths(server)
    assert sent[-1] == "sessions/s-1/finish"
    for each in drawing:
        with pytest.raises(ClientClosedError):
            each.result(10)
    clock.advance(1000)
    until(lambda: server.open_connections == 0)
    assert paths(server) == sent


def test_close_succeeds_if_finish_request_fails(server, service):
    client = service(max_retries=0)
    new_sampler(client)
    server.on(FINISH, Answer({}, 500))
    client.close().result(10)


def test_close_succeeds_if_service_is_gone(service):
    with ScriptedServer() as short_lived:
        client = service(base_url=short_lived.url, max_retries=0)
        new_sampler(client)
    client.close().result(10)
    with pytest.raises(APIConnectionError):
        service(base_url=short_lived.url, max_retries=0).get_server_capabilities()


def test_connections_are_closed_with_the_client(server, service):
    answer_samples(server)
    client = service()
    sample(new_sampler(client)).result(10)
    assert server.open_connections > 0
    client.close().result(10)
    until(lambda: server.open_connections == 0)


# -- timeouts ------------------------------------------------------------------------------------


def test_timeout_releases_caller(server, service):
    server.on(CREATE_SESSION, Hang())
    with pytest.raises(tinkex.APITimeoutError, match=r"0\.05 s"):
        new_sampler(service(), timeout=0.05)
