"""Which adapters an engine keeps open for sampling: the last 32 used, and more of them while all are small."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["KEPT_BYTES", "KEPT_OPEN", "surplus"]

#: Adapters that an engine keeps open, whatever their size.
KEPT_OPEN: Final = 32
#: Size of the stored weights up to which an engine keeps more adapters open.
KEPT_BYTES: Final = 1 << 30


def surplus(sizes: Iterable[int], *, least: int = KEPT_OPEN, limit: int = KEPT_BYTES) -> int:
    """How many adapters to close, the least recently used first; `sizes` are given in that order."""
    total = kept = 0
    ordered = list(sizes)
    for size in reversed(ordered):
        total += size
        if kept >= least and total > limit:
            break
        kept += 1
    return len(ordered) - kept
