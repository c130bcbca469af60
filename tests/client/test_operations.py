"""Operations by name: typed result, promise, raw answer."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex import types
from tinkex._wire.operations import OPERATIONS
from tinkex.errors import InvalidInputError

from ..scripted import Answer, promise
from .helpers import CREATE_MODEL, POLL, STEP

INFO = "POST /api/v1/get_info"
INFO_ANSWER = Answer({"model_id": "m", "model_data": {"model_name": "some/model"}})


@pytest.mark.parametrize("request_", [types.GetInfoRequest(model_id="m"), {"model_id": "m"}])
def test_immediate_operation_returns_typed_result(server, service, request_):
    server.on(INFO, INFO_ANSWER)
    info = service().api.call("get_info", request_).result(10)
    assert isinstance(info, types.GetInfoResponse)
    assert info.model_data.model_name == "some/model"
    assert server.asked(INFO)[0].json["model_id"] == "m"


def test_a_queued_operation_is_waited_for(server, service):
    server.on(STEP, promise("r-7"))
    paused = {"type": "try_again", "queue_state": "paused_capacity", "queue_state_reason": "busy"}
    server.on_future("r-7", Answer(paused), Answer({"metrics": {"grad_norm": 1.0}}))
    seen: list[Any] = []
    request = {"optim_params": types.AdamParams(), "model_id": "m", "seq_id": 1}
    stepped = service().api.call("optim_step", request, queue_state_observer=seen.append).result(10)
    assert isinstance(stepped, types.OptimStepResponse)
    assert stepped.metrics == {"grad_norm": 1.0}
    assert seen == [types.QueueState.PAUSED_CAPACITY]


def test_promise_can_be_submitted_and_polled_later(server, service):
    client = service()
    request = types.CreateModelRequest(session_id="s-1", model_seq_id=0, base_model="some/model")
    promised = client.api.submit("create_model", request).result(10)
    assert promised == types.UntypedAPIFuture(request_id="model")
    assert len(server.asked(CREATE_MODEL)) == 1
    assert server.asked(POLL) == []
    assert client.poll(promised.request_id).result(10) == {"model_id": "s-1:train:0"}


def test_submit_refuses_operation_that_is_not_queued(service):
    with pytest.raises(InvalidInputError, match="use call"):
        service().api.submit("get_info", {"model_id": "m"})


def test_a_raw_answer_comes_with_status_and_headers(server, service):
    server.on("GET /api/v1/training_runs/r-1", Answer({"x": 1}, headers={"X-Request-Id": "q"}))
    path = {"training_run_id": "r-1"}
    answer = service().api.raw("get_training_run", path=path).result(10)
    assert (answer.status, answer.header("x-request-id"), answer.data) == (200, "q", {"x": 1})


def test_a_raw_call_sends_query_and_body_as_the_operation_does(server, service):
    server.on("GET /api/v1/sessions", Answer({"sessions": []}))
    server.on(INFO, INFO_ANSWER)
    api = service().api
    api.raw("list_sessions", {"limit": 3}).result(10)
    api.raw("get_info", {"model_id": "m"}).result(10)
    assert server.asked("GET /api/v1/sessions")[0].query["limit"] == "3"
    assert server.asked(INFO)[0].json["model_id"] == "m"


@pytest.mark.parametrize(
    ("name", "request_", "field"),
    [
        ("no_such_call", None, "name"),
        ("get_info", None, "model_id"),
        ("get_info", {"model_id": "m", "typo": 1}, "typo"),
        ("get_info", "m", "request"),
    ],
)
def test_invalid_request_is_refused_before_sending(server, service, name, request_, field):
    with pytest.raises(InvalidInputError) as refused:
        service().api.call(name, request_)
    assert refused.value.field == field
    assert server.requests == []


def test_no_queued_operation_has_a_placeholder_in_its_path():
    assert [row.name for row in OPERATIONS.values() if row.queued and row.placeholders] == []
