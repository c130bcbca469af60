"""The events that clients emit to listeners, and that they create none without a listener."""

from __future__ import annotations

import asyncio
import gc

import pytest

import tinkex
from tinkex import telemetry
from tinkex.errors import (
    APIConnectionError,
    InternalServerError,
    RequestFailedError,
)
from tinkex.telemetry import bus
from tinkex.telemetry.events import (
    CustomLossEvent,
    Event,
    FutureCancelled,
    FutureCompleted,
    FutureConnectionError,
    FutureEvent,
    FutureFailure,
    FuturePolled,
    FutureSubmitted,
    HeartbeatFailed,
    HttpEvent,
    HttpRequestException,
    HttpRequestStart,
    HttpRequestStop,
    OperationEvent,
    OperationException,
    OperationStart,
    OperationStop,
    QueueStateChange,
    RegularizerEvent,
    RetryAttemptFailed,
    RetryAttemptRetry,
    RetryAttemptStart,
    RetryAttemptStop,
    RetryEvent,
    SampleStop,
    SessionClosed,
    SessionOpened,
    Throttled,
    TrainingPass,
    TrainingStep,
)

from ..scripted import Answer, Hang, Raw, promise
from .helpers import (
    CREATE_SESSION,
    HEARTBEAT,
    POLL,
    PROMPT,
    SAMPLE,
    STEP,
    STREAM,
    answer_samples,
    answer_training,
    datum,
    failed,
    flags,
    new_sampler,
    new_trainer,
    promise_by_seq,
    sample,
    sampled,
    until,
)

pytestmark = pytest.mark.usefixtures("quiet_bus")

PAUSED = {"type": "try_again", "queue_state": "paused_rate_limit", "queue_state_reason": "full"}


def kinds(events: list[Event]) -> list[type[Event]]:
    return [type(event) for event in events]


# -- requests ------------------------------------------------------------------------------------


def test_request_emits_start_and_stop_events(server, service, heard):
    server.on("GET /api/v1/get_server_capabilities", Answer({"supported_models": []}))
    client = service(user_metadata={"run": "7"})
    events = heard(HttpEvent)
    client.get_server_capabilities()
    config_start, config_stop, start, stop = events
    assert kinds(events[:2]) == [HttpRequestStart, HttpRequestStop]
    assert config_start.path == config_stop.path == "/api/v1/client/config"
    assert start.id == stop.id != config_start.id
    assert (start.method, start.path) == ("GET", "/api/v1/get_server_capabilities")
    assert (start.pool_type, start.base_url) == ("session", server.url)
    assert (stop.status, stop.result, stop.retry_count) == (200, "ok", 0)
    assert start.metadata == {"run": "7"}


def test_every_attempt_emits_its_own_request_events(server, service, heard):
    server.on(
        "GET /api/v1/get_server_capabilities", Answer({}, 500), Answer({"supported_models": []})
    )
    client = service()
    events = heard(HttpRequestStop)
    client.get_server_capabilities()
    asked = [event for event in events if event.path.endswith("capabilities")]
    assert [(event.status, event.result, event.retry_count) for event in asked] == [
        (500, "error", 0),
        (200, "ok", 1),
    ]


def test_request_without_answer_emits_exception_event(server, service, heard):
    server.on(CREATE_SESSION, Raw())
    client = service(max_retries=0, user_metadata={"run": "7"})
    events = heard(HttpRequestException)
    with pytest.raises(APIConnectionError):
        new_sampler(client)
    assert {event.path for event in events} == {"/api/v1/create_session"}
    assert events[0].kind == "APIConnectionError"
    assert "Connection failed" in events[0].reason
    assert "Traceback" in events[0].stacktrace
    assert events[0].metadata["run"] == "7"


def test_cancelled_request_emits_end_event(server, service, heard):
    server.on(SAMPLE, Hang())
    sampler = new_sampler(service())
    events, operations = heard(HttpEvent), heard(OperationEvent)
    future = sample(sampler)
    server.wait_for(SAMPLE)
    future.cancel()
    until(lambda: len(operations) == 2)
    assert kinds(events) == [HttpRequestStart, HttpRequestException]
    assert events[1].kind == "CancelledError"
    assert kinds(operations) == [OperationStart, OperationException]


