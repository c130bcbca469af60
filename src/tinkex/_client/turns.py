"""Places in line: operations of one model are dispatched in the order in which they were called."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

from .runtime import begin_anew_in_forks, leave_behind

__all__ = ["Turn", "Turns"]


class Turns:
    """Hands out places in line on the caller's thread and calls them up on the loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets = 0
        self._current = 0
        self._seq_id = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}
        begin_anew_in_forks(self)

    def _begin_anew(self) -> None:
        """In a forked child: what was in line before the fork is the parent's; numbers go on from there."""
        leave_behind(self._waiting)
        self._lock, self._waiting = threading.Lock(), {}
        self._current = self._tickets

    def ticket(self) -> Turn:
        with self._lock:
            ticket = self._tickets
            self._tickets += 1
        return Turn(self, ticket)

    async def reach(self, ticket: int) -> None:
        if ticket != self._current:
            place = self._waiting[ticket] = asyncio.get_running_loop().create_future()
            await place

    def finish(self) -> None:
        self._current += 1
        place = self._waiting.pop(self._current, None)
        if place is not None and not place.done():
            place.set_result(None)

    def next_seq(self) -> int:
        """Sequence ids are given out in line, so they have no gaps however calls are split."""
        self._seq_id += 1
        return self._seq_id


@dataclass(slots=True)
class Turn:
    """One place in line, held while an operation is being dispatched."""

    _turns: Turns
    _ticket: int

    def next_seq(self) -> int:
        return self._turns.next_seq()

    async def __aenter__(self) -> None:
        await self._turns.reach(self._ticket)

    async def __aexit__(self, *_: object) -> None:
        self._turns.finish()
