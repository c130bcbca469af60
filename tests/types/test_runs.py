from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.types import refuses, refuses_field
from tinkex.errors import InvalidPathError
from tinkex.types import (
    ActiveSessionStatusQuery,
    AuditLogEntry,
    BillingUsageEvent,
    Checkpoint,
    CheckpointArchiveUrlResponse,
    ClientFinishedSessionStatusQuery,
    ClientSessionFinished,
    ClientSessionFinishInterrupted,
    Cursor,
    FinishSessionRequest,
    ListSessionsRequest,
    OwnSearchOwner,
    ParsedCheckpointTinkerPath,
    SessionFailed,
    SessionFailedRequestReason,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSummary,
    SetCheckpointTtlRequest,
    StorageBillingEvent,
    TraceExportResponse,
    TrainingRun,
    UserSearchOwner,
)
from tinkex.types.paths import console_url, playground_url

# -- tinker:// paths -----------------------------------------------------------------------------

KINDS = [("weights", "training"), ("sampler_weights", "sampler"), ("external_weights", "external")]
segments = st.text(min_size=1, max_size=8).filter(
    lambda text: "/" not in text and text not in {".", ".."}
)


@pytest.mark.parametrize(("kind", "checkpoint_type"), KINDS)
@given(run=segments, name=segments)
def test_paths_are_parsed_and_composed(kind, checkpoint_type, run, name):
    path = f"tinker://{run}/{kind}/{name}"
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert parsed.model_dump() == {
        "tinker_path": path,
        "training_run_id": run,
        "checkpoint_type": checkpoint_type,
        "checkpoint_id": f"{kind}/{name}",
    }
    assert parsed.name == name
    assert ParsedCheckpointTinkerPath.of(run, checkpoint_type, name) == parsed


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "must start with tinker://"),
        ("run/weights/a", "must start with tinker://"),
        ("http://run/weights/a", "must start with tinker://"),
        ("Tinker://run/weights/a", "must start with tinker://"),
        (None, "must start with tinker://"),
        (b"tinker://run/weights/a", "must start with tinker://"),
        ("tinker://", "must be tinker://"),
        ("tinker://run", "must be tinker://"),
        ("tinker://run/weights", "must be tinker://"),
        ("tinker://run/weights/", "must be tinker://"),
        ("tinker:///weights/a", "must be tinker://"),
        ("tinker://run//a", "must be tinker://"),
        ("tinker://run/weights/a/b", "must be tinker://"),
        ("tinker://run/weights/a/", "must be tinker://"),
        ("tinker://run/optimizer/a", "kind must be one of weights.*not 'optimizer'"),
        ("tinker://run/Weights/a", "kind must be one of"),
        ("tinker://run/weights/..", "points outside"),
        ("tinker://../weights/a", "points outside"),
        ("tinker://run/weights/.", "points outside"),
    ],
    ids=str,
)
def test_malformed_paths_are_refused(path, words):
    with refuses("tinker_path", words) as refusal:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert isinstance(refusal.value, InvalidPathError)
    assert refusal.value.user_error


def test_long_path_is_truncated_in_the_message():
    with refuses("tinker_path") as refusal:
        ParsedCheckpointTinkerPath.from_tinker_path("x" * 10_000)
    assert len(str(refusal.value)) < 300


def test_paths_are_not_composed_from_invalid_parts():
    with refuses("tinker_path"):
        ParsedCheckpointTinkerPath.of("run", "training", "a/b")
    with refuses("tinker_path"):
        ParsedCheckpointTinkerPath.of("", "training", "a")
    with refuses("checkpoint_type", "not 'optimizer'"):
        ParsedCheckpointTinkerPath.of("run", "optimizer", "a")  # type: ignore[arg-type]


def test_urls_of_a_path_are_escaped():
    path = "tinker://a?b/sampler_weights/c#d"
    assert console_url(path).endswith("/checkpoints/a%3Fb/sampler_weights%2Fc%23d")
    assert playground_url(path).endswith(
        "checkpoint=tinker%3A%2F%2Fa%3Fb%2Fsampler_weights%2Fc%23d"
    )
    for page in (console_url, playground_url):
        with refuses("tinker_path"):
            page("nowhere")