def test_session_events_carry_session_id(server, service, heard):
    answer_training(server)
    client = service(user_metadata={"run": "7", "phase": "x"})
    trainer = new_trainer(client)
    events = heard(HttpRequestStop)
    trainer.forward_backward([datum(1, 2, 3)], "cross_entropy").result()
    trainer.optim_step().result()
    assert [event.metadata for event in events] == [
        {
            "run": "7",
            "phase": "x",
            "session_id": "s-1",
            "model_id": "s-1:train:0",
            "model_seq_id": 0,
            "base_model": "some/model",
            "seq_id": seq_id,
        }
        for seq_id in (1, 2)
    ]


def test_metadata_of_caller_is_added_and_has_precedence(server, service, heard):
    answer_samples(server)
    sampler = new_sampler(service(user_metadata={"phase": "training"}))
    events = heard()
    with telemetry.metadata(phase="evaluation", case=1), telemetry.metadata(case=2):
        sample(sampler).result()
    sample(sampler).result()
    told = [event.metadata for event in events]
    assert {(each["phase"], each.get("case")) for each in told} == {
        ("evaluation", 2),
        ("training", None),
    }


def test_concurrent_calls_have_separate_metadata(server, service, heard):
    server.on(SAMPLE, promise_by_seq)
    for number in range(20):
        server.on_future(f"r-{number}", sampled(7))
    sampler = new_sampler(service())
    events = heard(HttpEvent, FutureEvent, OperationEvent)
    futures = []
    for number in range(20):
        with telemetry.metadata(number=number):
            futures.append(sample(sampler))
    for future in futures:
        future.result()
    by_id = {
        event.id: event.metadata["number"] for event in events if isinstance(event, OperationStart)
    }
    assert sorted(by_id.values()) == list(range(20))
    for event in events:
        if isinstance(event, OperationStop):
            assert event.metadata["number"] == by_id[event.id]
        if isinstance(event, HttpRequestStop):
            assert event.metadata["seq_id"] in range(20)
    per_call = [sum(event.metadata["number"] == number for event in events) for number in range(20)]
    assert len(set(per_call)) == 1


# -- promises and queues -------------------------------------------------------------------------


def test_promise_emits_events_from_submission_to_result(server, service, heard):
    server.on(SAMPLE, promise("r-1"))
    server.on_future("r-1", Answer({"queue_state": "active"}, 408), sampled(7, 8))
    sampler = new_sampler(service())
    events = heard(FutureEvent)
    sample(sampler).result()
    assert kinds(events) == [FutureSubmitted, FuturePolled, FuturePolled, FutureCompleted]
    assert {event.request_id for event in events} == {"r-1"}
    assert {event.request_type for event in events} == {"Sample"}
    assert [(event.iteration, event.status) for event in events[1:3]] == [(0, 408), (1, 200)]
    assert events[3].iteration == 2


@pytest.mark.parametrize(
    ("reply", "name", "facts", "polls"),
    [
        (failed("no", "user"), "request_failed", (None, "user", "RequestFailedError"), 1),
        (Answer({"detail": "gone"}, 410), "api_error", (410, "server", "GoneError"), 6),
        (Answer(b"what?"), "validation_error", (200, "server", "APIResponseValidationError"), 1),
    ],
)
def test_failed_promise_event_has_reason(server, service, heard, reply, name, facts, polls):
    server.on(STEP, promise("r-1"))
    server.on_future("r-1", reply)
    trainer = new_trainer(service())
    events = heard(FutureFailure)
    with pytest.raises(tinkex.TinkerError):
        trainer.optim_step().result()
    (event,) = events
    assert event.name == f"tinkex.future.{name}"
    assert (event.status, event.category, event.error_type) == facts
    assert (event.request_type, event.iteration) == ("OptimStep", polls)
    assert event.metadata["model_id"] == "s-1:train:0"


