"""Telling the user what is being waited for, before they have to wonder.

Everything goes through the `tinkex` logger at WARNING, which Python prints on stderr unless the program
configured logging otherwise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tinkex.errors import TinkerError

from .retry import Clock

__all__ = ["Notices", "logger"]

logger = logging.getLogger("tinkex")

#: A silence longer than this is explained.
PATIENCE = 2.0
#: How often the same wait is mentioned again.
REPEAT = 30.0


@dataclass(slots=True)
class _Wait:
    what: str
    since: float
    limit: float


class Notices:
    """Watches calls in flight and retries; speaks up when one takes longer than a user expects."""

    def __init__(self, where: str, clock: Clock) -> None:
        self._where = where
        self._clock = clock
        self._flights: dict[int, _Wait] = {}
        self._next = 0
        self._tick: asyncio.TimerHandle | None = None
        self._last_spoken: dict[str, float] = {}
        self._mentioned: dict[str, float] = {}  # kinds of calls that are late, and when it was said
        self._deprecated: set[str] = set()

    def begin(self, what: str, limit: float) -> int:
        """Note that a call was sent that may take `limit` seconds; `end` it with the number returned."""
        self._next += 1
        self._flights[self._next] = _Wait(what, self._clock.monotonic(), limit)
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(PATIENCE / 2, self._look)
        return self._next

    def end(self, flight: int) -> None:
        self._flights.pop(flight, None)

    def _look(self) -> None:
        """Mention what has been silent for too long; one line however many calls wait."""
        now = self._clock.monotonic()
        late = [wait for wait in self._flights.values() if now - wait.since >= PATIENCE]
        said = {wait.what: self._mentioned.get(wait.what, -REPEAT) for wait in late}
        fresh = [wait for wait in late if now - said[wait.what] >= REPEAT]
        if fresh:
            oldest = min(fresh, key=lambda wait: wait.since)
            others = ("", " and another call", f" and {len(late) - 1} other calls")[
                min(len(late), 3) - 1
            ]
            logger.warning(
                "No answer yet from %s to %s%s, sent %.0f s ago, given up after %.0f s.",
                self._where,
                oldest.what,
                others,
                now - oldest.since,
                oldest.limit,
            )
            said = dict.fromkeys(said, now)
        self._mentioned = said  # a kind that answers again is forgotten, and told of anew
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(PATIENCE / 2, self._look) if self._flights else None

    def retry(
        self, what: str, error: TinkerError, attempt: int, elapsed: float, wait: float, limit: str
    ) -> None:
        """A call failed and is about to be tried again in `wait` seconds."""
        if elapsed + wait < PATIENCE:
            return
        self._say_seldom(
            what,
            lambda: (
                f"{what}: {_reason(error)} ({self._where}). Tried {attempt + 1} times in "
                f"{elapsed:.0f} s, next try in {wait:.1f} s, {limit}."
            ),
        )

    def paused(self, what: str, reason: str) -> None:
        self._say_seldom(what, lambda: f"{what}: {reason} ({self._where}).")

    def deprecated(self, note: str, level: str | None) -> None:
        """The service says that something will go away; once is enough."""
        if note not in self._deprecated:
            self._deprecated.add(note)
            say = logger.error if (level or "").lower() == "error" else logger.warning
            say("%s says: %s", self._where, note)

    def _say_seldom(self, what: str, message: Callable[[], str]) -> None:
        subject = what.partition(" (")[0]  # one line for all of a kind, not one for each request
        now = self._clock.monotonic()
        last = self._last_spoken.get(subject)
        if last is None or now - last >= REPEAT:
            self._last_spoken[subject] = now
            logger.warning("%s", message())

    def close(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        self._flights.clear()


def _reason(error: TinkerError) -> str:
    return str(error).rstrip(".") or type(error).__name__
