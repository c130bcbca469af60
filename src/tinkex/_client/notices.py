"""Messages to the user about slow calls and retries.

They go to the `tinkex` logger at WARNING, which Python prints to stderr unless the program configures logging.
Deprecations that the service marks as errors are logged at ERROR.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from tinkex._retry import Clock
from tinkex.errors import TinkerError

__all__ = ["Notices", "logger"]

logger = logging.getLogger("tinkex")

#: A call without an answer for this many seconds is reported.
PATIENCE = 2.0
#: Accepted work may take longer: it is reported after this many seconds, …
WORK_PATIENCE = 10.0
#: … and only if it takes this many times as long as the longest earlier request of its kind.
UNUSUAL = 3.0
#: Seconds between two reports of the same wait.
REPEAT = 30.0


@dataclass(slots=True)
class _Wait:
    """A call with a timeout of `limit` seconds, or accepted work, which has no limit."""

    what: str
    since: float
    limit: float | None
    request_id: str = ""
    trouble: str = ""


class Notices:
    """Watches calls in flight and retries, and logs a warning if one takes longer than a user expects."""

    def __init__(self, where: str, clock: Clock) -> None:
        self._where = where
        self._clock = clock
        self._waits: dict[int, _Wait] = {}
        self._next = 0
        self._tick: asyncio.TimerHandle | None = None
        self._last_spoken: dict[str, float] = {}
        self._mentioned: dict[str, float] = {}  # late kinds of calls → time of the last report
        self._longest: dict[str, float] = {}  # kind of work → longest duration in seconds
        self._deprecated: set[str] = set()

    def begin(self, what: str, limit: float) -> int:
        """Register a call with a timeout of `limit` seconds. Pass the returned number to `end`."""
        return self._add(_Wait(what, self._clock.monotonic(), limit))

    def expect(self, what: str, request_id: str) -> int:
        """Register accepted work whose result the service has promised. Pass the returned number to `end`."""
        return self._add(_Wait(what, self._clock.monotonic(), None, request_id))

    def explain(self, number: int, trouble: str) -> None:
        """Set the reason that the report of this wait gives; empty if nothing is wrong."""
        wait = self._waits.get(number)
        if wait is not None:
            wait.trouble = trouble

    def _add(self, wait: _Wait) -> int:
        self._next += 1
        self._waits[self._next] = wait
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(PATIENCE / 2, self._look)
        return self._next

    def end(self, number: int) -> None:
        wait = self._waits.pop(number, None)
        if wait is not None and wait.limit is None:
            took = self._clock.monotonic() - wait.since
            if took > self._longest.get(wait.what, 0.0):
                self._longest[wait.what] = took

    def _look(self) -> None:
        """Report late calls and late work, with one line each however many are late."""
        now = self._clock.monotonic()
        late = [wait for wait in self._waits.values() if now - wait.since >= self._patience(wait)]
        said = {_kind(wait): self._mentioned.get(_kind(wait), -REPEAT) for wait in late}
        for is_work in (False, True):
            alike = [wait for wait in late if (wait.limit is None) is is_work]
            fresh = [wait for wait in alike if now - said[_kind(wait)] >= REPEAT]
            if fresh:
                oldest = min(fresh, key=lambda wait: wait.since)
                logger.warning("%s", self._complaint(oldest, len(alike) - 1, now - oldest.since))
                said |= dict.fromkeys(map(_kind, alike), now)
        # A kind that is no longer late is dropped, so that its next delay is reported at once.
        self._mentioned = said
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(PATIENCE / 2, self._look) if self._waits else None

    def _patience(self, wait: _Wait) -> float:
        if wait.limit is not None:
            return PATIENCE
        return max(WORK_PATIENCE, UNUSUAL * self._longest.get(wait.what, 0.0))

    def _complaint(self, wait: _Wait, others: int, age: float) -> str:
        if wait.limit is None:
            more = ("", " and another request", f" and {others} other requests")[min(others, 2)]
            state = "and has not finished it"
            if wait.trouble:
                state = f"but {wait.trouble.rstrip('.')}"
            return (
                f"Waiting for {wait.what} ({wait.request_id}){more} for {age:.0f} s: {self._where} has "
                f"accepted it {state}."
            )
        more = ("", " and another call", f" and {others} other calls")[min(others, 2)]
        return (
            f"No answer yet from {self._where} to {wait.what}{more}, sent {age:.0f} s ago; giving up "
            f"after {wait.limit:.0f} s."
        )

    def retry(
        self, what: str, error: TinkerError, attempt: int, elapsed: float, wait: float, limit: str
    ) -> None:
        """Report that a call failed and is retried in `wait` seconds."""
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
        """Log a deprecation note of the service, once per note."""
        if note not in self._deprecated:
            self._deprecated.add(note)
            say = logger.error if (level or "").lower() == "error" else logger.warning
            say("%s says: %s", self._where, note)

    def _say_seldom(self, what: str, message: Callable[[], str]) -> None:
        # Without the request id: one line per kind of call, not per request.
        subject = what.partition(" (")[0]
        now = self._clock.monotonic()
        last = self._last_spoken.get(subject)
        if last is None or now - last >= REPEAT:
            self._last_spoken[subject] = now
            logger.warning("%s", message())

    def close(self) -> None:
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        self._waits.clear()


def _kind(wait: _Wait) -> str:
    return wait.what if wait.limit is not None else f"promise of {wait.what}"


def _reason(error: TinkerError) -> str:
    return str(error).rstrip(".") or type(error).__name__
