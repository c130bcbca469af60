"""Responses that take a while to send: what they hold is released when they end, also if their client hangs up early."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.responses import Response, StreamingResponse

from .quotas import Quota

__all__ = ["EndingResponse", "EventStream", "counted"]


class EndingResponse(StreamingResponse):
    """A response in parts; calls the functions of `on_end` when it ends."""

    def __init__(self, parts: AsyncIterator[bytes], **options: Any) -> None:
        super().__init__(parts, **options)
        self._parts = parts
        self.on_end: list[Callable[[], object]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with contextlib.suppress(RuntimeError):
                await self._parts.aclose()  # type: ignore[attr-defined]  # a generator
            for release in self.on_end:
                release()


class EventStream(EndingResponse):
    """A stream of server-sent events."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        headers: Mapping[str, str] | None = None,
        on_end: Callable[[], object] | None = None,
    ) -> None:
        headers = headers or {"cache-control": "no-cache"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self.on_end += [] if on_end is None else [on_end]


def counted(response: Response | None, quota: Quota, owner: str) -> None:
    """End the count of a request: now, or when its response ends."""
    if isinstance(response, EndingResponse):
        response.on_end.append(lambda: quota.release(owner))
    else:
        quota.release(owner)
