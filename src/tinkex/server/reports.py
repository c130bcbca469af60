"""Telemetry events that clients have sent, stored for their owner to read.

The protocol can only send telemetry; the path to list it is our own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Final

from pydantic import Field

from tinkex._wire import json_codec
from tinkex.types import Cursor, TelemetryEvent
from tinkex.types._base import RequestModel, ResponseModel

from .database import Database
from .quotas import Quota
from .tables import TelemetryRow

__all__ = [
    "PATH",
    "ListTelemetryRequest",
    "ListTelemetryResponse",
    "ReportedEvent",
    "Reports",
    "listed",
]

logger = logging.getLogger("tinkex.server")

PATH: Final = "/local/telemetry"
#: At its limit, a key's events are trimmed to this part of it, so that not every event causes a deletion.
_TRIMMED_TO: Final = 0.9


class Reports:
    """Stores the newest events of each key.

    A report is never refused, because clients would retry it. A key at its limit loses its own oldest events.
    """

    def __init__(self, database: Database, quota: Quota) -> None:
        self._db, self._store = database, database.store
        self._quota = quota

    async def restore(self) -> None:
        for owner, size in (await self._db(self._store.telemetry_bytes)).items():
            self._quota.add(owner, size)

    async def add(self, owner: str, rows: Sequence[TelemetryRow]) -> None:
        """Store events of one owner; if the disk is full, drop them with a warning in the log."""
        size = sum(len(json.dumps(row.event)) for row in rows)
        try:
            if not self._quota.has_room(owner, size):
                await self._make_room(owner, size)
            if self._quota.has_room(owner, size):
                await self._db(self._store.add_telemetry, rows)
                self._quota.add(owner, size)
                return
            why = str(self._quota.exceeded(owner))
        except OSError as error:
            why = str(error)
        logger.warning("Dropped %d telemetry events of %s: %s", len(rows), owner, why)

    async def _make_room(self, owner: str, size: int) -> None:
        # The count may be too high: retried events were counted twice, and old ones may have been deleted.
        await self._recount(owner)
        excess = self._quota.used(owner) + size - int(self._quota.limit * _TRIMMED_TO)
        if excess > 0 and size <= self._quota.limit:
            await self._db(self._store.trim_telemetry, owner, excess)
            await self._recount(owner)

    async def _recount(self, owner: str) -> None:
        kept = (await self._db(self._store.telemetry_bytes, owner)).get(owner, 0)
        self._quota.add(owner, kept - self._quota.used(owner))

    async def forget(self, before: datetime) -> None:
        await self._db(self._store.forget_telemetry, before)


class ListTelemetryRequest(RequestModel):
    session_id: str | None = None
    limit: Annotated[int, Field(ge=0, le=1000)] = 100
    offset: Annotated[int, Field(ge=0, lt=1 << 63)] = 0  # the largest integer of the databases


class ReportedEvent(ResponseModel):
    session_id: str
    received_at: datetime
    event: TelemetryEvent


class ListTelemetryResponse(ResponseModel):
    events: list[ReportedEvent]
    cursor: Cursor


async def listed(database: Database, owner: str, query: Mapping[str, str]) -> ListTelemetryResponse:
    """The events of an owner, of one session or of all, in the order in which they arrived."""
    asked = json_codec.from_object(dict(query), ListTelemetryRequest)
    rows, total = await database(
        database.store.telemetry, owner, asked.session_id, limit=asked.limit, offset=asked.offset
    )
    cursor = Cursor(offset=asked.offset, limit=asked.limit, total_count=total)
    return ListTelemetryResponse(events=[_shown(row) for row in rows], cursor=cursor)


def _shown(row: TelemetryRow) -> ReportedEvent:
    facts = {"session_id": row.session_id, "received_at": row.received_at, "event": row.event}
    return ReportedEvent.model_validate(facts)
