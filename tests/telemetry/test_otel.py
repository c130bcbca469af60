"""Events as OpenTelemetry spans and metrics, and trace context in requests."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tinkex
from tinkex import telemetry
from tinkex.errors import ConfigError
from tinkex.telemetry import bus
from tinkex.telemetry.events import Event
from tinkex.telemetry.otel import trace_context

from ..client.helpers import (
    PASS,
    SAMPLE,
    STEP,
    answer_samples,
    answer_training,
    datum,
    failed,
    flags,
    new_sampler,
    new_trainer,
    promise_by_seq,
    run_script,
    sample,
    sampled,
    until,
)
from ..scripted import Answer, Hang, promise

pytest.importorskip("opentelemetry.sdk")

from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

PAUSED = {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "busy"}


class Traces:
    """Finished spans and their parents."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def children(self, parent: ReadableSpan) -> list[str]:
        below = [
            span
            for span in self.spans
            if span.parent is not None and span.parent.span_id == parent.context.span_id
        ]
        return [span.name for span in sorted(below, key=lambda span: span.start_time or 0)]


@pytest.fixture
def traces() -> Iterator[Traces]:
    made = Traces()
    with telemetry.OpenTelemetry(made.provider):
        yield made


# -- spans ---------------------------------------------------------------------------------------


def test_sample_span_has_its_requests_and_its_wait_as_children(server, service, traces):
    server.on(SAMPLE, promise("r-1"))
    server.on_future("r-1", Answer(PAUSED), sampled(7, 8, prompt_cache_hit_tokens=1))
    sampler = new_sampler(service(user_metadata={"run": "7"}))
    sample(sampler).result()
    call = traces.named("tinkex.sample")
    assert call.parent is None
    assert traces.children(call) == ["POST /api/v1/asample", "tinkex.future"]
    wait = traces.named("tinkex.future")
    assert traces.children(wait) == ["POST /api/v1/retrieve_future"] * 2
    attributes = dict(call.attributes or {})
    assert attributes["tinkex.session_id"] == "s-1"
    assert attributes["tinkex.run"] == "7"
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 2
    assert attributes["tinkex.cached_tokens"] == 1
    assert attributes["gen_ai.request.model"] == "some/model"
    assert dict(wait.attributes or {}) == {
        "tinkex.request_id": "r-1",
        "tinkex.request_type": "Sample",
        "tinkex.polls": 2,
    }
    (change,) = wait.events
    assert change.name == "tinkex.queue.state_change"
    assert dict(change.attributes or {})["queue_state_reason"] == "busy"


def test_promise_span_links_to_its_request(server, service, traces):
    server.on(SAMPLE, promise("r-1"))
    server.on_future("r-1", sampled(7))
    sample(new_sampler(service())).result()
    (link,) = traces.named("tinkex.future").links
    assert link.context == traces.named("POST /api/v1/asample").context


def test_request_span_has_method_path_and_status(server, service, traces):
    server.on(SAMPLE, Answer({"detail": "oops"}, 500), sampled(7))
    sample(new_sampler(service())).result()
    bad, good = [span for span in traces.spans if span.name == "POST /api/v1/asample"]
    assert bad.kind is trace.SpanKind.CLIENT
    assert dict(bad.attributes or {}) == {
        "http.request.method": "POST",
        "url.template": "/api/v1/asample",
        "server.address": server.url,
        "http.response.status_code": 500,
    }
    assert bad.status.status_code is trace.StatusCode.ERROR
    assert good.status.status_code is trace.StatusCode.UNSET
    retry = [event.name for event in traces.named("tinkex.sample").events]
    assert retry == ["tinkex.retry.attempt.retry"]


def test_call_span_is_a_child_of_the_callers_span(server, service, traces):
    answer_training(server)
    trainer = new_trainer(service())
    tracer = traces.provider.get_tracer("mine")
    with tracer.start_as_current_span("step"):
        forward = trainer.forward_backward([datum(1, 2, 3)], "cross_entropy")
        step = trainer.optim_step()
    forward.result()
    step.result()
    assert traces.children(traces.named("step")) == [
        "tinkex.forward_backward",
        "tinkex.optim_step",
    ]
    facts = dict(traces.named("tinkex.forward_backward").attributes or {})
    assert (facts["tinkex.tokens"], facts["tinkex.data"], facts["tinkex.loss"]) == (3, 1, 1.0)


