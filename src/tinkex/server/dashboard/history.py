"""The last hour of a service: rates, queues and memory by time, and the requests that failed.

Values are totals of the whole service, as in `/metrics`. Errors belong to one key and are shown only to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import orjson

from tinkex._wire.operations import ServicePart
from tinkex.types import SampleResponse

from ..futures import Promise

__all__ = ["Failure", "History", "Reading"]

#: Seconds between two readings, and how long they and failures are kept.
INTERVAL: Final = 2.0
KEPT: Final = 3600.0
_MAX_FAILURES: Final = 1_000


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a service at one moment; fields that end in `_total` only grow."""

    time: float
    trained_total: int
    prefilled_total: int
    sampled_total: int
    samples_total: int
    steps_total: int
    cached_total: int
    failed_total: int
    waiting: int
    sampling: int
    service_bytes: int
    engine_bytes: int
    busy_total: float


@dataclass(frozen=True, slots=True)
class Failure:
    time: float
    owner: str
    operation: str
    scope: str
    message: str
    category: str


@dataclass
class History:
    """What happened in the last hour."""

    clock: Callable[[], float]
    readings: deque[Reading] = field(default_factory=lambda: deque(maxlen=int(KEPT / INTERVAL)))
    failures: deque[Failure] = field(default_factory=lambda: deque(maxlen=_MAX_FAILURES))
    samples: int = 0
    steps: int = 0
    cached: int = 0
    failed: int = 0

    async def watch(self, read: Callable[[], Reading]) -> None:
        while True:
            self.readings.append(read())
            await asyncio.sleep(INTERVAL)

    def valued(self, promise: Promise, value: Any) -> None:
        """Count a result before it is encoded."""
        if isinstance(value, SampleResponse):
            self.samples += len(value.sequences)
            self.cached += getattr(value, "prompt_cache_hit_tokens", None) or 0
        elif promise.operation.uses_gradients:
            self.steps += 1

    def finished(self, promise: Promise) -> None:
        result = promise.result
        if result is None or not result.failed:
            return
        self.failed += 1
        body: Any = {}
        with suppress(ValueError):
            body = orjson.loads(result.payload or b"{}")
        self.failures.append(
            Failure(
                self.clock(),
                promise.owner,
                promise.operation.name,
                promise.scope if promise.operation.runner is ServicePart.MODELS else "",
                str(body.get("error") or body.get("detail") or "")[:500],
                str(body.get("category") or ""),
            )
        )

    def failures_of(self, owner: str) -> list[Failure]:
        """The failures of an owner in the last hour, newest first."""
        since = self.clock() - KEPT
        return [
            each for each in reversed(self.failures) if each.owner == owner and each.time > since
        ]

    def rates(self, since: float = 0.0) -> dict[str, list[float]]:
        """The readings after a time as columns; totals become amounts per second."""
        found: dict[str, list[float]] = {"time": []}
        readings = list(self.readings)
        for before, now in pairwise(readings):
            if now.time <= since:
                continue
            seconds = max(1e-3, now.time - before.time)
            found["time"].append(now.time)
            for name in Reading.__slots__:
                if name == "time":
                    continue
                value = getattr(now, name)
                if name.endswith("_total"):
                    value = (value - getattr(before, name)) / seconds
                found.setdefault(name.removesuffix("_total"), []).append(round(value, 3))
        return found