# -- checkpoints and runs ------------------------------------------------------------------------

CHECKPOINT = {
    "checkpoint_id": "weights/a",
    "checkpoint_type": "training",
    "time": "2026-05-27T20:00:00Z",
    "tinker_path": "tinker://run/weights/a",
}
RUN = {
    "training_run_id": "run",
    "base_model": "b",
    "model_owner": "me",
    "is_lora": True,
    "last_request_time": "2026-05-27T20:00:00+00:00",
}
MOMENT = datetime(2026, 5, 27, 20, tzinfo=UTC)


def test_checkpoint_has_the_id_of_its_run():
    checkpoint = Checkpoint.model_validate(CHECKPOINT)
    assert checkpoint.training_run_id == "run"
    assert (checkpoint.public, checkpoint.size_bytes, checkpoint.expires_at) == (False, None, None)
    strange = Checkpoint.model_validate(CHECKPOINT | {"tinker_path": "elsewhere"})
    with refuses("tinker_path"):
        _ = strange.training_run_id


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("2026-05-27T20:00:00Z", MOMENT),
        ("2026-05-27T20:00:00+00:00", MOMENT),
        ("yesterday", "yesterday"),
        ("", ""),
    ],
)
def test_unreadable_timestamps_are_kept_as_text(text, read):
    assert Checkpoint.model_validate(CHECKPOINT | {"time": text}).time == read
    assert Checkpoint.model_validate(CHECKPOINT | {"expires_at": text}).expires_at == read
    assert TrainingRun.model_validate(RUN | {"last_request_time": text}).last_request_time == read
    assert CheckpointArchiveUrlResponse(url="u", expires=text).expires == read


def test_there_are_three_checkpoint_types():
    with refuses_field("checkpoint_type"):
        Checkpoint.model_validate(CHECKPOINT | {"checkpoint_type": "optimizer"})


def test_run_id_can_be_sent_as_id():
    fields = {name: value for name, value in RUN.items() if name != "training_run_id"}
    assert TrainingRun.model_validate(fields | {"id": "old"}).training_run_id == "old"
    assert TrainingRun.model_validate(RUN | {"id": "old"}).training_run_id == "run"
    with refuses_field("training_run_id", "required"):
        TrainingRun.model_validate(fields)


@pytest.mark.parametrize("written", [True, "true", "True", 1])
def test_run_is_not_corrupted_by_default(written):
    assert TrainingRun.model_validate(RUN).corrupted is False
    assert TrainingRun.model_validate(RUN | {"corrupted": written}).corrupted is True


def test_run_has_its_last_checkpoints():
    run = TrainingRun.model_validate(RUN | {"last_checkpoint": CHECKPOINT})
    assert run.last_checkpoint == Checkpoint.model_validate(CHECKPOINT)
    assert run.last_sampler_checkpoint is None


def test_cursors_read_numbers_written_as_text():
    assert Cursor.model_validate({"offset": "1", "limit": 2, "total_count": "3"}).total_count == 3
    assert Cursor.model_validate({"offset": 1, "limit": "x", "total_count": 3}).limit == 0
    with refuses_field("limit"):
        Cursor.model_validate({"offset": 1, "limit": [], "total_count": 3})


@pytest.mark.parametrize("field", ["limit", "offset"])
def test_negative_page_sizes_are_refused(field):
    with refuses_field(field):
        ListSessionsRequest(**{field: -1})
    assert ListSessionsRequest().model_dump() == {"limit": 20, "offset": 0, "access_scope": None}


def test_access_scope_is_owned_or_accessible():
    with refuses_field("access_scope", "owned.*accessible"):
        ListSessionsRequest(access_scope="all")


def test_ttl_none_must_be_given_explicitly():
    assert SetCheckpointTtlRequest(ttl_seconds=None).ttl_seconds is None
    with refuses_field("ttl_seconds", "required"):
        SetCheckpointTtlRequest()  # type: ignore[call-arg]


