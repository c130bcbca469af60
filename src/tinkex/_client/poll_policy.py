"""How polls are paced: the retry policy of waiting for a promised result.

| answer                                    | wait before the next poll                                           |
|-------------------------------------------|---------------------------------------------------------------------|
| not yet, held by the service for 1 s      | none: the service already waited                                    |
| not yet, at once                          | 0.1 s doubling to 5 s; 1 s first if paused or pending; or as asked  |
| 5xx, 408 and 425 at once, no answer       | 1 s doubling to 30 s, or `poll_backoff`, or `retry-after`           |
| 429                                       | 1 s doubling to 30 s, or `retry-after`                              |
| 402                                       | 5 s, for as long as the service allows                              |
| 400, 409, 410                             | none, then 1, 2, 4 … s; final after 3 or 5 repetitions              |
| other 4xx, or anything else               | final at once                                                       |

All doubling waits have full jitter: a random wait up to the value above. The duration of a failed poll counts as part
of the wait. Polling gives up after two hours without a useful answer from the service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from tinkex._retry import NotYetError, Tried, asked_wait, exponential, full_jitter
from tinkex._statuses import facts_of
from tinkex.errors import APIConnectionError, TinkerError

from .retry import BILLING_WAIT

__all__ = [
    "FIRST_PAUSED_WAIT",
    "FIRST_WAIT",
    "GIVE_UP_AFTER",
    "NotFinishedError",
    "PollPolicy",
    "Series",
]

#: An answer that took this many seconds was held by the service, so the next poll needs no wait.
HELD: Final = 1.0
FIRST_WAIT: Final = 0.1
FIRST_PAUSED_WAIT: Final = 1.0
MAX_NOT_YET_WAIT: Final = 5.0
FIRST_TROUBLE_WAIT: Final = 1.0
MAX_TROUBLE_WAIT: Final = 30.0
#: Bounds in seconds of the wait that an answer asks for. The upper bound applies only to "not yet".
LEAST_ASKED: Final = 0.1
MOST_ASKED: Final = 60.0
#: Give up after this many seconds without a useful answer …
GIVE_UP_AFTER: Final = 7200.0
#: … and at least this many polls: a stopped process or a sleeping machine sends none.
GIVE_UP_POLLS: Final = 10
#: The last poll is sent this many seconds before the caller's deadline.
LAST_POLL: Final = 1.0


class NotFinishedError(NotYetError):
    """The result is not ready yet.

    `asked` is the wait in seconds that the service asks for. Without it the waits double, starting at `first`.
    """

    def __init__(self, *, asked: float | None = None, first: float = FIRST_WAIT) -> None:
        super().__init__("not finished yet")
        self.asked = asked
        self.first = first


class Series(Enum):
    """Kinds of answers. The waits grow while answers of the same kind follow each other."""

    NOT_YET = auto()
    TROUBLE = auto()
    BUSY = auto()
    UNPAID = auto()
    DOUBTED = auto()
    FINAL = auto()


#: Answers that show that the service is up and knows the request.
_USEFUL: Final = frozenset({Series.NOT_YET, Series.BUSY, Series.UNPAID})


def series_of(error: Exception, took: float) -> Series:
    """The kind of answer that an error stands for; `took` is the duration of the poll in seconds."""
    if isinstance(error, NotYetError):
        return Series.NOT_YET
    if isinstance(error, APIConnectionError):
        return Series.TROUBLE
    status = error.status_code if isinstance(error, TinkerError) else None
    if status == 408 and took >= HELD:  # some services say "not yet" with a bare 408
        return Series.NOT_YET
    if status == 429:
        return Series.BUSY
    if status == 402:
        return Series.UNPAID
    facts = facts_of(status)
    if facts.poll_doubts:
        return Series.DOUBTED
    return Series.TROUBLE if facts.may_pass else Series.FINAL


@dataclass(slots=True)
class PollPolicy:
    """The retry policy of one poll loop. It counts the answers of its loop, so each loop needs its own."""

    billing_window: float = 3600.0
    time_left: float | None = None  # seconds from the first poll to the caller's deadline
    #: The setting `poll_backoff`: number of polls so far → seconds, for statuses of the series TROUBLE.
    chosen: Callable[[int], float] | None = None

    series: Series | None = None
    repeats: int = 0  # answers of this series in a row, before the last one
    last_useful: float = 0.0  # when the last useful answer came, in seconds after the first poll
    failed: int = 0  # polls since the last useful answer
    out_of_time: bool = False  # the caller's deadline ended the polls
    #: "Not yet" answers since the last held one. Errors in between do not reset it, so that a service that alternates
    #: between errors and "not yet" is not flooded.
    _immediate: int = 0
    _doubts: dict[int | None, int] = field(default_factory=dict)

    def wait_before_retry(self, error: Exception, tried: Tried) -> float | None:
        self._count(series_of(error, tried.took), tried)
        wait = self._wait(error, tried)
        if wait is None or self.time_left is None:
            return wait
        left = self.time_left - tried.elapsed
        if wait < left:
            return wait
        self.out_of_time = left <= LAST_POLL
        return None if self.out_of_time else left - LAST_POLL

    def _count(self, series: Series, tried: Tried) -> None:
        self.repeats = self.repeats + 1 if series is self.series else 0
        self.series = series
        if series is not Series.DOUBTED:
            self._doubts.clear()
        if series in _USEFUL:
            self.last_useful, self.failed = tried.elapsed, 0
        else:
            self.failed += 1

    def _wait(self, error: Exception, tried: Tried) -> float | None:
        match self.series:
            case Series.NOT_YET:
                return self._not_yet(error, tried)
            case Series.TROUBLE:
                return self._trouble(error, tried)
            case Series.BUSY:
                return _asked(error) or self._growing(tried)
            case Series.UNPAID:
                paid_for = self.repeats * BILLING_WAIT
                return BILLING_WAIT if paid_for < self.billing_window else None
            case Series.DOUBTED:
                return self._doubted(error)
        return None

    def _not_yet(self, error: Exception, tried: Tried) -> float:
        first = FIRST_WAIT
        if isinstance(error, NotFinishedError):
            first = error.first
            if error.asked is not None:
                return min(max(error.asked, LEAST_ASKED), MOST_ASKED)
        if tried.took >= HELD:
            self._immediate = 0
            return 0.0
        self._immediate += 1
        wait = exponential(self._immediate - 1, first, MAX_NOT_YET_WAIT)
        return full_jitter(wait, tried.chance)

    def _trouble(self, error: Exception, tried: Tried) -> float | None:
        silent = tried.elapsed - self.last_useful
        if silent >= GIVE_UP_AFTER and self.failed >= GIVE_UP_POLLS:
            return None
        if self.chosen is not None and not isinstance(error, APIConnectionError):
            return self.chosen(tried.attempt)
        return _asked(error) or max(0.0, self._growing(tried) - tried.took)

    def _growing(self, tried: Tried) -> float:
        return full_jitter(
            exponential(self.repeats, FIRST_TROUBLE_WAIT, MAX_TROUBLE_WAIT), tried.chance
        )

    def _doubted(self, error: Exception) -> float | None:
        status = error.status_code if isinstance(error, TinkerError) else None
        doubts = self._doubts.get(status, 0)
        if doubts >= facts_of(status).poll_doubts:
            return None
        self._doubts[status] = doubts + 1
        # The first repetition is immediate. Later ones wait: the sender of the answer may need time to recover.
        return 0.0 if doubts == 0 else exponential(doubts - 1, 1.0, MAX_TROUBLE_WAIT)


def _asked(error: Exception) -> float | None:
    asked = asked_wait(error) if isinstance(error, TinkerError) else None
    return None if asked is None else max(asked, LEAST_ASKED)
