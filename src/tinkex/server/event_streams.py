"""Streams of server-sent events: what they hold is released when they end, also if their client hangs up early."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import Response, StreamingResponse

from .quotas import Quota

__all__ = ["EventStream", "counted"]


class EventStream(StreamingResponse):
    """A stream of events; calls the functions of `on_end` when it ends."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: Mapping[str, str] | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        headers = headers or {"cache-control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self.on_end = [] if on_end is None else [on_end]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with contextlib.suppress(RuntimeError):
                await self._events.aclose()  # type: ignore[attr-defined]  # a generator
            for release in self.on_end:
                release()


def counted(response: Response | None, quota: Quota, owner: str) -> None:
    """End the count of a request: now, or when its stream ends."""
    if isinstance(response, EventStream):
        response.on_end.append(lambda: quota.release(owner))
    else:
        quota.release(owner)
