"""Sessions across a restart: those of which nothing is heard any more end like all others."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

from tinkex.server.sessions import Sessions
from tinkex.server.store import Database, SessionRow, Store

NOW = datetime(2026, 5, 1, tzinfo=UTC)


def test_sessions_that_were_silent_at_a_restart_expire(tmp_path):
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
        sessions = Sessions(database, expiry=100, monotonic=lambda: clock[0])
        await sessions.restore()
        assert await sessions.expire() == []  # the time counts from the restart
        clock[0] += 90
        await sessions.heartbeat("heard", "me")
        clock[0] += 20
        assert await sessions.expire() == ["silent"]
        assert await sessions.expire() == []

    try:
        asyncio.run(scenario())
        found = {
            row.session_id: row.status["type"] for row in store.sessions("me", limit=9, offset=0)
        }
        assert found == {"heard": "active", "silent": "cancelled", "over": "client_finished"}
        assert [row.session_id for row in store.active_sessions()] == ["heard"]
    finally:
        database.close()
