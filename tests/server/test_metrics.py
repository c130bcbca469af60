"""The Prometheus metrics of a service that has trained and sampled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tinkex.server.auth import Keys
from tinkex.testing import RunningService, service

from .api import Api

pytest.importorskip("torch")

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


@dataclass(frozen=True)
class Scrape:
    """One scrape of `/metrics`, parsed by the Prometheus client library."""

    families: dict[str, Metric]

    def value(self, name: str, **labels: str) -> float:
        """One value; 0 if it has not been recorded yet."""
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert len(found) <= 1, found
        return found[0] if found else 0.0


def scrape(running: RunningService) -> Scrape:
    answer = httpx.get(f"{running.url}/metrics", trust_env=False)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    return Scrape(families)


@pytest.fixture(scope="module")
def scrapes(tinkex_tiny):
    """Scrapes before and after three steps of three tokens, and two sampling requests."""
    before = scrape(tinkex_tiny)
    with Api(tinkex_tiny.url) as api:
        model = api.model()
        for _ in range(3):
            model.step()
        path = model.save("final", "save_weights_for_sampler")
        sampler = api.sampler(model.session_id, model_path=path)
        sampler.sample(prompt=(5, 6, 7), num_samples=4, max_tokens=5)
        sampler.sample(prompt=(5, 6, 7), num_samples=1, max_tokens=5)
        yield before, scrape(tinkex_tiny)


FAMILIES = {
    "tinkex_requests_waiting": "gauge",
    "tinkex_samples": "gauge",
    "tinkex_models": "gauge",
    "tinkex_samples_under_way": "histogram",
    "tinkex_tokens": "counter",
    "tinkex_work_seconds": "histogram",
    "tinkex_waiting_seconds": "histogram",
    "tinkex_engine_up": "gauge",
    "tinkex_engine_restarts": "counter",
    "tinkex_engine_load": "gauge",
    "tinkex_engine_memory_bytes": "gauge",
    "tinkex_engine_busy_seconds": "counter",
    "tinkex_engine_lives": "gauge",
    "tinkex_resident_bytes": "gauge",
    "tinkex_store_seconds": "histogram",
    "tinkex_journal_bytes": "gauge",
    "tinkex_results": "gauge",
    "tinkex_http_requests": "counter",
}


def test_every_metric_family_has_a_type_and_a_help_text(scrapes):
    _, after = scrapes
    families = {name: family.type for name, family in after.families.items()}
    # The creation times that the library adds.
    assert {
        name: kind for name, kind in families.items() if not name.endswith("_created")
    } == FAMILIES
    assert all(family.documentation for family in after.families.values())


@pytest.mark.parametrize("page", ["deploying.md", "many-engines.md"])
def test_metrics_that_a_guide_names_exist(scrapes, page):
    named = set(re.findall(r"\btinkex_[a-z_]+", (GUIDES / page).read_text()))
    kept = {sample.name for family in scrapes[1].families.values() for sample in family.samples}
    assert named
    assert {name for name in named - kept if not name.startswith("tinkex_sampler_")} == set()


def test_queue_gauges_are_zero_when_all_requests_are_done(scrapes):
    _, after = scrapes
    assert after.value("tinkex_requests_waiting") == 0
    assert after.value("tinkex_samples") == 0
    assert after.value("tinkex_models") >= 1


def grown(scrapes, name, **labels):
    before, after = scrapes
    return after.value(name, **labels) - before.value(name, **labels)


def test_tokens_are_counted_by_kind(scrapes):
    assert grown(scrapes, "tinkex_tokens_total", kind="training") == 3 * 3
    assert grown(scrapes, "tinkex_tokens_total", kind="sampling_prefill") == 2 * 3
    assert 5 <= grown(scrapes, "tinkex_tokens_total", kind="sampling_sample") <= 5 * 5


def test_only_tokens_count_as_tokens(scrapes):
    kinds = {sample.labels["kind"] for sample in scrapes[1].families["tinkex_tokens"].samples}
    assert kinds == {"training", "sampling_prefill", "sampling_sample"}


def test_steps_are_timed_from_acceptance_to_start_and_from_start_to_result(scrapes):
    for operation, count in [("forward_backward", 3), ("optim_step", 3), ("asample", 2)]:
        for name in ("tinkex_work_seconds", "tinkex_waiting_seconds"):
            assert grown(scrapes, f"{name}_count", operation=operation) == count
            everything = grown(scrapes, f"{name}_bucket", operation=operation, le="+Inf")
            assert everything == count
        assert grown(scrapes, "tinkex_work_seconds_sum", operation=operation) > 0
        assert grown(scrapes, "tinkex_waiting_seconds_sum", operation=operation) >= 0
    assert grown(scrapes, "tinkex_engine_busy_seconds_total") > 0
    assert scrapes[1].value("tinkex_engine_lives") >= 1


def test_a_batch_has_at_least_the_request_that_finished(scrapes):
    assert grown(scrapes, "tinkex_samples_under_way_count") == 2
    assert grown(scrapes, "tinkex_samples_under_way_sum") >= 2


def test_memory_of_both_processes_is_reported(scrapes):
    for process in ("service", "engine"):
        assert scrapes[1].value("tinkex_resident_bytes", process=process) > 10e6


def test_database_calls_are_timed(scrapes):
    calls = grown(scrapes, "tinkex_store_seconds_count")
    assert calls > 0
    assert grown(scrapes, "tinkex_store_seconds_bucket", le="+Inf") == calls
    assert grown(scrapes, "tinkex_store_seconds_sum") > 0
    assert grown(scrapes, "tinkex_journal_bytes") > 0
    assert grown(scrapes, "tinkex_results") > 0


def test_http_requests_are_counted_by_operation_and_status(scrapes):
    asked = {"operation": "optim_step", "status": "200"}
    assert grown(scrapes, "tinkex_http_requests_total", **asked) == 3


def test_the_queue_gauge_counts_waiting_requests(tinkex_tiny):
    """A request waits for its missing predecessor; the gauge counts it until that arrives."""
    with Api(tinkex_tiny.url) as api:
        model = api.model()
        later = model.optim_step(seq_id=2)
        assert scrape(tinkex_tiny).value("tinkex_requests_waiting") == 1
        first = model.forward_backward(seq_id=1)
        api.retrieve(first)
        api.retrieve(later)
        assert scrape(tinkex_tiny).value("tinkex_requests_waiting") == 0


def test_metrics_need_a_key_if_the_service_has_keys(tmp_path):
    (tmp_path / "keys").write_text("tml-mine\n")
    with service("fake", keys=Keys.from_file(tmp_path / "keys")) as running:
        assert httpx.get(f"{running.url}/metrics", trust_env=False).status_code == 401
        mine = {"X-API-Key": "tml-mine"}
        assert httpx.get(f"{running.url}/metrics", headers=mine, trust_env=False).is_success