def test_promise_that_times_out_emits_timeout_event(server, service, heard, clock):
    server.on(STEP, promise("r-1"))
    server.on_future("r-1", Answer({"type": "try_again", "retry_after_ms": 4000}))
    trainer = new_trainer(service())
    events = heard(FutureFailure)
    with pytest.raises(tinkex.APITimeoutError):
        trainer.optim_step(timeout=9.0).result()
    assert [event.name for event in events] == ["tinkex.future.timeout"]
    assert events[0].elapsed_time == 8.0  # the next wait of 4 s would cross the deadline


def test_unreachable_service_emits_connection_error_event(server, service, heard, clock):
    server.on(STEP, promise("r-1"))
    server.on_future("r-1", Raw())
    trainer = new_trainer(service())
    events = heard(FutureFailure)
    step = trainer.optim_step()
    until(lambda: clock.sleeping == 3)  # after 1 + 2 + 4 + 8 s, the first long pause
    while not step.done():
        clock.advance(8000)
        until(lambda: clock.sleeping >= 3 or step.done())
    assert isinstance(step.exception(), APIConnectionError)
    assert kinds(events) == [FutureConnectionError]


def test_cancelled_promise_emits_cancelled_event(server, service, heard):
    server.on(SAMPLE, promise("r-1"))
    server.on_future("r-1", Hang())
    sampler = new_sampler(service())
    events = heard(FutureEvent)
    future = sample(sampler)
    server.wait_for(POLL)
    future.cancel()
    until(lambda: len(events) == 2)
    assert kinds(events) == [FutureSubmitted, FutureCancelled]


def test_queue_state_change_emits_one_event(server, service, heard):
    other = {**PAUSED, "queue_state_reason": "still full"}
    odd = {**PAUSED, "queue_state": "on fire"}
    server.on(SAMPLE, promise("r-1"))
    server.on_future("r-1", *map(Answer, (PAUSED, PAUSED, other, odd)), sampled(7))
    sampler = new_sampler(service())
    events = heard(QueueStateChange)
    sample(sampler).result()
    assert [(event.queue_state, event.queue_state_reason) for event in events] == [
        ("paused_rate_limit", "full"),
        ("paused_rate_limit", "still full"),
        ("unknown", "full"),
    ]
    assert {event.request_id for event in events} == {"r-1"}
    assert {event.metadata["sampling_session_id"] for event in events} == {"s-1:sample:0"}


def test_queue_state_of_throttled_sample_emits_event(server, service, heard):
    busy = {"detail": "slow down", "queue_state": "paused_capacity"}
    server.on(SAMPLE, Answer(busy, 429), sampled(7))
    sampler = new_sampler(service())
    events = heard(QueueStateChange, Throttled)
    sample(sampler).result()
    change, throttled = events
    assert (change.queue_state, change.request_id) == ("paused_capacity", None)
    assert throttled.delay > 0
    assert "slow down" in throttled.reason


def test_throttled_poll_emits_throttled_event(server, service, heard):
    server.on(STEP, promise("r-1"))
    server.on_future("r-1", Answer({"detail": "slow down"}, 429), Answer({"metrics": {}}))
    trainer = new_trainer(service())
    events = heard(Throttled)
    trainer.optim_step().result()
    assert [event.delay for event in events] == [1.0]


# -- retries -------------------------------------------------------------------------------------


def test_each_attempt_emits_event(server, service, heard):
    server.on(SAMPLE, Answer({"detail": "oops"}, 500), sampled(7))
    sampler = new_sampler(service())
    events = heard(RetryEvent)
    sample(sampler).result()
    assert kinds(events) == [
        RetryAttemptStart,
        RetryAttemptRetry,
        RetryAttemptStart,
        RetryAttemptStop,
    ]
    assert [event.attempt for event in events] == [0, 0, 1, 1]
    assert {event.operation for event in events} == {"sample"}
    assert isinstance(events[1].error, InternalServerError)
    assert events[1].delay > 0
    assert events[0].metadata["sampling_session_id"] == "s-1:sample:0"


