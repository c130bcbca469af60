"""The memory that the processes of a service use."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator

from tinkex.engine.resident import resident_bytes

__all__ = ["memory_of"]


def memory_of(engines: Iterable[int | None]) -> Iterator[tuple[str, int]]:
    """Resident bytes of this process, and of those of the engines on this machine."""
    yield "service", resident_bytes("self") or _peak()
    if size := sum(resident_bytes(str(engine)) for engine in engines if engine is not None):
        yield "engine", size


def _peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
