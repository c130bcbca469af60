"""One poll for all samples of a client, if the service supports it."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest

import tinkex
from tinkex.errors import NotFoundError, PermissionDeniedError, RequestFailedError

from ..scripted import Answer, Raw, Reply, Request, ScriptedServer, promise
from .helpers import (
    JOIN,
    POLL,
    POLL_MANY,
    SAMPLE,
    failed,
    flags,
    new_sampler,
    promise_by_seq,
    sample,
    sampled,
)


@pytest.fixture
def sampler(server, service):
    """A client of a service that supports it. Sample number n becomes request r-n and returns token n."""
    flags(server, sample_use_retrieve_futures=True)
    server.on(SAMPLE, promise_by_seq)
    for number in range(50):
        server.on_future(f"r-{number}", sampled(number))
    return new_sampler(service())


def finished(*request_ids: str, cursor: int = 1, **more: Any) -> Answer:
    completions = [{"state": "finished", "request_id": each, **more} for each in request_ids]
    return Answer({"completions": completions, "cursor": cursor})


def held(answer: Answer, until: threading.Event) -> Answer:
    return Answer(answer.body, answer.status, wait_for=until)


def token(future: tinkex.APIFuture[Any]) -> int:
    return int(future.result(10).sequences[0].tokens[0])


def fetched(server: ScriptedServer) -> list[str]:
    return [request.json["request_id"] for request in server.asked(POLL)]


def test_a_result_is_fetched_when_the_service_says_it_is_finished(server, sampler):
    server.on(POLL_MANY, Answer({"completions": [], "cursor": 0}), finished("r-0"))
    assert token(sample(sampler)) == 0
    assert fetched(server) == ["r-0"]
    first, second = server.asked(POLL_MANY)
    assert first.json == second.json
    assert first.json == {
        "target": {
            "type": "sampling_session",
            "sampling_session_id": "s-1:sample:0",
            "cloned_sampler_id": 0,
        },
        "prev_cursor": 0,
        "timeout": 30.0,
        "retrieved_request_ids": [],
    }


def test_many_samples_wait_with_one_poll(server, sampler):
    until = threading.Event()
    everything = finished(*(f"r-{number}" for number in range(20)))
    server.on(POLL_MANY, held(everything, until))
    drawing = [sample(sampler) for _ in range(20)]
    server.wait_for(SAMPLE, 20)
    until.set()
    assert sorted(map(token, drawing)) == list(range(20))
    assert sorted(fetched(server)) == sorted(f"r-{number}" for number in range(20))
    assert len(server.asked(POLL_MANY)) == 1


def test_next_poll_sends_last_cursor(server, sampler):
    server.on(
        POLL_MANY,
        finished("r-9", cursor=5),
        Answer({"completions": [], "cursor": 8}),
        finished("r-0", cursor=9),
        finished("r-1", cursor=12),
    )
    assert token(sample(sampler)) == 0
    assert token(sample(sampler)) == 1
    assert [request.json["prev_cursor"] for request in server.asked(POLL_MANY)] == [0, 5, 8, 9]


def test_no_poll_without_waiter(server, sampler):
    server.on(POLL_MANY, *(finished(f"r-{number}") for number in range(3)))
    assert [token(sample(sampler)) for _ in range(3)] == [0, 1, 2]
    assert len(server.asked(POLL_MANY)) == 3


def test_result_is_released_only_after_it_was_fetched(server, sampler):
    fetch, go_on = threading.Event(), threading.Event()
    server.on_future("r-0", held(sampled(0), fetch))
    server.on(
        POLL_MANY,
        finished("r-0"),
        held(Answer({"completions": [], "cursor": 2}), go_on),
        finished("r-1"),
    )
    first, second = sample(sampler), sample(sampler)
    server.wait_for(POLL_MANY, 2)
    server.wait_for(POLL)
    fetch.set()
    assert token(first) == 0
    go_on.set()
    assert token(second) == 1
    reported = [request.json["retrieved_request_ids"] for request in server.asked(POLL_MANY)]
    assert reported == [[], [], ["r-0"]]


def test_fetched_results_are_reported_again_if_the_report_was_lost(server, sampler):
    server.on(POLL_MANY, finished("r-0"), Answer({}, 500), finished("r-1"), finished("r-2"))
    assert [token(sample(sampler)) for _ in range(3)] == [0, 1, 2]
    reported = [request.json["retrieved_request_ids"] for request in server.asked(POLL_MANY)]
    assert reported == [[], ["r-0"], ["r-0"], ["r-1"]]


def test_failed_work_is_fetched_like_any_other(server, sampler):
    completions = [{"state": "failed", "request_id": "r-0"}]
    server.on(POLL_MANY, Answer({"completions": completions, "cursor": 1}))
    server.on_future("r-0", failed("bad prompt"))
    with pytest.raises(RequestFailedError, match="bad prompt"):
        sample(sampler).result(10)


@pytest.mark.parametrize(("size", "allow"), [(None, True), (1000, False)])
def test_known_size_is_not_requested_again(server, sampler, size, allow):
    more = {} if size is None else {"response_payload_uncompressed_size": size}
    server.on(POLL_MANY, finished("r-0", **more))
    assert token(sample(sampler)) == 0
    assert server.asked(POLL)[0].json["allow_metadata_only"] is allow


def test_completion_that_arrives_before_promise_is_kept(server, sampler):
    late = threading.Event()
    server.on(SAMPLE, promise("r-0"), held(promise("r-1"), late))
    both = threading.Event()
    server.on(POLL_MANY, held(finished("r-1", "r-0"), both))
    first = sample(sampler)
    server.wait_for(SAMPLE, 1)
    second = sample(sampler)
    server.wait_for(SAMPLE, 2)
    both.set()
    assert token(first) == 0
    late.set()
    assert token(second) == 1
    assert len(server.asked(POLL_MANY)) == 1


def test_sample_after_cancelled_one_joins_running_poll(server, sampler):
    server.on(
        "GET /api/v1/samplers/s-1%3Asample%3A0", Answer({"sampler_id": "x", "base_model": "m"})
    )
    until = threading.Event()
    server.on(POLL_MANY, held(finished("r-0", "r-1"), until))
    first = sample(sampler)
    server.wait_for(POLL_MANY)
    first.cancel()
    second = sample(sampler)
    server.wait_for(SAMPLE, 2)
    sampler.get_base_model()  # now the promise of the second sample has been read
    until.set()
    assert token(second) == 1
    assert len(server.asked(POLL_MANY)) == 1


def test_final_error_fails_current_waiters_only(server, sampler):
    until = threading.Event()
    server.on(POLL_MANY, held(Answer({"detail": "not yours"}, 403), until), finished("r-2"))
    waiting = [sample(sampler) for _ in range(2)]
    server.wait_for(SAMPLE, 2)
    server.wait_for(POLL_MANY)
    until.set()
    for each in waiting:
        with pytest.raises(PermissionDeniedError, match="not yours"):
            each.result(10)
    assert token(sample(sampler)) == 2


def test_repeated_400_is_final(server, sampler):
    server.on(POLL_MANY, Answer({"detail": "no such cursor"}, 400))
    with pytest.raises(tinkex.BadRequestError, match="no such cursor"):
        sample(sampler).result(10)
    assert len(server.asked(POLL_MANY)) == 4


def test_missing_endpoint_fails_waiters(server, sampler):
    server.on(POLL_MANY, Answer({"detail": "no such path"}, 404))
    with pytest.raises(NotFoundError):
        sample(sampler).result(10)


@pytest.mark.parametrize(
    ("replies", "waits"),
    [
        ([Answer({}, 408)] * 3, [1.0, 2.0, 4.0]),
        ([Answer({}, 500), Answer({}, 503)], [1.0, 2.0]),
        ([Answer({"completions": [], "cursor": 0})] * 3, [0.1, 0.2, 0.4]),
        ([Answer({}, 429)] * 3, [1.0, 2.0, 4.0]),
        ([Answer(b"", 400)] * 3, [1.0, 2.0]),
        ([Raw(b"not HTTP\r\n\r\n")] * 3, [1.0, 2.0, 4.0]),
        (
            [Answer({}, 429), Answer({"completions": [], "cursor": 0}), Answer({}, 429)],
            [1.0, 0.1, 1.0],
        ),
    ],
)
def test_temporary_error_is_polled_again(server, sampler, clock, replies, waits):
    server.on(POLL_MANY, *replies, finished("r-0"))
    assert token(sample(sampler)) == 0
    assert clock.slept == pytest.approx(waits)


def test_undecodable_answer_fails_waiters(server, sampler):
    server.on(POLL_MANY, Answer({"completions": "all of them"}))
    with pytest.raises(tinkex.APIResponseValidationError):
        sample(sampler).result(10)


def test_copy_of_client_receives_only_its_own_completions(server, service):
    flags(server, sample_use_retrieve_futures=True, sample_join_sampling_session=True)
    server.on(SAMPLE, promise_by_seq)
    server.on(JOIN, Answer({"client_counter": 3}))

    def complete(request: Request) -> Reply:
        clone = request.json["target"]["cloned_sampler_id"]
        return finished(f"r-{clone * 1_000_000_000}")

    server.on(POLL_MANY, complete)
    server.on_future("r-3000000000", sampled(3))
    copy = pickle.loads(pickle.dumps(new_sampler(service())))
    assert token(sample(copy)) == 3
    assert server.asked(POLL_MANY)[0].json["target"]["cloned_sampler_id"] == 3
    copy.holder.close().result(10)
