"""Decides from its reported progress whether an engine is stuck; pure."""

from __future__ import annotations

from math import inf
from typing import Final

from tinkex.engine.progress import IDLE, UNTIMED

__all__ = ["Watch"]

#: Looks per deadline: the deadline is kept to within a tenth.
_LOOKS: Final = 10
_MAX_INTERVAL: Final = 1.0


class Watch:
    """Counts the seconds in which an engine with work to do makes no progress.

    A late look counts for at most two intervals: if the whole machine was suspended, the engine is not stuck.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.interval = min(_MAX_INTERVAL, deadline / _LOOKS)
        self.silent = 0.0
        self._seen = (-1, IDLE)
        self._looked_at = inf

    def look(self, progress: tuple[int, int], *, waiting: bool, now: float) -> bool:
        """Whether the engine exceeded its deadline; `waiting` says that a call waits for its reply."""
        work = progress[1]
        passed = min(max(0.0, now - self._looked_at), 2 * self.interval)
        busy = work != UNTIMED and (work != IDLE or waiting)
        self.silent = self.silent + passed if busy and progress == self._seen else 0.0
        self._seen, self._looked_at = progress, now
        return self.silent > self.deadline
