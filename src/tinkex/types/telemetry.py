"""Telemetry events as the client sends them to the service."""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError, field_validator

from ._base import RequestModel, ResponseModel

__all__ = [
    "EventType",
    "GenericEvent",
    "SessionEndEvent",
    "SessionStartEvent",
    "Severity",
    "TelemetryBatch",
    "TelemetryEvent",
    "TelemetryResponse",
    "TelemetrySendRequest",
    "UnhandledExceptionEvent",
    "telemetry_event",
]

EventType: TypeAlias = Literal[
    "SESSION_START", "SESSION_END", "UNHANDLED_EXCEPTION", "GENERIC_EVENT"
]
Severity: TypeAlias = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


class _Event(ResponseModel):
    event: EventType
    event_id: str
    event_session_index: Annotated[int, Field(ge=0)]
    severity: Severity = "INFO"
    timestamp: datetime


class SessionStartEvent(_Event):
    event: Literal["SESSION_START"] = "SESSION_START"


class SessionEndEvent(_Event):
    event: Literal["SESSION_END"] = "SESSION_END"
    duration: str | None = None


class UnhandledExceptionEvent(_Event):
    event: Literal["UNHANDLED_EXCEPTION"] = "UNHANDLED_EXCEPTION"
    severity: Severity = "ERROR"
    error_type: str
    error_message: str
    traceback: str | None = None


class GenericEvent(_Event):
    event: Literal["GENERIC_EVENT"] = "GENERIC_EVENT"
    event_name: str
    event_data: dict[str, Any] = {}


TelemetryEvent: TypeAlias = Annotated[
    SessionStartEvent | SessionEndEvent | UnhandledExceptionEvent | GenericEvent,
    Field(discriminator="event"),
]

_event_adapter: TypeAdapter[TelemetryEvent] = TypeAdapter(
    TelemetryEvent, config={"defer_build": True}
)


def telemetry_event(data: Any) -> TelemetryEvent | None:
    """Read one event; None for an unknown kind."""
    try:
        return _event_adapter.validate_python(data)
    except ValidationError:
        return None


class TelemetrySendRequest(RequestModel):
    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str = ""


class TelemetryBatch(ResponseModel):
    """Events that were sent together; events of an unknown kind are dropped."""

    events: list[TelemetryEvent]
    platform: str
    sdk_version: str
    session_id: str
    process_uuid: str = ""

    @field_validator("events", mode="before")
    @classmethod
    def _known_only(cls, events: Any) -> Any:
        if not isinstance(events, list):
            return events
        return [known for event in events if (known := telemetry_event(event)) is not None]

    @property
    def size(self) -> int:
        return len(self.events)


class TelemetryResponse(ResponseModel):
    status: Literal["accepted"] = "accepted"
