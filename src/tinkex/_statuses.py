"""What each HTTP status means for a retry: the one table, read by errors, retries, polls and downloads.

| status     | may pass | user's fault | a poll raises it         | a signed link: expired |
|------------|----------|--------------|--------------------------|------------------------|
| 400        | no       | yes          | after 3 repetitions      | yes                    |
| 401, 403   | no       | yes          | at once                  | yes                    |
| 402        | paused   | yes          | after the billing window | no                     |
| 408        | yes      | no           | never                    | no                     |
| 409        | yes      | yes          | after 5 repetitions      | no                     |
| 410        | no       | no           | after 5 repetitions      | yes                    |
| 425        | yes      | yes          | never                    | no                     |
| 429        | yes      | no           | never                    | no                     |
| other 4xx  | no       | yes          | at once                  | no                     |
| 5xx        | yes      | no           | never                    | no                     |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["StatusFacts", "facts_of"]


@dataclass(frozen=True, slots=True)
class StatusFacts:
    """One row of the table."""

    #: The same request may succeed later, so it is sent again.
    may_pass: bool = False
    #: The caller has to change the request.
    user_fault: bool = False
    #: A poll retries the status this many times in a row: a proxy may have sent it, and raising it ends a training run.
    poll_doubts: int = 0
    #: File stores send this status for a signed link that has expired.
    expired_link: bool = False


_REFUSED: Final = StatusFacts(user_fault=True)
_TROUBLE: Final = StatusFacts(may_pass=True)
_TABLE: Final = {
    400: StatusFacts(user_fault=True, poll_doubts=3, expired_link=True),
    401: StatusFacts(user_fault=True, expired_link=True),
    403: StatusFacts(user_fault=True, expired_link=True),
    408: _TROUBLE,
    409: StatusFacts(may_pass=True, user_fault=True, poll_doubts=5),
    410: StatusFacts(poll_doubts=5, expired_link=True),
    425: StatusFacts(may_pass=True, user_fault=True),
    429: _TROUBLE,
}
_UNKNOWN: Final = StatusFacts()


def facts_of(status: int | None) -> StatusFacts:
    """The row of a status; a status outside 4xx and 5xx is nobody's fault and is not retried."""
    if status is None:
        return _UNKNOWN
    row = _TABLE.get(status)
    if row is not None:
        return row
    if 400 <= status < 500:
        return _REFUSED
    return _TROUBLE if 500 <= status < 600 else _UNKNOWN
