"""A FIFO queue of operations: those of one model are dispatched in the order in which they were called."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass

from .runtime import begin_anew_in_forks, leave_behind

__all__ = ["DispatchTurn", "Turns"]


class Turns:
    """Issues tickets on the caller's thread; on the event loop, tickets proceed in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets = 0
        self._current = 0
        self._seq_id = 0
        self._waiting: dict[int, asyncio.Future[None]] = {}
        begin_anew_in_forks(self)

    def _begin_anew(self) -> None:
        """In a forked child: waiting operations belong to the parent and are skipped; numbering continues."""
        leave_behind(self._waiting)
        self._lock, self._waiting = threading.Lock(), {}
        self._current = self._tickets

    def ticket(self) -> DispatchTurn:
        with self._lock:
            ticket = self._tickets
            self._tickets += 1
        return DispatchTurn(self, ticket)

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
        """The next sequence id. Call it during a turn: then ids have no gaps, however calls are split."""
        self._seq_id += 1
        return self._seq_id


@dataclass(slots=True)
class DispatchTurn:
    """One ticket. The block waits for its turn and holds it while the operation is dispatched."""

    _turns: Turns
    _ticket: int

    def next_seq(self) -> int:
        return self._turns.next_seq()

    async def __aenter__(self) -> None:
        await self._turns.reach(self._ticket)

    async def __aexit__(self, *_: object) -> None:
        self._turns.finish()
