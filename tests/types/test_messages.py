import copy
import pickle

import pytest
from hypothesis import given, settings
from pydantic import BaseModel

from tests.strategies import json_values, models
from tests.types import refuses_field
from tinkex import errors, types
from tinkex.types import (
    ApiKeyInfoResponse,
    AuthTokenResponse,
    ClientConfigResponse,
    ClientDynamicConfigResponse,
    FutureFailed,
    FutureFinished,
    FutureRetrieveRequest,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    MetadataOnlyResponse,
    QueueState,
    RequestErrorCategory,
    RequestFailedResponse,
    SamplingSessionFuturesTarget,
    SupportedModel,
    TryAgainResponse,
    UntypedAPIFuture,
)
from tinkex.types._base import RequestModel, ResponseModel

# -- rules for all messages ----------------------------------------------------------------

MODELS: list[type[BaseModel]] = [
    kind
    for kind in (getattr(types, name) for name in dir(types))
    if isinstance(kind, type) and issubclass(kind, BaseModel)
]
COMPLETE = [kind for kind in MODELS if kind is not types.OptimParamsBase]  # a base has no values
CLOSED = [kind for kind in MODELS if issubclass(kind, RequestModel)]
OPEN = [kind for kind in MODELS if issubclass(kind, ResponseModel)]


def test_every_message_is_a_request_or_a_response():
    assert len(CLOSED) + len(OPEN) == len(MODELS)


@pytest.mark.parametrize("kind", COMPLETE)
def test_messages_can_be_dumped_pickled_and_copied(kind):
    @settings(max_examples=8)
    @given(models(kind))
    def check(value):
        for again in (
            kind.model_validate(value.model_dump()),
            kind.model_validate_json(value.model_dump_json()),
            pickle.loads(pickle.dumps(value)),
            copy.deepcopy(value),
            value.model_copy(),
        ):
            assert again == value

    check()


@pytest.mark.parametrize("kind", MODELS)
def test_messages_cannot_be_changed(kind):
    assert kind.model_config["frozen"] is True


@pytest.mark.parametrize("kind", [kind for kind in CLOSED if kind is not types.OptimizerConfig])
def test_misspelt_fields_of_a_request_are_refused(kind):
    with refuses_field("no_such_field", "Extra inputs"):
        kind.model_validate({"no_such_field": 1})


@pytest.mark.parametrize("kind", OPEN)
def test_fields_of_a_newer_release_are_ignored_in_answers(kind):
    @settings(max_examples=2)
    @given(models(kind))
    def check(value):
        assert kind.model_validate(value.model_dump() | {"no_such_field": 1}) == value

    check()


# -- futures -------------------------------------------------------------------------------------


def test_queue_states():
    assert {state.name: state.value for state in QueueState} == {
        "ACTIVE": "active",
        "PAUSED_RATE_LIMIT": "paused_rate_limit",
        "PAUSED_CAPACITY": "paused_capacity",
        "UNKNOWN": "unknown",
    }


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("active", QueueState.ACTIVE),
        (" Active\n", QueueState.ACTIVE),
        ("PAUSED_CAPACITY", QueueState.PAUSED_CAPACITY),
        ("Paused_Rate_Limit", QueueState.PAUSED_RATE_LIMIT),
        (QueueState.ACTIVE, QueueState.ACTIVE),
        ("paused", QueueState.UNKNOWN),
        ("", QueueState.UNKNOWN),
        (None, QueueState.UNKNOWN),
        (1, QueueState.UNKNOWN),
    ],
)
def test_queue_state_is_read_in_any_case(text, state):
    assert QueueState.parse(text) is state


@given(json_values)
def test_unknown_queue_state_is_never_active(value):
    assert QueueState.parse(value) is QueueState.UNKNOWN


TRY_AGAIN = {"type": "try_again", "request_id": "r", "queue_state": "active"}


@pytest.mark.parametrize("tag", ["try_again", "TRY_AGAIN", "Try_Again"])
def test_try_again_is_read_in_any_case(tag):
    answer = TryAgainResponse.model_validate(TRY_AGAIN | {"type": tag})
    assert (answer.type, answer.queue_state) == ("try_again", QueueState.ACTIVE)
    assert (answer.queue_state_reason, answer.retry_after_ms) == (None, None)


def test_try_again_has_reason_and_delay():
    answer = TryAgainResponse.model_validate(
        TRY_AGAIN | {"queue_state": "full", "queue_state_reason": "busy", "retry_after_ms": 250}
    )
    assert answer.queue_state is QueueState.UNKNOWN
    assert (answer.queue_state_reason, answer.retry_after_ms) == ("busy", 250)


@pytest.mark.parametrize("missing", ["type", "request_id", "queue_state"])
def test_try_again_needs_its_three_fields(missing):
    fields = {name: value for name, value in TRY_AGAIN.items() if name != missing}
    with refuses_field(missing, "required"):
        TryAgainResponse.model_validate(fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("type", "done"),
        ("type", 5),
        ("request_id", 5),
        ("queue_state_reason", 5),
        ("retry_after_ms", -1),
        ("retry_after_ms", 1.5),
        ("retry_after_ms", "soon"),
    ],
)
def test_try_again_refuses_fields_of_another_type(field, value):
    with refuses_field(field):
        TryAgainResponse.model_validate(TRY_AGAIN | {field: value})


