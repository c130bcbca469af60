"""The service's metrics for Prometheus.

Counts that the service keeps anyway are read on each scrape; only durations are recorded as they happen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tinkex.engine.interface import EngineStatus

from .futures import Promise
from .memory_use import engine_memory, memory_of

if TYPE_CHECKING:
    from .service import Service

__all__ = ["ServiceMetrics"]

_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_SHORT_SECONDS: Final = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1)
_COUNTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class ServiceMetrics:
    """The metrics of one service."""

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(service))
        self._calls = Counter(
            "tinkex_http_requests",
            "HTTP requests answered.",
            ["operation", "status"],
            registry=self._registry,
        )
        self._work = Histogram(
            "tinkex_work_seconds",
            "From the start of a request's work to its result.",
            ["operation"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._waiting = Histogram(
            "tinkex_waiting_seconds",
            "From acceptance of a request to the start of its work.",
            ["operation"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._batch = Histogram(
            "tinkex_samples_under_way",
            "Sampling requests in flight when one of them finished.",
            buckets=_COUNTS,
            registry=self._registry,
        )
        store = Histogram(
            "tinkex_store_seconds",
            "Duration of a database call, including the wait for its thread.",
            buckets=_SHORT_SECONDS,
            registry=self._registry,
        )
        service.database.on_call = store.observe
        self._service = service
        service.promises.on_finish.append(self._finished)

    def call(self, operation: str, status: int) -> None:
        self._calls.labels(operation, str(status)).inc()

    def _finished(self, promise: Promise) -> None:
        assert promise.result is not None
        started = promise.started_at or promise.accepted_at
        name = promise.operation.name
        self._work.labels(name).observe(max(0.0, promise.result.at - started))
        self._waiting.labels(name).observe(max(0.0, started - promise.accepted_at))
        if promise.num_samples is not None:
            self._batch.observe(self._service.samplers.under_way)

    def text(self) -> bytes:
        return generate_latest(self._registry)


class _Now(Collector):
    """Values that are read from the service on each scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        service = self._service
        engines = service.engine.status()
        yield _gauge(
            "tinkex_requests_waiting", "Training requests in the queue.", service.models.waiting
        )
        yield _gauge("tinkex_models", "Loaded training models.", service.models.count)
        yield _gauge("tinkex_samples", "Sampling requests in flight.", service.samplers.under_way)
        yield _gauge(
            "tinkex_results",
            "Requests whose result can be fetched now or later.",
            len(service.promises),
        )
        yield _gauge("tinkex_journal_bytes", "Size of the journal.", service.journal.size)
        yield _gauge(
            "tinkex_engine_lives",
            "Number of times that engines were started.",
            sum(engine.starts for engine in engines),
        )
        tokens = CounterMetricFamily("tinkex_tokens", "Tokens processed.", labels=["kind"])
        for kind, count in service.usage.totals.items():
            if kind != "checkpoint":
                tokens.add_metric([kind], count)
        yield tokens
        busy = CounterMetricFamily(
            "tinkex_engine_busy_seconds", "Time the engine has spent on training."
        )
        busy.add_metric([], sum(engine.busy_seconds for engine in engines))
        yield busy
        yield from _each_engine(engines)
        memory = GaugeMetricFamily("tinkex_resident_bytes", "Memory in use.", labels=["process"])
        for name, size in memory_of(engines):
            memory.add_metric([name], size)
        yield memory


def _each_engine(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    """One sample per engine and metric; the labels of `tinkex_engine_up` describe the engine."""
    up = GaugeMetricFamily(
        "tinkex_engine_up",
        "Whether an engine can work: it has started and is not stuck.",
        labels=["engine", "kind", "node", "device", "base_models"],
    )
    restarts = CounterMetricFamily(
        "tinkex_engine_restarts", "Number of restarts of an engine.", labels=["engine"]
    )
    load = GaugeMetricFamily(
        "tinkex_engine_load",
        "Work of an engine: its models, training requests in its queue, samples in flight.",
        labels=["engine", "of"],
    )
    memory = GaugeMetricFamily(
        "tinkex_engine_memory_bytes", "Memory that an engine uses.", labels=["engine"]
    )
    for each in engines:
        size = engine_memory(each)
        if size:
            memory.add_metric([each.name], size)
        named = ",".join(each.base_models)
        up.add_metric([each.name, each.kind, each.node, each.device, named], float(each.works))
        restarts.add_metric([each.name], max(0, each.starts - 1))
        for kind, count in (
            ("models", each.models),
            ("in_line", each.in_line),
            ("samples", each.samples),
        ):
            load.add_metric([each.name, kind], count)
    yield from (up, restarts, load, memory)
    foreign = [each for each in engines if each.kind == "vllm"]
    if foreign:
        yield from _drift(foreign)


def _drift(engines: Sequence[EngineStatus]) -> Iterator[Metric]:
    """How far the logprobs of a sampler are from the trainer's; the mean is the sum divided by the tokens."""
    tokens = CounterMetricFamily(
        "tinkex_sampler_drift_tokens",
        "Tokens whose logprobs were compared with the trainer's.",
        labels=["engine"],
    )
    total = CounterMetricFamily(
        "tinkex_sampler_drift_sum",
        "Sum of the absolute differences of these logprobs.",
        labels=["engine"],
    )
    worst = GaugeMetricFamily(
        "tinkex_sampler_drift_max", "Largest of these differences.", labels=["engine"]
    )
    for each in engines:
        tokens.add_metric([each.name], each.drift_tokens)
        total.add_metric([each.name], each.drift_sum)
        worst.add_metric([each.name], each.drift_max)
    yield from (tokens, total, worst)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)
