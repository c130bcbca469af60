"""The tag that joins the requests of one large pass, so that a service can keep all of their gradients or none.

A `forward_backward` call that is too large for one request is sent in several parts. Each carries the header
`x-tinkex-pass: <pass id> <number>/<count>`, numbered from 1. A service that knows the tag answers with the same
header and the value `all-or-nothing`; other services ignore it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tinkex.errors import InvalidInputError

__all__ = ["ALL_OR_NOTHING", "PASS_HEADER", "PassPart"]

PASS_HEADER: Final = "x-tinkex-pass"  # noqa: S105 - a forward-backward pass
ALL_OR_NOTHING: Final = "all-or-nothing"
_FORM: Final = re.compile(r"([\w:.-]{1,100}) ([1-9]\d{0,8})/([1-9]\d{0,8})", re.ASCII)


@dataclass(frozen=True, slots=True)
class PassPart:
    """The part of a pass that a request carries; `index` counts from 0."""

    pass_id: str
    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> PassPart:
        """Read the value of the header."""
        found = _FORM.fullmatch(text)
        if found is None or int(found[2]) > int(found[3]):
            raise InvalidInputError(
                f"must be '<pass id> <number>/<count>', not {text!r:.150}", field=PASS_HEADER
            )
        return cls(found[1], int(found[2]) - 1, int(found[3]))

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> PassPart | None:
        text = headers.get(PASS_HEADER)
        return None if text is None else cls.parse(text)

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def follows(self, other: PassPart) -> bool:
        """Whether this is the part right after `other`."""
        return self == PassPart(other.pass_id, other.index + 1, other.count)

    def __str__(self) -> str:
        return f"{self.pass_id} {self.index + 1}/{self.count}"
