"""What clients have reported of themselves, for their owner to read.

The protocol only takes telemetry in; this is a path of our own to see it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Final

from pydantic import Field

from tinkex._wire import json_codec
from tinkex.types import Cursor, TelemetryEvent
from tinkex.types._base import RequestModel, ResponseModel

from .store import Database, TelemetryRow

__all__ = ["PATH", "ListTelemetryRequest", "ListTelemetryResponse", "ReportedEvent", "listed"]

PATH: Final = "/local/telemetry"


class ListTelemetryRequest(RequestModel):
    session_id: str | None = None
    limit: Annotated[int, Field(ge=0, le=1000)] = 100
    offset: Annotated[int, Field(ge=0, lt=1 << 63)] = 0  # what a database can count


class ReportedEvent(ResponseModel):
    session_id: str
    received_at: datetime
    event: TelemetryEvent


class ListTelemetryResponse(ResponseModel):
    events: list[ReportedEvent]
    cursor: Cursor


async def listed(database: Database, owner: str, query: Mapping[str, str]) -> ListTelemetryResponse:
    """The events of one session of an owner, or of all, in the order in which they came."""
    asked = json_codec.from_object(dict(query), ListTelemetryRequest)
    rows, total = await database(
        database.store.telemetry, owner, asked.session_id, limit=asked.limit, offset=asked.offset
    )
    cursor = Cursor(offset=asked.offset, limit=asked.limit, total_count=total)
    return ListTelemetryResponse(events=[_shown(row) for row in rows], cursor=cursor)


def _shown(row: TelemetryRow) -> ReportedEvent:
    facts = {"session_id": row.session_id, "received_at": row.received_at, "event": row.event}
    return ReportedEvent.model_validate(facts)
