"""OpenTelemetry spans of the service, as children of its clients' spans; no-ops if OpenTelemetry is not installed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .futures import Promise

try:
    from opentelemetry import propagate, trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ImportError:  # the extra `otel` is not installed
    trace = None  # type: ignore[assignment]

__all__ = ["Tracing"]


class Tracing:
    """Creates spans if a tracer is set up; otherwise every method is a no-op."""

    def __init__(self) -> None:
        self._tracer = None if trace is None else trace.get_tracer("tinkex.server")
        self._contexts: dict[str, Any] = {}

    def call(self, operation: str, headers: Mapping[str, str]) -> AbstractContextManager[Any]:
        """The span of one HTTP request, as a child of the client's span; no span if the headers name none."""
        if self._tracer is None or "traceparent" not in headers:
            return nullcontext()
        return self._tracer.start_as_current_span(
            operation,
            context=propagate.extract(dict(headers)),
            kind=SpanKind.SERVER,
            attributes={"tinkex.operation": operation},
        )

    def accepted(self, promise: Promise) -> None:
        """Remember the trace that the work of a promise belongs to."""
        if self._tracer is not None and trace.get_current_span().get_span_context().is_valid:
            self._contexts[promise.request_id] = trace.set_span_in_context(trace.get_current_span())

    def finished(self, promise: Promise) -> None:
        """Record the span of the work: from acceptance, including the time in the queue, to the result."""
        context = self._contexts.pop(promise.request_id, None)
        result = promise.result
        if context is None or self._tracer is None or result is None:
            return
        started = promise.started_at or promise.accepted_at
        span = self._tracer.start_span(
            f"{promise.operation.name} work",
            context=context,
            start_time=round(promise.accepted_at * 1e9),
            attributes={
                "tinkex.request_id": promise.request_id,
                "tinkex.scope": promise.scope,
                "tinkex.waiting_seconds": started - promise.accepted_at,
            },
        )
        if result.failed:
            span.set_status(Status(StatusCode.ERROR))
        span.end(round(result.at * 1e9))