def test_giving_up_emits_event(server, service, heard):
    server.on(SAMPLE, Answer({"detail": "bad prompt"}, 422))
    sampler = new_sampler(service())
    events = heard(RetryAttemptFailed)
    with pytest.raises(tinkex.UnprocessableEntityError):
        sample(sampler).result()
    assert [(event.attempt, event.result) for event in events] == [(0, "failed")]


# -- operations ----------------------------------------------------------------------------------


def test_sample_event_counts_tokens(server, service, heard):
    server.on(SAMPLE, sampled(7, 8, prompt_cache_hit_tokens=2))
    sampler = new_sampler(service())
    events = heard(OperationEvent)
    sample(sampler).result()
    start, done, stop = events
    assert kinds(events) == [OperationStart, SampleStop, OperationStop]
    assert start.id == done.id == stop.id
    assert {event.operation for event in events} == {"sample"}
    assert (done.prompt_tokens, done.cached_tokens) == (3, 2)
    assert (done.sampled_tokens, done.sequences) == (2, 1)
    assert done.metadata["base_model"] == "some/model"


def test_an_image_of_unknown_length_is_not_counted(server, service, heard):
    server.on(SAMPLE, sampled(7, 8))
    answer_training(server)
    image = tinkex.types.ImageChunk(data=b"1", format="png")
    prompt = tinkex.ModelInput(chunks=[*PROMPT.chunks, image])
    samples, passes = heard(SampleStop), heard(TrainingPass)
    client = service()
    new_sampler(client).sample(prompt, 1, tinkex.SamplingParams(max_tokens=2)).result()
    given = tinkex.Datum(prompt, datum(1, 2).loss_fn_inputs)
    new_trainer(client).forward([given], "cross_entropy").result()
    assert [event.prompt_tokens for event in samples] == [3]
    assert [event.tokens for event in passes] == [3]


async def streamed(sampler: tinkex.SamplingClient) -> int:
    return len([chunk async for chunk in sampler.sample_stream(PROMPT)])


def test_streamed_sample_event_counts_tokens(server, service, heard):
    body = b'data: {"token_id": 1}\n\ndata: {"token_id": 2}\n\ndata: {"finish_reason": "stop"}\n\n'
    server.on(STREAM, Answer(body, content_type="text/event-stream"))
    sampler = new_sampler(service())
    events, requests = heard(SampleStop), heard(HttpEvent)
    assert asyncio.run(streamed(sampler)) == 3
    until(lambda: bool(events))
    assert [(event.prompt_tokens, event.sampled_tokens) for event in events] == [(3, 2)]
    assert kinds(requests) == [HttpRequestStart, HttpRequestStop]
    assert requests[1].path == "/api/v1/stream_sample"


def test_sample_that_replaces_unsupported_stream_counts_tokens_once(server, service, heard):
    answer_samples(server, 7, 8, 9)
    sampler = new_sampler(service())
    events = heard(SampleStop)
    asyncio.run(streamed(sampler))
    until(lambda: bool(events))
    assert [(event.operation, event.sampled_tokens) for event in events] == [("stream_sample", 3)]


def test_training_emits_pass_and_step_events(server, service, heard):
    answer_training(server)
    server.on(STEP, Answer({"metrics": {"grad_norm": 0.5}}))
    trainer = new_trainer(service())
    events = heard(TrainingPass, TrainingStep)
    trainer.forward([datum(1, 2)], "cross_entropy").result()
    trainer.forward_backward([datum(1, 2), datum(1, 2, 3)], "cross_entropy").result()
    trainer.optim_step().result()
    forward, both, step = events
    assert (forward.operation, forward.data, forward.tokens) == ("forward", 1, 2)
    assert (both.operation, both.data, both.tokens, both.loss) == ("forward_backward", 2, 5, 2.0)
    assert step.metrics == {"grad_norm": 0.5}


def test_tokens_are_counted_even_if_caller_changes_its_list(server, service, heard):
    answer_training(server)
    events = heard(TrainingPass)
    data = [datum(1, 2), datum(1, 2, 3)]
    passed = new_trainer(service()).forward_backward(data, "cross_entropy")
    data.clear()
    passed.result()
    assert [(event.data, event.tokens) for event in events] == [(2, 5)]