def test_promise_needs_only_a_request_id():
    promise = UntypedAPIFuture.model_validate({"request_id": "r", "sample_sequence_ids": ["a"]})
    assert (promise.request_id, promise.model_id, promise.sample_sequence_ids) == ("r", None, ["a"])
    with refuses_field("request_id", "required"):
        UntypedAPIFuture.model_validate({})


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("user", RequestErrorCategory.User),
        ("SERVER", RequestErrorCategory.Server),
        ("weather", RequestErrorCategory.Unknown),
        (None, RequestErrorCategory.Unknown),
    ],
)
def test_failed_requests_have_a_category(text, category):
    answer = RequestFailedResponse.model_validate({"error": "no", "category": text})
    assert answer.category is category


def test_missing_category_is_unknown():
    assert RequestFailedResponse(error="no").category is RequestErrorCategory.Unknown
    assert types.RequestErrorCategory is errors.RequestErrorCategory


def test_polls_do_not_allow_metadata_only_by_default():
    assert FutureRetrieveRequest(request_id="r").allow_metadata_only is False


def test_metadata_only_response_has_a_size():
    assert MetadataOnlyResponse(response_payload_size=5).status == "complete_metadata"
    with refuses_field("response_payload_size"):
        MetadataOnlyResponse(response_payload_size=-1)


def test_completions_are_distinguished_by_state():
    answer = FuturesRetrieveResponse.model_validate(
        {
            "completions": [
                {"state": "finished", "request_id": "a"},
                {"state": "failed", "request_id": "b"},
            ],
            "cursor": 7,
        }
    )
    assert answer.completions == [FutureFinished(request_id="a"), FutureFailed(request_id="b")]
    with refuses_field("completions.0"):
        FuturesRetrieveResponse.model_validate({"completions": [{"state": "lost"}], "cursor": 0})


def test_cursor_of_a_session_wide_wait_starts_at_zero():
    request = FuturesRetrieveRequest(target=SamplingSessionFuturesTarget(sampling_session_id="s"))
    assert request.model_dump(exclude_none=True) == {
        "target": {"type": "sampling_session", "sampling_session_id": "s", "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "retrieved_request_ids": [],
    }
    with refuses_field("timeout"):
        FuturesRetrieveRequest(target=request.target, timeout=-1)


# -- the service ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ([], []),
        (["a", "b"], ["a", "b"]),
        ([{"model_name": "a", "max_context_length": 9}, "b", None, {}], ["a", "b"]),
        ([SupportedModel(model_name="a")], ["a"]),
    ],
)
def test_supported_models_may_be_objects_or_names(listed, names):
    answer = GetServerCapabilitiesResponse.model_validate({"supported_models": listed})
    assert answer.model_names() == names


def test_supported_model_has_its_facts():
    listed = [{"model_id": "m", "model_name": "n", "arch": "llama"}]
    answer = GetServerCapabilitiesResponse.model_validate({"supported_models": listed})
    assert answer.supported_models == [SupportedModel(model_id="m", model_name="n", arch="llama")]


@pytest.mark.parametrize("body", [{}, {"supported_models": None}, {"supported_models": "a"}])
def test_capabilities_without_a_list_of_models_are_refused(body):
    with refuses_field("supported_models"):
        GetServerCapabilitiesResponse.model_validate(body)


def test_empty_client_config_means_the_defaults():
    config = ClientConfigResponse.model_validate({})
    assert config.parallel_fwdbwd_chunks is True
    assert (config.fwdbwd_max_chunk_len, config.fwdbwd_max_chunk_bytes_count) == (1024, 5_000_000)
    assert config.sample_dispatch_bytes_semaphore_size == 10 * 1024 * 1024
    assert config.inflight_response_bytes_semaphore_size == 50 * 1024 * 1024
    assert config.billing_exception_max_pause_duration_sec == 3600
    assert not config.pjwt_auth_enabled
    assert ClientDynamicConfigResponse.model_validate({}).model_dump() == {
        "refresh_interval_sec": 300,
        "sample_cancel_enabled": False,
        "sample_cancel_max_batch_size": 64,
    }


def test_health_status_is_ok():
    assert HealthResponse.model_validate({}).status == "ok"
    with refuses_field("status"):
        HealthResponse.model_validate({"status": "ill"})


def test_repr_hides_the_auth_token():
    assert "eyJ" not in repr(AuthTokenResponse(jwt="eyJhbGciOi"))


def test_key_details_name_owner_and_organisation():
    info = ApiKeyInfoResponse.model_validate(
        {
            "key_id": 1,
            "name": "laptop",
            "note": "",
            "details": {"org_details": {"name": "lab"}, "user_details": {"email": "a@b"}},
        }
    )
    assert (info.details.org_details.name, info.details.user_details.email) == ("lab", "a@b")
