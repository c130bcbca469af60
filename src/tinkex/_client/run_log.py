"""Sends what a training loop reports about its run. Entries that come while a request is in flight share the next one.

Reports are for people who look at the run; training must not depend on them. So nothing here raises once the values
are checked. If the service does not have the call, nothing more is sent. If it refuses a report, that report is dropped
and the next one is sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tinkex.errors import APIStatusError, InvalidInputError, TinkerError
from tinkex.types import LogEntry, LogRequest, LogResponse

from .notices import logger

if TYPE_CHECKING:
    from .session import Session

__all__ = ["RunLog", "number"]

#: Entries of one report, and about how many metrics and characters of samples they have together.
_MOST_ENTRIES: Final = 1_000
_MOST_METRICS: Final = 20_000
_MOST_TEXT: Final = 4 << 20
#: Most entries that wait; further ones are dropped.
_MOST_WAITING: Final = 100_000


def number(value: Any, field: str) -> float:
    """A value as a float: it may be of Python, numpy or torch."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InvalidInputError(f"must be a number, not {value!r:.80}", field=field) from None


@dataclass(eq=False, slots=True)
class _Waiting:
    entry: LogEntry
    taken: bool | None = None  # whether the service accepted it; None until it was sent


class RunLog:
    """The reports of one run."""

    def __init__(self, session: Session, run_id: str) -> None:
        self._session = session
        self._run_id = run_id
        self._waiting: deque[_Waiting] = deque()
        self._sending: asyncio.Lock | None = None
        self._offered = True  # whether the service has the call, as far as is known
        self._warned = False
        self._unsent = 0  # entries that are not sent yet
        self._sent: asyncio.Event | None = (
            None  # set when all are sent; created when a caller waits
        )
        session.run_logs.add(self)

    async def drain(self) -> None:
        """Wait until everything that was logged is sent."""
        if self._unsent:
            self._sent = asyncio.Event()
            await self._sent.wait()

    async def send(self, entry: LogEntry) -> LogResponse:
        """Send an entry, together with others that wait; returns how much of it the service accepted."""
        if not self._offered or len(self._waiting) >= _MOST_WAITING:
            return LogResponse()
        self._unsent += 1
        try:
            taken = await self._taken(_Waiting(entry))
        finally:
            self._unsent -= 1
            if self._sent is not None and not self._unsent:
                self._sent.set()
        if not taken:
            return LogResponse()
        return LogResponse(metrics=len(entry.metrics), samples=len(entry.samples))

    async def _taken(self, mine: _Waiting) -> bool:
        self._waiting.append(mine)
        if self._sending is None:
            self._sending = asyncio.Lock()
        async with self._sending:
            while mine.taken is None:  # otherwise the task before this one has sent it too
                batch = self._next_batch()
                taken = await self._send([each.entry for each in batch])
                for each in batch:
                    each.taken = taken
        return mine.taken

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        size = metrics = 0
        while (
            self._waiting
            and len(batch) < _MOST_ENTRIES
            and size < _MOST_TEXT
            and metrics < _MOST_METRICS
        ):
            batch.append(self._waiting.popleft())
            metrics += len(batch[-1].entry.metrics)
            samples = batch[-1].entry.samples
            size += sum(len(each.text or "") + len(each.prompt or "") for each in samples)
        return batch

    async def _send(self, entries: list[LogEntry]) -> bool:
        if not self._offered:
            return False
        try:
            path = {"training_run_id": self._run_id}
            await self._session.call("log_run", LogRequest(entries=entries), path=path)
        except APIStatusError as error:
            self._refused(error)
            return False
        except TinkerError as error:
            self._warn(error)
            return False
        return True

    def _refused(self, error: APIStatusError) -> None:
        if error.status_code in {404, 405, 501}:
            self._offered = False
            logger.debug("The service does not keep metrics of runs: %s", error)
        else:
            self._warn(error)

    def _warn(self, error: TinkerError) -> None:
        if not self._warned:  # once: a loop would repeat it with every step
            self._warned = True
            logger.warning("Metrics of %s could not be logged: %s", self._run_id, error)
