"""Waiting for a promised result: how the client reacts to each answer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

import tinkex
from tinkex import types
from tinkex._client.queue_state import observer_of
from tinkex._wire import proto_codec
from tinkex._wire.media_types import PROTOBUF
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    BadRequestError,
    BillingError,
    GoneError,
    InternalServerError,
    RequestErrorCategory,
    RequestFailedError,
)
from tinkex.types import QueueState

from ..scripted import Answer, FakeClock, Raw, Reply, Request, ScriptedServer, promise
from .helpers import (
    PASS,
    POLL,
    SAMPLE,
    STEP,
    datum,
    failed,
    flags,
    new_sampler,
    new_trainer,
    output,
    sample,
)

DONE = Answer({"metrics": {"x": 1.0}})
NO_ANSWER = Raw(b"this is not HTTP\r\n\r\n")


def not_yet(state: str = "active", reason: str | None = None, **more: Any) -> dict[str, Any]:
    body = {"type": "try_again", "request_id": "r-1", "queue_state": state, **more}
    return body if reason is None else {**body, "queue_state_reason": reason}


class Polls:
    """Runs one queued operation without a session, so that no heartbeat shares its clock."""

    def __init__(self, server: ScriptedServer, make: Callable[..., Any]) -> None:
        self.server, self._make = server, make
        self.clock = FakeClock(long=math.inf)
        server.on(STEP, promise("r-1"))

    def start(
        self,
        *replies: Reply | Callable[[Request], Reply],
        observers: Sequence[Any] = (),
        timeout: float | None = None,
        **options: Any,
    ) -> tinkex.APIFuture[types.OptimStepResponse]:
        self.server.on_future("r-1", *replies)
        session = self._make(clock=self.clock, **options).holder
        request = types.OptimStepRequest(optim_params=types.AdamParams(), model_id="m", seq_id=1)
        deadline = session.deadline(timeout)
        called = tuple(map(observer_of, observers))  # as the public methods do
        work = session.run("optim_step", request, observers=called, deadline=deadline)
        future: tinkex.APIFuture[types.OptimStepResponse] = session.submit(work)
        return future

    def finish(self, *replies: Reply | Callable[[Request], Reply], **options: Any) -> None:
        """Run the operation with these answers; it must succeed."""
        assert self.start(*replies, **options).result(10).metrics == {"x": 1.0}

    def fail(self, *replies: Reply | Callable[[Request], Reply], **options: Any) -> BaseException:
        error = self.start(*replies, **options).exception(10)
        assert error is not None
        return error

    @property
    def asked(self) -> list[Request]:
        return self.server.asked(POLL)

    def after(self, seconds: float, answer: Answer) -> Callable[[Request], Reply]:
        """An answer that takes `seconds`."""

        def reply(_: Request) -> Reply:
            self.clock.now += seconds
            return answer

        return reply


@pytest.fixture
def polls(server, service):
    return Polls(server, service)


# -- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"metrics": {"x": 1.0}},
        {"metrics": {"x": 1.0}, "type": "optim_step"},
        {"metrics": {"x": 1.0}, "type": "something new", "more": [1]},
        {"metrics": {"x": 1.0}, "error": None, "status": "whatever"},
        {"status": "completed", "result": {"metrics": {"x": 1.0}}},
        {"status": "completed", "metrics": {"x": 1.0}},
    ],
)
def test_other_json_object_is_the_result(polls, body):
    polls.finish(Answer(body))
    assert polls.clock.slept == []


@pytest.mark.parametrize("body", [b"[1, 2]", b'"done"', b"7", b"null", b"{", b"<html>", b"\xff"])
def test_answer_that_is_not_json_object_is_error_with_request_id(polls, body):
    error = polls.fail(Answer(body))
    assert isinstance(error, APIResponseValidationError)
    assert error.request_id == "r-1"
    assert "optim_step" in str(error)
    assert len(polls.asked) == 1


def test_result_of_wrong_type_is_error(polls):
    error = polls.fail(Answer({"metrics": [1]}))
    assert isinstance(error, APIResponseValidationError)
    assert "metrics" in str(error)


def test_empty_answer_is_empty_result(polls):
    assert polls.start(Answer(b"")).result(10).metrics is None


def test_immediate_result_is_not_polled(polls):
    polls.server.on(STEP, DONE)
    polls.finish(Answer({}, 500))
    assert polls.asked == []


@pytest.mark.parametrize("category", list(RequestErrorCategory))
def test_failed_work_raises_error_with_its_category(polls, category):
    error = polls.fail(failed("out of memory", category.value.upper()))
    assert isinstance(error, RequestFailedError)
    assert (error.message, error.request_id, error.category) == ("out of memory", "r-1", category)
    assert len(polls.asked) == 1


@pytest.mark.parametrize(
    ("body", "message", "category"),
    [
        (
            {"status": "failed", "error": {"message": "m", "category": "server"}},
            "m",
            RequestErrorCategory.Server,
        ),
        ({"status": "failed", "error": "m"}, "m", RequestErrorCategory.Unknown),
        (
            {"status": "failed"},
            "The service gave no reason.",
            RequestErrorCategory.Unknown,
        ),
    ],
)
def test_failed_work_in_older_format_raises_error(polls, body, message, category):
    error = polls.fail(Answer(body))
    assert isinstance(error, RequestFailedError)
    assert (error.message, error.category) == (message, category)


# -- not yet -------------------------------------------------------------------------------------


def test_pending_answers_wait_from_one_second_up_to_five(polls):
    polls.finish(*[Answer({"status": "pending"})] * 5, DONE)
    assert polls.clock.slept == [1.0, 2.0, 4.0, 5.0, 5.0]


@pytest.mark.parametrize(
    ("body", "wait"),
    [
        (not_yet("active"), [0.1]),
        (not_yet("paused_capacity"), [1.0]),
        (not_yet("PAUSED_RATE_LIMIT"), [1.0]),
        (not_yet("active", retry_after_ms=250), [0.25]),
        (not_yet("paused_capacity", retry_after_ms=2500), [2.5]),
        ({"type": "TRY_AGAIN"}, [0.1]),
        (not_yet("active", retry_after_ms=0), [0.1]),
        (not_yet("active", retry_after_ms=10**9), [60.0]),
    ],
)
def test_try_again_waits_as_asked_or_a_second_while_paused(polls, body, wait):
    polls.finish(Answer(body), DONE)
    assert polls.clock.slept == wait


def test_408_and_5xx_that_come_at_once_wait_1_2_4_up_to_30_seconds(polls):
    polls.finish(*(Answer({}, status) for status in (408, 408, 500, 503, 408, 599, 502)), DONE)
    assert polls.clock.slept == [1, 2, 4, 8, 16, 30, 30]
    assert len(polls.asked) == 8


@pytest.mark.parametrize("status", [200, 408])
def test_try_again_that_the_service_held_is_polled_again_at_once(polls, status):
    held = polls.after(1.0, Answer(not_yet("active"), status))
    polls.finish(*[held] * 20, DONE)
    assert polls.clock.slept == []


@pytest.mark.parametrize("status", [200, 408])
def test_immediate_try_again_waits_a_tenth_of_a_second_doubling_to_five(polls, status):
    polls.finish(*[Answer(not_yet("active"), status)] * 8, DONE)
    assert polls.clock.slept == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_held_answer_resets_wait_after_immediate_answers(polls):
    at_once = Answer(not_yet("active"))
    polls.finish(at_once, at_once, polls.after(30, at_once), at_once, DONE)
    assert polls.clock.slept == pytest.approx([0.1, 0.2, 0.1])


def test_bare_408_after_hold_means_not_yet_without_limit(polls):
    polls.finish(*[polls.after(300, Answer({"detail": "timeout"}, 408))] * 100, DONE)
    assert polls.clock.slept == []


def test_duration_of_failed_poll_is_part_of_wait(polls):
    gateway_timeout = polls.after(3, Answer({}, 504))
    polls.finish(*[gateway_timeout] * 4, DONE)
    assert polls.clock.slept == [
        1,
        5,
    ]  # the first two waits are shorter than the 3 s poll; then 4 - 3 and 8 - 3


def test_poll_waits_as_long_as_retry_after_asks(polls):
    polls.finish(Answer({}, 503, {"retry-after": "7"}), Answer({}, 429, {"retry-after": "3"}), DONE)
    assert polls.clock.slept == [7, 3]


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.99])
def test_waits_between_polls_have_full_jitter(polls, chance):
    polls.clock = FakeClock(long=math.inf, chance=chance)
    polls.finish(Answer({}, 502), Answer({}, 502), Answer(not_yet()), DONE)
    assert polls.clock.slept == pytest.approx([(1 - chance) * wait for wait in (1, 2, 0.1)])


@pytest.mark.parametrize(
    ("answer", "most"),
    [
        (Answer(b"Bad Gateway", 502), 250),
        (Answer({}, 500), 250),
        (Answer({}, 408), 250),
        (NO_ANSWER, 250),
        (Answer({}, 429), 250),
        (Answer(not_yet("active")), 1500),
        (Answer(not_yet("active"), 408), 1500),
        (Answer(not_yet("paused_capacity")), 1500),
        (Answer({"status": "pending"}), 1500),
    ],
)
def test_service_that_answers_immediately_is_not_flooded(polls, answer, most):
    error = polls.fail(answer, timeout=3600)
    assert isinstance(error, APITimeoutError)
    assert 10 < len(polls.asked) <= most  # in one hour


@pytest.mark.parametrize("other", [Answer({}, 409), Answer({}, 502), Answer({}, 429)])
def test_alternating_answers_do_not_reset_waits(polls, other):
    error = polls.fail(*[other, Answer(not_yet())] * 2000, timeout=600)
    assert isinstance(error, APITimeoutError)
    assert len(polls.asked) < 300  # in ten minutes


def test_retry_after_below_minimum_is_raised_to_100_ms(polls):
    polls.finish(Answer({}, 503, {"retry-after-ms": "1"}), DONE)
    assert polls.clock.slept == [0.1]


@pytest.mark.parametrize("status", [408, 500, 502, 503])
def test_poll_gives_up_after_two_hours_without_useful_answer(polls, status):
    error = polls.fail(Answer({"detail": "no"}, status))
    assert isinstance(error, APIStatusError)
    assert error.status_code == status
    assert sum(polls.clock.slept) == pytest.approx(7200, abs=30)


def test_useful_answer_resets_two_hour_limit(polls):
    refused = [polls.after(700, Answer({}, 502))] * 10
    polls.finish(*refused, Answer(not_yet()), *refused, DONE)


def test_log_names_last_answer_attempts_and_next_poll(polls, caplog):
    polls.finish(*[Answer({"detail": "no upstream"}, 502)] * 3, DONE)
    (line,) = [each.getMessage() for each in caplog.records if "no upstream" in each.getMessage()]
    assert "optim_step (r-1): no upstream" in line
    assert "Tried 2 times in 1 s, next try in 2.0 s" in line
    assert "giving up after 2 h without a useful answer" in line


def test_transport_does_not_retry_polls(polls):
    polls.finish(Answer({}, 500), DONE, max_retries=5)
    assert len(polls.asked) == 2
    assert [request.headers["x-stainless-retry-count"] for request in polls.asked] == ["0", "0"]


def test_poll_backoff_sets_wait_after_408_and_5xx(polls):
    polls.finish(
        Answer({}, 408), Answer({}, 500), Answer({}, 408), DONE, poll_backoff=("exponential", 1, 3)
    )
    assert polls.clock.slept == [1.0, 2.0, 3.0]


def test_poll_backoff_may_be_a_function_of_the_iteration(polls):
    seen: list[int] = []

    def backoff(iteration: int) -> float:
        seen.append(iteration)
        return -1 if iteration == 0 else iteration / 10

    polls.finish(Answer({}, 408), Answer({}, 500), Answer({}, 408), DONE, poll_backoff=backoff)
    assert seen == [0, 1, 2]
    assert polls.clock.slept == [0.1, 0.2]


def test_poll_backoff_does_not_affect_other_answers(polls):
    polls.finish(
        Answer(not_yet("paused_capacity")),
        Answer({}, 429),
        Answer({}, 400),
        DONE,
        poll_backoff=True,
    )
    assert polls.clock.slept == [1.0, 1.0]


# -- errors --------------------------------------------------------------------------------------


def test_410_is_raised_as_lost_result(polls):
    error = polls.fail(Answer({"detail": "expired"}, 410))
    assert isinstance(error, GoneError)
    assert error.retryable
    assert error.request_id == "r-1"


def test_blank_410_error_says_what_to_do(polls):
    assert "submit the request again" in str(polls.fail(Answer(b"", 410)))


@pytest.mark.parametrize("status", [409, 410])
def test_repeated_409_and_410_are_final(polls, status):
    said = Answer({"detail": "no"}, status)
    polls.finish(*[said] * 5, Answer({}, 408), *[said] * 5, DONE)
    assert polls.clock.slept == [1, 2, 4, 8, 1, 1, 2, 4, 8]  # the first repetition has no wait
    assert polls.fail(said).status_code == status


def test_repetitions_are_counted_per_status(polls):
    conflict, bad = Answer({"detail": "no"}, 409), Answer(b"", 400)
    polls.finish(*[conflict] * 5, *[bad] * 3, DONE)
    assert polls.fail(*[conflict, bad] * 9).status_code == 400  # ends after a limited number


@pytest.mark.parametrize("status", [401, 403, 404, 413, 418, 422])
def test_other_4xx_end_the_poll_at_once(polls, status):
    error = polls.fail(Answer({"detail": "no such future"}, status), DONE)
    assert isinstance(error, APIStatusError)
    assert (error.status_code, error.message) == (status, "no such future")
    assert error.request_id == "r-1"
    assert polls.clock.slept == []


def test_429_waits_1_2_4_up_to_30_seconds(polls):
    polls.finish(*[Answer({}, 429)] * 7, DONE)
    assert polls.clock.slept == [1, 2, 4, 8, 16, 30, 30]


def test_429_waits_restart_after_another_answer(polls):
    polls.finish(Answer({}, 429), Answer({}, 429), Answer(not_yet()), Answer({}, 429), DONE)
    assert polls.clock.slept == [1, 2, 0.1, 1]


def test_429_is_polled_without_limit(polls):
    polls.finish(*[Answer({}, 429)] * 1100, DONE)
    assert polls.clock.slept[-1] == 30


def test_402_is_polled_every_5_seconds_for_as_long_as_the_service_allows(polls):
    flags(polls.server, billing_exception_max_pause_duration_sec=20)
    error = polls.fail(Answer({"detail": "out of credit"}, 402))
    assert isinstance(error, BillingError)
    assert polls.clock.slept == [5.0] * 4


def test_402_window_restarts_after_payment(polls):
    flags(polls.server, billing_exception_max_pause_duration_sec=10)
    unpaid = Answer({"detail": "out of credit"}, 402)
    polls.finish(unpaid, unpaid, Answer(not_yet()), unpaid, unpaid, DONE)
    assert polls.clock.slept == [5.0, 5.0, 0.1, 5.0, 5.0]


def test_400_is_polled_three_times_more_and_then_raised(polls):
    error = polls.fail(Answer(b"", 400))
    assert isinstance(error, BadRequestError)
    assert len(polls.asked) == 4
    assert polls.clock.slept == [1, 2]


def test_400_count_restarts_after_another_answer(polls):
    bad = [Answer(b"", 400)] * 3
    metadata = Answer({"status": "complete_metadata", "response_payload_size": 1})
    polls.finish(*bad, Answer({}, 408), *bad, metadata, *bad, DONE)


def test_no_answer_waits_1_2_4_up_to_30_seconds(polls):
    polls.finish(*[NO_ANSWER] * 7, DONE)
    assert polls.clock.slept == [1, 2, 4, 8, 16, 30, 30]


def test_waits_without_answer_restart_after_an_answer(polls):
    polls.finish(NO_ANSWER, NO_ANSWER, Answer(not_yet()), NO_ANSWER, DONE)
    assert polls.clock.slept == [1, 2, 0.1, 1]


def test_poll_gives_up_after_two_hours_without_any_answer(polls):
    error = polls.fail(NO_ANSWER)
    assert isinstance(error, APIConnectionError)
    assert sum(polls.clock.slept) == pytest.approx(7200, abs=30)


# -- deadlines -----------------------------------------------------------------------------------


def test_deadline_error_names_last_408(polls):
    error = polls.fail(polls.after(30, Answer({"detail": "still busy"}, 408)), timeout=100)
    assert isinstance(error, APITimeoutError)
    assert "still busy" in str(error)
    assert isinstance(error.__cause__, APIStatusError)
    assert error.__cause__.status_code == 408
    assert len(polls.asked) == 4


def test_deadline_error_names_last_error_of_any_kind(polls):
    slow = polls.after(60, Answer(not_yet("active")))
    error = polls.fail(Answer({"detail": "broken"}, 500), slow, slow, DONE, timeout=100)
    assert isinstance(error.__cause__, InternalServerError)


def test_deadline_without_error_is_plain_timeout(polls):
    error = polls.fail(polls.after(60, Answer(not_yet("active"))), timeout=100)
    assert isinstance(error, APITimeoutError)
    assert error.__cause__ is None
    assert "optim_step (r-1)" in str(error)


def test_deadline_ends_poll_without_answer(polls):
    error = polls.fail(NO_ANSWER, timeout=10)
    assert isinstance(error, APITimeoutError)
    assert isinstance(error.__cause__, APIConnectionError)
    assert polls.clock.slept == [1, 2, 4, 2]  # the last poll is sent 1 s before the deadline


def test_timeout_of_call_is_deadline_of_its_polls(server, service, clock):
    def late(_: Request) -> Reply:
        clock.now += 10
        return Answer({"detail": "still busy"}, 408)

    server.on(STEP, promise("step"))
    server.on_future("step", late)
    with pytest.raises(APITimeoutError, match="still busy") as caught:
        new_trainer(service()).optim_step(timeout=5).result(10)
    assert isinstance(caught.value.__cause__, APIStatusError)


# -- large results -------------------------------------------------------------------------------


METADATA = {"status": "complete_metadata", "response_payload_size": 100}


def test_a_large_result_is_announced_and_then_fetched(polls):
    polls.finish(Answer(METADATA), DONE)
    assert [request.json for request in polls.asked] == [
        {"request_id": "r-1", "allow_metadata_only": True},
        {"request_id": "r-1", "allow_metadata_only": False},
    ]


def test_errors_between_announcement_and_result_do_not_announce_it_again(polls):
    polls.finish(Answer(METADATA), Answer({}, 408), NO_ANSWER, DONE)
    asked = [request.json["allow_metadata_only"] for request in polls.asked]
    assert asked == [True, False, False, False]


@pytest.mark.parametrize("size", [None, -1, "100", 1.5])
def test_invalid_announcement_is_error(polls, size):
    error = polls.fail(Answer({**METADATA, "response_payload_size": size}))
    assert isinstance(error, APIResponseValidationError)


def test_second_announcement_is_error(polls):
    error = polls.fail(Answer(METADATA), Answer(METADATA))
    assert isinstance(error, APIResponseValidationError)
    assert len(polls.asked) == 2


def test_large_result_waits_for_room_in_byte_budget(server, service):
    flags(server, inflight_response_bytes_semaphore_size=100)
    held = threading.Event()
    fetched_early: list[bool] = []

    def second(_: Request) -> Reply:
        fetched_early.append(not held.is_set())
        return DONE

    server.on(STEP, promise("first"), promise("second"), promise("third"))
    over = Answer({"status": "complete_metadata", "response_payload_size": 101})
    server.on_future("first", over, Answer(DONE.body, wait_for=held))
    server.on_future("second", Answer(METADATA), second)
    server.on_future("third", DONE)
    trainer = new_trainer(service())
    first = trainer.optim_step()
    server.wait_for(POLL, 3)  # the model's poll, the announcement, and the fetch that hangs
    later = trainer.optim_step()
    server.wait_for(POLL, 4)
    trainer.optim_step().result(10)  # small results need no room
    held.set()
    assert [first.result(10).metrics, later.result(10).metrics] == [{"x": 1.0}] * 2
    assert fetched_early == [False]


# -- headers of a poll ---------------------------------------------------------------------------


def test_poll_headers_name_request_type_and_iteration(polls):
    polls.finish(Answer({}, 408), Answer({}, 408), DONE)
    headers = [request.headers for request in polls.asked]
    assert [each["x-tinker-request-iteration"] for each in headers] == ["0", "1", "2"]
    assert {each["x-tinker-request-type"] for each in headers} == {"OptimStep"}
    assert {each["accept"] for each in headers} == {"application/json"}
    assert len({each["x-idempotency-key"] for each in headers}) == 3
    seconds = [each.get("x-tinker-create-promise-roundtrip-time") for each in headers]
    assert float(seconds[0] or "nan") >= 0
    assert seconds[1:] == [None, None]


# -- protobuf ------------------------------------------------------------------------------------


def proto(body: bytes) -> Answer:
    return Answer(body, content_type=PROTOBUF)


def test_a_sample_may_arrive_as_protobuf(server, service):
    server.on(SAMPLE, promise("s", sample_sequence_ids=["q-1"]))
    response = types.SampleResponse([types.SampledSequence("stop", tokens=[7], logprobs=[-0.5])])
    server.on_future("s", proto(proto_codec.encode_sample_response(response)))
    got = sample(new_sampler(service())).result(10).sequences[0]
    assert (got.tokens, got.logprobs, got.sequence_id) == ([7], [-0.5], "q-1")
    assert server.asked(POLL)[0].headers["accept"].startswith("application/x-protobuf")
    assert "application/json" in server.asked(POLL)[0].headers["accept"]


def test_json_sequences_get_ids_from_promise(server, service):
    server.on(SAMPLE, promise("s", sample_sequence_ids=["q-1", "q-2"]))
    sequence = {"stop_reason": "length", "tokens": [1]}
    server.on_future("s", Answer({"sequences": [sequence, sequence]}))
    got = sample(new_sampler(service())).result(10).sequences
    assert [each.sequence_id for each in got] == ["q-1", "q-2"]


def test_the_output_of_a_pass_may_arrive_as_protobuf(server, service):
    server.on(PASS, promise("p"))
    tensor = types.TensorData([-1.0, -2.0], "float32", [2])
    result = types.ForwardBackwardOutput("kind", [{"logprobs": tensor}], {"loss:sum": 3.0})
    server.on_future("p", proto(proto_codec.encode_forward_backward_output(result)))
    got = new_trainer(service()).forward_backward([datum(1, 2)], "cross_entropy").result(10)
    assert got.loss_fn_outputs[0]["logprobs"].tolist() == [-1.0, -2.0]
    assert (got.loss_fn_output_type, got.metrics) == ("kind", {"loss:sum": 3.0})


def test_invalid_protobuf_is_error(server, service):
    server.on(PASS, promise("p"))
    server.on_future("p", proto(b"\xff\xff"))
    with pytest.raises(APIResponseValidationError) as caught:
        new_trainer(service()).forward_backward([datum(1)], "cross_entropy").result(10)
    assert caught.value.request_id == "p"


def test_unexpected_protobuf_is_error(polls):
    error = polls.fail(proto(b""))
    assert isinstance(error, APIResponseValidationError)


def test_the_output_of_a_pass_may_arrive_as_json(server, service):
    server.on(PASS, promise("p"))
    server.on_future("p", Answer(output(kind="k", loss__sum=3.0)))
    got = new_trainer(service()).forward_backward([datum(1)], "cross_entropy").result(10)
    assert (got.loss_fn_output_type, got.loss) == ("k", 3.0)


# -- queue states --------------------------------------------------------------------------------


CAPACITY, RATE = QueueState.PAUSED_CAPACITY, QueueState.PAUSED_RATE_LIMIT


def test_observers_are_called_once_per_change(polls):
    heard: list[Any] = []
    polls.finish(
        Answer(not_yet("paused_capacity", "full")),
        Answer(not_yet("paused_capacity", "full")),
        Answer(not_yet("paused_capacity", "fuller")),
        Answer(not_yet("active")),
        Answer(not_yet("active")),
        Answer(not_yet("paused_rate_limit")),
        DONE,
        observers=[lambda state, reason: heard.append((state, reason))],
    )
    assert heard == [
        (CAPACITY, "full"),
        (CAPACITY, "fuller"),
        (QueueState.ACTIVE, None),
        (RATE, None),
    ]


@pytest.mark.parametrize("status", [200, 408, 429, 503])
def test_queue_state_is_read_from_any_answer(polls, status):
    heard: list[Any] = []
    polls.finish(
        Answer(not_yet("paused_rate_limit", "slow down"), status),
        Answer({}, status if status >= 400 else 408),  # no queue state in the body: no change
        Answer(not_yet("paused_rate_limit", "slow down"), status),
        DONE,
        observers=[lambda *change: heard.append(change)],
    )
    assert heard == [(RATE, "slow down")]


def test_unknown_state_is_reported_and_non_text_reason_is_ignored(polls):
    heard: list[Any] = []
    polls.finish(
        Answer({**not_yet("on holiday"), "queue_state_reason": 7}),
        DONE,
        observers=[lambda state, reason: heard.append((state, reason))],
    )
    assert heard == [(QueueState.UNKNOWN, None)]


class Watcher:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_queue_state_change(self, state: QueueState, reason: str | None = None) -> None:
        self.heard.append((state, reason))


def test_observers_may_take_one_argument_two_or_be_objects(polls):
    one: list[Any] = []
    two: list[Any] = []
    watcher = Watcher()
    polls.finish(
        Answer(not_yet("paused_capacity", "full")),
        DONE,
        observers=[one.append, lambda state, reason=None: two.append((state, reason)), watcher],
    )
    assert one == [CAPACITY]
    assert two == watcher.heard == [(CAPACITY, "full")]


def test_failing_observer_is_logged_and_ignored(polls, caplog):
    heard: list[Any] = []
    polls.finish(
        Answer(not_yet("paused_capacity")), DONE, observers=[lambda _: 1 / 0, heard.append]
    )
    assert heard == [CAPACITY]
    assert "observer failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
