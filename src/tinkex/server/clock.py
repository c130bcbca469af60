"""Time that stays usable when the wall clock is set while the service runs, by hours, in either direction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

__all__ = ["ServiceClock"]


class ServiceClock:
    """Combines the wall clock with a monotonic one."""

    def __init__(self, now: Callable[[], datetime], monotonic: Callable[[], float]) -> None:
        self._now = now
        self._monotonic = monotonic
        self._began = now()
        self._began_at = monotonic()

    def steady(self) -> float:
        """Wall time at the start plus monotonic seconds since. Use differences of it as ages and durations."""
        return self._began.timestamp() + self._monotonic() - self._began_at

    def expiry(self) -> datetime:
        """The time to compare expiry times with: the earlier of both clocks.

        If the wall clock is set forward, nothing expires early. If it is set back, expiry is only delayed.
        """
        elapsed = timedelta(seconds=self._monotonic() - self._began_at)
        return min(self._now(), self._began + elapsed)
