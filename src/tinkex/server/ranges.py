"""HTTP range requests, with which a client resumes an interrupted download."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

__all__ = ["asked_range"]

# At most 18 digits: parsing a very long number is slow, and no file is that large.
_RANGE: Final = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


def asked_range(headers: Mapping[str, str], size: int, tag: str) -> range | None:
    """The requested bytes: None means the whole file, an empty range means bytes that do not exist.

    `headers` have lower-case names. Several ranges, or a malformed one, get the whole file, as HTTP allows. So does a
    range of a file that has changed (`If-Range`).
    """
    asked = _RANGE.fullmatch(headers.get("range", "").strip())
    if asked is None or headers.get("if-range", tag).strip() != tag:
        return None
    first, last = asked.groups()
    if not first and not last:
        return None
    if not first:  # `last` counts from the end
        return range(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None
    return range(int(first), min(size, int(last) + 1) if last else size)
