"""Events as OpenTelemetry spans and metrics.

    with OpenTelemetry():
        train(client)

Each call of a client method is a span below the caller's current span. Its requests and the wait for its result are
child spans; queue states that the service reports are events on them. With the setting `otel_propagate` every
request sends its trace context to the service, so that the service's spans belong to the same trace.

Without `opentelemetry-api` the class cannot be used, and nothing of it is imported. If the program has set up no
OpenTelemetry SDK, nothing is recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tinkex._version import __version__
from tinkex.errors import ConfigError

from .bus import Subscriber
from .events import (
    Event,
    FutureCancelled,
    FutureCompleted,
    FutureFailure,
    FutureSubmitted,
    HttpRequestException,
    HttpRequestStart,
    HttpRequestStop,
    OperationException,
    OperationStart,
    OperationStop,
    QueueStateChange,
    RetryAttemptRetry,
    SampleStop,
    Throttled,
    TrainingPass,
    TrainingStep,
)

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.trace import Span, SpanContext, TracerProvider

__all__ = ["OpenTelemetry", "trace_context"]

_logger = logging.getLogger("tinkex")
Attributes = dict[str, str | bool | int | float]

#: The last request of a call, for a link from the promise it returns.
_sent: ContextVar[SpanContext | None] = ContextVar("sent", default=None)


def trace_context() -> Callable[[dict[str, str]], None] | None:
    """A function that adds the current trace to headers and overwrites none; None without OpenTelemetry."""
    if find_spec("opentelemetry") is None:
        return None
    from opentelemetry import propagate

    def add(headers: dict[str, str]) -> None:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        for name, value in carrier.items():
            headers.setdefault(name.lower(), value)

    return add


class OpenTelemetry:
    """Sends the client's events to OpenTelemetry from `attach` to `detach`, or inside a `with` block.

    Spans and measurements go to the given providers, else to the program's global ones.
    """

    def __init__(
        self,
        tracer_provider: TracerProvider | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        if find_spec("opentelemetry") is None:
            raise ConfigError("traces need opentelemetry-api: pip install 'tinkex[otel]'")
        self._tracer_provider = tracer_provider
        self._meter_provider = meter_provider
        self._subscribers: list[Subscriber] = []

    def attach(self) -> Self:
        if self._subscribers:
            return self
        from opentelemetry import metrics, trace

        traces = self._tracer_provider or trace.get_tracer_provider()
        meters = self._meter_provider or metrics.get_meter_provider()
        if not isinstance(traces, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
            self._subscribers.append(_Spans(traces).attach())
        # The API's placeholder class is private; every real provider is in another package.
        if not type(meters).__module__.startswith("opentelemetry.metrics"):
            self._subscribers.append(_Measurements(meters).attach())
        if not self._subscribers:
            _logger.warning("OpenTelemetry has no SDK set up in this program: nothing is recorded.")
        return self

    def detach(self) -> None:
        for each in self._subscribers:
            each.detach()
        self._subscribers.clear()

    def __enter__(self) -> Self:
        return self.attach()

    def __exit__(
        self, kind: object, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


class _Spans(Subscriber):
    """Keeps the spans of calls in flight.

    Handlers run in the task that does the work, so a span made current at the start is the current one for
    everything below. Only calls start a trace: events outside a call, such as heartbeats, or in a call that is not
    sampled, create no span.
    """

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import context, trace

        self._context, self._trace = context, trace
        self._tracer = provider.get_tracer("tinkex", __version__)
        self._open: dict[object, tuple[Span, Token[Context]]] = {}

    def handlers(self) -> Mapping[type[Event], Callable[[Any], object]]:
        return {
            OperationStart: self._operation_started,
            OperationStop: self._operation_stopped,
            OperationException: self._operation_failed,
            SampleStop: self._sampled,
            TrainingPass: self._trained,
            TrainingStep: self._stepped,
            HttpRequestStart: self._request_started,
            HttpRequestStop: self._request_stopped,
            HttpRequestException: self._request_failed,
            FutureSubmitted: self._promised,
            FutureCompleted: self._kept,
            FutureCancelled: self._kept,
            FutureFailure: self._broken,
            QueueStateChange: self._note,
            RetryAttemptRetry: self._note,
            Throttled: self._note,
        }

    def _begin(self, key: object, span: Span) -> None:
        token = self._context.attach(self._trace.set_span_in_context(span))
        self._open[key] = (span, token)

    def _end(self, key: object, attributes: Attributes, problem: object = None) -> Span | None:
        if key not in self._open:
            return None
        span, token = self._open.pop(key)
        self._context.detach(token)
        span.set_attributes(attributes)
        if isinstance(problem, BaseException):
            span.record_exception(problem)
        if problem is not None:
            span.set_status(self._trace.StatusCode.ERROR, str(problem))
        span.end()
        return span

    @property
    def _current(self) -> Span:
        return self._trace.get_current_span()

    def _note(self, event: Event) -> None:
        if self._current.is_recording():
            facts = event.measurements | event.facts
            self._current.add_event(event.name, _attributes(facts, ""))

    # -- calls -------------------------------------------------------------------------------

    def _operation_started(self, event: OperationStart) -> None:
        _sent.set(None)
        span = self._tracer.start_span(
            f"tinkex.{event.operation}",
            attributes=_attributes(event.metadata),
            start_time=round(event.system_time * 1e9),
        )
        self._begin(("operation", event.id), span)

    def _operation_stopped(self, event: OperationStop) -> None:
        self._end(("operation", event.id), _attributes(event.metadata))

    def _operation_failed(self, event: OperationException) -> None:
        self._end(("operation", event.id), _attributes(event.metadata), event.error)

    def _sampled(self, event: SampleStop) -> None:
        self._current.set_attributes(
            {
                "gen_ai.operation.name": "text_completion",
                "gen_ai.usage.input_tokens": event.prompt_tokens,
                "gen_ai.usage.output_tokens": event.sampled_tokens,
                "tinkex.cached_tokens": event.cached_tokens,
                **_model(event),
            }
        )

    def _trained(self, event: TrainingPass) -> None:
        facts = {"data": event.data, "tokens": event.tokens, "loss": event.loss}
        self._current.set_attributes(_attributes(facts))

    def _stepped(self, event: TrainingStep) -> None:
        self._current.set_attributes(_attributes(event.metrics))

    # -- requests and promises ---------------------------------------------------------------

    def _request_started(self, event: HttpRequestStart) -> None:
        if self._current.is_recording():
            span = self._tracer.start_span(
                f"{event.method} {event.path}",
                kind=self._trace.SpanKind.CLIENT,
                attributes={
                    "http.request.method": event.method,
                    "url.template": event.path,
                    "server.address": event.base_url,
                },
            )
            self._begin(("request", event.id), span)

    def _request_stopped(self, event: HttpRequestStop) -> None:
        facts: Attributes = {"http.response.status_code": event.status}
        if event.retry_count:
            facts["http.request.resend_count"] = event.retry_count
        problem = None if event.status < 400 else f"status {event.status}"
        span = self._end(("request", event.id), facts, problem)
        _sent.set(None if span is None else span.get_span_context())

    def _request_failed(self, event: HttpRequestException) -> None:
        problem = f"{event.kind}: {event.reason}"
        self._end(("request", event.id), {"error.type": event.kind}, problem)

    def _promised(self, event: FutureSubmitted) -> None:
        if self._current.is_recording():
            sent = _sent.get()
            span = self._tracer.start_span(
                "tinkex.future",
                attributes={
                    "tinkex.request_id": event.request_id,
                    "tinkex.request_type": event.request_type,
                },
                links=[] if sent is None else [self._trace.Link(sent)],
            )
            self._begin(("future", event.request_id), span)

    def _kept(self, event: FutureCompleted | FutureCancelled) -> None:
        self._end(("future", event.request_id), {"tinkex.polls": event.iteration})

    def _broken(self, event: FutureFailure) -> None:
        facts: Attributes = {"tinkex.polls": event.iteration, "tinkex.category": event.category}
        self._end(("future", event.request_id), facts, event.error_type)


class _Measurements(Subscriber):
    """The client's measurements, under OpenTelemetry's semantic names where they exist."""

    def __init__(self, provider: MeterProvider) -> None:
        meter = provider.get_meter("tinkex", __version__)
        self._request_seconds = meter.create_histogram("http.client.request.duration", "s")
        self._operation_seconds = meter.create_histogram("gen_ai.client.operation.duration", "s")
        self._token_usage = meter.create_histogram("gen_ai.client.token.usage", "{token}")
        self._training_tokens = meter.create_counter("tinkex.training.tokens", "{token}")
        self._retries = meter.create_counter("tinkex.retries", "{retry}")
        self._throttled = meter.create_counter("tinkex.throttled", "{pause}")
        self._queue_states = meter.create_counter("tinkex.queue.state_changes", "{change}")

    def handlers(self) -> Mapping[type[Event], Callable[[Any], object]]:
        return {
            HttpRequestStop: self._request_stopped,
            HttpRequestException: self._request_failed,
            OperationStop: self._operation_stopped,
            OperationException: self._operation_failed,
            SampleStop: self._sampled,
            TrainingPass: lambda event: self._training_tokens.add(event.tokens, _model(event)),
            RetryAttemptRetry: self._tried_again,
            Throttled: lambda _: self._throttled.add(1),
            QueueStateChange: self._queue_changed,
        }

    def _request_stopped(self, event: HttpRequestStop) -> None:
        status: Attributes = {"http.response.status_code": event.status}
        self._request_seconds.record(event.duration, _request(event) | status)

    def _request_failed(self, event: HttpRequestException) -> None:
        failed: Attributes = {"error.type": event.kind}
        self._request_seconds.record(event.duration, _request(event) | failed)

    def _operation_stopped(self, event: OperationStop) -> None:
        self._operation_seconds.record(event.duration, _operation(event))

    def _operation_failed(self, event: OperationException) -> None:
        failed: Attributes = {"error.type": type(event.error).__name__}
        self._operation_seconds.record(event.duration, _operation(event) | failed)

    def _sampled(self, event: SampleStop) -> None:
        model = _model(event)
        self._token_usage.record(event.prompt_tokens, {"gen_ai.token.type": "input", **model})
        self._token_usage.record(event.sampled_tokens, {"gen_ai.token.type": "output", **model})

    def _tried_again(self, event: RetryAttemptRetry) -> None:
        self._retries.add(1, {"error.type": type(event.error).__name__})

    def _queue_changed(self, event: QueueStateChange) -> None:
        self._queue_states.add(1, {"tinkex.queue_state": event.queue_state})


def _attributes(facts: Mapping[str, Any], prefix: str = "tinkex.") -> Attributes:
    """Facts as OpenTelemetry attributes: plain values unchanged, others as text, None left out."""
    return {
        f"{prefix}{name}": value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in facts.items()
        if value is not None
    }


def _model(event: Event) -> Attributes:
    model = event.metadata.get("base_model")
    return {} if model is None else {"gen_ai.request.model": str(model)}


def _operation(event: OperationStop | OperationException) -> Attributes:
    return {"gen_ai.operation.name": event.operation, **_model(event)}


def _request(event: HttpRequestStop | HttpRequestException) -> Attributes:
    return {
        "http.request.method": event.method,
        "url.template": event.path,
        "server.address": event.base_url,
    }
