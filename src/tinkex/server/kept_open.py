"""Which adapters an engine keeps open for sampling: the last 32 used, and more of them while all are small."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

__all__ = ["IN_MEMORY", "KEPT_BYTES", "KEPT_OPEN", "surplus"]

#: Adapters that an engine keeps open, whatever their size.
KEPT_OPEN: Final = 32
#: Memory of all adapters together up to which an engine keeps more of them open.
KEPT_BYTES: Final = 1 << 30
#: Memory of an open adapter, in sizes of its stored weights: as they are, fused, and packed for the kernels. Measured
#: with `tinkex/tiny`: 3.7 at rank 8 and 3.4 at rank 32 in float32, 2.2 in bfloat16.
IN_MEMORY: Final = 4


def surplus(sizes: Iterable[int], *, least: int = KEPT_OPEN, limit: int = KEPT_BYTES) -> int:
    """How many adapters to close, the least recently used first; `sizes` of their files are given in that order."""
    total = kept = 0
    ordered = list(sizes)
    for size in reversed(ordered):
        total += size * IN_MEMORY
        if kept >= least and total > limit:
            break
        kept += 1
    return len(ordered) - kept
