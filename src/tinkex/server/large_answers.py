"""Large answers: they are sent in pieces that follow flow control, and their bytes are counted until they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final
from weakref import WeakValueDictionary

from starlette.responses import Response

from tinkex.errors import RateLimitError

from .byte_budget import ByteBudget, Hold
from .event_streams import EndingResponse

__all__ = ["LARGE", "LargeAnswers"]

#: Smaller answers fit into the buffers of their connection.
LARGE: Final = 64 << 10
#: Bytes given to a connection at a time; the next follow when most of them have left.
PIECE: Final = 64 << 10


class LargeAnswers:
    """The large answers of one service that are being made or sent."""

    def __init__(self, per_key: int, total: int) -> None:
        self.budget = ByteBudget(
            per_key,
            total,
            what="Answers to {whose} that are being sent",
            advice="Ask for fewer large results at a time, and read them faster",
        )
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._freed = asyncio.Event()

    def check(self, owner: str) -> None:
        """Refuse a request for an answer of unknown size while the limit is reached."""
        self.budget.check(owner, 1, 0)

    async def room(self, owner: str, size: int, seconds: float) -> Hold:
        """A hold of `size` bytes when there is room for them, or the refusal after some seconds.

        Waiting is better than a refusal here: the answer is not in memory yet, and old clients do not retry.
        """
        hold = self.budget.hold(owner)
        try:
            async with asyncio.timeout(seconds), self._turns.setdefault(owner, asyncio.Lock()):
                while not _taken(hold, size):
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            hold.take(size)
        return hold

    def answer(
        self, owner: str, content: bytes, media_type: str, hold: Hold | None = None
    ) -> Response:
        """A response with this content; its bytes are counted in `hold`, or if it is large in a new one."""
        if hold is None:
            if len(content) < LARGE:
                return Response(content, media_type=media_type)
            hold = self.budget.hold(owner)
        hold.settle(len(content))
        headers = {"content-length": str(len(content))}
        response = EndingResponse(_pieces(content), media_type=media_type, headers=headers)
        response.on_end.append(lambda: self.release(hold))
        return response

    def release(self, hold: Hold) -> None:
        hold.release()
        self._freed.set()


def _taken(hold: Hold, size: int) -> bool:
    try:
        hold.take(size)
    except RateLimitError:
        return False
    return True


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(content), PIECE):
        yield content[start : start + PIECE]
