"""Time for a service whose wall clock may be set while it runs, by hours, in either direction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

__all__ = ["Clock"]


class Clock:
    """A wall clock, and beside it a steady one that nobody sets."""

    def __init__(self, now: Callable[[], datetime], monotonic: Callable[[], float]) -> None:
        self._now = now
        self._monotonic = monotonic
        self._began = now()
        self._began_at = monotonic()

    def steady(self) -> float:
        """Seconds since 1970 by the wall clock of the start; ages and durations are differences of these."""
        return self._began.timestamp() + self._monotonic() - self._began_at

    def expiry(self) -> datetime:
        """The moment up to which things have expired: the earlier of both clocks.

        A wall clock that is set forward must not delete what has days to live; one that is set back only delays.
        """
        elapsed = timedelta(seconds=self._monotonic() - self._began_at)
        return min(self._now(), self._began + elapsed)
