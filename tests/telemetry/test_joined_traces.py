"""A training run against the real service: the spans of both belong together.

The run has a process of its own, because a process has one set-up of OpenTelemetry for all its life.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from ..client.helpers import ROOT

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("torch")

RUN = """
import json

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import tinkex
from tinkex.objectives import completion
from tinkex.testing import service

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
mine = trace.get_tracer("mine")

with service("torch") as running, tinkex.telemetry.OpenTelemetry():
    client = running.client(otel_propagate=True)
    training = client.create_lora_training_client(running.base_model, rank=4)
    for number in range(2):
        with mine.start_as_current_span(f"step {number}"):
            passed = training.forward_backward([completion([5, 6], [7, 8])], "cross_entropy")
            stepped = training.optim_step()
        passed.result()
        stepped.result()
    sampler = training.save_weights_and_get_sampling_client()
    with mine.start_as_current_span("evaluation"):
        drawn = sampler.sample(
            tinkex.ModelInput.from_ints([5, 6]),
            sampling_params=tinkex.SamplingParams(max_tokens=4, seed=1),
        )
    drawn.result()
    running.client().create_sampling_client(base_model=running.base_model)

for span in exporter.get_finished_spans():
    facts = {
        "name": span.name,
        "scope": span.instrumentation_scope.name,
        "kind": span.kind.name,
        "trace": span.context.trace_id,
        "id": span.context.span_id,
        "parent": span.parent and span.parent.span_id,
        "start": span.start_time,
        "end": span.end_time,
        "attributes": dict(span.attributes),
    }
    print(json.dumps(facts))
"""


@dataclass(frozen=True)
class Span:
    name: str
    scope: str
    kind: str
    trace: int
    id: int
    parent: int | None
    start: int
    end: int
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Run:
    spans: dict[int, Span]

    def of(self, scope: str) -> list[Span]:
        return [span for span in self.spans.values() if span.scope == scope]

    def line(self, span: Span) -> list[Span]:
        """A span and its ancestors, the root first."""
        above = [] if span.parent is None else self.line(self.spans[span.parent])
        return [*above, span]

    def lines(self, name: str) -> list[list[str]]:
        """The lines of all spans with one name, in the order of their start."""
        found = [span for span in self.spans.values() if span.name == name]
        found.sort(key=lambda span: span.start)
        return [[each.name for each in self.line(span)] for span in found]


@pytest.fixture(scope="module")
def run() -> Run:
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    spans = [Span(**json.loads(line)) for line in done.stdout.splitlines()]
    return Run({span.id: span for span in spans})


@pytest.mark.parametrize(
    ("operation", "path", "parents"),
    [
        ("forward_backward", "forward_backward", ["step 0", "step 1"]),
        ("optim_step", "optim_step", ["step 0", "step 1"]),
        ("sample", "asample", ["evaluation"]),
    ],
)
def test_service_spans_are_below_the_client_call(run, operation, path, parents):
    assert run.lines(f"{path} work") == [
        [parent, f"tinkex.{operation}", f"POST /api/v1/{path}", path, f"{path} work"]
        for parent in parents
    ]


def test_polls_reach_the_service_in_the_same_trace(run):
    polls = run.lines("retrieve_future")
    assert polls
    request = "POST /api/v1/retrieve_future"
    assert all(line[-3:] == ["tinkex.future", request, "retrieve_future"] for line in polls)
    assert ["step 0", "tinkex.optim_step"] in [line[:2] for line in polls]


def test_each_span_shares_the_trace_of_its_parents_and_steps_have_separate_traces(run):
    for span in run.spans.values():
        assert {each.trace for each in run.line(span)} == {span.trace}
    roots = [span for span in run.of("mine") if span.parent is None]
    assert len({span.trace for span in roots}) == len(roots) == 3


def test_service_span_lies_within_its_client_request(run):
    calls = [span for span in run.of("tinkex.server") if span.kind == "SERVER"]
    for call in calls:
        request = run.spans[call.parent]
        assert (request.scope, request.kind) == ("tinkex", "CLIENT")
        assert request.start <= call.start <= call.end <= request.end
        assert call.attributes["tinkex.operation"] == call.name


def test_operation_span_has_the_request_id_of_the_client(run):
    promised = {
        span.attributes["tinkex.request_id"]: span.trace
        for span in run.of("tinkex")
        if span.name == "tinkex.future"
    }
    works = [span for span in run.of("tinkex.server") if span.kind == "INTERNAL"]
    assert works
    for work in works:
        assert promised[work.attributes["tinkex.request_id"]] == work.trace
        assert work.attributes["tinkex.waiting_seconds"] >= 0


def test_client_without_trace_creates_no_span_in_the_service(run):
    """The last client of the run did not send its trace; its requests were executed all the same."""
    assert run.lines("POST /api/v1/create_sampling_session")
    assert run.lines("create_sampling_session") == []
