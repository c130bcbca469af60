"""Sessions across a restart, and their end."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from tinkex._wire.json_codec import from_object
from tinkex.errors import GoneError
from tinkex.server.database import Database
from tinkex.server.quotas import KeyLimits, Quotas
from tinkex.server.sessions import Sessions
from tinkex.server.store import Store
from tinkex.server.tables import SessionRow
from tinkex.types import CreateSessionRequest, FinishSessionRequest

NOW = datetime(2026, 5, 1, tzinfo=UTC)


async def expired(sessions: Sessions) -> list[str]:
    return [session_id async for session_id in sessions.expire()]


def test_silent_sessions_expire_after_a_restart(tmp_path):
    clock = [1000.0]
    store = Store(f"sqlite:///{tmp_path}/tinkex.db")
    store.open()
    over = {"type": "client_finished", "reason": {"type": "success"}}
    for name, status in (
        ("heard", {"type": "active"}),
        ("silent", {"type": "active"}),
        ("over", over),
    ):
        store.add_session(SessionRow(name, "me", NOW, NOW, [], None, "0", "p", None, status))
    database = Database(store)

    async def scenario() -> None:
        sessions = Sessions(
            database, Quotas.of(KeyLimits()).sessions, expiry=100, monotonic=lambda: clock[0]
        )
        await sessions.restore()
        assert await expired(sessions) == []  # the time counts from the restart
        clock[0] += 90
        await sessions.heartbeat("heard", "me")
        clock[0] += 20
        assert await expired(sessions) == ["silent"]
        assert await expired(sessions) == []

    try:
        asyncio.run(scenario())
        found = {
            row.session_id: row.status["type"] for row in store.sessions("me", limit=9, offset=0)
        }
        assert found == {"heard": "active", "silent": "cancelled", "over": "client_finished"}
        assert [row.session_id for row in store.active_sessions()] == ["heard"]
    finally:
        database.close()


def test_ended_sessions_are_not_kept_in_memory(tmp_path):
    store = Store(f"sqlite:///{tmp_path}/tinkex.db")
    store.open()
    database = Database(store)
    begin = CreateSessionRequest(tags=[], sdk_version="0")
    finish = from_object({"reason": {"type": "success"}}, FinishSessionRequest)

    async def scenario() -> None:
        sessions = Sessions(database, Quotas.of(KeyLimits()).sessions, expiry=100)
        kept = await sessions.create("me", begin, None)
        for number in range(5):
            ended = await sessions.create("me", begin, f"{number}")
            assert await sessions.finish(ended, "me", finish)
            assert not await sessions.finish(ended, "me", finish)
            with pytest.raises(GoneError):
                await sessions.heartbeat(ended, "me")
            assert await sessions.create("me", begin, f"{number}") == ended
        assert len(sessions) == 1
        await sessions.heartbeat(kept, "me")

    try:
        asyncio.run(scenario())
    finally:
        database.close()


class FullStore(Store):
    """Cannot store the end of one session."""

    full = True

    def update_session(self, session_id: str, **changes: Any) -> bool:
        if self.full and session_id == "second":
            raise OSError(28, "No space left on device")
        return super().update_session(session_id, **changes)


def test_a_session_stays_active_if_its_end_cannot_be_stored(tmp_path):
    clock = [1000.0]
    store = FullStore(f"sqlite:///{tmp_path}/tinkex.db")
    store.open()
    for name in ("first", "second"):
        row = SessionRow(name, "me", NOW, NOW, [], None, "0", "p", None, {"type": "active"})
        store.add_session(row)
    database = Database(store)
    over = from_object({"reason": {"type": "success"}}, FinishSessionRequest)

    async def scenario() -> None:
        sessions = Sessions(
            database, Quotas.of(KeyLimits()).sessions, expiry=100, monotonic=lambda: clock[0]
        )
        await sessions.restore()
        with pytest.raises(OSError, match="No space"):
            await sessions.finish("second", "me", over)
        await sessions.check_active("second", "me")
        clock[0] += 200
        ending = sessions.expire()
        assert (
            await anext(ending) == "first"
        )  # its objects can be cleaned up before the next one fails
        with pytest.raises(OSError, match="No space"):
            await anext(ending)
        store.full = False
        assert await sessions.finish("second", "me", over)

    try:
        asyncio.run(scenario())
    finally:
        database.close()
