"""What runs next: pure bookkeeping on what is pending.

Requests of one model run strictly by their number, whatever order they arrive in. A number that never comes — its
request was refused, or its client died between two chunks — holds up the others for a while and is then passed
over. Between models, keys take turns, so that one user's thousand requests do not make another's one wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

__all__ = ["GAP_LIMIT", "SETTLED_GAP_LIMIT", "Candidate", "Sequencer", "Shares"]

T = TypeVar("T")

#: Seconds that requests wait for a number that is missing before them.
GAP_LIMIT: Final = 60.0
#: The same, when one of them is not a pass: clients send it only once all before it were accepted, so what is
#: missing then was used up inside the client.
SETTLED_GAP_LIMIT: Final = 5.0


@dataclass
class Sequencer(Generic[T]):
    """The requests of one model, in line.

    A request is offered once under its number; offering the number again gives back what was offered first, so
    that a client's retry finds its own promise. Requests without a number stand behind all that are there.
    """

    next_seq: int = 1
    _pending: dict[int, T] = field(default_factory=dict)
    _unnumbered: list[tuple[int, T]] = field(default_factory=list)
    _again: deque[T] = field(default_factory=deque)
    _passed: set[int] = field(default_factory=set)
    _gap_since: float | None = None
    _settled: int = -1

    def offer(self, seq_id: int | None, request: T, *, settles: bool = False) -> T:
        """Put a request in line; the one that stands there already, if the number is taken.

        `settles` says that its client had all numbers before it accepted when it sent this one.
        """
        if settles and seq_id is not None:
            self._settled = max(self._settled, seq_id)
        if seq_id is None:
            highest = max(self._pending, default=self.next_seq - 1)
            self._unnumbered.append((highest, request))
            return request
        return self._pending.setdefault(seq_id, request)

    def knows(self, seq_id: int) -> bool:
        """Whether the number was run, passed over or is in line."""
        return seq_id < self.next_seq or seq_id in self._pending or seq_id in self._passed

    def refuse(self, seq_id: int) -> None:
        """A number whose request was turned away: nobody needs to wait for it."""
        if seq_id >= self.next_seq:
            self._passed.add(seq_id)
            self._skip_passed()

    def take(self, now: float) -> T | None:
        """The next request, which then counts as run; None while there is none or a number is missing."""
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
        """Whether `take` would give something."""
        if self._again or (self._unnumbered and self._unnumbered[0][0] < self.next_seq):
            return True
        return self.next_seq in self._pending or self._gap_is_old(now)

    def wakes_at(self, now: float) -> float | None:
        """When a missing number will be passed over, if one is being waited for."""
        if not self._pending or self.next_seq in self._pending:
            return None
        if self._gap_since is None:
            self._gap_since = now
        settled = self.next_seq < self._settled
        return self._gap_since + (SETTLED_GAP_LIMIT if settled else GAP_LIMIT)

    def drop_done(self) -> list[T]:
        """Those whose turn is over, taken out of line: others after them have run."""
        over = sorted(seq_id for seq_id in self._pending if seq_id < self.next_seq)
        return [self._pending.pop(seq_id) for seq_id in over]

    def run_again(self, requests: Iterable[T]) -> None:
        """Those whose turn is over and whose work is lost: they go before all others, in this order."""
        self._again.extend(requests)

    @property
    def goes_back(self) -> bool:
        """Whether there are numbers before `next_seq` that are still to run."""
        return bool(self._again)

    def drain(self) -> list[T]:
        """All that is in line, taken out of it."""
        left = [*self._again, *(self._pending[seq_id] for seq_id in sorted(self._pending))]
        left += [request for _, request in self._unnumbered]
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
    """A model with something to run: whose it is, and since when it waits."""

    model_id: str
    key: Hashable
    since: float


@dataclass
class Shares:
    """What each key has had. Among those who wait all count the same, whatever they had before they came."""

    _served: dict[Hashable, float] = field(default_factory=dict)
    _floor: float = 0.0  # what the key had that was chosen last: who waits has had about as much

    def arrive(self, key: Hashable) -> None:
        """A key of which nothing was waiting: while it was away it has not saved up turns."""
        self._served[key] = max(self._served.get(key, 0.0), self._floor)

    def choose(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """The next model to serve: of the key that has had least, the one that has waited longest."""
        chosen = min(
            candidates,
            key=lambda each: (self._served.get(each.key, 0.0), each.since, each.model_id),
            default=None,
        )
        if chosen is not None:
            self._floor = max(self._floor, self._served.get(chosen.key, 0.0))
        return chosen

    def serve(self, key: Hashable, amount: float) -> None:
        self._served[key] = self._served.get(key, 0.0) + amount
