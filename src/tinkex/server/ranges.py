"""Which part of a file an HTTP request is for: what a transfer that broke needs to be taken up again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["asked_range"]

# No more digits than a size has: reading a number takes longer the more there are.
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


def asked_range(headers: Mapping[str, str], size: int, tag: str) -> range | None:
    """The bytes that are asked for; None for all of them, an empty range for some that are not there.

    `headers` have lower-case names. Several ranges at once, and whatever is no range, are answered with the whole,
    as HTTP allows. So is a range of something that has changed meanwhile.
    """
    asked = _RANGE.fullmatch(headers.get("range", "").strip())
    if asked is None or headers.get("if-range", tag).strip() != tag:
        return None
    first, last = asked.groups()
    if not first and not last:
        return None
    if not first:  # so many from the end
        return range(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    return range(int(first), min(size, int(last) + 1) if last else size)
