"""The memory that the processes of a service use."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator

from tinkex.engine.interface import EngineStatus
from tinkex.engine.resident import resident_bytes

from .processes import resident_with_children

__all__ = ["engine_memory", "memory_of"]


def memory_of(engines: Iterable[EngineStatus]) -> Iterator[tuple[str, int]]:
    """Resident bytes of this process, and of those of the engines on this machine."""
    yield "service", resident_bytes("self") or _peak()
    if size := sum(engine_memory(each) or 0 for each in engines if each.pid is not None):
        yield "engine", size


def engine_memory(engine: EngineStatus) -> int | None:
    """Bytes of memory of an engine, if they are known. vLLM computes in processes that its own has started."""
    if engine.pid is None:
        return engine.memory
    if engine.kind == "vllm":
        return resident_with_children(engine.pid)
    return resident_bytes(str(engine.pid))


def _peak() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
