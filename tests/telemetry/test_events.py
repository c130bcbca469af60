"""The events: names, measurements, immutability."""

from __future__ import annotations

import dataclasses

import pytest

from tinkex.telemetry import events
from tinkex.telemetry.events import (
    Event,
    HttpRequestStop,
    RecoveryDetected,
    RetryAttemptStop,
    concrete,
)

# Event: measurements; other fields.
PROMISED = {
    "http.request.start": ("system_time", "method path pool_type base_url"),
    "http.request.stop": ("duration", "method path pool_type base_url result retry_count"),
    "http.request.exception": (
        "duration",
        "method path pool_type base_url kind reason stacktrace",
    ),
    "queue.state_change": ("", "request_id queue_state queue_state_reason"),
    "future.timeout": ("elapsed_time", "request_id request_type iteration"),
    **dict.fromkeys(
        [
            "future.api_error",
            "future.connection_error",
            "future.request_failed",
            "future.validation_error",
        ],
        ("elapsed_time", "request_id request_type iteration status category error_type"),
    ),
    "retry.attempt.start": ("system_time", "attempt"),
    "retry.attempt.stop": ("duration", "attempt result"),
    "retry.attempt.retry": ("duration delay", "attempt error"),
    "retry.attempt.failed": ("duration", "attempt result error"),
    "custom_loss.start": ("system_time", "regularizer_count track_grad_norms"),
    "custom_loss.stop": ("duration loss_total regularizer_total", "regularizer_count"),
    "custom_loss.exception": ("duration", "reason"),
    "regularizer.compute.start": ("system_time", "regularizer_name weight is_async"),
    "regularizer.compute.stop": (
        "duration value contribution grad_norm",
        "regularizer_name weight is_async",
    ),
    "regularizer.compute.exception": ("duration", "regularizer_name weight reason"),
    "recovery.detected": ("", "run_id checkpoint"),
    "recovery.poll_error": ("", "run_id error"),
    "recovery.started": ("attempt", "run_id strategy"),
    "recovery.checkpoint_selected": ("attempt", "run_id strategy checkpoint"),
    "recovery.client_created": ("attempt", "run_id strategy checkpoint client"),
    "recovery.completed": ("attempt", "run_id strategy checkpoint client"),
    "recovery.failed": ("attempt", "run_id strategy error"),
    "recovery.exhausted": ("attempt", "run_id strategy error"),
}
BY_NAME = {kind.name: kind for kind in concrete()}


@pytest.mark.parametrize("name", PROMISED)
def test_events_have_the_documented_fields(name):
    kind = BY_NAME[f"tinkex.{name}"]
    measured, told = PROMISED[name]
    assert set(kind.measured) == set(measured.split())
    own = {field.name for field in dataclasses.fields(kind)} - set(kind.measured)
    assert own >= {*told.split(), "metadata"}


@pytest.mark.parametrize("kind", concrete(), ids=lambda kind: kind.name)
def test_every_event_is_a_frozen_dataclass_with_indexed_fields(kind):
    names = [field.name for field in dataclasses.fields(kind) if not field.kw_only]
    event = kind(**{name: name for name in names}, metadata={"session_id": "s-1"})
    positional = kind(*names, metadata={"session_id": "s-1"})
    assert event == positional
    assert [getattr(event, name) for name in names] == names
    assert event.measurements.keys() == set(kind.measured)
    assert event.facts.keys() == {*names, "session_id"} - set(kind.measured)
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.metadata = {}
    with pytest.raises(TypeError):
        kind(*names, unknown=1)


def test_names_are_unique_and_exported():
    assert len(BY_NAME) == len(concrete())
    assert {kind.__name__ for kind in concrete()} <= set(events.__all__)


def test_fields_may_have_defaults():
    assert RetryAttemptStop("sample", 0, 0.5).result == "ok"
    assert RecoveryDetected("run").checkpoint is None
    assert dict(RecoveryDetected("run").metadata) == {}


def test_user_metadata_has_priority_in_facts_but_not_in_attributes():
    event = HttpRequestStop(
        1, "GET", "/x", "session", "u", 0.5, 200, "ok", 0, metadata={"path": "mine", "run": 7}
    )
    assert (event.facts["path"], event.facts["run"], event.path) == ("mine", 7, "/x")
    assert event.measurements == {"duration": 0.5}


def test_base_class_is_not_an_event():
    assert Event not in concrete()
