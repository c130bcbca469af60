"""Decides which results are evicted, and compacts the journal afterwards.

Evictions of a key make room only for requests of the same key. All results are kept for `result_retention` while they
are few. Above `kept_results`, results fetched more than `told_retention` ago are evicted. At the limits of the key,
fetched results are evicted, oldest first, then unfetched ones that are older than `abandoned_after`: their client is
assumed to be gone. If that is not enough, the new request is refused.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from .futures import Promise, Promises
from .journal import Journal
from .quotas import Quotas

__all__ = ["Retention"]


@dataclass(slots=True)
class _Finished:
    """The results of one key, in the order of eviction."""

    #: Time of fetch and promise. A result that is fetched again gets a second entry; the first is then ignored.
    fetched: deque[tuple[float, Promise]] = field(default_factory=deque)
    unfetched: OrderedDict[str, Promise] = field(default_factory=OrderedDict)


class Retention:
    """Evicts results, except those of requests that are `needed` for a replay."""

    def __init__(
        self,
        promises: Promises,
        journal: Journal,
        needed: Callable[[Promise], bool],
        quotas: Quotas,
        *,
        result_retention: float,
        kept_results: int,
        told_retention: float,
        abandoned_after: float,
    ) -> None:
        self._promises = promises
        self._journal = journal
        self._needed = needed
        self._results, self._bytes = quotas.results, quotas.journal_bytes
        self._result_retention = result_retention
        self._kept_results = kept_results
        self._told_retention = told_retention
        self._abandoned_after = abandoned_after
        self._of: defaultdict[str, _Finished] = defaultdict(_Finished)
        promises.on_finish.append(self._finished)
        promises.on_fetched.append(self._fetched)
        promises.make_room = self.make_room

    def restore(self) -> None:
        """Take over the results from before a restart; they count as unfetched."""
        done = [promise for promise in self._promises if promise.done]
        for promise in sorted(done, key=lambda promise: promise.finished_at):
            self._finished(promise)

    def _finished(self, promise: Promise) -> None:
        self._of[promise.owner].unfetched[promise.request_id] = promise

    def _fetched(self, promise: Promise) -> None:
        """Record a fetch; evict results of the same key that were fetched long enough ago, if it has too many."""
        now = promise.fetched_at
        assert now is not None
        mine = self._of[promise.owner]
        mine.unfetched.pop(promise.request_id, None)
        mine.fetched.append((now, promise))
        while mine.fetched and mine.fetched[0][0] <= now - self._told_retention:
            oldest = self._pop_fetched(mine)
            if oldest is not None and self._results.used(promise.owner) > self._kept_results:
                self._forget(oldest)

    def make_room(self, owner: str, more_bytes: int) -> None:
        """Evict results of a key at its limits until one more request fits, or none can be evicted."""
        mine = self._of.get(owner)
        if mine is None:
            return
        evictable = self._evictable(mine)
        while not (self._results.has_room(owner) and self._bytes.has_room(owner, more_bytes)):
            promise = next(evictable, None)
            if promise is None:
                return
            self._forget(promise)

    def _evictable(self, mine: _Finished) -> Iterator[Promise]:
        while mine.fetched:
            promise = self._pop_fetched(mine)
            if promise is not None:
                yield promise
        abandoned = self._promises.clock() - self._abandoned_after
        while mine.unfetched:
            oldest = next(iter(mine.unfetched.values()))
            if oldest.finished_at > abandoned:
                return
            del mine.unfetched[oldest.request_id]
            if not self._needed(oldest):
                yield oldest

    def _pop_fetched(self, mine: _Finished) -> Promise | None:
        """Remove and return the result fetched first; None if it was fetched again since, or is needed."""
        at, promise = mine.fetched.popleft()
        return None if promise.fetched_at != at or self._needed(promise) else promise

    def _forget(self, promise: Promise) -> None:
        self._of[promise.owner].unfetched.pop(promise.request_id, None)
        self._promises.forget(promise)

    def forget(self) -> None:
        """Check all results: evict those that are too old, and the oldest of keys that have too many."""
        now = self._promises.clock()
        done = [each for each in self._promises if each.done and not self._needed(each)]
        # Pairs: the number of results that a key may have, and which may be evicted beyond it, oldest first.
        rules: list[tuple[int, Callable[[Promise], bool]]] = [
            (0, lambda each: each.finished_at < now - self._result_retention),
            (self._kept_results, lambda each: each.fetched_before(now - self._told_retention)),
            (self._results.limit, lambda each: each.fetched_before(now)),
            (self._results.limit, lambda each: each.finished_at < now - self._abandoned_after),
        ]
        for limit, is_evictable in rules:
            for promise in done:
                if self._results.used(promise.owner) > limit and is_evictable(promise):
                    self._forget(promise)

    async def compact(self) -> None:
        """Compact the journal, oldest segment first, while most of it belongs to evicted results."""
        while self._is_mostly_evicted():
            needed = lambda record: self._promises.knows(record.head["id"])  # noqa: E731
            if not await self._journal.compact(needed):
                break

    def _is_mostly_evicted(self) -> bool:
        return self._journal.size > 2 * self._bytes.total + (64 << 20)
