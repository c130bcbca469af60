"""Decides which request runs next; pure, without I/O.

Requests of one model run strictly in the order of their numbers, whatever order they arrive in. A number may never
arrive: its request was refused, or its client crashed between two chunks. Later requests wait for it until a time
limit, then it is skipped. Between models, keys share the engine fairly, so that a user with one request does not
wait for another's thousand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from tinkex.engine.interface import HOME, Spot

__all__ = ["GAP_LIMIT", "SETTLED_GAP_LIMIT", "Candidate", "Sequencer", "Shares"]

T = TypeVar("T")

#: Seconds that requests wait for a missing earlier number.
GAP_LIMIT: Final = 60.0
#: The same if a request that is not a pass is among them: clients send it only after all earlier ones were accepted,
#: so the missing number was never sent.
SETTLED_GAP_LIMIT: Final = 5.0


@dataclass
class Sequencer(Generic[T]):
    """The queue of one model.

    Offering a number again returns the request that was offered first, so that a client's retry finds its own
    promise. A request without a number runs after all that are in the queue when it arrives.
    """

    next_seq: int = 1
    _pending: dict[int, T] = field(default_factory=dict)
    _unnumbered: list[tuple[int, T]] = field(default_factory=list)
    _again: deque[T] = field(default_factory=deque)
    _passed: set[int] = field(default_factory=set)
    _gap_since: float | None = None
    _settled: int = -1

    def offer(self, seq_id: int | None, request: T, *, settles: bool = False) -> T:
        """Queue a request and return it, or the earlier one if the number is already in the queue.

        `settles` means that all earlier numbers of its client were accepted before it sent this one.
        """
        if settles and seq_id is not None:
            self._settled = max(self._settled, seq_id)
        if seq_id is None:
            highest = max(self._pending, default=self.next_seq - 1)
            self._unnumbered.append((highest, request))
            return request
        return self._pending.setdefault(seq_id, request)

    def knows(self, seq_id: int) -> bool:
        """Whether the number has run, was skipped or is in the queue."""
        return seq_id < self.next_seq or seq_id in self._pending or seq_id in self._passed

    def refuse(self, seq_id: int) -> None:
        """Skip the number of a refused request: no other request waits for it."""
        if seq_id >= self.next_seq:
            self._passed.add(seq_id)
            self._skip_passed()

    def take(self, now: float) -> T | None:
        """Remove and return the next request; None if the queue is empty or waits for a missing number."""
        if self._again:
            return self._again.popleft()
        if self._unnumbered and self._unnumbered[0][0] < self.next_seq:
            return self._unnumbered.pop(0)[1]
        if self.next_seq not in self._pending and not self._give_up_gap(now):
            return None
        self._gap_since = None
        request = self._pending.pop(self.next_seq)
        self.next_seq += 1
        self._skip_passed()
        return request

    def ready(self, now: float) -> bool:
        """Whether `take` would return a request."""
        if self._again or (self._unnumbered and self._unnumbered[0][0] < self.next_seq):
            return True
        return self.next_seq in self._pending or self._gap_is_old(now)

    def wakes_at(self, now: float) -> float | None:
        """The time at which a missing number will be skipped; None if none is missing."""
        if not self._pending or self.next_seq in self._pending:
            return None
        if self._gap_since is None:
            self._gap_since = now
        settled = self.next_seq < self._settled
        return self._gap_since + (SETTLED_GAP_LIMIT if settled else GAP_LIMIT)

    def run_again(self, requests: Iterable[T]) -> None:
        """Queue requests whose work was lost; they run before all others, in this order."""
        self._again.extend(requests)

    @property
    def goes_back(self) -> bool:
        """Whether requests before `next_seq` still have to run again."""
        return bool(self._again)

    @property
    def missing(self) -> int | None:
        """The number that the queue waits for although later ones are there; None if none is missing."""
        waits = self._pending and not self._again and self.next_seq not in self._pending
        return self.next_seq if waits else None

    def waiting(self) -> list[T]:
        """All requests, in the order of their numbers."""
        left = [*self._again, *(self._pending[seq_id] for seq_id in sorted(self._pending))]
        return left + [request for _, request in self._unnumbered]

    def drain(self) -> list[T]:
        """Remove and return all requests."""
        left = self.waiting()
        self._again.clear()
        self._pending.clear()
        self._unnumbered.clear()
        return left

    def __len__(self) -> int:
        return len(self._again) + len(self._pending) + len(self._unnumbered)

    def _gap_is_old(self, now: float) -> bool:
        wakes_at = self.wakes_at(now)
        return wakes_at is not None and now >= wakes_at

    def _give_up_gap(self, now: float) -> bool:
        if not self._gap_is_old(now):
            return False
        self.next_seq = min(self._pending)
        return True

    def _skip_passed(self) -> None:
        while self.next_seq in self._passed:
            self._passed.discard(self.next_seq)
            self.next_seq += 1


@dataclass(frozen=True)
class Candidate:
    """A model with a request to run: its id, its key, since when it waits, and where it could run now."""

    model_id: str
    key: Hashable
    since: float
    spot: Spot = HOME


@dataclass
class Shares:
    """Fair shares of all engines: counts the seconds of engines that each key has used."""

    #: Seconds of finished requests, and what those in flight are expected to take.
    _used: dict[Hashable, float] = field(default_factory=dict)
    _expected: dict[Hashable, float] = field(default_factory=dict)
    _highest: float = 0.0

    def arrive(self, key: Hashable, busy: Iterable[Hashable] = ()) -> None:
        """Raise the count of a key that was idle to the lowest of the busy ones: idle time gives no credit."""
        counts = [self._used.get(each, 0.0) for each in busy if each != key]
        self._used[key] = max(self._used.get(key, 0.0), min(counts, default=self._highest))

    def choose(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """The next model: of the key with the lowest count, the one that has waited longest.

        A model moves to an idle engine if no other model can run at home. It moves to an engine that others use only
        if its key is behind theirs by more than the price of moving.
        """
        here = away = None
        for each in sorted(candidates, key=self._rank):
            if each.spot.moves:
                away = away or each
            else:
                here = here or each
        if away is None:
            return here
        if here is None:
            return away if away.spot.idle else None
        behind = self._rank(here)[0] - self._rank(away)[0]
        return away if behind > away.spot.price else here

    def _rank(self, each: Candidate) -> tuple[float, float, str]:
        count = self._used.get(each.key, 0.0) + self._expected.get(each.key, 0.0)
        return count, each.since, each.model_id

    def begin(self, key: Hashable, expected: float) -> None:
        """Count a request when it starts: a key is not chosen again and again before its first request ends."""
        self._expected[key] = self._expected.get(key, 0.0) + expected

    def end(self, key: Hashable, expected: float, used: float) -> None:
        """Count what a request has used instead of what was expected."""
        self._expected[key] -= expected
        self._used[key] = count = self._used.get(key, 0.0) + used
        self._highest = max(self._highest, count)
