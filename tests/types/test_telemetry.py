from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given

from tests.strategies import json_values
from tests.types import refuses_field
from tinkex.types import (
    GenericEvent,
    SessionEndEvent,
    SessionStartEvent,
    TelemetryBatch,
    TelemetryResponse,
    TelemetrySendRequest,
    UnhandledExceptionEvent,
    telemetry_event,
)

COMMON: dict[str, Any] = {
    "event_id": "e",
    "event_session_index": 0,
    "severity": "INFO",
    "timestamp": "2026-05-27T20:00:00Z",
}
EVENTS: list[tuple[Any, dict[str, Any]]] = [
    (SessionStartEvent, {"event": "SESSION_START"}),
    (SessionEndEvent, {"event": "SESSION_END", "duration": "0:01:00"}),
    (
        UnhandledExceptionEvent,
        {"event": "UNHANDLED_EXCEPTION", "error_type": "ValueError", "error_message": "no"},
    ),
    (GenericEvent, {"event": "GENERIC_EVENT", "event_name": "n", "event_data": {"a": 1}}),
]


@pytest.mark.parametrize(("kind", "fields"), EVENTS)
def test_events_are_distinguished_by_name(kind, fields):
    event = telemetry_event(COMMON | fields)
    assert type(event) is kind
    assert event is not None
    assert event.timestamp == datetime(2026, 5, 27, 20, tzinfo=UTC)
    assert telemetry_event(event.model_dump(mode="json")) == event


@given(json_values)
def test_unknown_event_reads_as_none(value):
    assert telemetry_event(value) is None
    assert telemetry_event(COMMON | {"event": value}) is None


def test_events_need_only_fields_without_defaults():
    event = UnhandledExceptionEvent(
        event_id="e",
        event_session_index=1,
        timestamp=datetime.now(UTC),
        error_type="ValueError",
        error_message="no",
    )
    assert (event.event, event.severity, event.traceback) == (
        "UNHANDLED_EXCEPTION",
        "ERROR",
        None,
    )


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("event_session_index", -1),
        ("severity", "LOUD"),
        ("timestamp", "later"),
        ("event", "SESSION_END"),
        ("event_id", None),
    ],
)
def test_events_refuse_invalid_values(field, bad):
    with refuses_field(field):
        SessionStartEvent.model_validate(COMMON | {field: bad})


def test_a_batch_becomes_a_request():
    events = [telemetry_event(COMMON | fields) for _, fields in EVENTS]
    batch = TelemetryBatch.model_validate(
        {"events": events, "platform": "linux", "sdk_version": "1", "session_id": "s"}
    )
    assert batch.size == len(EVENTS)
    request = TelemetrySendRequest(**batch.model_dump())
    assert request.events == batch.events
    assert request.process_uuid == ""


def test_response_status_is_accepted():
    assert TelemetryResponse.model_validate({}).status == "accepted"
    with refuses_field("status"):
        TelemetryResponse.model_validate({"status": "refused"})


def test_reading_a_batch_drops_events_of_an_unknown_kind():
    known = COMMON | EVENTS[0][1]
    batch = TelemetryBatch.model_validate(
        {
            "events": [known, COMMON | {"event": "FROM_THE_FUTURE"}],
            "platform": "linux",
            "sdk_version": "1",
            "session_id": "s",
        }
    )
    assert [event.event for event in batch.events] == ["SESSION_START"]
