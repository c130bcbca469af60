"""Usage: tokens by hour, session, model and kind, counted in memory and written periodically."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Literal

from .checkpoints import now_utc
from .database import Database
from .tables import UsageRow

__all__ = ["UsageKind", "UsageMeter"]

UsageKind = Literal["training", "sampling_prefill", "sampling_sample", "checkpoint"]


class UsageMeter:
    """Counts the usage of one service."""

    def __init__(self, database: Database, now: Callable[[], datetime] = now_utc) -> None:
        self._db = database
        self._now = now
        self._counts: Counter[tuple[datetime, str, str, str, UsageKind]] = Counter()
        #: Totals since the service started, for the metrics.
        self.totals: Counter[UsageKind] = Counter()

    def add(
        self, owner: str, session_id: str, base_model: str, kind: UsageKind, count: int
    ) -> None:
        hour = self._now().replace(minute=0, second=0, microsecond=0)
        self._counts[hour, owner, session_id, base_model, kind] += count
        self.totals[kind] += count

    async def write(self) -> None:
        counts, self._counts = self._counts, Counter()
        if counts:
            rows = [UsageRow(*key, count) for key, count in counts.items()]
            try:
                await self._db(self._db.store.add_usage, rows)
            except Exception:  # disk full: keep the counts for the next write
                self._counts.update(counts)
                raise
