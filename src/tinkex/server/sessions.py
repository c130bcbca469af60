"""Sessions: creation, heartbeats, expiry and search.

A session ends when its client finishes it, or when it expires after a long time without requests or heartbeats. Then
its models are unloaded and its samplers are closed; checkpoints stay.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from tinkex._wire.json_codec import from_object
from tinkex.errors import GoneError, InvalidInputError, NotFoundError
from tinkex.types import (
    CreateSessionRequest,
    FinishSessionRequest,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionSummary,
)

from .checkpoints import now_utc
from .database import Database
from .quotas import Quota
from .tables import SessionRow

__all__ = ["DEFAULT_PROJECT", "Sessions"]

DEFAULT_PROJECT = "default"


@dataclass
class _Live:
    """The facts of an active session that every request needs."""

    owner: str
    heard: float
    status: dict[str, Any]


class Sessions:
    """All sessions; active ones are in memory."""

    def __init__(
        self,
        database: Database,
        quota: Quota,
        *,
        expiry: float,
        now: Callable[[], datetime] = now_utc,
        # Not the wall clock: while a laptop sleeps, sessions must not expire.
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._db, self._store = database, database.store
        self._quota = quota
        self._expiry = expiry
        self._now, self._monotonic = now, monotonic
        self._live: dict[str, _Live] = {}

    def __len__(self) -> int:
        """The number of active sessions."""
        return len(self._live)

    async def restore(self) -> None:
        """Load the active sessions from before a restart; their time to expiry starts again."""
        now = self._monotonic()
        for row in await self._db(self._store.active_sessions):
            self._live[row.session_id] = _Live(row.owner, now, dict(row.status))
            self._quota.add(row.owner)

    async def create(
        self, owner: str, request: CreateSessionRequest, idempotency_key: str | None
    ) -> str:
        now = self._now()
        wanted = SessionRow(
            session_id=str(uuid.uuid4()),
            owner=owner,
            created_at=now,
            last_heartbeat=now,
            tags=request.tags,
            user_metadata=request.user_metadata,
            sdk_version=request.sdk_version,
            project_id=request.project_id or DEFAULT_PROJECT,
            display_name=request.display_name,
            status={"type": "active"},
            idempotency_key=None if idempotency_key is None else f"{owner}:{idempotency_key}",
        )
        if not self._quota.has_room(owner):
            known = await self._repeated(wanted)
            if known is not None:
                return known.session_id
        self._quota.take(owner)  # before the first await: many requests may arrive at once
        try:
            row = await self._db(self._store.add_session, wanted)
        except BaseException:
            self._quota.release(owner)
            raise
        if row.session_id != wanted.session_id:  # a concurrent retry of the same request
            self._quota.release(owner)
        else:
            self._live[row.session_id] = _Live(owner, self._monotonic(), dict(row.status))
        return row.session_id

    async def _repeated(self, wanted: SessionRow) -> SessionRow | None:
        """The session that an earlier attempt of this request created: a retry never exceeds a limit."""
        if wanted.idempotency_key is None:
            return None
        return await self._db(self._store.session_of_key, wanted.idempotency_key)

    async def find(self, session_id: str, owner: str) -> _Live:
        live = self._live.get(session_id)
        if live is None:
            row = await self._db(self._store.session, session_id)  # an ended one
            if row is not None:
                live = _Live(row.owner, self._monotonic(), dict(row.status))
        if live is None or live.owner != owner:
            raise NotFoundError(f"There is no session {session_id!r:.100}.")
        return live

    def owner(self, session_id: str) -> str | None:
        """The owner of an active session; None if it has ended or does not exist."""
        live = self._live.get(session_id)
        return None if live is None else live.owner

    async def check_active(self, session_id: str, owner: str) -> None:
        """Refuse work for a session that has ended."""
        live = await self.find(session_id, owner)
        if live.status["type"] != "active":
            raise InvalidInputError(
                f"session {session_id!r:.100} has ended ({_in_words(live.status)}); start a new one and "
                "continue from a checkpoint",
                field="session_id",
            )
        live.heard = self._monotonic()

    async def heartbeat(self, session_id: str, owner: str) -> None:
        live = await self.find(session_id, owner)
        if live.status["type"] != "active":
            raise GoneError(f"Session {session_id!r:.100} has ended ({_in_words(live.status)}).")
        live.heard = self._monotonic()

    async def finish(self, session_id: str, owner: str, request: FinishSessionRequest) -> bool:
        """End a session; False if it had ended before: then the first reason stays."""
        live = await self.find(session_id, owner)
        if live.status["type"] != "active":
            return False
        status = {
            "type": "client_finished",
            "reason": {"type": request.reason.type},
            "detail": request.detail,
        }
        await self._end(session_id, live, status)
        return True

    async def expire(self) -> AsyncIterator[str]:
        """End sessions without a recent request or heartbeat; yields the id of each once it has ended."""
        limit = self._monotonic() - self._expiry
        silent = [(name, live) for name, live in self._live.items() if live.heard < limit]
        for session_id, live in silent:
            if live.status["type"] != "active":  # its client has finished it meanwhile
                continue
            detail = f"no request or heartbeat for {self._expiry:.0f} seconds"
            status = {"type": "cancelled", "detail": detail}
            await self._end(session_id, live, status)
            yield session_id

    async def _end(self, session_id: str, live: _Live, status: dict[str, Any]) -> None:
        before, live.status = (
            live.status,
            status,
        )  # before the first await: from now on requests are refused
        try:
            await self._db(self._store.update_session, session_id, status=status)
        except Exception:
            live.status = before  # still active: ending it can be retried
            raise
        if self._live.pop(session_id, None) is not None:
            self._quota.release(live.owner)

    # -- searching -----------------------------------------------------------------------------

    async def search(self, owner: str, request: SessionSearchRequest) -> SessionSearchResponse:
        """Matching sessions, newest first; each key sees only its own."""
        wanted = request.owner
        names = {owner, f"tml:user:{owner}"}  # the forms used in sessions and in tokens
        if wanted.type == "user" and names.isdisjoint(wanted.owner_urns):
            return SessionSearchResponse(sessions=[])
        cursor = request.cursor
        before = None
        if cursor is not None:
            created = utc(cursor.last_created_at, "cursor.last_created_at")
            before = created, cursor.last_session_id
        found: list[SessionRow] = []
        more = True
        while more and len(found) <= request.limit:
            page = await self._db(
                self._store.search_sessions,
                owners=[owner],
                project_ids=request.project_ids,
                before=before,
                limit=200,
            )
            found += [row for row in page if _fits(row, request)]
            more = len(page) == 200
            if page:
                before = (page[-1].created_at, page[-1].session_id)
        shown = found[: request.limit]
        last = shown[-1] if len(found) > request.limit else None
        return SessionSearchResponse(
            sessions=[await self._summary(row) for row in shown],
            next_cursor=None
            if last is None
            else SessionSearchCursor(
                last_created_at=last.created_at, last_session_id=last.session_id
            ),
        )

    async def _summary(self, row: SessionRow) -> SessionSummary:
        def checkpoints() -> tuple[int, int]:
            kept = [
                checkpoint
                for run in self._store.runs_of_session(row.session_id)
                for checkpoint in self._store.checkpoints_of_run(run.run_id)
            ]
            return len(kept), sum(checkpoint.size_bytes for checkpoint in kept)

        count, size = await self._db(checkpoints)
        facts = {
            "session_id": row.session_id,
            "created_at": row.created_at,
            "owner": row.owner,
            "project_id": row.project_id or DEFAULT_PROJECT,
            "status": row.status,
            "checkpoints_count": count,
            "display_name": row.display_name,
            "user_metadata": text_map(row.user_metadata),
            "checkpoint_storage_bytes": size,
        }
        return from_object(facts, SessionSummary)


def utc(moment: datetime, field: str) -> datetime:
    """A time from a request, in UTC; one without a zone is taken as UTC."""
    try:
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except OverflowError:
        raise InvalidInputError("is out of range in UTC", field=field) from None


def text_map(metadata: Any) -> dict[str, str] | None:
    """Metadata in the form that clients receive: all values are strings."""
    if metadata is None:
        return None
    return {
        name: value if isinstance(value, str) else str(value) for name, value in metadata.items()
    }


def _in_words(status: dict[str, Any]) -> str:
    if status["type"] == "client_finished":
        return f"finished by its client: {status['reason']['type']}"
    return str(status.get("detail") or status["type"])


def _fits(row: SessionRow, request: SessionSearchRequest) -> bool:
    by_name = request.display_name is not None and all(
        word in (row.display_name or "").lower() for word in request.display_name.lower().split()
    )
    by_id = request.session_id is not None and row.session_id == request.session_id
    if (request.session_id is not None or request.display_name is not None) and not (
        by_name or by_id
    ):
        return False
    metadata = text_map(row.user_metadata) or {}
    if any(metadata.get(name) != value for name, value in request.user_metadata.items()):
        return False
    return request.statuses is None or any(
        _has_status(row.status, query) for query in request.statuses
    )


def _has_status(status: Any, query: Any) -> bool:
    if status["type"] != query.type:
        return False
    reasons = getattr(query, "reasons", None)
    return not reasons or status["reason"]["type"] in reasons