def test_a_pass_in_many_chunks_is_one_operation(server, service, heard):
    flags(server, fwdbwd_max_chunk_len=1)
    answer_training(server)
    trainer = new_trainer(service())
    operations, requests = heard(OperationEvent), heard(HttpRequestStop)
    trainer.forward_backward([datum(1, 2), datum(3, 4), datum(5, 6)], "cross_entropy").result()
    assert kinds(operations) == [OperationStart, TrainingPass, OperationStop]
    assert sorted(event.metadata["seq_id"] for event in requests) == [1, 2, 3]


def test_a_custom_loss_counts_both_passes(server, service, heard):
    torch = pytest.importorskip("torch")
    answer_training(server)
    trainer = new_trainer(service())
    events = heard(TrainingPass)

    def loss(data, logprobs):
        return -torch.cat(logprobs).sum(), {}

    trainer.forward_backward_custom([datum(1, 2, 3)], loss).result()
    assert [(event.operation, event.tokens) for event in events] == [("forward_backward_custom", 6)]


def test_custom_loss_emits_events_for_its_parts(server, service, heard):
    torch = pytest.importorskip("torch")
    answer_training(server)
    trainer = new_trainer(service())
    events = heard(CustomLossEvent, RegularizerEvent)

    def loss(data, logprobs):
        return -torch.cat(logprobs).sum(), {}

    square = {"fn": lambda _, logprobs: ((torch.cat(logprobs) ** 2).sum(), {}), "name": "square"}
    trainer.forward_backward_custom(
        [datum(1, 2, 3)], loss, regularizers=[{**square, "weight": 0.5}]
    ).result()
    assert [event.name.removeprefix("tinkex.") for event in events] == [
        "custom_loss.start",
        "regularizer.compute.start",
        "regularizer.compute.stop",
        "custom_loss.stop",
    ]
    assert (events[2].regularizer_name, events[2].contribution) == ("square", 1.5)
    assert (events[3].loss_total, events[3].regularizer_total) == (4.5, 1.5)
    assert {event.metadata["model_id"] for event in events} == {"s-1:train:0"}


def test_failed_operation_event_has_error(server, service, heard):
    server.on(STEP, promise("r-1"))
    server.on_future("r-1", failed("no"))
    trainer = new_trainer(service())
    events = heard(OperationException, TrainingStep)
    with pytest.raises(RequestFailedError) as raised:
        trainer.optim_step().result()
    (event,) = events
    assert event.operation == "optim_step"
    assert event.error is raised.value


def test_refused_operation_leaves_no_unawaited_coroutine(server, service, heard, recwarn):
    answer_samples(server)
    client = service()
    sampler = new_sampler(client)
    heard()
    client.close().result()
    with pytest.raises(tinkex.ClientClosedError):
        sample(sampler)
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


def test_sampler_events_carry_model_id(server, service, heard):
    answer_training(server)
    answer_samples(server)
    server.on(
        "POST /api/v1/save_weights_for_sampler", Answer({"sampling_session_id": "s-1:sample:9"})
    )
    client = service()
    trainer = new_trainer(client)
    unnamed = trainer.save_weights_and_get_sampling_client()
    saved = client.create_sampling_client(model_path="tinker://s-1:train:0/sampler_weights/a")
    foreign = client.create_sampling_client(model_path="tinker://other/sampler_weights/a")
    events = heard(SampleStop)
    for sampler in (unnamed, saved, foreign):
        sample(sampler).result()
    assert [(event.metadata["model_id"], event.metadata["base_model"]) for event in events] == [
        ("s-1:train:0", "some/model"),
        ("s-1:train:0", "some/model"),
        ("other", None),
    ]


def test_event_of_creating_model_carries_session_it_opened(server, service, heard):
    server.on_future("model", Answer(PAUSED), Answer({"model_id": "s-1:train:0"}))
    events = heard(QueueStateChange, OperationStart)
    new_trainer(service())
    start, change = events
    assert (start.operation, start.metadata["base_model"]) == ("create_model", "some/model")
    assert change.metadata["session_id"] == "s-1"


