"""Which results are kept, and how the journal gives back the room of the others.

All of them for hours, while they are few. Of many those go that were told a while ago, each when its time has come:
as many as are told, so that memory stays level under an even load. What is left over is looked through once a minute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from .futures import Promise, Promises
from .journal import Journal

__all__ = ["Retention"]

#: What the journal writes beside the bodies of a request and its result.
_HEADS: Final = 512


class Retention:
    """Lets results go, except those of requests that are `needed` to run them again."""

    def __init__(
        self,
        promises: Promises,
        journal: Journal,
        needed: Callable[[Promise], bool],
        *,
        result_retention: float,
        kept_results: int,
        told_retention: float,
        max_results: int,
    ) -> None:
        self._promises = promises
        self._journal = journal
        self._needed = needed
        self._result_retention = result_retention
        self._kept_results = kept_results
        self._told_retention = told_retention
        self._max_results = max_results
        self._told: deque[tuple[float, Promise]] = deque()
        promises.on_told.append(self._forget_as_many)

    def _forget_as_many(self, promise: Promise) -> None:
        """For a result that was told now, let those go that were told long enough ago."""
        now = promise.fetched_at
        assert now is not None
        self._told.append((now, promise))
        long_ago = now - self._told_retention
        while self._told and (
            self._told[0][0] <= long_ago or len(self._promises) > self._max_results
        ):
            at, oldest = self._told.popleft()
            if (
                len(self._promises) > self._kept_results
                and oldest.fetched_at == at  # or it was told again since
                and not self._needed(oldest)
            ):
                self._promises.forget(oldest)

    def forget(self) -> None:
        """Look through all results: those go that are too old, and the oldest of too many."""
        now = self._promises.clock()
        done = [each for each in self._promises if each.done and not self._needed(each)]
        # How many results may stay, and of which those go that are beyond: the oldest first.
        rules: list[tuple[int, Callable[[Promise], bool]]] = [
            (0, lambda each: each.finished_at < now - self._result_retention),
            (self._kept_results, lambda each: each.told_before(now - self._told_retention)),
            (self._max_results, lambda each: each.told_before(now)),
            (self._max_results, lambda _: True),
        ]
        for limit, may_go in rules:
            for promise in done:
                if len(self._promises) <= limit:
                    break
                if may_go(promise):
                    self._promises.forget(promise)

    async def compact(self) -> None:
        """Rewrite the journal from its beginning while most of it is of results that are gone."""
        while self._mostly_forgotten():
            needed = lambda record: self._promises.knows(record.head["id"])  # noqa: E731
            if not await self._journal.compact(needed):
                break

    def _mostly_forgotten(self) -> bool:
        kept = sum(
            _HEADS + promise.place.length + (promise.result.place.length if promise.result else 0)
            for promise in self._promises
        )
        return self._journal.size > 2 * kept + (64 << 20)
