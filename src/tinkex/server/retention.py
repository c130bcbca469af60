"""Which results are kept, and how the journal gives back the room of the others.

Results of a key make room only for requests of the same key. All are kept for hours while they are few. Above
`kept_results` those go that were fetched a while ago. At the limits of the key, first fetched results go, oldest first,
then those that nobody has fetched for so long that their client must be gone. If that is not enough, the request that
needs the room is refused.
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
    """The results of one key, in the order in which they may go."""

    #: When each was fetched. A result that is fetched again has a second entry, and the first no longer counts.
    fetched: deque[tuple[float, Promise]] = field(default_factory=deque)
    unfetched: OrderedDict[str, Promise] = field(default_factory=OrderedDict)


class Retention:
    """Lets results go, except those of requests that are `needed` to run them again."""

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
        promises.on_told.append(self._fetched)
        promises.make_room = self.make_room

    def restore(self) -> None:
        """Take up the results of before a restart; which of them were fetched is not known any more."""
        done = [promise for promise in self._promises if promise.done]
        for promise in sorted(done, key=lambda promise: promise.finished_at):
            self._finished(promise)

    def _finished(self, promise: Promise) -> None:
        self._of[promise.owner].unfetched[promise.request_id] = promise

    def _fetched(self, promise: Promise) -> None:
        """Note when a result was fetched, and let those of its key go that were fetched long enough ago."""
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
        """At the limits of a key, let its own results go until one more request fits, or no more may go."""
        mine = self._of.get(owner)
        if mine is None:
            return
        may_go = self._disposable(mine)
        while not (self._results.has_room(owner) and self._bytes.has_room(owner, more_bytes)):
            promise = next(may_go, None)
            if promise is None:
                return
            self._forget(promise)

    def _disposable(self, mine: _Finished) -> Iterator[Promise]:
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
        """The result that was fetched first, unless it was fetched again since, or is needed."""
        at, promise = mine.fetched.popleft()
        return None if promise.fetched_at != at or self._needed(promise) else promise

    def _forget(self, promise: Promise) -> None:
        self._of[promise.owner].unfetched.pop(promise.request_id, None)
        self._promises.forget(promise)

    def forget(self) -> None:
        """Look through all results: those go that are too old, and the oldest of keys that have too many."""
        now = self._promises.clock()
        done = [each for each in self._promises if each.done and not self._needed(each)]
        # How many results a key may have, and which of them go when it has more: the oldest first.
        rules: list[tuple[int, Callable[[Promise], bool]]] = [
            (0, lambda each: each.finished_at < now - self._result_retention),
            (self._kept_results, lambda each: each.told_before(now - self._told_retention)),
            (self._results.limit, lambda each: each.told_before(now)),
            (self._results.limit, lambda each: each.finished_at < now - self._abandoned_after),
        ]
        for limit, may_go in rules:
            for promise in done:
                if self._results.used(promise.owner) > limit and may_go(promise):
                    self._forget(promise)

    async def compact(self) -> None:
        """Rewrite the journal from its beginning while most of it is of results that are gone."""
        while self._mostly_forgotten():
            needed = lambda record: self._promises.knows(record.head["id"])  # noqa: E731
            if not await self._journal.compact(needed):
                break

    def _mostly_forgotten(self) -> bool:
        return self._journal.size > 2 * self._bytes.total + (64 << 20)
