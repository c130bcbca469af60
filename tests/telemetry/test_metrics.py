"""Counters, gauges, histograms, and automatic counting of events."""

from __future__ import annotations

import threading

import pytest

from tinkex.errors import InvalidInputError
from tinkex.telemetry import Metrics, bus
from tinkex.telemetry.events import (
    FutureCompleted,
    FutureTimeout,
    HttpRequestException,
    HttpRequestStop,
    QueueStateChange,
    RetryAttemptRetry,
    SampleStop,
    Throttled,
    TrainingPass,
    TrainingStep,
)
from tinkex.telemetry.metrics import HistogramSnapshot

from ..client.helpers import SAMPLE, answer_training, datum, new_sampler, new_trainer, sample
from ..client.helpers import sampled as drawn
from ..scripted import Answer

HTTP = ("GET", "/x", "session", "http://x")


def request(milliseconds: float, status: int = 200) -> HttpRequestStop:
    result = "ok" if status == 200 else "error"
    return HttpRequestStop(1, *HTTP, milliseconds / 1000, status, result, 0)


# -- by hand -------------------------------------------------------------------------------------


def test_counters_and_gauges():
    metrics = Metrics()
    metrics.increment("b")
    metrics.increment("a", 3)
    metrics.increment("b", 2)
    metrics.set_gauge("depth", 4)
    metrics.set_gauge("depth", 2)
    found = metrics.snapshot()
    assert list(found.counters.items()) == [("a", 3), ("b", 3)]
    assert found.gauges == {"depth": 2}
    metrics.reset()
    assert metrics.snapshot().counters == {}
    metrics.flush()


def test_percentiles_of_a_few_values():
    metrics = Metrics()
    for value in (10, 20, 40):
        metrics.record_histogram("latency", value)
    found = metrics.snapshot().histograms["latency"]
    assert (found.count, found.min, found.max) == (3, 10, 40)
    assert found.mean == pytest.approx(23.333, abs=0.001)
    assert (found.p50, found.p95, found.p99) == (20, 40, 40)
    assert found.buckets[10] == found.buckets[20] == found.buckets[50] == 1


def test_percentiles_of_many_values():
    metrics = Metrics()
    for value in range(1, 101):
        metrics.record_histogram("latency", value)
    found = metrics.snapshot().histograms["latency"]
    assert (found.p50, found.p95, found.p99) == (50.5, 95, 99)


def test_percentiles_use_the_latest_values_and_totals_use_all():
    metrics = Metrics(histogram_max_samples=2)
    for value in (1000, 1, 3):
        metrics.record_histogram("latency", value)
    found = metrics.snapshot().histograms["latency"]
    assert (found.count, found.max, found.p50, found.p99) == (3, 1000, 2, 3)


def test_buckets_count_each_value_once_and_the_last_is_unbounded():
    metrics = Metrics(latency_buckets=(1, 10))
    for value in (0.5, 1, 1.5, 10, 11):
        metrics.record_histogram("latency", value)
    assert metrics.snapshot().histograms["latency"].buckets == {1: 2, 10: 2, float("inf"): 1}


def test_an_empty_histogram_has_no_numbers():
    assert HistogramSnapshot() == HistogramSnapshot(0, None, None, None, None, None, None, {})


@pytest.mark.parametrize("buckets", [(), (2, 1), (1, 1)])
def test_buckets_must_increase(buckets):
    with pytest.raises(InvalidInputError, match="latency_buckets"):
        Metrics(latency_buckets=buckets)


def test_counts_of_many_threads_are_complete():
    metrics = Metrics()

    def count() -> None:
        for _ in range(1000):
            metrics.increment("a")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.snapshot().counters == {"a": 4000}


# -- from events --------------------------------------------------------------------------------


@pytest.mark.usefixtures("paused_loop")
def test_requests_are_counted():
    with Metrics() as metrics:
        for event in (request(10), request(20), request(40, 500)):
            bus.emit(event)
        bus.emit(HttpRequestException(1, *HTTP, 0.09, "APITimeoutError", "no", ""))
    bus.emit(request(1))  # no longer attached
    found = metrics.snapshot()
    assert found.counters == {
        "tinkex_requests_total": 4,
        "tinkex_requests_success": 2,
        "tinkex_requests_failure": 2,
    }
    assert found.histograms["tinkex_request_duration_ms"].p50 == pytest.approx(30)


