"""Sampling over HTTP: requests, responses, retries, cancellation, streaming."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import pytest

from tinkex import types
from tinkex._wire import json_codec
from tinkex._wire.proto_codec import decode_sample_response
from tinkex.server.samplers import PASSING_LIMIT
from tinkex.testing import service

from .api import PROTO, TINY, Api, Sampler


@pytest.fixture(scope="module")
def api():
    with service("fake") as running, Api(running.url) as user:
        yield user


@pytest.fixture
def sampler(api):
    return api.sampler()


# -- samplers --------------------------------------------------------------------------------------


def test_the_oldest_clients_can_sample_from_a_base_model(api):
    session = api.session()
    body = {
        "session_id": session,
        "sampling_session_seq_id": 0,
        "base_model": TINY,
        "model_path": None,
    }
    made = api.told("create_sampling_session", body)
    assert made["sampling_session_id"] == f"{session}:sample:0"
    assert api.told("create_sampling_session", body) == made
    promise = api.told(
        "asample",
        {
            "num_samples": 2,
            "prompt": {"chunks": [{"tokens": [5, 6, 7]}]},
            "sampling_params": {"max_tokens": 4},
            "sampling_session_id": made["sampling_session_id"],
            "seq_id": 0,
            "prompt_logprobs": None,
        },
    )
    result = api.retrieve(promise)
    assert len(result["sequences"]) == 2
    for sequence in result["sequences"]:
        assert len(sequence["tokens"]) == len(sequence["logprobs"]) <= 4
        assert sequence["stop_reason"] in {"length", "stop"}
    assert "prompt_logprobs" not in result


def test_the_origin_of_a_sampler_can_be_fetched(api):
    model = api.model()
    path = model.save("s", "save_weights_for_sampler")
    named = api.sampler(model.session_id, 0, model_path=path, base_model=TINY)
    found = api.got(f"samplers/{named.sampler_id}")
    assert found["sampler_id"] == named.sampler_id
    assert (found["base_model"], found["model_path"]) == (TINY, path)
    base = api.sampler(model.session_id, 1)
    assert api.got(f"samplers/{base.sampler_id}").get("model_path") is None
    assert api.get("samplers/nobody:sample:0").status_code == 404
    session = api.got(f"sessions/{model.session_id}")
    assert session["sampler_ids"] == [named.sampler_id, base.sampler_id]


def test_a_sampler_keeps_its_weights_while_training_continues(api):
    model = api.model()
    model.step()
    unnamed = model.do("save_weights_for_sampler", sampling_session_seq_id=0)
    path = model.save("latest")
    samplers = [
        Sampler(api, unnamed["sampling_session_id"]),
        api.sampler(model.session_id, 1, model_path=path),
        api.sampler(model.session_id, 2, model_path=model.save("s", "save_weights_for_sampler")),
    ]
    before = [sampler.sample() for sampler in samplers]
    assert before[0] == before[1] == before[2]
    for _ in range(20):
        model.step()
    model.save("latest", overwrite=True)
    sampled = f"training_runs/{model.model_id}/checkpoints/sampler_weights/s"
    assert api.ask("DELETE", sampled).status_code == 200
    assert [sampler.sample() for sampler in samplers] == before
    newer = api.sampler(model.session_id, 3, model_path=path)
    assert newer.sample() != before[0]
    # And sampling did not change the training model.
    assert model.logprobs()[0][0] > api.model().logprobs()[0][0]


def test_a_retry_with_the_same_number_returns_the_same_sampler(api):
    model = api.model()
    base = api.sampler(model.session_id, 0)
    before = base.sample()
    for _ in range(20):
        model.step()
    saves = [model.send("save_weights_for_sampler", sampling_session_seq_id=n) for n in (0, 1, 1)]
    results = [api.retrieve(save) for save in saves]
    assert [result.get("category") for result in results] == ["user", None, "user"]
    assert "sampling_session_seq_id" in results[0]["error"]
    assert base.sample() == before


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"base_model": "no/such"}, "base_model"),
        ({"base_model": None}, "base_model"),
        ({"model_path": "tinker://nobody:train:0/sampler_weights/x"}, "no checkpoint"),
        ({"model_path": "nonsense"}, "tinker://"),
    ],
)
def test_invalid_sampler_sources_are_refused(api, fields, complaint):
    body = {"session_id": api.session(), "sampling_session_seq_id": 0, **fields}
    refused = api.post("create_sampling_session", body)
    assert refused.status_code in {400, 404}
    assert complaint in refused.json()["detail"]


def test_external_weights_and_other_base_models_are_refused(api):
    model = api.model()
    external = model.save("e", "save_weights_external")
    path = model.save("s", "save_weights_for_sampler")
    for fields, field in (
        ({"model_path": external}, "model_path"),
        ({"model_path": path, "base_model": "other"}, "base_model"),
    ):
        body = {"session_id": model.session_id, "sampling_session_seq_id": 9, **fields}
        refused = api.post("create_sampling_session", body)
        assert (refused.status_code, refused.json()["field"]) == (400, field)


def test_each_copy_of_a_client_gets_its_own_number(api, sampler):
    body = {"sampling_session_id": sampler.sampler_id, "type": "join_sampling_session"}
    numbers = [api.told("join_sampling_session", body)["client_counter"] for _ in range(3)]
    assert numbers == [1, 2, 3]
    body["sampling_session_id"] = "nobody:sample:0"
    assert api.post("join_sampling_session", body).status_code == 404


# -- without a sampler -----------------------------------------------------------------------------


def drawn(api, **source) -> list[list[int]]:
    """Sample from a model or checkpoint that the request itself names."""
    return Sampler(api, "").tokens(fields={"sampling_session_id": None, **source})


def test_a_request_can_name_a_model_instead_of_a_sampler(api, sampler):
    assert drawn(api, base_model=TINY) == sampler.tokens()
    body = Sampler(api, "").request(fields={"sampling_session_id": None, "base_model": TINY})
    with api.http.stream("POST", "/api/v1/stream_sample", json=body) as answer:
        assert answer.status_code == 200, answer.read()


def test_equal_numbers_without_a_session_are_separate_requests(api):
    first = drawn(api, base_model=TINY)
    body = {"sampling_session_id": None, "base_model": TINY, "seq_id": 0}
    assert Sampler(api, "").tokens((8, 9), fields=body) != first
    with pytest.raises(AssertionError, match="no-such-model"):
        drawn(api, base_model="no-such-model")


def test_a_request_that_names_a_checkpoint_uses_its_current_weights(api):
    model = api.model()
    path = model.save("w")
    before = drawn(api, model_path=path)
    assert before == api.sampler(model_path=path).tokens()
    for _ in range(5):
        model.step()
    assert drawn(api, model_path=path) == before
    model.save("w", overwrite=True)
    after = drawn(api, model_path=path)
    assert after != before
    assert after == api.sampler(model_path=path).tokens()
    run, _, checkpoint = path.removeprefix("tinker://").partition("/")
    assert api.ask("DELETE", f"training_runs/{run}/checkpoints/{checkpoint}").status_code == 200
    with pytest.raises(AssertionError, match="no checkpoint"):
        drawn(api, model_path=path)


def test_implicit_samplers_are_limited_and_end_with_their_session(tmp_path):
    with service("fake", data_dir=tmp_path) as running, Api(running.url) as api:
        model = api.model()
        for number in range(PASSING_LIMIT + 3):
            drawn(api, model_path=model.save(f"w{number}"))
            assert len(list((tmp_path / "samplers").iterdir())) == min(number + 1, PASSING_LIMIT)
        (session,) = set(api.got("sessions")["sessions"]) - {model.session_id}
        finish = {"reason": {"type": "success"}, "detail": None}
        api.told(f"sessions/{session}/finish", finish)
        assert not list((tmp_path / "samplers").iterdir())
        assert drawn(api, base_model=TINY)
        assert len(api.got("sessions")["sessions"]) == 3


# -- sampling --------------------------------------------------------------------------------------------


def test_a_promise_names_its_sequences(api, sampler):
    promise = sampler.send(num_samples=3)
    assert len(set(promise["sample_sequence_ids"])) == 3
    assert all(promise["sample_sequence_ids"])
    assert len(api.retrieve(promise)["sequences"]) == 3


def test_a_retried_sample_request_runs_once(api, sampler):
    request = sampler.request(seed=None, num_samples=2)
    first, second = api.told("asample", request), api.told("asample", request)
    assert first == second
    assert api.told("asample", request | {"seq_id": 77}) != first
    unnumbered = request | {"seq_id": None}
    assert api.told("asample", unnumbered) != api.told("asample", unnumbered)


@pytest.mark.parametrize("seq_id", [10**21, 2**63, 2**64 - 1, 999_999 * 10**9 + 5])
def test_numbers_over_64_bits_stay_distinct(api, sampler, seq_id):
    request = sampler.request(seed=None)
    first = api.told("asample", request | {"seq_id": seq_id})
    assert api.told("asample", request | {"seq_id": seq_id}) == first
    assert api.told("asample", request | {"seq_id": seq_id + 1}) != first
    assert api.retrieve(first)["sequences"]


def test_the_same_seed_gives_the_same_sample(sampler):
    once, again, other = (sampler.tokens(num_samples=3, seed=seed) for seed in (5, 5, 6))
    assert once == again != other
    assert len({tuple(tokens) for tokens in once}) == 3
    assert sampler.tokens(num_samples=1, seed=5) == once[:1]
    unseeded = [sampler.tokens(seed=None, max_tokens=20) for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_temperature_zero_gives_the_likeliest_tokens(sampler):
    results = [sampler.tokens(temperature=0, seed=seed, num_samples=2) for seed in (1, 2)]
    assert results[0] == results[1]
    assert results[0][0] == results[0][1]
    assert sampler.tokens(top_k=1, seed=9) == results[0][:1]
    assert sampler.tokens(top_p=0, seed=9) == results[0][:1]


def test_sampling_stops_at_stop_tokens_and_limits(sampler):
    (free,) = sampler.tokens(max_tokens=300, temperature=2)
    assert len(free) == 300  # stop=[] never stops
    ends = [index for index, token in enumerate(free) if token in {257, 260}]
    (ended,) = sampler.sample(max_tokens=300, temperature=2, stop=None)["sequences"]
    assert ended["tokens"] == (free[: ends[0] + 1] if ends else free)
    (stopped,) = sampler.sample(max_tokens=300, temperature=2, stop=[free[7]])["sequences"]
    assert stopped["tokens"] == free[: free.index(free[7]) + 1]
    assert stopped["stop_reason"] == "stop"
    (length,) = sampler.sample(max_tokens=3, temperature=2)["sequences"]
    assert (length["stop_reason"], len(length["tokens"])) == ("length", 3)


@pytest.mark.parametrize("form", [str, list])
def test_sampling_stops_at_stop_strings(sampler, form):
    (free,) = sampler.tokens(max_tokens=200)
    letters = [index for index, token in enumerate(free) if 65 <= token < 127]
    text = chr(free[letters[0]])
    stop = text if form is str else [text, "no such text"]
    (stopped,) = sampler.sample(max_tokens=200, stop=stop)["sequences"]
    assert stopped["tokens"] == free[: letters[0] + 1]
    assert stopped["stop_reason"] == "stop"


@pytest.mark.parametrize("stop", ["", [""], ["a", ""], [1, "a"], {"a": 1}, [1.5]])
def test_invalid_stop_values_are_refused(api, sampler, stop):
    refused = api.post("asample", sampler.request(stop=stop))
    assert refused.status_code in {400, 422}
    assert "stop" in refused.json()["detail"]


def test_prompt_logprobs_are_returned(sampler):
    fields = {"prompt_logprobs": True, "topk_prompt_logprobs": 2}
    result = sampler.sample(fields=fields)
    logprobs, topk = result["prompt_logprobs"], result["topk_prompt_logprobs"]
    assert logprobs[0] is topk[0] is None
    assert [value < 0 for value in logprobs[1:]] == [True, True]
    assert [len(row) for row in topk[1:]] == [2, 2]
    assert topk[1][0][1] >= topk[1][1][1]
    last = sampler.sample(fields={"prompt_logprobs": True, "prompt_logprobs_last_n": 1})
    assert last["prompt_logprobs"] == [None, None, logprobs[2]]


def test_topk_prompt_logprobs_are_returned(sampler):
    wanted = {"data": [6, 9, -1, 7], "dtype": "int64", "shape": [2, 2]}
    result = sampler.sample(fields={"target_prompt_logprobs": wanted, "prompt_logprobs": True})
    found = result["target_prompt_logprobs"]
    assert found["shape"] == [2, 2]
    assert found["data"][0] == result["prompt_logprobs"][1]
    assert found["data"][3] == result["prompt_logprobs"][2]
    assert found["data"][2] == 0


def test_topk_logprobs_of_sampled_tokens_are_returned(sampler):
    (sequence,) = sampler.sample(fields={"topk_sample_logprobs": 3}, temperature=0)["sequences"]
    assert [len(row) for row in sequence["topk_logprobs"]] == [3] * 5
    assert [row[0][0] for row in sequence["topk_logprobs"]] == sequence["tokens"]


def test_unsupported_fields_are_refused(api, sampler):
    refused = api.post("asample", sampler.request(fields={"prompt_alt_tokens_k": 2}))
    assert (refused.status_code, refused.json()["field"]) == (400, "prompt_alt_tokens_k")


def test_protobuf_and_json_samples_are_equal(api, sampler):
    fields = {"prompt_logprobs": True, "topk_prompt_logprobs": 1, "topk_sample_logprobs": 1}
    promise = sampler.send(num_samples=2, fields=fields)
    decoded = decode_sample_response(api.retrieve(promise, PROTO))
    assert json_codec.parse(json_codec.encode(decoded)) == api.retrieve(promise)
    assert decoded.prompt_logprobs_np is not None
    assert np.isnan(decoded.prompt_logprobs_np[0])


def test_a_failed_sample_has_an_error_category(api, sampler):
    answer = api.poll(sampler.send(prompt=(5, 999_999)), PROTO)
    assert answer.status_code == 200
    assert answer.json()["category"] == "user"
    assert "prompt" in answer.json()["error"]


def test_a_prompt_may_have_several_chunks(sampler):
    pieces = {"chunks": [{"tokens": [5]}, {"tokens": [6, 7], "type": "encoded_text"}]}
    assert sampler.sample(fields={"prompt": pieces}) == sampler.sample()


# -- waiting for any ------------------------------------------------------------------------------------------


def listen(api, sampler, cursor=0, clone=0, **more):
    target = {"sampling_session_id": sampler.sampler_id, "cloned_sampler_id": clone}
    target["type"] = "sampling_session"
    return api.told("retrieve_futures", {"target": target, "prev_cursor": cursor, **more})


def test_one_poll_receives_all_finished_samples(api, sampler):
    promises = [sampler.send(), sampler.send(prompt=(999_999,)), sampler.send()]
    for promise in promises:
        api.retrieve(promise)
    heard = listen(api, sampler)
    states = {entry["request_id"]: entry for entry in heard["completions"]}
    assert [states[promise["request_id"]]["state"] for promise in promises] == [
        "finished",
        "failed",
        "finished",
    ]
    size = states[promises[0]["request_id"]]["response_payload_uncompressed_size"]
    assert size == len(api.retrieve(promises[0], PROTO))
    nothing = listen(api, sampler, heard["cursor"], timeout=0.01)
    assert nothing == {"completions": [], "cursor": heard["cursor"]}
    later = sampler.send()
    more = listen(api, sampler, heard["cursor"], retrieved_request_ids=list(states))
    assert [entry["request_id"] for entry in more["completions"]] == [later["request_id"]]
    assert more["cursor"] > heard["cursor"]


def test_each_copy_of_a_client_receives_only_its_own_samples(api, sampler):
    mine, theirs = sampler.request(), sampler.request()
    theirs["seq_id"] = 3_000_000_001
    promises = [api.told("asample", request) for request in (mine, theirs)]
    for promise in promises:
        api.retrieve(promise)
    for clone, promise in ((0, promises[0]), (3, promises[1])):
        (entry,) = listen(api, sampler, clone=clone)["completions"]
        assert entry["request_id"] == promise["request_id"]
    assert listen(api, sampler, clone=1, timeout=0)["completions"] == []


def test_a_finished_sample_wakes_a_poll_for_any(api, sampler):
    heard: list[Any] = []
    listening = threading.Thread(target=lambda: heard.append(listen(api, sampler)))
    listening.start()
    promise = sampler.send()
    listening.join()
    assert [entry["request_id"] for entry in heard[0]["completions"]] == [promise["request_id"]]


# -- cancellation -----------------------------------------------------------------------------------------------


def test_a_cancelled_sample_fails_as_cancelled(api, sampler):
    promise = sampler.send(num_samples=512, max_tokens=2000)
    assert api.post("cancel_future", {"request_id": promise["request_id"]}).status_code == 200
    result = api.retrieve(promise)
    assert "cancelled" in result["error"]
    assert sampler.tokens()


def test_cancelling_a_finished_or_unknown_request_succeeds(api, sampler):
    promise = sampler.send()
    result = api.retrieve(promise)
    for request_id in (promise["request_id"], "nonsense", "0" * 32):
        assert api.post("cancel_future", {"request_id": request_id}).status_code == 200
    assert api.retrieve(promise) == result


# -- streaming -----------------------------------------------------------------------------------------------------


def events(api, request):
    found = []
    with api.http.stream("POST", "/api/v1/stream_sample", json=request) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for block in "".join(answer.iter_text()).strip().split("\n\n"):
            kind, data = block.split("\n")
            found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def test_a_streamed_sample_equals_the_polled_one(api, sampler):
    whole = sampler.sample(num_samples=2)["sequences"]
    streamed = events(api, sampler.request(num_samples=2))
    for index, sequence in enumerate(whole):
        mine = [(kind, data) for kind, data in streamed if data.get("index", 0) == index]
        tokens = [data for kind, data in mine if kind == "token"]
        assert [data["token_id"] for data in tokens] == sequence["tokens"]
        assert [data["logprob"] for data in tokens] == pytest.approx(sequence["logprobs"])
        assert mine[-1] == (
            "done",
            {"index": index, "finish_reason": "length", "total_tokens": 5},
        )


def test_a_stream_reports_early_errors_by_status_and_later_ones_by_event(api, sampler):
    request = sampler.request(num_samples=0)
    assert api.post("stream_sample", request).status_code == 422
    ((kind, data),) = events(api, sampler.request(prompt=(5, 999_999)))
    assert kind == "error"
    assert "prompt" in data["error"]


def test_disconnecting_from_a_stream_cancels_the_sample(api, sampler):
    request = sampler.request(num_samples=64, max_tokens=2000)
    with api.http.stream("POST", "/api/v1/stream_sample", json=request) as answer:
        next(answer.iter_raw())
    assert sampler.tokens()


def test_prompt_that_was_read_before_reports_its_cached_tokens(tinkex_tiny):
    with tinkex_tiny.client() as client:
        sampling = client.create_sampling_client(base_model="tinkex/tiny")
        prompt = types.ModelInput.from_ints([number % 200 for number in range(150)])
        options = types.SamplingParams(max_tokens=4, seed=1)
        first, again = (sampling.sample(prompt, 1, options).result() for _ in range(2))
        assert first.prompt_cache_hit_tokens == 0
        assert again.prompt_cache_hit_tokens == 128
        assert again.sequences[0].tokens == first.sequences[0].tokens