def test_events_of_created_clients_carry_session_and_sequence_number(server, service, heard):
    events = heard(HttpRequestStop, OperationStop)
    client = service()
    new_sampler(client)
    new_trainer(client)
    new_trainer(client)
    operations = [event for event in events if isinstance(event, OperationStop)]
    assert [event.metadata["session_id"] for event in operations] == ["s-1"] * 3
    assert [event.metadata.get("model_seq_id") for event in operations] == [None, 0, 1]
    requests = [event for event in events if event.facts.get("path") == "/api/v1/create_model"]
    assert [event.metadata["model_seq_id"] for event in requests] == [0, 1]


def test_calls_by_path_and_rest_calls_are_operations(server, service, heard):
    server.on("GET /api/v1/anything", Answer({}))
    server.on("GET /api/v1/sessions", Answer({"sessions": []}))
    client = service()
    events = heard(OperationStart)
    client.http.get("/api/v1/anything").result()
    client.create_rest_client().list_sessions().result()
    assert [event.operation for event in events] == ["GET /api/v1/anything", "list_sessions"]


# -- sessions ------------------------------------------------------------------------------------


def test_session_emits_opened_and_closed_events(server, service, heard):
    events = heard(SessionOpened, SessionClosed)
    client = service()
    new_sampler(client)
    client.close("interrupted").result()
    opened, closed = events
    assert (opened.session_id, opened.base_url) == ("s-1", server.url)
    assert (closed.session_id, closed.reason) == ("s-1", "interrupted")


def test_events_hide_password_in_url(server, service, heard):
    events = heard(SessionOpened)
    new_sampler(service(base_url=server.url.replace("://", "://u:secret@")))
    assert "secret" not in str(events[0])


def test_failed_heartbeat_emits_event(server, service, heard, clock):
    server.on(HEARTBEAT, Answer({"detail": "key?"}, 401))
    events = heard(HeartbeatFailed)
    new_sampler(service())
    until(lambda: clock.sleeping == 2)
    clock.advance(10)
    until(lambda: bool(events))
    assert events[0].session_id == "s-1"
    assert events[0].silence >= 10
    assert isinstance(events[0].error, tinkex.AuthenticationError)


def test_background_work_belongs_to_no_call(server, service, heard, clock):
    events = heard(HttpRequestStop)
    new_sampler(service())
    until(lambda: clock.sleeping == 2)
    clock.advance(10)
    until(lambda: any(event.path.endswith("heartbeat") for event in events))
    (beat,) = [event for event in events if event.path.endswith("heartbeat")]
    assert beat.metadata == {"session_id": "s-1"}


# -- no listener ---------------------------------------------------------------------------------


class Unspeakable(Exception):
    """Raised if an event is created without a listener."""


def test_no_event_is_created_without_listener(server, service, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise Unspeakable

    answer_training(server)
    server.on(SAMPLE, Answer({"detail": "slow down"}, 429), Answer({}, 500), promise("r-1"))
    server.on_future("r-1", Answer(PAUSED), Answer({"detail": "later"}, 429), sampled(7))
    client = service()
    for kind in telemetry.events.concrete():
        monkeypatch.setattr(kind, "__init__", refuse)
    sampler, trainer = new_sampler(client), new_trainer(client)
    assert sample(sampler).result().sequences[0].tokens == [7]
    trainer.forward_backward([datum(1, 2)], "cross_entropy").result()
    trainer.optim_step().result()
    assert not bus.wants(Event)


def test_failing_handler_does_not_affect_work(server, service, caplog):
    def broken(event: Event) -> None:
        raise Unspeakable

    answer_samples(server, 7, 8)
    sampler = new_sampler(service())
    number = bus.attach(broken)
    try:
        assert sample(sampler).result().sequences[0].tokens == [7, 8]
    finally:
        bus.detach(number)
    assert caplog.text.count("A telemetry handler failed") == 1
