"""Sampling: requests, retries, limits, cancellation and streams."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import weakref
from collections import Counter
from typing import Any, Self

import pytest

import tinkex
from tinkex import types
from tinkex._client.retry import RetryConfig
from tinkex._client.tokenizers import set_tokenizer_loader
from tinkex.errors import (
    APIConnectionError,
    APIResponseValidationError,
    APITimeoutError,
    BadRequestError,
    ClientClosedError,
    GoneError,
    InternalServerError,
    InvalidInputError,
    InvalidPathError,
    RateLimitError,
    RequestFailedError,
)
from tinkex.types import QueueState

from ..scripted import Answer, FakeClock, Hang, Raw, Reply, Request, promise
from .helpers import (
    CANCEL,
    CREATE_SAMPLER,
    DYNAMIC,
    ONE_TOKEN,
    POLL,
    PROMPT,
    SAMPLE,
    STREAM,
    answer_samples,
    answer_training,
    failed,
    flags,
    new_sampler,
    new_trainer,
    promise_by_seq,
    sample,
    sampled,
    seq_ids,
    until,
)

GET_SAMPLER = "GET /api/v1/samplers/s-1%3Asample%3A0"
BUSY = Answer({"detail": "slow down"}, 429, {"retry-after": "33"})


@pytest.fixture
def sampler(server, service):
    return new_sampler(service())


# -- creation ------------------------------------------------------------------------------------


def test_sampler_is_created_from_a_base_model_or_a_checkpoint(server, service):
    client = service()
    client.create_sampling_client(base_model="m")
    client.create_sampling_client("tinker://r/sampler_weights/a")
    sent = [request.json for request in server.asked(CREATE_SAMPLER)]
    assert [(each.get("base_model"), each.get("model_path")) for each in sent] == [
        ("m", None),
        (None, "tinker://r/sampler_weights/a"),
    ]


@pytest.mark.parametrize(
    "path", ["tinker://model_1/ckpt", "tinker://r/sampler_weights/a/b", "tinker://x"]
)
def test_checkpoint_path_of_unknown_form_is_sent_to_the_service(server, service, path):
    service().create_sampling_client(path)
    assert server.asked(CREATE_SAMPLER)[0].json["model_path"] == path


def test_sampler_without_model_is_refused_before_sending(server, service):
    with pytest.raises(InvalidInputError, match="base_model"):
        service().create_sampling_client()
    with pytest.raises(InvalidPathError):
        service().create_sampling_client(model_path="/some/file")
    assert server.requests == []


def test_existing_sampling_session_is_used_without_a_request(server, service):
    answer_samples(server)
    client = service()
    sampler = tinkex.SamplingClient.create(client.holder, sampling_session_id="x").result(10)
    sample(sampler).result(10)
    assert server.asked(SAMPLE)[0].json["sampling_session_id"] == "x"
    assert server.asked(CREATE_SAMPLER) == []


@pytest.mark.parametrize("made", ["create", "create_async"])
def test_sampler_can_be_created_from_a_service_client_and_awaited(server, service, made):
    async def create() -> tinkex.SamplingClient:
        make = getattr(tinkex.SamplingClient, made)
        sampler: tinkex.SamplingClient = await make(service(), base_model="some/model")
        return sampler

    assert asyncio.run(create())._sampling_session_id == "s-1:sample:0"


# -- requests ------------------------------------------------------------------------------------


def test_sample_request_has_all_fields(server, sampler):
    answer_samples(server)
    params = types.SamplingParams(max_tokens=5, temperature=0.5, stop=["\n"], seed=1, top_k=3)
    sampler.sample(PROMPT, 2, params).result(10)
    (request,) = server.asked(SAMPLE)
    assert request.json == {
        "type": "sample",
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": {
            "max_tokens": 5,
            "temperature": 0.5,
            "stop": ["\n"],
            "seed": 1,
            "top_k": 3,
            "top_p": 1,
        },
        "sampling_session_id": "s-1:sample:0",
        "seq_id": 0,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
    }
    assert request.headers["x-tinker-sampling-backpressure"] == "1"


@pytest.mark.parametrize(("given", "sent"), [(None, None), (True, True), (False, False)])
def test_include_prompt_logprobs_is_sent_as_given_or_omitted(server, sampler, given, sent):
    answer_samples(server)
    sample(sampler, include_prompt_logprobs=given).result(10)
    assert server.asked(SAMPLE)[0].json.get("prompt_logprobs") is sent


def test_optional_fields_are_sent_only_if_given(server, service):
    table = {"dtype": "float32", "shape": [2, 1], "data": [-1.0, -2.0]}
    drawn = {"tokens": {**table, "dtype": "int64", "data": [1, 2]}, "logprobs": table}
    scored = {"prompt_logprobs": [None, None, -1.0], "target_prompt_logprobs": table}
    server.on(SAMPLE, sampled(7, prompt_alt_tokens=drawn, **scored))
    sampler = new_sampler(service(), record_stability_info=True)
    targets = types.TensorData([4, 5], "int64", [2, 1])
    sampler.sample(
        PROMPT,
        sampling_params=ONE_TOKEN,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        topk_sample_logprobs=4,
        target_prompt_logprobs=targets,
        prompt_alt_tokens_k=5,
        prompt_logprobs_last_n=1,
    ).result(10)
    sent = server.asked(SAMPLE)[0].json
    assert sent["target_prompt_logprobs"] == {"data": [4, 5], "dtype": "int64", "shape": [2, 1]}
    assert {
        name: sent[name] for name in sent if name.startswith(("topk", "prompt_", "record"))
    } == {
        "topk_prompt_logprobs": 3,
        "topk_sample_logprobs": 4,
        "prompt_logprobs": True,
        "prompt_alt_tokens_k": 5,
        "prompt_logprobs_last_n": 1,
        "record_stability_info": True,
    }


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        (
            {"prompt_logprobs_last_n": 1, "include_prompt_logprobs": True},
            "prompt_logprobs_last_n",
        ),
    ],
)
def test_answer_without_requested_fields_is_an_error(server, sampler, asked, named):
    server.on(SAMPLE, sampled(7, prompt_logprobs=[None, -1.0, -2.0]))
    with pytest.raises(APIResponseValidationError, match=named):
        sample(sampler, **asked).result(10)
    assert len(server.asked(SAMPLE)) == 1


def test_logprobs_of_only_the_last_tokens_can_be_requested(server, sampler):
    server.on(SAMPLE, sampled(7, prompt_logprobs=[None, None, -2.0]))
    assert sampler.compute_logprobs(PROMPT, 1).result(10) == [None, None, -2.0]


@pytest.mark.parametrize(
    "arguments",
    [
        {"prompt": "text"},
        {"prompt": [1, 2]},
        {"num_samples": 0},
        {"num_samples": True},
        {"num_samples": 1.5},
        {"topk_prompt_logprobs": -1},
        {"topk_sample_logprobs": -1},
        {"prompt_alt_tokens_k": -1},
        {"prompt_logprobs_last_n": -1, "include_prompt_logprobs": True},
        {"prompt_logprobs_last_n": 0, "include_prompt_logprobs": True},
        {"prompt_logprobs_last_n": 1},
        {"target_prompt_logprobs": types.TensorData([1.0, 2.0], "float32", [2, 1])},
        {"target_prompt_logprobs": types.TensorData([1, 2], "int64", [2])},
        {"target_prompt_logprobs": [[1], [2]]},
    ],
)
def test_invalid_sample_arguments_are_refused_before_sending(server, sampler, arguments):
    with pytest.raises(InvalidInputError) as caught:
        sampler.sample(**{"prompt": PROMPT, "sampling_params": ONE_TOKEN, **arguments})
    assert caught.value.field == next(iter(arguments))
    assert server.asked(SAMPLE) == []


def test_every_sample_has_its_own_seq_id(server, sampler):
    answer_samples(server)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        drawing = list(pool.map(lambda _: sample(sampler), range(200)))
    for each in drawing:
        each.result(10)
    assert sorted(seq_ids(server.asked(SAMPLE))) == list(range(200))


# -- results -------------------------------------------------------------------------------------


def test_sample_is_answered_with_a_result_or_a_promise(server, sampler):
    server.on(SAMPLE, sampled(7), promise("later", sample_sequence_ids=["q"]))
    server.on_future("later", sampled(8))
    assert sample(sampler).result(10).sequences[0].tokens == [7]
    later = sample(sampler).result(10).sequences[0]
    assert (later.tokens, later.sequence_id) == ([8], "q")


def test_all_kinds_of_logprobs_are_read(server, sampler):
    sequence = {
        "stop_reason": "length",
        "tokens": [7, 8],
        "logprobs": [-0.5, -0.25],
        "topk_logprobs": [[[7, -0.5], [9, -1.0]], [[8, -0.25]]],
    }
    target = {"data": [-1.0, -2.0], "dtype": "float32", "shape": [2, 1]}
    body = {
        "sequences": [sequence],
        "prompt_logprobs": [None, -1.0, -2.0],
        "topk_prompt_logprobs": [None, [[2, -1.0]], [{"token_id": 3, "logprob": -2.0}]],
        "target_prompt_logprobs": target,
    }
    server.on(SAMPLE, Answer(body))
    response = sample(sampler).result(10)
    assert response.prompt_logprobs == [None, -1.0, -2.0]
    assert response.topk_prompt_logprobs == [None, [(2, -1.0)], [(3, -2.0)]]
    assert response.target_prompt_logprobs.tolist() == [[-1.0], [-2.0]]
    assert response.sequences[0].topk_logprobs == [[(7, -0.5), (9, -1.0)], [(8, -0.25)]]
    assert response.sequences[0].logprobs == [-0.5, -0.25]


def test_compute_logprobs_is_a_sample_of_one_token(server, sampler):
    server.on(SAMPLE, sampled(7, prompt_logprobs=[None, -1.0, -2.0]))
    assert sampler.compute_logprobs(PROMPT, prompt_logprobs_last_n=2).result(10) == [
        None,
        -1.0,
        -2.0,
    ]
    sent = server.asked(SAMPLE)[0].json
    assert sent["prompt_logprobs"] is True
    assert sent["prompt_logprobs_last_n"] == 2
    assert (sent["num_samples"], sent["sampling_params"]["max_tokens"]) == (1, 1)
    assert asyncio.run(sampler.compute_logprobs_async(PROMPT)) == [None, -1.0, -2.0]


def test_missing_prompt_logprobs_are_an_error(server, sampler):
    answer_samples(server)
    with pytest.raises(APIResponseValidationError, match="no prompt logprobs"):
        sampler.compute_logprobs(PROMPT).result(10)


def test_compute_logprobs_raises_the_error_of_its_sample(server, sampler):
    server.on(SAMPLE, Answer({"detail": "too long"}, 400))
    with pytest.raises(BadRequestError, match="too long"):
        sampler.compute_logprobs(PROMPT).result(10)


# -- 429 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "wait"), [(10, 1.0), (13_107, 1.0), (13_108, 5.0), (15_000, 5.0)]
)
def test_429_pauses_samples_for_1_second_or_5_if_they_are_large(
    server, sampler, clock, tokens, wait
):
    server.on(SAMPLE, BUSY, sampled(7))
    sampler.sample(types.ModelInput.from_ints([1] * tokens), 1, ONE_TOKEN).result(10)
    assert clock.slept == [wait]


def test_429_sends_the_same_request_again(server, sampler):
    server.on(SAMPLE, BUSY, BUSY, sampled(7))
    sample(sampler).result(10)
    requests = server.asked(SAMPLE)
    assert seq_ids(requests) == [0, 0, 0]
    assert len({request.headers["x-idempotency-key"] for request in requests}) == 1
    assert len({request.body for request in requests}) == 1


def test_repeated_429_is_not_raised(server, service, clock):
    server.on(SAMPLE, *[BUSY] * 30, sampled(7))
    assert sample(new_sampler(service())).result(10).sequences[0].tokens == [7]
    assert clock.slept == [1.0] * 30


def test_429_is_raised_at_once_when_retries_are_off(server, service):
    server.on(SAMPLE, BUSY)
    sampler = new_sampler(service(), retry_config=RetryConfig(enable_retry_logic=False))
    with pytest.raises(RateLimitError):
        sample(sampler).result(10)
    assert len(server.asked(SAMPLE)) == 1


def test_429_is_raised_after_max_retries(server, service):
    server.on(SAMPLE, BUSY)
    sampler = new_sampler(service(), retry_config=RetryConfig(max_retries=3))
    with pytest.raises(RateLimitError):
        sample(sampler).result(10)
    assert len(server.asked(SAMPLE)) == 4


def test_429_pauses_samples_even_if_the_service_switches_retries_off(server, service, clock):
    flags(server, sample_no_retries=True)
    server.on(SAMPLE, BUSY, BUSY, sampled(7))
    assert sample(new_sampler(service())).result(10).sequences[0].tokens == [7]
    assert clock.slept == [1.0, 1.0]


def test_all_samples_wait_for_the_same_pause(server, service):
    clock = FakeClock(long=0.5)
    server.on(DYNAMIC, Answer({}, 404))
    server.on(SAMPLE, BUSY, sampled(7))
    sampler = new_sampler(service(clock=clock))
    first = sample(sampler)
    until(lambda: clock.sleeping == 2)  # the sample and the heartbeat
    others = [sample(sampler) for _ in range(20)]
    until(lambda: clock.sleeping == 11)  # ten samples at a time after a 429, and the heartbeat
    assert len(server.asked(SAMPLE)) == 1
    clock.advance(1)
    for each in (first, *others):
        each.result(10)
    # The refused seq_id was used again, and none is missing.
    assert sorted(seq_ids(server.asked(SAMPLE))) == [0, *range(21)]


def test_queue_state_in_a_429_is_reported_and_logged_once_a_minute(server, sampler, clock, caplog):
    heard: list[Any] = []
    sampler.observe_queue_state(lambda state, reason: heard.append((state, reason)))
    busy = Answer({"queue_state": "paused_rate_limit", "queue_state_reason": "too many"}, 429)
    server.on(SAMPLE, busy, sampled(7))

    def pause_again() -> None:
        server.on(SAMPLE, busy, sampled(7))
        sample(sampler).result(10)

    def logged() -> int:
        text: str = caplog.text
        return text.count("Sampling is paused for s-1:sample:0. Reason: too many")

    pause_again()
    assert heard == [(QueueState.PAUSED_RATE_LIMIT, "too many")]
    pause_again()
    assert logged() == 1
    clock.now += 60
    pause_again()
    assert logged() == 2
    pause_again()
    assert logged() == 2
    sampler.clear_queue_state_debounce()
    pause_again()
    assert logged() == 3


@pytest.mark.parametrize(
    ("state", "reason", "text"),
    [
        ("paused_rate_limit", None, "concurrent sampler weights limit hit"),
        ("paused_capacity", " ", "Tinker backend is running short on capacity, please wait"),
        ("paused_capacity", "maintenance", "maintenance"),
        ("sleeping", None, "unknown"),
    ],
)
def test_pause_while_polling_is_logged_with_its_reason(
    server, sampler, caplog, state, reason, text
):
    body = {"type": "try_again", "queue_state": state, "queue_state_reason": reason}
    server.on(SAMPLE, promise("s"))
    server.on_future("s", Answer(body, 408), sampled(7))
    sample(sampler).result(10)
    assert f"Reason: {text}" in caplog.text


def test_active_sample_is_not_logged(server, sampler, caplog):
    server.on(SAMPLE, promise("s"))
    server.on_future("s", Answer({"type": "try_again", "queue_state": "active"}, 408), sampled(7))
    sample(sampler).result(10)
    assert "paused" not in caplog.text


def test_subclass_can_override_on_queue_state_change(server, service):
    heard: list[Any] = []

    class Mine(tinkex.SamplingClient):
        def on_queue_state_change(
            self, queue_state: QueueState, queue_state_reason: str | None = None
        ) -> None:
            heard.append((queue_state, queue_state_reason))

    client = service()
    mine = Mine(client.holder, sampling_session_id="x")
    server.on(SAMPLE, Answer({"queue_state": "paused_capacity"}, 429), sampled(7))
    sample(mine).result(10)
    assert heard == [(QueueState.PAUSED_CAPACITY, None)]


# -- retries -------------------------------------------------------------------------------------


def test_lost_result_is_drawn_again_with_a_new_seq_id(server, sampler):
    server.on(SAMPLE, promise_by_seq)
    server.on_future("r-0", Answer({"detail": "expired"}, 410))
    server.on_future("r-1", sampled(8))
    assert sample(sampler).result(10).sequences[0].tokens == [8]
    assert seq_ids(server.asked(SAMPLE)) == [0, 1]


@pytest.mark.parametrize(
    "trouble",
    [Answer({}, 408), Answer({}, 409), Answer({}, 500), Answer({}, 503), Raw(b"not HTTP\r\n\r\n")],
)
def test_transient_failures_are_retried_with_growing_waits(server, sampler, clock, trouble):
    server.on(SAMPLE, *[trouble] * 6, sampled(7))
    assert sample(sampler).result(10).sequences[0].tokens == [7]
    # 0.5 · 2ⁿ seconds, at most 10, minus the full jitter of a quarter
    assert clock.slept == [0.375, 0.75, 1.5, 3.0, 6.0, 7.5]
    # The service may have accepted it each time: by the seq_id it recognises the same sample.
    assert seq_ids(server.asked(SAMPLE)) == [0] * 7


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_refused_sample_is_not_retried(server, sampler, status):
    server.on(SAMPLE, Answer({"detail": "no"}, status), sampled(7))
    with pytest.raises(tinkex.APIStatusError) as caught:
        sample(sampler).result(10)
    assert caught.value.status_code == status
    assert len(server.asked(SAMPLE)) == 1


@pytest.mark.parametrize("category", ["user", "server", "unknown"])
def test_failed_sample_is_not_retried(server, sampler, category):
    server.on(SAMPLE, promise("s"))
    server.on_future("s", failed("bad prompt", category))
    with pytest.raises(RequestFailedError, match="bad prompt"):
        sample(sampler).result(10)
    assert len(server.asked(SAMPLE)) == 1


def test_first_error_is_raised_if_retries_are_off(server, service):
    server.on(SAMPLE, Answer({}, 500), sampled(7))
    sampler = new_sampler(service(), retry_config=RetryConfig(enable_retry_logic=False))
    with pytest.raises(InternalServerError):
        sample(sampler).result(10)


def test_service_flag_switches_retries_off(server, service):
    flags(server, sample_no_retries=True)
    server.on(SAMPLE, promise("s"))
    server.on_future("s", Answer({}, 410))
    with pytest.raises(GoneError):
        sample(new_sampler(service())).result(10)


def test_max_retries_limits_the_attempts(server, service):
    server.on(SAMPLE, Answer({}, 500))
    with pytest.raises(InternalServerError):
        sample(new_sampler(service(), retry_config=RetryConfig(max_retries=2))).result(10)
    assert len(server.asked(SAMPLE)) == 3


def test_config_max_retries_does_not_multiply_sample_attempts(server, service):
    server.on(SAMPLE, Answer({}, 500))
    config = RetryConfig(enable_retry_logic=False)
    with pytest.raises(InternalServerError):
        sample(new_sampler(service(max_retries=5), retry_config=config)).result(10)
    assert len(server.asked(SAMPLE)) == 1


def test_samples_without_progress_fail_after_progress_timeout(server, service, clock):
    server.on(SAMPLE, promise_by_seq)
    for number in range(5):
        server.on_future(f"r-{number}", Hang())
    sampler = new_sampler(service(), retry_config=RetryConfig(progress_timeout=0.01))
    stuck = [sample(sampler) for _ in range(5)]
    server.wait_for(POLL, 5)
    clock.advance(1)
    for each in stuck:
        with pytest.raises(APIConnectionError, match="progress"):
            each.result(10)
    answer_samples(server)
    assert sample(sampler).result(10)  # a new sample is not affected


def test_time_while_the_machine_sleeps_does_not_count_as_stuck(server, service, clock):
    held = threading.Event()
    server.on(SAMPLE, promise("s"))
    server.on_future("s", Answer(sampled(7).body, wait_for=held))
    sampler = new_sampler(service(), retry_config=RetryConfig(progress_timeout=7200))
    drawing = sample(sampler)
    server.wait_for(POLL)
    clock.advance(9 * 3600)  # overnight
    state = sampler._state
    assert state is not None
    until(lambda: not state._check_progress())  # type: ignore[func-returns-value]
    held.set()
    assert drawing.result(10).sequences[0].tokens == [7]


def test_samples_are_not_stuck_while_one_makes_progress(server, service, clock):
    held = threading.Event()
    server.on(SAMPLE, promise("slow"), sampled(7))
    server.on_future("slow", Answer(sampled(9).body, wait_for=held))
    sampler = new_sampler(service(), retry_config=RetryConfig(progress_timeout=3600))
    slow = sample(sampler)
    server.wait_for(POLL)
    for _ in range(10):
        clock.advance(3000)
        sample(sampler).result(10)
    held.set()
    assert slow.result(10).sequences[0].tokens == [9]


def test_progress_timeout_counts_from_the_last_progress(server, service, clock):
    held = threading.Event()
    server.on(SAMPLE, promise("slow"), sampled(7))
    server.on_future("slow", Answer(sampled(9).body, wait_for=held))
    sampler = new_sampler(service(), retry_config=RetryConfig(progress_timeout=30))
    slow = sample(sampler)
    server.wait_for(POLL)
    clock.advance(29)
    sample(sampler).result(10)
    clock.advance(2)
    state = sampler._state
    assert state is not None
    until(lambda: not state._check_progress())  # type: ignore[func-returns-value]
    held.set()
    assert slow.result(10).sequences[0].tokens == [9]


def test_a_finished_sample_is_freed_without_the_garbage_collector(server, service):
    server.on(SAMPLE, promise("s"))
    server.on_future("s", sampled(7))
    sampler = new_sampler(service())
    sample(sampler).result(10)
    gc.disable()
    try:
        drawn = sample(sampler)
        drawn.result(10)
        left = weakref.ref(drawn)
        del drawn
        until(lambda: left() is None)
    finally:
        gc.enable()


# -- limits --------------------------------------------------------------------------------------


def test_max_connections_limits_samples_in_flight(server, service):
    held = threading.Event()
    server.on(SAMPLE, promise_by_seq)
    for number in range(6):
        server.on_future(f"r-{number}", Answer(sampled(number).body, wait_for=held))
    sampler = new_sampler(service(), retry_config=RetryConfig(max_connections=2))
    drawing = [sample(sampler) for _ in range(6)]
    server.wait_for(POLL, 2)
    assert len(server.asked(SAMPLE)) == 2
    held.set()
    for each in drawing:
        each.result(10)


def test_service_flag_limits_samples_in_flight(server, service):
    flags(server, sample_max_concurrent_requests=1)
    held = threading.Event()
    server.on(SAMPLE, Answer(sampled(7).body, wait_for=held))
    sampler = new_sampler(service())
    drawing = [sample(sampler) for _ in range(3)]
    server.wait_for(SAMPLE)
    held.set()
    for each in drawing:
        each.result(10)
    assert seq_ids(server.asked(SAMPLE)) == [0, 1, 2]


def test_prompt_waits_while_too_many_bytes_are_being_sent(server, service):
    flags(server, sample_dispatch_bytes_semaphore_size=25)
    held = threading.Event()
    server.on(SAMPLE, Answer(promise("first").body, wait_for=held), sampled(8))
    server.on_future("first", sampled(7))
    sampler = new_sampler(service())
    first = sample(sampler)  # 30 bytes: above the limit, but nothing else is being sent
    server.wait_for(SAMPLE)
    second = sample(sampler)
    server.on(GET_SAMPLER, Answer({"sampler_id": "x", "base_model": "m"}))
    sampler.get_base_model()
    assert len(server.asked(SAMPLE)) == 1
    held.set()
    assert [each.result(10).sequences[0].tokens for each in (first, second)] == [[7], [8]]


def test_byte_limit_is_released_once_the_service_accepts(server, service):
    flags(server, sample_dispatch_bytes_semaphore_size=1)
    server.on(SAMPLE, promise("slow"), sampled(8))
    server.on_future("slow", Hang())
    sampler = new_sampler(service())
    slow = sample(sampler)
    server.wait_for(POLL)
    assert sample(sampler).result(10).sequences[0].tokens == [8]
    assert not slow.done()


# -- concurrency ---------------------------------------------------------------------------------


def test_thousand_samples_complete_while_some_are_cancelled(server, sampler):
    held = threading.Event()
    server.on(DYNAMIC, Answer({}))
    server.on(SAMPLE, promise_by_seq)
    for number in range(1000):
        server.on_future(f"r-{number}", Answer({"type": "try_again"}, 408), sampled(number))
    server.on_future("r-0", Answer(sampled(0).body, wait_for=held))
    drawing = [sample(sampler) for _ in range(1000)]
    cancelled = drawing[::10]
    for each in cancelled:
        each.cancel()
    held.set()
    tokens = [each.result(30).sequences[0].tokens[0] for each in drawing if each not in cancelled]
    assert len(tokens) == len(set(tokens)) == 900
    assert all(each.cancelled() or each.done() for each in cancelled)
    assert max(Counter(seq_ids(server.asked(SAMPLE))).values()) == 1
    answer_samples(server, 5)
    assert sample(sampler).result(10).sequences[0].tokens == [5]


def test_threads_and_event_loops_share_one_client(server, sampler):
    server.on(SAMPLE, lambda request: sampled(request.json["prompt"]["chunks"][0]["tokens"][0]))

    def prompt(number: int) -> types.ModelInput:
        return types.ModelInput.from_ints([number])

    def block(first: int) -> list[int]:
        drawing = [sampler.sample(prompt(first + each), 1, ONE_TOKEN) for each in range(25)]
        return [each.result(10).sequences[0].tokens[0] for each in drawing]

    async def wait(first: int) -> list[int]:
        drawn = await asyncio.gather(
            *(sampler.sample_async(prompt(first + each), 1, ONE_TOKEN) for each in range(25))
        )
        return [each.sequences[0].tokens[0] for each in drawn]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        blocking = [pool.submit(block, 100 * number) for number in range(4)]
        awaiting = [pool.submit(asyncio.run, wait(1000 + 100 * number)) for number in range(4)]
        for number in range(4):
            assert blocking[number].result(30) == [100 * number + each for each in range(25)]
            assert awaiting[number].result(30) == [1000 + 100 * number + each for each in range(25)]


# -- cancelling ----------------------------------------------------------------------------------


@pytest.fixture
def waiting_sampler(server, service):
    """Makes a sampler whose first sample never finishes; `enabled` sets the flag sample_cancel_enabled."""

    def make(enabled: bool) -> tinkex.SamplingClient:
        server.on(DYNAMIC, Answer({"sample_cancel_enabled": enabled}))
        server.on(SAMPLE, promise_by_seq)
        server.on_future("r-0", Hang())
        server.on_future("r-1", sampled(8))
        server.on(CANCEL, Answer({}))
        client = service()
        sampler = new_sampler(client)
        until(lambda: client.holder.dynamic.sample_cancel_enabled is enabled)
        return sampler

    return make


def test_cancelled_sample_is_cancelled_at_the_service_with_the_flag(server, waiting_sampler):
    drawing = sample(waiting_sampler(True))
    server.wait_for(POLL)
    drawing.cancel()
    assert server.wait_for(CANCEL)[0].json == {"request_id": "r-0"}


def test_cancelling_compute_logprobs_cancels_its_sample(server, waiting_sampler):
    drawing = waiting_sampler(True).compute_logprobs(PROMPT)
    server.wait_for(POLL)
    drawing.cancel()
    assert server.wait_for(CANCEL)[0].json == {"request_id": "r-0"}


def test_timed_out_sample_is_cancelled_at_the_service(server, clock, waiting_sampler):
    def late(_: Request) -> Answer:
        clock.now += 60
        return Answer({"type": "try_again"}, 408)

    sampler = waiting_sampler(True)
    server.on_future("r-0", late)
    drawing = sample(sampler, timeout=30)
    with pytest.raises(APITimeoutError):
        drawing.result(10)
    assert server.wait_for(CANCEL)[0].json == {"request_id": "r-0"}


def test_cancelled_sample_is_not_cancelled_at_the_service_without_the_flag(server, waiting_sampler):
    sampler = waiting_sampler(False)
    drawing = sample(sampler)
    server.wait_for(POLL)
    drawing.cancel()
    assert sample(sampler).result(10).sequences[0].tokens == [8]
    assert server.asked(CANCEL) == []


def test_failed_cancel_request_is_ignored(server, waiting_sampler):
    sampler = waiting_sampler(True)
    server.on(CANCEL, Answer({}, 500))
    drawing = sample(sampler)
    server.wait_for(POLL)
    drawing.cancel()
    server.wait_for(CANCEL)
    assert sample(sampler).result(10).sequences[0].tokens == [8]


def test_cancelled_sample_frees_its_slot(server, service):
    server.on(SAMPLE, promise_by_seq)
    server.on_future("r-0", Hang())
    server.on_future("r-1", sampled(8))
    sampler = new_sampler(service(), retry_config=RetryConfig(max_connections=1))
    first, second = sample(sampler), sample(sampler)
    server.wait_for(POLL)
    first.cancel()
    assert second.result(10).sequences[0].tokens == [8]


# -- argument checks ------------------------------------------------------------------------------


@pytest.mark.parametrize("params", ["zzz", 5, [1]])
def test_invalid_sampling_params_are_refused_before_sending(server, sampler, params):
    with pytest.raises(InvalidInputError, match="sampling_params: expected SamplingParams"):
        sampler.sample(PROMPT, 1, params)
    assert server.asked(SAMPLE) == []


def test_sampling_params_may_be_a_mapping(server, sampler):
    answer_samples(server)
    sampler.sample(PROMPT, 1, {"max_tokens": 3}).result(10)
    assert server.asked(SAMPLE)[0].json["sampling_params"]["max_tokens"] == 3
    with pytest.raises(InvalidInputError, match="did you mean max_tokens"):
        sampler.sample(PROMPT, 1, {"max_token": 3})


def test_retry_config_may_be_a_mapping(server, service):
    server.on(SAMPLE, Answer({}, 500))
    sampler = new_sampler(service(), retry_config={"max_retries": 2})
    with pytest.raises(InternalServerError):
        sample(sampler).result(10)
    assert len(server.asked(SAMPLE)) == 3


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"retries": 2}, "'retries' is not one of max_connections"),
        ({"retry_delay_base": -1}, "retry_delay_base: must be a positive"),
        (3, "expected RetryConfig, got int"),
    ],
)
def test_invalid_retry_config_is_refused_before_sending(server, service, config, words):
    with pytest.raises(InvalidInputError, match=words):
        new_sampler(service(), retry_config=config)
    assert server.requests == []


@pytest.mark.parametrize("timeout", [-1, 0, "5", float("nan"), True])
def test_invalid_timeout_is_refused(server, service, timeout):
    client = service()
    sampler = new_sampler(client)
    sent = len(server.requests)
    for call in (
        lambda: sample(sampler, timeout=timeout),
        lambda: sampler.compute_logprobs(PROMPT, timeout=timeout),
        lambda: client.get_server_capabilities(timeout=timeout),
        lambda: client.create_lora_training_client("m", timeout=timeout),
        lambda: client.create_rest_client().delete_checkpoint(
            "tinker://r/weights/a", timeout=timeout
        ),
        lambda: client.poll("r-1", timeout=timeout),
    ):
        with pytest.raises(
            InvalidInputError, match="timeout: must be a positive number of seconds"
        ):
            call()
    assert len(server.requests) == sent


def test_refused_timeout_does_not_block_later_calls(server, service):
    answer_training(server)
    trainer = new_trainer(service())
    with pytest.raises(InvalidInputError):
        trainer.optim_step(timeout=-1)
    trainer.optim_step().result(10)


def test_timeout_that_looks_like_milliseconds_warns(server, service):
    answer_samples(server)
    sampler = new_sampler(service())
    with pytest.warns(UserWarning, match="timeout=120000 is 33 hours"):
        sample(sampler, timeout=120_000).result(10)


# -- streams -------------------------------------------------------------------------------------


def events(*lines: str) -> Answer:
    body = "".join(f"{line}\n\n" for line in lines).encode()
    return Answer(body, content_type="text/event-stream")


async def drawn(sampler: tinkex.SamplingClient, **options: Any) -> list[types.SampleStreamChunk]:
    return [chunk async for chunk in sampler.sample_stream(PROMPT, ONE_TOKEN, **options)]


def test_stream_yields_tokens_and_finish_reason(server, sampler):
    server.on(
        STREAM,
        events(
            ": keep awake",
            "retry: 1000",
            'data: {"token": "a", "token_id": 7, "logprob": -0.5}',
            'event: token\ndata: {"token_id": 8, "index": 1}',
            'data: {"finish_reason": "stop", "total_tokens": 2}',
            'data: {"finish_reason": "length", "index": 1}',
        ),
    )
    chunks = asyncio.run(drawn(sampler, num_samples=2))
    assert chunks == [
        types.SampleStreamChunk(token="a", token_id=7, logprob=-0.5),
        types.SampleStreamChunk(token_id=8, index=1),
        types.SampleStreamChunk(finish_reason="stop", total_tokens=2),
        types.SampleStreamChunk(finish_reason="length", index=1),
    ]
    assert [chunk.event_type for chunk in chunks] == ["token", "token", "done", "done"]
    assert "None" not in "".join(f"{chunk.token}" for chunk in chunks)
    (request,) = server.asked(STREAM)
    assert request.headers["accept"] == "text/event-stream"
    assert request.json["num_samples"] == 2
    assert request.json["seq_id"] == 0
    assert request.json["sampling_session_id"] == "s-1:sample:0"


class SlowStream:
    """A service whose streams the test writes piece by piece; other requests get default answers."""

    def __init__(self) -> None:
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        self.send("")

    def send(self, text: str) -> None:
        self._pieces.put_nowait(f"data: {text}\n\n".encode() if text else b"")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        while head := await reader.readline():
            length = 0
            while (line := await reader.readline()).strip():
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            await reader.readexactly(length)
            if b"stream_sample" in head:
                break
            body = b'{"session_id": "s-1", "sampling_session_id": "x"}'
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        else:
            return
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        while piece := await self._pieces.get():
            writer.write(piece)
        writer.close()


def test_stream_yields_tokens_before_the_sample_is_complete(service):
    async def stream() -> list[int | None]:
        async with SlowStream() as slow:
            client = service(base_url=slow.url)
            sampler = await client.create_sampling_client_async(base_model="m")
            tokens = []
            slow.send('{"token_id": 0}')
            async for chunk in sampler.sample_stream(PROMPT, ONE_TOKEN):
                if chunk.done:
                    slow.send("")
                    continue
                tokens.append(chunk.token_id)
                more = (
                    f'"token_id": {len(tokens)}' if len(tokens) < 3 else '"finish_reason": "stop"'
                )
                slow.send(f"{{{more}}}")
            await client.close()
            return tokens

    assert asyncio.run(stream()) == [0, 1, 2]


def test_closing_the_client_ends_a_stream_with_client_closed_error(service):
    async def stream() -> None:
        async with SlowStream() as slow:
            client = service(base_url=slow.url)
            sampler = await client.create_sampling_client_async(base_model="m")
            slow.send('{"token_id": 0}')
            async for _ in sampler.sample_stream(PROMPT, ONE_TOKEN):
                await client.close()

    with pytest.raises(ClientClosedError):
        asyncio.run(stream())


def test_stream_falls_back_to_a_plain_sample(server, sampler):
    server.on(STREAM, Answer({"detail": "no such path"}, 404))
    server.on(SAMPLE, sampled(7, 8))
    chunks = asyncio.run(drawn(sampler))
    assert [(chunk.token_id, chunk.logprob) for chunk in chunks] == [
        (7, -0.5),
        (8, -0.5),
        (None, None),
    ]
    assert (chunks[-1].finish_reason, chunks[-1].total_tokens) == ("stop", 2)
    sent = server.asked(SAMPLE)[0].json
    assert (sent["prompt"], sent["sampling_params"]["max_tokens"]) == (
        {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        1,
    )


def test_stream_error_is_raised_after_earlier_tokens(server, sampler):
    told = '{"error": "out of memory", "category": "server"}'
    server.on(STREAM, events('data: {"token_id": 7}', f"event: error\ndata: {told}"))
    seen = []

    async def read() -> None:
        async for chunk in sampler.sample_stream(PROMPT, ONE_TOKEN):
            seen.append(chunk)  # noqa: PERF401 - a comprehension would lose the tokens before the error

    with pytest.raises(RequestFailedError, match="out of memory") as failed:
        asyncio.run(read())
    assert ([chunk.token_id for chunk in seen], failed.value.category) == ([7], "server")


@pytest.mark.parametrize(
    ("num_samples", "lines"),
    [
        (1, []),
        (1, ['data: {"token_id": 7}']),
        (2, ['data: {"token_id": 7}', 'data: {"finish_reason": "stop"}']),
    ],
)
def test_stream_that_ends_early_raises(server, sampler, num_samples, lines):
    server.on(STREAM, events(*lines))
    with pytest.raises(APIConnectionError, match="before the sample was finished"):
        asyncio.run(drawn(sampler, num_samples=num_samples))


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Answer({"detail": "broken"}, 500), InternalServerError),
        (Answer({"detail": "bad"}, 400), BadRequestError),
        (Raw(b"not HTTP\r\n\r\n"), APIConnectionError),
        (events("data: hello"), APIResponseValidationError),
        (events('data: {"token_id": 1}'), APIConnectionError),
    ],
)
def test_failed_stream_is_not_retried(server, sampler, reply, error):
    server.on(STREAM, reply)
    with pytest.raises(error):
        asyncio.run(drawn(sampler))
    assert len(server.asked(STREAM)) == 1


def test_stream_is_cancelled_if_its_reader_stops(server, sampler):
    server.on(STREAM, events(*('data: {"token_id": 1}' for _ in range(100))))

    async def first() -> Any:
        stream = sampler.sample_stream(PROMPT, ONE_TOKEN)
        async for chunk in stream:
            await stream.aclose()
            return chunk
        raise AssertionError

    assert asyncio.run(first()).token_id == 1
    answer_samples(server)
    assert sample(sampler).result(10)


# -- identity ------------------------------------------------------------------------------------


def test_get_base_model_asks_the_service(server, sampler):
    server.on(GET_SAMPLER, Answer({"sampler_id": "x", "base_model": "org/model"}))
    assert sampler.get_base_model() == "org/model"
    assert asyncio.run(sampler.get_base_model_async()) == "org/model"


def test_tokenizer_is_derived_from_the_base_model(server, sampler):
    server.on(GET_SAMPLER, Answer({"sampler_id": "x", "base_model": "org/model/variant:7"}))
    set_tokenizer_loader(lambda name, revision: (name, revision))
    try:
        assert sampler.get_tokenizer() == ("org/model", None)
    finally:
        set_tokenizer_loader(None)


def test_repr_has_the_sampling_session_id(sampler):
    assert repr(sampler) == "SamplingClient(sampling_session_id='s-1:sample:0')"


def test_malformed_promise_is_an_error(server, sampler):
    replies: list[Reply] = [Answer(b"<html>"), Answer({"request_id": 7}), Answer([1])]
    for reply in replies:
        server.on(SAMPLE, reply)
        with pytest.raises(APIResponseValidationError, match="asample"):
            sample(sampler).result(10)


def test_failure_keeps_message_and_body_of_the_service(server, sampler):
    def refuse(request: Request) -> Answer:
        return Answer({"detail": f"no {request.json['seq_id']}", "category": "user"}, 400)

    server.on(SAMPLE, refuse)
    with pytest.raises(BadRequestError, match="no 0") as caught:
        sample(sampler).result(10)
    assert caught.value.body == {"detail": "no 0", "category": "user"}


def test_unused_sampler_is_garbage_collected(server, service):
    answer_samples(server)
    client = service()
    sampler = new_sampler(client)
    sample(sampler).result(10)
    gone = weakref.ref(sampler)
    del sampler
    until(lambda: gc.collect() is not None and gone() is None)


# -- billing and service flags -------------------------------------------------------------------


def test_sample_is_retried_while_billing_is_blocked(server, service, clock):
    server.on(SAMPLE, Answer({"detail": "pay"}, 402), Answer({"detail": "pay"}, 402), sampled(7))
    sampler = new_sampler(service(), retry_config=RetryConfig(max_retries=0))
    assert sample(sampler).result(10).sequences[0].tokens == [7]
    assert clock.slept == [5.0, 5.0]
    assert seq_ids(server.asked(SAMPLE)) == [0, 0, 0]


def test_service_flag_overrides_the_retry_config(server, service):
    flags(server, sample_no_retries=True)
    server.on(SAMPLE, Answer({}, 500), sampled(7))
    sampler = new_sampler(service(), retry_config=RetryConfig(progress_timeout=60))
    with pytest.raises(InternalServerError):
        sample(sampler).result(10)
    assert len(server.asked(SAMPLE)) == 1
