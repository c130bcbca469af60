"""Leases: a private service runs as long as a client holds a lease.

A lease is an open connection that stays idle. It closes when its holder exits or crashes. So a service that
was started for a script stops with it, and a service that several scripts share stops with the last one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

__all__ = ["Leases"]


class Leases:
    """Counts the holders and calls `on_last` after the last one has left."""

    def __init__(self, on_last: Callable[[], None], *, grace: float = 2.0) -> None:
        self._on_last = on_last
        self._grace = grace
        self._held = 0
        self._leaving: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the time limit for the first holder."""
        self._wait(30.0)

    async def endpoint(self, request: Request) -> Response:
        return StreamingResponse(self._hold(request), media_type="text/plain")

    async def _hold(self, request: Request) -> AsyncIterator[bytes]:
        self._held += 1
        if self._leaving is not None:
            self._leaving.cancel()
        try:
            yield b"held\n"
            while (await request.receive())["type"] != "http.disconnect":
                pass
        finally:
            self._held -= 1
            if not self._held:
                self._wait(self._grace)

    def _wait(self, seconds: float) -> None:
        # A grace period: a script may close one client and open the next.
        loop = asyncio.get_running_loop()
        self._leaving = loop.call_later(seconds, self._on_last)
