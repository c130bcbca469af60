import re
from datetime import UTC, date, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tinkex import types
from tinkex._wire.operations import (
    OPERATIONS,
    Body,
    Operation,
    Pool,
    ServicePart,
    Theme,
    operation,
    query_of,
)
from tinkex.errors import InvalidInputError

ROWS = list(OPERATIONS.values())
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)

# Protocol §2, without 6b. `F` answers with a promise, `D` with the result itself.
CATALOGUE = """
D GET /api/v1/healthz
D GET /api/v1/get_server_capabilities
D POST /api/v1/client/config
D POST /api/v1/client/dynamic_config
D POST /api/v1/auth/token
D GET /api/v1/auth/apikey/me
D DELETE /api/v1/auth/apikey/me
D POST /api/v1/create_session
D POST /api/v1/session_heartbeat
D POST /api/v1/sessions/{session_id}/finish
D GET /api/v1/sessions
D GET /api/v1/sessions/{session_id}
D PUT /api/v1/sessions/{session_id}/project
D GET /api/v1/sessions/{session_id}/trace_export
D POST /api/v1/sessions/search
F POST /api/v1/create_model
D POST /api/v1/get_info
F POST /api/v1/unload_model
F POST /api/v1/forward
F POST /api/v1/forward_backward
F POST /api/v1/optim_step
F POST /api/v1/load_weights
F POST /api/v1/save_weights
F POST /api/v1/save_weights_for_sampler
F POST /api/v1/save_weights_external
D POST /api/v1/copy_weights
D POST /api/v1/weights_info
D POST /api/v1/create_sampling_session
D POST /api/v1/join_sampling_session
D GET /api/v1/samplers/{sampler_id}
F POST /api/v1/asample
D POST /api/v1/retrieve_future
D POST /api/v1/retrieve_futures
D POST /api/v1/cancel_future
F POST /api/v1/create_custom_loss
D POST /api/v1/telemetry
D GET /api/v1/training_runs
D GET /api/v1/training_runs/{training_run_id}
D GET /api/v1/training_runs/{training_run_id}/checkpoints
D GET /api/v1/checkpoints
D DELETE /api/v1/training_runs/{training_run_id}/checkpoints/{checkpoint_id}
D POST /api/v1/training_runs/{training_run_id}/checkpoints/{checkpoint_id}/publish
D DELETE /api/v1/training_runs/{training_run_id}/checkpoints/{checkpoint_id}/publish
D PUT /api/v1/training_runs/{training_run_id}/checkpoints/{checkpoint_id}/ttl
D GET /api/v1/training_runs/{training_run_id}/checkpoints/{checkpoint_id}/archive
D GET /api/v1/training_runs/{training_run_id}/checkpoints/{checkpoint_id}/external_weights_urls
D GET /api/v1/audit
D GET /api/v1/billing/usage/events
D GET /api/v1/billing/usage/checkpoints/current
"""
# Not in the official protocol: streamed tokens, and what a training loop reports, for services that offer them.
OURS = {
    "D POST /api/v1/stream_sample",
    "D POST /api/v1/training_runs/{training_run_id}/log",
}


def line(row: Operation[Any]) -> str:
    return f"{'F' if row.queued else 'D'} {row.method} {row.path}"


# -- the table -----------------------------------------------------------------------------------


def test_table_has_exactly_the_calls_of_the_protocol():
    assert {line(row) for row in ROWS} - OURS == set(CATALOGUE.strip().splitlines())


def test_every_call_has_one_row():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert len({(row.method, row.path) for row in ROWS}) == len(ROWS)
    assert all(OPERATIONS[name].name == name for name in OPERATIONS)


def test_a_row_is_found_by_name():
    assert operation("asample") is OPERATIONS["asample"]
    with pytest.raises(KeyError):
        operation("sample")


@each_row
def test_every_row_has_a_theme_and_a_summary(row):
    assert row.theme is not None
    assert row.summary
    assert not row.summary.endswith(".")