# -- sessions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["success", "errored", "interrupted"])
def test_session_finish_has_three_reasons(reason):
    request = FinishSessionRequest.model_validate({"reason": {"type": reason}})
    assert request.reason.type == reason
    assert request.detail is None


def test_unknown_session_finish_reason_is_refused():
    with pytest.raises(ValidationError, match=r"(?s)reason.*bored"):
        FinishSessionRequest.model_validate({"reason": {"type": "bored"}})


@pytest.mark.parametrize(
    ("written", "status"),
    [
        (
            {"type": "client_finished", "reason": {"type": "interrupted"}},
            ClientSessionFinished(reason=ClientSessionFinishInterrupted()),
        ),
        (
            {
                "type": "failed",
                "category": "internal",
                "message": "no",
                "reason": {"type": "request", "request_id": "r", "request_type": "Sample"},
            },
            SessionFailed(
                category="internal",
                message="no",
                reason=SessionFailedRequestReason(request_id="r", request_type="Sample"),
            ),
        ),
    ],
    ids=["finished", "failed"],
)
def test_session_status_is_distinguished_by_type(written, status):
    summary = SessionSummary.model_validate(
        {
            "session_id": "s",
            "created_at": "2026-05-27T20:00:00Z",
            "owner": "me",
            "project_id": "p",
            "checkpoints_count": 0,
            "status": written,
        }
    )
    assert summary.status == status
    assert summary.created_at == MOMENT


def test_search_defaults_to_the_newest_fifty_own_sessions():
    request = SessionSearchRequest()
    assert (request.owner, request.limit, request.statuses) == (OwnSearchOwner(), 50, None)


def test_search_distinguishes_owners_and_statuses_by_type():
    request = SessionSearchRequest.model_validate(
        {
            "owner": {"type": "user", "owner_urns": ["u"]},
            "statuses": [{"type": "active"}, {"type": "client_finished", "reasons": ["errored"]}],
        }
    )
    assert request.owner == UserSearchOwner(owner_urns=["u"])
    assert request.statuses == [
        ActiveSessionStatusQuery(),
        ClientFinishedSessionStatusQuery(reasons=["errored"]),
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"display_name": ""}, "display_name"),
        ({"statuses": []}, "statuses"),
        ({"owner": {"type": "user", "owner_urns": []}}, "owner.user.owner_urns"),
        ({"owner": {"type": "user", "owner_urns": ["u"] * 11}}, "owner.user.owner_urns"),
        ({"owner": {"type": "everyone"}}, "owner"),
        ({"statuses": [{"type": "asleep"}]}, "statuses.0"),
    ],
    ids=str,
)
def test_search_refuses_invalid_values(fields, field):
    with refuses_field(field):
        SessionSearchRequest.model_validate(fields)


def test_search_cursors_need_a_time_zone():
    with refuses_field("last_created_at", "timezone"):
        SessionSearchCursor(last_created_at="2026-05-27T20:00:00", last_session_id="s")


def test_trace_exports_are_pending_ready_or_failed():
    assert TraceExportResponse(status="ready", url="u").url == "u"
    with refuses_field("status"):
        TraceExportResponse(status="lost")


# -- audit and billing ---------------------------------------------------------------------------


def test_billing_events_are_distinguished_by_type():
    hour = {"bucket_start": "2026-05-27T20:00:00Z", "bucket_end": "2026-05-27T21:00:00Z"}
    storage = {"type": "storage", "gigabyte_hours": 2, "tier": "cold"}
    event = BillingUsageEvent.model_validate(hour | {"event_info": storage})
    assert event.event_info == StorageBillingEvent(gigabyte_hours=2.0)
    with refuses_field("event_info"):
        BillingUsageEvent.model_validate(hour | {"event_info": {"type": "gift"}})


def test_audit_entries_have_their_own_details():
    first = AuditLogEntry(timestamp=MOMENT, event="e")
    second = AuditLogEntry(timestamp=MOMENT, event="e")
    first.event_details["a"] = 1
    assert second.event_details == {}
