"""Counters, gauges and histograms of this process, kept from the client's events.

    with Metrics() as metrics:
        train(client)
    print(metrics.snapshot().histograms["tinkex_request_duration_ms"].p95)

Names end in their unit; durations are in milliseconds.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Final, Self

from tinkex.errors import InvalidInputError

from . import bus
from .bus import column
from .events import (
    Event,
    FutureCompleted,
    FutureFailure,
    HttpRequestException,
    HttpRequestStop,
    QueueStateChange,
    RetryAttemptRetry,
    SampleStop,
    Throttled,
    TrainingPass,
    TrainingStep,
)

__all__ = ["LATENCY_BUCKETS", "HistogramSnapshot", "Metrics", "MetricsSnapshot"]

#: Upper bounds in milliseconds; one more bucket counts longer durations.
LATENCY_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Count, mean, minimum and maximum of all values; percentiles of the latest values. None while empty."""

    count: int = 0
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    #: Values per upper bound, and under infinity those above the last bound; each value is counted once.
    buckets: Mapping[float, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    histograms: Mapping[str, HistogramSnapshot]


class _Histogram:
    __slots__ = ("bounds", "count", "counts", "latest", "max", "min", "total")

    def __init__(self, bounds: Sequence[float], max_samples: int) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.latest: deque[float] = deque(maxlen=max_samples)
        self.count, self.total = 0, 0.0
        self.min, self.max = float("inf"), float("-inf")

    def record(self, values: Sequence[float]) -> None:
        ordered = sorted(values)
        self.count += len(ordered)
        self.total += sum(ordered)
        self.latest.extend(values)
        self.min, self.max = min(self.min, ordered[0]), max(self.max, ordered[-1])
        before = 0
        for place, bound in enumerate(self.bounds):
            below = bisect_right(ordered, bound)
            self.counts[place] += below - before
            before = below
        self.counts[-1] += len(ordered) - before

    def snapshot(self) -> HistogramSnapshot:
        buckets = dict(zip((*self.bounds, float("inf")), self.counts, strict=True))
        if not self.count:
            return HistogramSnapshot(buckets=buckets)
        ordered = sorted(self.latest)
        return HistogramSnapshot(
            self.count,
            self.total / self.count,
            self.min,
            self.max,
            _median(ordered),
            _nearest_rank(ordered, 95),
            _nearest_rank(ordered, 99),
            buckets,
        )


def _median(ordered: Sequence[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _nearest_rank(ordered: Sequence[float], percent: int) -> float:
    return ordered[ceil(len(ordered) * percent / 100) - 1]


class Metrics(bus.Collector):
    """Counters, gauges and histograms by name; inside a `with` block, also those of the client.

    Tokens per second are averages since the previous snapshot, or since the start.
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        latency_buckets: Sequence[float] = LATENCY_BUCKETS,
        histogram_max_samples: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        if not latency_buckets or any(low >= high for low, high in pairwise(latency_buckets)):
            raise InvalidInputError(
                "must be one or more increasing numbers", field="latency_buckets"
            )
        if histogram_max_samples < 1:
            raise InvalidInputError("must be 1 or more", field="histogram_max_samples")
        self._enabled = enabled
        self._bounds = tuple(latency_buckets)
        self._max_samples = histogram_max_samples
        self._clock = clock
        self._measured = 0.0  # time of the last measurement of tokens per second
        self._ended: float | None = None
        self.reset()

    # -- recording ---------------------------------------------------------------------------

    def increment(self, name: str, delta: float = 1) -> None:
        with self._lock:
            self._counters[name] += delta

    def set_gauge(self, name: str, value: float) -> None:
        with self._lock:
            self._gauges[name] = value

    def record_histogram(self, name: str, value_ms: float) -> None:
        with self._lock:
            self._record(name, [value_ms])

    def _record(self, name: str, values: Sequence[float]) -> None:
        histogram = self._histograms.get(name)
        if histogram is None:
            histogram = self._histograms[name] = _Histogram(self._bounds, self._max_samples)
        histogram.record(values)

    def snapshot(self) -> MetricsSnapshot:
        self.flush()
        with self._lock:
            self._measure_flows()
            return MetricsSnapshot(
                dict(sorted(self._counters.items())),
                dict(sorted(self._gauges.items())),
                {name: each.snapshot() for name, each in sorted(self._histograms.items())},
            )

    def _measure_flows(self) -> None:
        now = self._clock() if self._ended is None else self._ended
        seconds = now - self._measured
        if seconds <= 0:
            return
        for name in _FLOWS:
            if name in self._counters:
                gone = self._counters[name] - self._flowed.get(name, 0)
                self._flowed[name] = self._counters[name]
                self._gauges[f"{name}_per_second"] = gone / seconds
        self._measured = now

    def reset(self) -> None:
        """Set everything back to zero; recording continues."""
        self.flush()
        with self._lock:
            self._counters: defaultdict[str, float] = defaultdict(int)
            self._gauges: dict[str, float] = {}
            self._histograms: dict[str, _Histogram] = {}
            self._flowed: dict[str, float] = {}
            self._measured = self._clock()
            if self._subscriptions:
                self._count_from_zero()

    def _count_from_zero(self) -> None:
        """Create the request counters at 0, so that a snapshot has them before the first request."""
        for name in _REQUESTS:
            self._counters[name] += 0

    # -- subscribing -------------------------------------------------------------------------

    def attach(self) -> Self:
        """Record the client's events too, unless created with `enabled=False`."""
        self._ended = None
        if not self._enabled:
            return self
        with self._lock:
            self._count_from_zero()
        return super().attach()

    def detach(self) -> None:
        super().detach()
        self._ended = self._clock()

    def count(self, kind: type[Event], events: list[bus.Unmade]) -> None:
        count = _COUNTED.get(kind) or _COUNTED[FutureFailure]  # the only base class among the keys
        count(self, events)

    def _add(self, name: str, amount: float) -> None:
        self._counters[name] += amount

    def _durations(self, name: str, seconds: Iterable[float]) -> None:
        self._record(name, [1000 * each for each in seconds])

    def _requests(self, events: list[bus.Unmade]) -> None:
        succeeded = [*column(events, "result")].count("ok")
        self._add("tinkex_requests_total", len(events))
        if succeeded:
            self._add("tinkex_requests_success", succeeded)
        if succeeded < len(events):
            self._add("tinkex_requests_failure", len(events) - succeeded)
        self._durations("tinkex_request_duration_ms", column(events, "duration"))

    def _failed_requests(self, events: list[bus.Unmade]) -> None:
        self._add("tinkex_requests_total", len(events))
        self._add("tinkex_requests_failure", len(events))
        self._durations("tinkex_request_duration_ms", column(events, "duration"))

    def _futures(self, events: list[bus.Unmade]) -> None:
        self._add("tinkex_futures_completed", len(events))
        self._durations("tinkex_future_duration_ms", column(events, "elapsed_time"))

    def _failed_futures(self, events: list[bus.Unmade]) -> None:
        self._add("tinkex_futures_failed", len(events))

    def _retries(self, events: list[bus.Unmade]) -> None:
        self._add("tinkex_retries_total", len(events))

    def _queue_states(self, events: list[bus.Unmade]) -> None:
        for state in column(events, "queue_state"):
            self._add(f"tinkex_queue_{state}", 1)

    def _pauses(self, events: list[bus.Unmade]) -> None:
        self._add("tinkex_throttled_total", len(events))
        self._add("tinkex_throttled_seconds", sum(column(events, "delay")))

    def _training_passes(self, events: list[bus.Unmade]) -> None:
        self._add("tinkex_training_passes", len(events))
        self._add("tinkex_training_tokens", sum(column(events, "tokens")))
        self._durations("tinkex_training_pass_duration_ms", column(events, "duration"))

    def _training_steps(self, events: list[bus.Unmade]) -> None:
        self._add("tinkex_training_steps", len(events))
        self._durations("tinkex_training_step_duration_ms", column(events, "duration"))

    def _samples(self, events: list[bus.Unmade]) -> None:
        self._add("tinkex_samples", sum(column(events, "sequences")))
        self._add("tinkex_prompt_tokens", sum(column(events, "prompt_tokens")))
        self._add("tinkex_cached_tokens", sum(column(events, "cached_tokens")))
        self._add("tinkex_sampled_tokens", sum(column(events, "sampled_tokens")))
        self._durations("tinkex_sample_duration_ms", column(events, "duration"))


_COUNTED: Final[Mapping[type[Event], Callable[[Metrics, list[bus.Unmade]], None]]] = {
    HttpRequestStop: Metrics._requests,
    HttpRequestException: Metrics._failed_requests,
    FutureCompleted: Metrics._futures,
    FutureFailure: Metrics._failed_futures,
    QueueStateChange: Metrics._queue_states,
    RetryAttemptRetry: Metrics._retries,
    Throttled: Metrics._pauses,
    TrainingPass: Metrics._training_passes,
    TrainingStep: Metrics._training_steps,
    SampleStop: Metrics._samples,
}
Metrics.kinds = tuple(_COUNTED)
_REQUESTS: Final = ("tinkex_requests_total", "tinkex_requests_success", "tinkex_requests_failure")
#: Counters that are also shown per second.
_FLOWS: Final = ("tinkex_training_tokens", "tinkex_sampled_tokens")