def test_rows_of_a_theme_stand_together_in_the_order_of_the_themes():
    assert list(dict.fromkeys(row.theme for row in ROWS)) == list(Theme)


@each_row
def test_only_requests_that_a_model_runs_have_an_effect_on_it(row):
    effects = (row.makes_model, row.changes_model, row.uses_gradients, row.ends_model, row.in_parts)
    assert not any((*effects, row.frees_journal)) or row.runner is ServicePart.MODELS


def test_crash_recovery_replays_the_operations_that_change_a_model():
    assert {row.name for row in ROWS if row.changes_model} == {
        "create_model",
        "load_weights",
        "forward_backward",
        "optim_step",
    }
    assert {row.name for row in ROWS if row.makes_model} == {"create_model", "load_weights"}


def test_polls_of_samples_have_their_own_connections():
    apart = [row.name for row in ROWS if row.poll_pool is not Pool.FUTURES]
    assert apart == ["asample"]
    assert operation("asample").poll_pool is operation("retrieve_futures").pool


@each_row
def test_a_refused_field_is_a_field_of_the_request(row):
    assert row.refused_field is None or row.refused_field in row.request.model_fields


@each_row
def test_only_queued_calls_are_labelled(row):
    assert (row.request_type is not None) == row.queued


def test_labels_are_unique():
    labels = [row.request_type for row in ROWS if row.queued]
    assert len(set(labels)) == len(labels)


@each_row
def test_paths_are_absolute_and_have_each_placeholder_once(row):
    assert row.path.startswith("/api/v1/")
    assert not row.path.endswith("/")
    assert len(set(row.placeholders)) == len(row.placeholders) == row.path.count("{")


@each_row
def test_body_encoding_fits_the_http_method(row):
    if row.method in {"GET", "DELETE"}:
        assert row.body in {Body.NONE, Body.QUERY}
    else:
        assert row.body is not Body.QUERY
    if row.body is Body.NONE:
        assert row.request is types.EmptyRequest
    if row.body is Body.QUERY:
        assert issubclass(row.request, BaseModel)
        assert row.request is not types.EmptyRequest


@each_row
def test_requests_and_results_are_types_of_the_protocol(row):
    assert getattr(types, row.request.__name__) is row.request
    assert row.result is object or getattr(types, row.result.__name__) is row.result


@each_row
def test_flags_exist_in_the_client_config(row):
    flags = {
        **types.ClientConfigResponse.model_fields,
        **types.ClientDynamicConfigResponse.model_fields,
    }
    assert row.flag is None or row.flag in flags


def test_binary_bodies_match_the_protocol():
    assert [row.name for row in ROWS if row.body is Body.JSON_OR_PROTO] == ["forward_backward"]
    assert {row.name for row in ROWS if row.binary_result} == {
        "forward",
        "forward_backward",
        "asample",
    }


def test_polls_and_heartbeats_are_never_resent_by_the_transport():
    single = {"session_heartbeat", "retrieve_future", "retrieve_futures", "asample", "telemetry"}
    for name in single:
        assert not operation(name).retries


def test_timeouts_match_the_protocol():
    assert operation("session_heartbeat").timeout == 10
    assert operation("retrieve_future").timeout == 45
    assert operation("telemetry").timeout == 5
    assert operation("create_session").timeout is None


def test_polling_never_waits_behind_sampling_or_training():
    assert operation("asample").pool is Pool.SAMPLING
    assert operation("forward_backward").pool is Pool.TRAINING
    assert operation("retrieve_future").pool is Pool.FUTURES
    assert operation("retrieve_futures").pool is Pool.SAMPLE_FUTURES
    assert operation("session_heartbeat").pool is Pool.SESSION
    assert operation("list_training_runs").pool is Pool.REST
    assert operation("telemetry").pool is Pool.TELEMETRY


# -- paths ---------------------------------------------------------------------------------------