@pytest.mark.usefixtures("paused_loop")
def test_everything_else_is_counted():
    now = [0.0]
    with Metrics(clock=lambda: now[0]) as metrics:
        now[0] = 2.0
        for event in (
            FutureCompleted("r", "Sample", 0.5, 2),
            FutureTimeout("r", "Sample", 9.0, 2, None, "unknown", "APITimeoutError"),
            QueueStateChange("r", "paused_rate_limit", "full"),
            QueueStateChange("r", "active", None),
            RetryAttemptRetry("sample", 0, 0.1, 0.5, RuntimeError()),
            Throttled(5.0, "slow down"),
            TrainingPass(1, "forward_backward", 2.0, 4, 1000, 1.5),
            TrainingStep(2, "optim_step", 0.25, {}),
            SampleStop(3, "sample", 2.0, 100, 60, 50, 2),
        ):
            bus.emit(event)
    found = metrics.snapshot()
    assert {name: count for name, count in found.counters.items() if count} == {
        "tinkex_futures_completed": 1,
        "tinkex_futures_failed": 1,
        "tinkex_queue_active": 1,
        "tinkex_queue_paused_rate_limit": 1,
        "tinkex_retries_total": 1,
        "tinkex_throttled_seconds": 5.0,
        "tinkex_throttled_total": 1,
        "tinkex_training_passes": 1,
        "tinkex_training_steps": 1,
        "tinkex_training_tokens": 1000,
        "tinkex_samples": 2,
        "tinkex_prompt_tokens": 100,
        "tinkex_cached_tokens": 60,
        "tinkex_sampled_tokens": 50,
    }
    assert found.gauges == {
        "tinkex_sampled_tokens_per_second": 25,
        "tinkex_training_tokens_per_second": 500,
    }
    assert {name: each.mean for name, each in found.histograms.items()} == {
        "tinkex_future_duration_ms": 500,
        "tinkex_sample_duration_ms": 2000,
        "tinkex_training_pass_duration_ms": 2000,
        "tinkex_training_step_duration_ms": 250,
    }


def test_tokens_per_second_are_since_the_previous_snapshot():
    now = [100.0]
    with Metrics(clock=lambda: now[0]) as metrics:
        bus.emit(SampleStop(1, "sample", 2.0, 10, 0, 50, 1))
        now[0] += 5
        assert metrics.snapshot().gauges == {"tinkex_sampled_tokens_per_second": 10}
        assert metrics.snapshot().gauges == {"tinkex_sampled_tokens_per_second": 10}
        bus.emit(SampleStop(1, "sample", 2.0, 10, 0, 8, 1))
        now[0] += 2
    now[0] += 1000  # after `detach` the rate no longer changes
    assert metrics.snapshot().gauges == {"tinkex_sampled_tokens_per_second": 4}


@pytest.mark.usefixtures("paused_loop")
def test_many_events_are_counted_before_a_snapshot():
    with Metrics() as metrics:
        for _ in range(2500):
            bus.emit(request(10))
        assert metrics._counters["tinkex_requests_total"] == 2000
    assert metrics.snapshot().counters["tinkex_requests_total"] == 2500


@pytest.mark.usefixtures("paused_loop")
def test_request_counters_exist_before_the_first_request():
    zeros = {
        "tinkex_requests_failure": 0,
        "tinkex_requests_success": 0,
        "tinkex_requests_total": 0,
    }
    with Metrics() as metrics:
        assert metrics.snapshot().counters == zeros
        bus.emit(request(1))
        metrics.reset()
        assert metrics.snapshot().counters == zeros


def test_disabled_metrics_ignore_events_but_count_by_hand():
    with Metrics(enabled=False) as metrics:
        assert not bus.wants(HttpRequestStop)
        bus.emit(request(1))
        metrics.increment("a")
    assert metrics.snapshot().counters == {"a": 1}


@pytest.mark.usefixtures("paused_loop")
def test_attaching_twice_counts_once():
    metrics = Metrics().attach().attach()
    bus.emit(request(1))
    metrics.detach()
    metrics.detach()
    assert metrics.snapshot().counters["tinkex_requests_total"] == 1


def test_calls_of_a_client_are_counted(server, service):
    answer_training(server)
    server.on(SAMPLE, Answer({}, 500), drawn(7, 8, prompt_cache_hit_tokens=1))
    client = service()
    trainer, sampler = new_trainer(client), new_sampler(client)
    with Metrics() as metrics:
        trainer.forward_backward([datum(1, 2, 3)], "cross_entropy").result()
        trainer.optim_step().result()
        sample(sampler).result()
    counters = metrics.snapshot().counters
    assert counters["tinkex_requests_total"] == 4
    assert counters["tinkex_requests_failure"] == counters["tinkex_retries_total"] == 1
    assert counters["tinkex_training_tokens"] == 3
    assert counters["tinkex_training_steps"] == 1
    assert counters["tinkex_sampled_tokens"] == 2
    assert counters["tinkex_cached_tokens"] == 1