def test_concurrent_calls_keep_their_own_parents(server, service, traces):
    server.on(SAMPLE, promise_by_seq)
    for number in range(20):
        server.on_future(f"r-{number}", sampled(7))
    sampler = new_sampler(service())
    tracer, futures = traces.provider.get_tracer("mine"), []
    for number in range(20):
        with tracer.start_as_current_span(f"parent {number}"):
            futures.append(sample(sampler))
    for future in futures:
        future.result()
    for number in range(20):
        assert traces.children(traces.named(f"parent {number}")) == ["tinkex.sample"]


def test_chunks_of_a_pass_are_below_their_call(server, service, traces):
    flags(server, fwdbwd_max_chunk_len=1)
    server.on(PASS, *(promise(f"c-{number}") for number in range(3)))
    for number in range(3):
        server.on_future(f"c-{number}", Answer({"loss_fn_output_type": "x", "loss_fn_outputs": []}))
    trainer = new_trainer(service())
    trainer.forward_backward([datum(1, 2), datum(3, 4), datum(5, 6)], "cross_entropy").result()
    below = traces.children(traces.named("tinkex.forward_backward"))
    assert sorted(below) == ["POST /api/v1/forward_backward"] * 3 + ["tinkex.future"] * 3


def test_failure_is_recorded_on_the_spans(server, service, traces):
    server.on(STEP, promise("r-1"))
    server.on_future("r-1", failed("bad step"))
    trainer = new_trainer(service())
    with pytest.raises(tinkex.RequestFailedError):
        trainer.optim_step().result()
    call = traces.named("tinkex.optim_step")
    assert call.status.status_code is trace.StatusCode.ERROR
    assert "bad step" in str(call.status.description)
    assert [event.name for event in call.events] == ["exception"]
    waits = [span for span in traces.spans if span.name == "tinkex.future"]
    assert [span.status.description for span in waits] == [None, "RequestFailedError"]


def test_a_cancelled_call_ends_all_its_spans(server, service, traces):
    server.on(SAMPLE, Hang())
    sampler = new_sampler(service())
    future = sample(sampler)
    server.wait_for(SAMPLE)
    future.cancel()
    until(lambda: any(span.name == "tinkex.sample" for span in traces.spans))
    request = traces.named("POST /api/v1/asample")
    assert request.status.status_code is trace.StatusCode.ERROR


def test_events_outside_a_call_create_no_span(server, service, traces, clock):
    new_sampler(service())
    until(lambda: clock.sleeping == 2)
    clock.advance(10)
    server.wait_for("POST /api/v1/session_heartbeat")
    roots = {span.name for span in traces.spans if span.parent is None}
    assert roots == {"tinkex.create_sampling_session"}


def test_unsampled_trace_creates_no_spans(server, service):
    answer_samples(server)
    sampler = new_sampler(service())
    exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=ALWAYS_OFF)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with telemetry.OpenTelemetry(provider):
        assert sample(sampler).result().sequences[0].tokens == [7]
    assert exporter.get_finished_spans() == ()


def test_every_span_is_ended(server, service):
    answer_training(server)
    answer_samples(server)
    made = Traces()
    bridge = telemetry.OpenTelemetry(made.provider).attach()
    spans: Any = bridge._subscribers[0]
    client = service()
    new_trainer(client).optim_step().result()
    sample(new_sampler(client)).result()
    assert spans._open == {}
    bridge.detach()
    assert not bus.wants(Event)


# -- metrics -------------------------------------------------------------------------------------


def points(reader: InMemoryMetricReader) -> dict[str, list[Any]]:
    data: Any = reader.get_metrics_data()
    return {
        metric.name: list(metric.data.data_points)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }


def test_measurements_go_to_the_meters(server, service):
    answer_training(server)
    server.on(SAMPLE, Answer({}, 500), Answer({**PAUSED, "detail": "x"}, 429), sampled(7, 8))
    client = service()
    trainer, sampler = new_trainer(client), new_sampler(client)
    reader = InMemoryMetricReader()
    with telemetry.OpenTelemetry(meter_provider=MeterProvider([reader])):
        trainer.forward_backward([datum(1, 2, 3)], "cross_entropy").result()
        sample(sampler).result()
    found = points(reader)
    statuses = {
        point.attributes["http.response.status_code"]: point.count
        for point in found["http.client.request.duration"]
        if point.attributes["url.template"] == "/api/v1/asample"
    }
    assert statuses == {500: 1, 429: 1, 200: 1}
    usage = {
        point.attributes["gen_ai.token.type"]: point.sum
        for point in found["gen_ai.client.token.usage"]
    }
    assert usage == {"input": 3, "output": 2}
    operations = {
        point.attributes["gen_ai.operation.name"]
        for point in found["gen_ai.client.operation.duration"]
    }
    assert operations == {"forward_backward", "sample"}
    assert found["tinkex.training.tokens"][0].value == 3
    assert found["tinkex.retries"][0].value == 1
    assert found["tinkex.throttled"][0].value == 1
    assert found["tinkex.queue.state_changes"][0].value == 1


def test_without_an_sdk_there_is_no_subscription(caplog):
    with telemetry.OpenTelemetry():
        assert not bus.wants(Event)
    assert "no SDK" in caplog.text


# -- propagation ---------------------------------------------------------------------------------


def parent_of(header: str) -> int:
    return int(header.split("-")[2], 16)


def test_requests_carry_the_trace_with_otel_propagate(server, service, traces):
    answer_samples(server)
    sampler = new_sampler(service(otel_propagate=True))
    sample(sampler).result()
    (request,) = server.asked(SAMPLE)
    span = traces.named("POST /api/v1/asample")
    assert span.context is not None
    assert parent_of(request.headers["traceparent"]) == span.context.span_id


def test_requests_carry_no_trace_by_default(server, service, traces):
    answer_samples(server)
    sample(new_sampler(service())).result()
    assert not any("traceparent" in request.headers for request in server.requests)


def test_callers_trace_is_sent_without_tinkex_spans(server, service):
    answer_samples(server)
    sampler = new_sampler(service(otel_propagate=True))
    tracer = TracerProvider().get_tracer("mine")
    with tracer.start_as_current_span("mine") as span:
        first = sample(sampler)
    second = sample(sampler)
    first.result()
    second.result()
    headers = [request.headers.get("traceparent") for request in server.asked(SAMPLE)]
    assert [parent_of(header) for header in headers if header] == [span.get_span_context().span_id]


def test_headers_of_the_caller_are_not_overwritten(server, service, traces):
    mine = "00-11111111111111111111111111111111-2222222222222222-01"
    server.on("GET /api/v1/anything", Answer({}))
    client = service(otel_propagate=True)
    client.http.get("/api/v1/anything", headers={"Traceparent": mine}).result()
    assert server.asked("GET /api/v1/anything")[0].headers["traceparent"] == mine


def test_streams_carry_the_trace_too(server, service, traces):
    server.on("GET /api/v1/anything", Answer(b"hello"))
    client = service(otel_propagate=True)
    tracer = traces.provider.get_tracer("mine")

    async def read() -> bytes:
        async with client.http.with_streaming_response("GET", "/api/v1/anything") as response:
            return b"".join([part async for part in response.iter_bytes()])

    with tracer.start_as_current_span("mine"):
        assert asyncio.run(read()) == b"hello"
    (request,) = server.asked("GET /api/v1/anything")
    span = traces.named("GET /api/v1/anything")
    assert span.context is not None
    assert parent_of(request.headers["traceparent"]) == span.context.span_id


# -- without the package -------------------------------------------------------------------------


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Simulate that OpenTelemetry is not installed."""

    def hide() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "opentelemetry"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr("tinkex.telemetry.otel.find_spec", lambda _: None)

    return hide


def test_propagation_is_silent_without_the_package(server, service, absent):
    absent()
    answer_samples(server)
    assert trace_context() is None
    assert sample(new_sampler(service(otel_propagate=True))).result().sequences[0].tokens == [7]
    assert "opentelemetry" not in sys.modules


def test_error_names_the_missing_package(absent):
    absent()
    with pytest.raises(ConfigError, match=r"tinkex\[otel\]"):
        telemetry.OpenTelemetry()


def test_client_does_not_import_opentelemetry():
    run_script(
        "import sys, tinkex; tinkex.ServiceClient(api_key='tml-x'); tinkex.telemetry.Metrics(); "
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)"
    )