CHECKPOINT = operation("delete_checkpoint")
SESSION = operation("get_session")
SAMPLER = operation("get_sampler")


def test_path_without_placeholders_needs_no_values():
    assert operation("healthz").url_path() == "/api/v1/healthz"
    assert operation("healthz").url_path({"session_id": "s"}) == "/api/v1/healthz"


def test_ids_keep_their_colons_and_a_checkpoint_its_slash():
    path = CHECKPOINT.url_path({"training_run_id": "s:train:0", "checkpoint_id": "weights/a.b"})
    assert path == "/api/v1/training_runs/s:train:0/checkpoints/weights/a.b"


def test_sampler_ids_are_escaped_completely():
    assert SAMPLER.url_path({"sampler_id": "s:sample:0"}) == "/api/v1/samplers/s%3Asample%3A0"


@pytest.mark.parametrize(
    ("value", "segment"),
    [
        ("a b", "a%20b"),
        ("a?b#c", "a%3Fb%23c"),
        ("a%2Fb", "a%252Fb"),
        ("é", "%C3%A9"),
        ("a/b", "a%2Fb"),
    ],
)
def test_ids_are_escaped(value, segment):
    assert SESSION.url_path({"session_id": value}) == f"/api/v1/sessions/{segment}"


@pytest.mark.parametrize(
    "value", ["", " ", None, 5, ".", "..", "a/..", "../a", "a//b", "/a", "a/", "a/./b"], ids=repr
)
@pytest.mark.parametrize(
    ("row", "name"),
    [(SESSION, "session_id"), (SAMPLER, "sampler_id"), (CHECKPOINT, "checkpoint_id")],
    ids=["session", "sampler", "checkpoint"],
)
def test_id_that_could_reach_another_path_is_refused(row, name, value):
    values = {"training_run_id": "r"} | {name: value}
    with pytest.raises(InvalidInputError, match=f"^{name}: ") as refusal:
        row.url_path(values)
    assert refusal.value.field == name


def test_a_missing_id_is_refused_by_name():
    with pytest.raises(InvalidInputError, match=r"^checkpoint_id: "):
        CHECKPOINT.url_path({"training_run_id": "r"})
    with pytest.raises(InvalidInputError, match=r"^session_id: "):
        SESSION.url_path()


@given(st.text(min_size=1, max_size=20))
def test_an_id_never_adds_a_segment_query_or_fragment(value):
    try:
        path = SESSION.url_path({"session_id": value})
    except InvalidInputError:
        return
    assert re.fullmatch(r"/api/v1/sessions/[\w.~:%-]+", path, re.ASCII)


# -- queries -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "query"),
    [
        (types.ListSessionsRequest(), {"limit": "20", "offset": "0"}),
        (
            types.ListTrainingRunsRequest(limit=5, access_scope="accessible", project_id="p"),
            {"limit": "5", "offset": "0", "access_scope": "accessible", "project_id": "p"},
        ),
        (types.GetSessionRequest(), {}),
        (types.ListCheckpointsRequest(), {"limit": "100", "offset": "0"}),
        (
            types.GetAuditLogRequest(day=date(2026, 5, 27)),
            {"event_type": "all", "day": "2026-05-27"},
        ),
        (
            types.GetBillingUsageRequest(
                starting_on=datetime(2026, 5, 1, tzinfo=UTC),
                ending_before=datetime(2026, 5, 2, tzinfo=UTC),
            ),
            {"starting_on": "2026-05-01T00:00:00Z", "ending_before": "2026-05-02T00:00:00Z"},
        ),
        (types.GetCurrentCheckpointStorageUsageRequest(), {}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_query_has_the_set_fields_as_text(request_, query):
    assert query_of(request_) == query


@each_row
def test_every_query_round_trips(row):
    if row.body is Body.QUERY and not any(
        f.is_required() for f in row.request.model_fields.values()
    ):
        request = row.request()
        assert row.request.model_validate(query_of(request)) == request
