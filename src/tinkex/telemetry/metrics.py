"""Numbers about this process: counters, gauges and histograms, kept by listening.

    with Metrics() as metrics:
        train(client)
    print(metrics.snapshot().histograms["tinkex_request_duration_ms"].p95)

Names end in what they count; durations are milliseconds, as their names say.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil
from typing import Any, Final, Self

from tinkex.errors import InvalidInputError

from . import bus
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

__all__ = ["LATENCY_BUCKETS", "HistogramSnapshot", "Metrics", "Rate", "Snapshot"]

#: Upper ends in milliseconds; longer ones are counted beyond the last.
LATENCY_BUCKETS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
#: Seconds over which tokens per second are averaged.
_RATE_WINDOW: Final = 10.0


@dataclass(frozen=True, slots=True)
class HistogramSnapshot:
    """Count, mean, least and most of everything; percentiles of the latest values. None while empty."""

    count: int = 0
    mean: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    #: How many values lie up to each bound, and beyond the last under infinity; each value is counted once.
    buckets: Mapping[float, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
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

    def record(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.latest.append(value)
        self.counts[bisect_left(self.bounds, value)] += 1
        if value < self.min:  # noqa: PLR1730 - min() costs more than all the rest
            self.min = value
        if value > self.max:  # noqa: PLR1730
            self.max = value

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


class Rate:
    """How much comes in per second, lately."""

    __slots__ = ("_clock", "_seen", "_since", "_total", "_window")

    def __init__(self, clock: Callable[[], float], window: float = _RATE_WINDOW) -> None:
        self._clock = clock
        self._window = window
        self._seen: deque[list[float]] = (
            deque()
        )  # [when, amount], one a tenth of the window at most
        self._total = 0.0
        self._since: float | None = None

    def add(self, amount: float, duration: float = 0.0) -> None:
        """Count what took `duration` seconds until now."""
        now = self._clock()
        if self._since is None:
            self._since = now - duration
        self._total += amount
        if self._seen and now - self._seen[-1][0] < self._window / 10:
            self._seen[-1][1] += amount
        else:
            self._seen.append([now, amount])
        self._forget(now)

    def per_second(self) -> float:
        now = self._clock()
        self._forget(now)
        if self._since is None:
            return 0.0
        seconds = min(now - self._since, self._window)
        return self._total / seconds if seconds > 0 else 0.0

    def _forget(self, now: float) -> None:
        while self._seen and now - self._seen[0][0] >= self._window:
            self._total -= self._seen.popleft()[1]


class Metrics(bus.Subscriber):
    """Counters, gauges and histograms by name; inside a `with` block, also those of the client."""

    def __init__(
        self,
        *,
        enabled: bool = True,
        latency_buckets: Sequence[float] = LATENCY_BUCKETS,
        histogram_max_samples: int = 1000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not latency_buckets or any(low >= high for low, high in pairwise(latency_buckets)):
            raise InvalidInputError("must be one or more rising numbers", field="latency_buckets")
        if histogram_max_samples < 1:
            raise InvalidInputError("must be 1 or more", field="histogram_max_samples")
        self._enabled = enabled
        self._bounds = tuple(latency_buckets)
        self._max_samples = histogram_max_samples
        self._clock = clock
        self._lock = bus.lock()
        self.reset()

    # -- keeping -----------------------------------------------------------------------------

    def increment(self, name: str, delta: float = 1) -> None:
        with self._lock:
            self._counters[name] += delta

    def set_gauge(self, name: str, value: float) -> None:
        with self._lock:
            self._gauges[name] = value

    def record_histogram(self, name: str, value_ms: float) -> None:
        with self._lock:
            self._record(name, value_ms)

    def _record(self, name: str, value: float) -> None:
        histogram = self._histograms.get(name)
        if histogram is None:
            histogram = self._histograms[name] = _Histogram(self._bounds, self._max_samples)
        histogram.record(value)

    def snapshot(self) -> Snapshot:
        with self._lock:
            rates = {name: rate.per_second() for name, rate in self._rates.items()}
            return Snapshot(
                dict(sorted(self._counters.items())),
                dict(sorted((self._gauges | rates).items())),
                {name: each.snapshot() for name, each in sorted(self._histograms.items())},
            )

    def reset(self) -> None:
        """Forget everything and go on."""
        with self._lock:
            self._counters: defaultdict[str, float] = defaultdict(int)
            self._gauges: dict[str, float] = {}
            self._histograms: dict[str, _Histogram] = {}
            self._rates: dict[str, Rate] = {}

    def flush(self) -> None:
        """Return when what was emitted before is counted; events are counted as they occur."""
        with self._lock:
            return

    # -- listening ---------------------------------------------------------------------------

    def attach(self) -> Self:
        """Keep the client's numbers too, unless made with `enabled=False`."""
        return super().attach() if self._enabled else self

    def handlers(self) -> Mapping[type[Event], Callable[[Any], object]]:
        return {
            HttpRequestStop: self._request,
            HttpRequestException: self._request_failed,
            FutureCompleted: self._future,
            FutureFailure: lambda _: self.increment("tinkex_futures_failed"),
            QueueStateChange: lambda event: self.increment(f"tinkex_queue_{event.queue_state}"),
            RetryAttemptRetry: lambda _: self.increment("tinkex_retries_total"),
            Throttled: self._throttled,
            TrainingPass: self._training_pass,
            TrainingStep: self._training_step,
            SampleStop: self._sample,
        }

    # One acquired lock and plain additions each: a client that samples passes here thousands of times a second.

    def _request(self, event: HttpRequestStop) -> None:
        with self._lock:
            counters = self._counters
            counters["tinkex_requests_total"] += 1
            counters[_RESULTS[event.result]] += 1
            self._record("tinkex_request_duration_ms", event.duration * 1000)

    def _request_failed(self, event: HttpRequestException) -> None:
        with self._lock:
            self._counters["tinkex_requests_total"] += 1
            self._counters["tinkex_requests_failure"] += 1
            self._record("tinkex_request_duration_ms", event.duration * 1000)

    def _future(self, event: FutureCompleted) -> None:
        with self._lock:
            self._counters["tinkex_futures_completed"] += 1
            self._record("tinkex_future_duration_ms", event.elapsed_time * 1000)

    def _throttled(self, event: Throttled) -> None:
        self.increment("tinkex_throttled_total")
        self.increment("tinkex_throttled_seconds", event.delay)

    def _training_pass(self, event: TrainingPass) -> None:
        with self._lock:
            self._counters["tinkex_training_passes"] += 1
            self._counters["tinkex_training_tokens"] += event.tokens
            self._record("tinkex_training_pass_duration_ms", event.duration * 1000)
            self._flow("tinkex_training_tokens_per_second", event.tokens, event.duration)

    def _training_step(self, event: TrainingStep) -> None:
        with self._lock:
            self._counters["tinkex_training_steps"] += 1
            self._record("tinkex_training_step_duration_ms", event.duration * 1000)

    def _sample(self, event: SampleStop) -> None:
        with self._lock:
            counters = self._counters
            counters["tinkex_samples"] += event.sequences
            counters["tinkex_prompt_tokens"] += event.prompt_tokens
            counters["tinkex_cached_tokens"] += event.cached_tokens
            counters["tinkex_sampled_tokens"] += event.sampled_tokens
            self._record("tinkex_sample_duration_ms", event.duration * 1000)
            self._flow("tinkex_sampled_tokens_per_second", event.sampled_tokens, event.duration)

    def _flow(self, name: str, amount: float, seconds: float) -> None:
        rate = self._rates.get(name)
        if rate is None:
            rate = self._rates[name] = Rate(self._clock)
        rate.add(amount, seconds)


_RESULTS: Final = {"ok": "tinkex_requests_success", "error": "tinkex_requests_failure"}
