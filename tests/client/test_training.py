"""Training: order, seq_ids, chunks, argument checks, weights and custom losses."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import tinkex
from tinkex import types
from tinkex._client.tokenizers import set_tokenizer_loader
from tinkex.errors import (
    APIResponseValidationError,
    APITimeoutError,
    BadRequestError,
    GoneError,
    InvalidInputError,
    InvalidPathError,
    RequestFailedError,
)
from tinkex.regularizers import CustomLossError, CustomLossTimeoutError

from ..late import only_late
from ..scripted import Answer, Request, ScriptedServer, promise
from .helpers import (
    CREATE_MODEL,
    CREATE_SAMPLER,
    LOAD,
    PASS,
    POLL,
    SAVE,
    SAVE_SAMPLER,
    STEP,
    answer_pass,
    answer_training,
    datum,
    failed,
    flags,
    input_of,
    logprobs_of,
    new_sampler,
    new_trainer,
    output,
    pass_of,
    seq_of,
)

EXTERNAL = "POST /api/v1/save_weights_external"
FORWARD = "POST /api/v1/forward"
UNLOAD = "POST /api/v1/unload_model"
INFO = "POST /api/v1/get_info"
WEIGHTS_INFO = "POST /api/v1/weights_info"
PATH = "tinker://s-1:train:0/weights/a"


@pytest.fixture
def trainer(server, service):
    answer_training(server)
    return new_trainer(service())


def operations(server: ScriptedServer) -> list[Request]:
    """The seq_ids of all operations, in the order of arrival."""
    routes = {STEP, SAVE, SAVE_SAMPLER, LOAD, EXTERNAL, PASS}
    return [each for each in server.requests if f"{each.method} {each.path}" in routes]


def numbers(server: ScriptedServer) -> list[int]:
    return [seq_of(request) for request in operations(server)]


# -- creating models -----------------------------------------------------------------------------


def test_create_model_sends_the_given_options(server, service):
    trainer = service().create_lora_training_client(
        "some/model", 8, 7, False, True, False, {"note": "x"}, types.DimuonOptimizerConfig()
    )
    assert trainer.model_id == "s-1:train:0"
    assert server.asked(CREATE_MODEL)[0].json == {
        "session_id": "s-1",
        "model_seq_id": 0,
        "base_model": "some/model",
        "user_metadata": {"note": "x"},
        "lora_config": {
            "rank": 8,
            "seed": 7,
            "train_mlp": False,
            "train_attn": True,
            "train_unembed": False,
        },
        "optimizer_config": {"type": "dimuon", "version": 1},
        "type": "create_model",
    }


def test_given_options_override_lora_config(server, service):
    client, config = service(), types.LoraConfig(rank=16, seed=7, train_attn=False)
    client.create_lora_training_client("m", lora_config=config)
    client.create_lora_training_client("m", 8, train_mlp=False, lora_config=config)
    client.create_lora_training_client("m", rank=32, train_attn=True, lora_config=config)
    asyncio.run(client.create_lora_training_client_async("m", rank=32, lora_config=config))
    asyncio.run(client.create_lora_training_client_async("m", lora_config=config))
    kept, changed, defaults, later, plain = (
        each.json["lora_config"] for each in server.asked(CREATE_MODEL)
    )
    parts = {"seed": 7, "train_attn": False, "train_unembed": True}
    assert kept == plain == {"rank": 16, "train_mlp": True, **parts}
    assert changed == {"rank": 8, "train_mlp": False, **parts}
    # A given option overrides the config even if it equals the default.
    assert defaults == {"rank": 32, "train_mlp": True, **parts, "train_attn": True}
    assert later == {"rank": 32, "train_mlp": True, **parts}


def test_model_without_metadata_gets_the_configured_metadata(server, service):
    new_trainer(
        service(
            config=tinkex.Config(base_url=server.url, api_key="tml-x", user_metadata={"a": "b"})
        )
    )
    assert server.asked(CREATE_MODEL)[0].json["user_metadata"] == {"a": "b"}


def test_create_model_may_be_answered_without_a_promise(server, service):
    server.on(CREATE_MODEL, Answer({"model_id": "m"}))
    assert new_trainer(service()).model_id == "m"
    assert server.asked(POLL) == []


@pytest.mark.parametrize(
    "arguments",
    [
        {"base_model": ""},
        {"base_model": None},
        {"rank": 0},
        {"rank": True},
        {"rank": 1.5},
        {"seed": "x"},
        {"train_mlp": False, "train_attn": False, "train_unembed": False},
    ],
)
def test_invalid_model_options_are_refused_before_sending(server, service, arguments):
    with pytest.raises(InvalidInputError):
        service().create_lora_training_client(**{"base_model": "m", **arguments})
    assert server.requests == []


def test_error_of_the_service_on_create_model_is_raised(server, service):
    server.on_future("model", failed("unknown model"))
    with pytest.raises(RequestFailedError, match="unknown model"):
        new_trainer(service())


# -- seq_ids and order ---------------------------------------------------------------------------


def test_seq_ids_start_at_1_without_gaps(server, trainer):
    data = [datum(1, 2)]
    waiting: list[Any] = [
        trainer.forward_backward(data, "cross_entropy"),
        trainer.optim_step(),
        trainer.forward(data, "cross_entropy"),
        trainer.save_state("a"),
        trainer.save_weights_for_sampler("a"),
        trainer.save_weights_external("a"),
        trainer.load_state(PATH),
        trainer.create_sampling_client(PATH),  # takes no seq_id
        trainer.forward_backward(data, "cross_entropy"),
    ]
    for each in waiting:
        if isinstance(each, tinkex.APIFuture):
            each.result(10)
    assert numbers(server) == list(range(1, 9))


def test_each_model_has_its_own_seq_ids(server, service):
    answer_training(server)
    client = service()
    first, second = new_trainer(client), new_trainer(client)
    for trainer in (first, second, first):
        trainer.optim_step().result(10)
    assert numbers(server) == [1, 1, 2]


def test_later_operations_wait_for_a_delayed_send(server, trainer):
    held = threading.Event()
    server.on(SAVE, Answer(promise("save").body, wait_for=held), Answer({"path": PATH}))
    server.on_future("save", Answer({"path": PATH}))
    lock = threading.Lock()
    called: list[str] = ["first"]
    waiting = [trainer.save_state("first")]
    server.wait_for(SAVE)

    def call(name: str) -> None:
        with lock:
            called.append(name)
            waiting.append(trainer.save_state(name))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(call, (f"thread-{number}" for number in range(20))))

    async def tasks() -> None:
        async def one(name: str) -> None:
            called.append(name)
            waiting.append(await trainer.save_state_async(name))

        await asyncio.gather(*(one(f"task-{number}") for number in range(20)))

    asyncio.run(tasks())
    assert len(server.asked(SAVE)) == 1
    held.set()
    for each in waiting:
        each.result(10)
    assert [request.json["path"] for request in server.asked(SAVE)] == called
    assert numbers(server) == list(range(1, 42))


def test_operation_is_sent_while_the_service_still_runs_the_one_before(server, trainer):
    held = threading.Event()
    server.on(PASS, promise("pass"))
    server.on_future("pass", Answer(output(), wait_for=held))
    forward = trainer.forward_backward([datum(1)], "cross_entropy")
    assert trainer.optim_step().result(10)
    assert not forward.done()
    held.set()
    forward.result(10)


def test_later_operations_wait_while_a_large_pass_is_encoded(server, trainer):
    many = [datum(*range(1, 20_001)) for _ in range(5)]  # large enough to be encoded on a thread
    waiting = [trainer.forward_backward(many, "cross_entropy"), trainer.optim_step()]
    for each in waiting:
        each.result(10)
    assert [request.path.rpartition("/")[2] for request in operations(server)] == [
        "forward_backward",
        "optim_step",
    ]


def test_failed_operation_does_not_block_later_ones(server, trainer):
    server.on(STEP, Answer({"detail": "no"}, 400), promise("step"), Answer({}, 410), Answer({}))
    server.on_future("step", failed("diverged", "server"))
    with pytest.raises(BadRequestError):
        trainer.optim_step().result(10)
    with pytest.raises(RequestFailedError, match="diverged"):
        trainer.optim_step().result(10)
    with pytest.raises(GoneError):
        trainer.optim_step().result(10)
    trainer.optim_step().result(10)
    assert numbers(server) == [1, 2, 3, 4]  # a refused seq_id is not used again


def test_cancelled_operation_is_still_sent_in_order(server, trainer):
    held = threading.Event()
    server.on(SAVE, Answer({"path": PATH}, wait_for=held), Answer({"path": PATH}))
    first, dropped, last = (trainer.save_state(name) for name in ("a", "b", "c"))
    server.wait_for(SAVE)
    assert dropped.cancel()
    held.set()
    first.result(10)
    last.result(10)
    assert [request.json["path"] for request in server.asked(SAVE)] == ["a", "b", "c"]


def test_timeout_is_raised_while_an_earlier_operation_is_stuck(server, trainer, clock):
    held = threading.Event()
    server.on(STEP, Answer({}, wait_for=held), Answer({}))
    stuck = trainer.optim_step()
    server.wait_for(STEP)
    with pytest.raises(APITimeoutError):
        trainer.save_state("late", timeout=0.02).result(10)
    clock.advance(1)
    last = trainer.optim_step()
    held.set()
    stuck.result(10)
    last.result(10)
    # The expired operation was not sent and took no seq_id, so the service waits for nothing.
    assert server.asked(SAVE) == []
    assert numbers(server) == [1, 2]


def test_send_without_answer_is_retried_with_the_same_seq_id(server, trainer):
    server.on(STEP, Answer({}, 503), Answer({}, 409), Answer({}))
    trainer.optim_step().result(10)
    assert numbers(server) == [1, 1, 1]
    keys = {request.headers["x-idempotency-key"] for request in server.asked(STEP)}
    assert len(keys) == 1


# -- chunks --------------------------------------------------------------------------------------


def sizes(server: ScriptedServer) -> list[int]:
    """Datums per request, in the order of their seq_ids."""
    return [len(input_of(request).data) for request in sorted(server.asked(PASS), key=seq_of)]


@pytest.mark.parametrize(("count", "chunks"), [(1, [1]), (1024, [1024]), (1025, [1024, 1])])
def test_request_has_at_most_1024_datums(server, trainer, count, chunks):
    result = trainer.forward_backward([datum(1)] * count, "cross_entropy").result(10)
    assert sizes(server) == chunks
    assert len(result.loss_fn_outputs) == count
    assert result.metrics == {"loss:sum": float(count)}


def test_request_has_at_most_5_million_bytes(server, trainer):
    hundred_kilobytes = datum(*range(6250))  # 4 bytes of input, 8 of target, 4 of weight each
    trainer.forward_backward([hundred_kilobytes] * 51, "cross_entropy").result(20)
    assert sizes(server) == [50, 1]


def test_service_flags_set_the_chunk_limits(server, service):
    answer_training(server)
    flags(server, fwdbwd_max_chunk_len=2, fwdbwd_max_chunk_bytes_count=100)
    trainer = new_trainer(service())
    trainer.forward_backward([datum(1)] * 5, "cross_entropy").result(10)
    assert sizes(server) == [2, 2, 1]
    trainer.forward_backward([datum(1, 2, 3, 4)] * 2, "cross_entropy").result(10)  # 64 bytes each
    assert sizes(server)[3:] == [1, 1]


def test_first_chunk_is_sent_last(server, service):
    answer_training(server)
    flags(server, fwdbwd_max_chunk_len=1)
    trainer = new_trainer(service())
    forward = trainer.forward_backward([datum(number) for number in range(1, 5)], "cross_entropy")
    trainer.optim_step().result(10)
    forward.result(10)
    arrived = numbers(server)
    assert sorted(arrived[:3]) == [2, 3, 4]
    assert arrived[3:] == [1, 5]


def test_chunks_are_sent_one_after_another_without_the_parallel_flag(server, service):
    answer_training(server)
    flags(server, fwdbwd_max_chunk_len=1, parallel_fwdbwd_chunks=False)
    data = [datum(number) for number in range(1, 5)]
    new_trainer(service()).forward_backward(data, "cross_entropy").result(10)
    assert numbers(server) == [1, 2, 3, 4]
    tokens = [input_of(request).data[0].model_input.to_ints() for request in server.asked(PASS)]
    assert tokens == [[1], [2], [3], [4]]


def test_chunk_results_are_combined_in_order(server, service):
    flags(server, fwdbwd_max_chunk_len=2)
    server.on(PASS, lambda request: promise(f"p-{seq_of(request)}"))
    rows = [logprobs_of(1, -float(number)) for number in range(5)]
    server.on_future("p-1", Answer(output(*rows[:2], loss__sum=1.0, norm__mean=1.0, peak__max=3.0)))
    server.on_future(
        "p-2", Answer(output(*rows[2:4], loss__sum=2.0, norm__mean=2.0, peak__max=9.0))
    )
    server.on_future("p-3", Answer(output(*rows[4:], loss__sum=4.0, norm__mean=7.0, peak__max=5.0)))
    result = new_trainer(service()).forward([datum(1)] * 5, "cross_entropy").result(10)
    got = [each["logprobs"].tolist() for each in result.loss_fn_outputs]
    assert got == [[-0.0], [-1.0], [-2.0], [-3.0], [-4.0]]
    assert result.metrics == {"loss:sum": 7.0, "norm:mean": 13 / 5, "peak:max": 9.0}


def test_failed_chunk_fails_the_call(server, service):
    flags(server, fwdbwd_max_chunk_len=1)
    answer_training(server)
    server.on(PASS, lambda request: promise(f"p-{seq_of(request)}"))
    server.on_future("p-1", Answer(output()))
    server.on_future("p-2", failed("bad datum"))
    server.on_future("p-3", Answer({}, 408))
    trainer = new_trainer(service())
    with pytest.raises(RequestFailedError, match="bad datum"):
        trainer.forward_backward([datum(1)] * 3, "cross_entropy").result(10)
    trainer.optim_step().result(10)
    assert numbers(server)[-1] == 4


def test_refused_chunk_fails_the_call(server, service):
    flags(server, fwdbwd_max_chunk_len=1)
    answer_training(server)

    def refuse_second(request: Request) -> Answer:
        return Answer({"detail": "no"}, 400) if seq_of(request) == 2 else answer_pass(request)

    server.on(PASS, refuse_second)
    trainer = new_trainer(service())
    with pytest.raises(BadRequestError):
        trainer.forward_backward([datum(1)] * 3, "cross_entropy").result(10)
    # The first chunk was sent nevertheless: the service would wait for its seq_id.
    assert sorted(seq_of(request) for request in server.asked(PASS)) == [1, 2, 3]
    assert trainer.optim_step().result(10).success


def tagged(request_id: str) -> Answer:
    """The promise of a service that counts the gradients of all chunks or of none."""
    return Answer({"request_id": request_id}, headers={"x-tinkex-pass": "all-or-nothing"})


def by_seq(answers: dict[int, Answer]) -> Callable[[Request], Answer]:
    return lambda request: answers[seq_of(request)]


def test_chunks_of_one_call_share_a_tag_with_their_index(server, service):
    flags(server, fwdbwd_max_chunk_len=2)
    server.on(PASS, promise("p"))
    server.on_future("p", Answer(output()))
    trainer = new_trainer(service())
    for _ in range(2):
        trainer.forward_backward([datum(1)] * 5, "cross_entropy").result(10)
    trainer.forward([datum(1)] * 3, "cross_entropy").result(10)
    trainer.forward_backward([datum(1)], "cross_entropy").result(10)
    tags = [request.headers.get("x-tinkex-pass") for request in server.asked(PASS)]
    first, second = ({tag.partition(" ")[0] for tag in tags[at : at + 3] if tag} for at in (0, 3))
    assert len(first) == len(second) == 1
    assert first != second
    assert sorted(tag.partition(" ")[2] for tag in tags[:3] if tag) == ["1/3", "2/3", "3/3"]
    assert tags[6:] == [None] * 3  # forward passes and passes of one request have no tag


@pytest.mark.parametrize("text", ["data.1.target_tokens: is required", "data[1]: is bad"])
def test_error_names_the_datum_by_its_index_in_the_callers_list(server, service, text):
    flags(server, fwdbwd_max_chunk_len=2)
    server.on(PASS, by_seq({1: tagged("first"), 2: tagged("p"), 3: tagged("p")}))
    server.on_future("first", Answer(output()))
    server.on_future("p", failed(text))
    call = new_trainer(service()).forward_backward([datum(1)] * 6, "cross_entropy")
    with pytest.raises(RequestFailedError) as caught:
        call.result(10)
    assert str(caught.value).startswith(text.replace("1", "3"))
    assert "request 2 of 3 (data 2 to 3)" in str(caught.value)
    assert "none was accumulated" in str(caught.value)


def test_error_of_the_first_failed_chunk_is_raised(server, service):
    flags(server, fwdbwd_max_chunk_len=1)
    server.on(PASS, by_seq({2: tagged("b"), 3: tagged("c"), 1: tagged("a")}))
    polled = threading.Event()
    server.on_future("a", Answer(failed("the cause").body, wait_for=polled))
    server.on_future("b", failed("a consequence"))
    server.on_future("c", failed("a consequence"))
    call = new_trainer(service()).forward_backward([datum(1)] * 3, "cross_entropy")
    server.wait_for(POLL, 4)
    polled.set()
    with pytest.raises(RequestFailedError, match="the cause"):
        call.result(10)


def test_error_explains_how_to_clear_gradients_of_a_half_accepted_pass(server, service):
    flags(server, fwdbwd_max_chunk_len=1)
    server.on(PASS, by_seq({1: promise("a"), 2: promise("b")}))
    server.on_future("a", Answer(output()))
    server.on_future("b", failed("out of memory"))
    call = new_trainer(service()).forward_backward([datum(1)] * 2, "cross_entropy")
    with pytest.raises(RequestFailedError) as caught:
        call.result(10)
    assert "keeps the gradients of the requests that succeeded" in str(caught.value)
    assert "load_state_with_optimizer" in str(caught.value)
    assert "learning_rate=0" in str(caught.value)


def test_error_of_a_single_request_call_is_not_changed(server, trainer):
    server.on(PASS, promise("p"))
    server.on_future("p", failed("data.0.target_tokens: is required"))
    with pytest.raises(RequestFailedError) as caught:
        trainer.forward_backward([datum(1)], "cross_entropy").result(10)
    assert str(caught.value) == "data.0.target_tokens: is required"


# -- services without protobuf --------------------------------------------------------------------


def json_only(refusal: Answer) -> Callable[[Request], Answer]:
    def answer(request: Request) -> Answer:
        return promise("p") if request.headers["content-type"] == "application/json" else refusal

    return answer


@pytest.mark.parametrize(
    "refusal",
    [
        Answer({"detail": "Unsupported Media Type"}, 415),
        Answer({"detail": "cannot read application/x-protobuf"}, 400),
        Answer({"detail": [{"type": "json_invalid", "msg": "JSON decode error"}]}, 422),
        Answer({"detail": [{"msg": "Input should be a valid dictionary or object"}]}, 422),
    ],
)
def test_passes_are_sent_as_json_after_protobuf_was_refused(server, trainer, refusal):
    server.on(PASS, json_only(refusal))
    server.on(FORWARD, promise("p"))
    server.on_future("p", Answer(output()))
    trainer.forward_backward([datum(1, 2)], "cross_entropy").result(10)
    trainer.forward_backward([datum(1, 2)], "cross_entropy").result(10)
    trainer.forward([datum(1, 2)], "cross_entropy").result(10)
    kinds = [request.headers["content-type"] for request in server.asked(PASS)]
    assert kinds == ["application/x-protobuf", "application/json", "application/json"]
    first, second = (request.json for request in server.asked(PASS)[1:])
    assert (first["seq_id"], second["seq_id"]) == (1, 2)
    assert first["forward_backward_input"]["loss_fn"] == "cross_entropy"
    (forward,) = server.asked(FORWARD)
    assert (forward.json["seq_id"], "forward_input" in forward.json) == (3, True)


def test_forward_pass_falls_back_to_json_too(server, trainer):
    server.on(PASS, Answer({"detail": "no"}, 415))
    server.on(FORWARD, promise("p"))
    server.on_future("p", Answer(output()))
    trainer.forward([datum(1)], "cross_entropy").result(10)
    assert len(server.asked(PASS)) == len(server.asked(FORWARD)) == 1


def test_refusal_is_raised_if_protobuf_was_accepted_before(server, trainer):
    server.on(PASS, promise("p"), Answer({"detail": "protobuf: bad field"}, 400))
    server.on_future("p", Answer(output()))
    trainer.forward_backward([datum(1)], "cross_entropy").result(10)
    with pytest.raises(tinkex.BadRequestError, match="bad field"):
        trainer.forward_backward([datum(1)], "cross_entropy").result(10)
    assert len(server.asked(PASS)) == 2


def test_first_refusal_is_raised_if_json_is_refused_too(server, trainer):
    refused = Answer({"detail": "data.0: content type of the image"}, 422)
    server.on(PASS, refused, Answer({"detail": "request 1 was refused before"}, 400))
    with pytest.raises(tinkex.UnprocessableEntityError, match="content type of the image"):
        trainer.forward_backward([datum(1)], "cross_entropy").result(10)
    kinds = [request.headers["content-type"] for request in server.asked(PASS)]
    assert kinds == ["application/x-protobuf", "application/json"]


def test_other_refusals_do_not_cause_the_json_fallback(server, trainer):
    server.on(PASS, Answer({"detail": "data.0: too long"}, 422))
    with pytest.raises(tinkex.UnprocessableEntityError):
        trainer.forward_backward([datum(1)], "cross_entropy").result(10)
    assert len(server.asked(PASS)) == 1


@pytest.mark.parametrize("zstd", [False, True])
def test_pass_is_compressed_if_the_service_flag_says_so(server, service, zstd):
    answer_training(server)
    flags(server, proto_compress_fwdbwd=zstd)
    new_trainer(service()).forward_backward([datum(*[1] * 1000)], "cross_entropy").result(10)
    (request,) = server.asked(PASS)
    assert request.headers.get("content-encoding") == ("zstd" if zstd else None)
    assert request.headers["content-type"] == "application/x-protobuf"
    assert (len(request.body) < 1000) is zstd
    assert input_of(request).data[0].model_input.length == 1000


# -- content of a pass ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["forward", "forward_backward"])
def test_pass_request_has_data_loss_and_settings(server, trainer, name):
    getattr(trainer, name)([datum(1, 2)], "ppo", {"clip_low_threshold": 0.5}).result(10)
    sent = pass_of(server.asked(PASS)[0])
    assert isinstance(sent, types.ForwardRequest) is (name == "forward")
    assert (sent.model_id, sent.seq_id) == ("s-1:train:0", 1)
    inputs = input_of(server.asked(PASS)[0])
    assert (inputs.loss_fn, inputs.loss_fn_config) == ("ppo", {"clip_low_threshold": 0.5})
    assert inputs.data == [datum(1, 2)]


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (1, 1.0),
        (" 0.5 ", 0.5),
        (np.float32(2.0), 2.0),
        ("1e2", 100.0),
    ],
)
def test_loss_settings_are_sent_as_numbers(server, trainer, given, sent):
    trainer.forward_backward([datum(1)], "ppo", {"setting": given}).result(10)
    assert input_of(server.asked(PASS)[0]).loss_fn_config == {"setting": sent}


@pytest.mark.parametrize("loss", ["custom", "stable_reinforce"])
def test_settings_of_some_losses_may_be_text(server, trainer, loss):
    trainer.forward_backward([datum(1)], loss, {"mode": "exact"}).result(10)
    assert input_of(server.asked(PASS)[0]).loss_fn_config == {"mode": "exact"}


def test_loss_id_of_digits_stays_text(server, trainer):
    trainer.forward_backward([datum(1)], "custom", {"loss_id": "123"}).result(10)
    assert input_of(server.asked(PASS)[0]).loss_fn_config == {"loss_id": "123"}


IMAGE = types.ModelInput(chunks=[types.ImageChunk(data=b"abc", format="png")])


def test_row_count_is_not_checked_for_inputs_with_images(server, trainer):
    seen = types.Datum(IMAGE, {"target_tokens": [1, 2], "weights": [1.0, 1.0]})
    trainer.forward_backward([seen], "cross_entropy").result(10)
    assert input_of(server.asked(PASS)[0]).data == [seen]


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ([], "data"),
        (None, "data"),
        (datum(1), "data"),
        ([datum(1), "text"], "data.1"),
        (
            [types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [1]})],
            "data.0.loss_fn_inputs.target_tokens",
        ),
        (
            [
                datum(1),
                types.Datum(
                    types.ModelInput.from_ints([1]),
                    {"target_tokens": [1], "weights": [1.0, 1.0]},
                ),
            ],
            "data.1.loss_fn_inputs.weights",
        ),
    ],
)
@pytest.mark.parametrize("name", ["forward", "forward_backward"])
def test_invalid_data_is_refused_before_sending(server, trainer, name, data, field):
    with pytest.raises(InvalidInputError) as caught:
        getattr(trainer, name)(data, "cross_entropy")
    assert caught.value.field == field
    trainer.optim_step().result(10)
    assert numbers(server) == [1]


@pytest.mark.parametrize(
    ("loss", "config", "named"),
    [
        ("mse", None, "cross_entropy"),
        (None, None, "loss_fn"),
        ("ppo", [("a", 1)], "loss_fn_config"),
        ("ppo", {1: 1.0}, "loss_fn_config"),
        ("ppo", {"a": True}, "loss_fn_config.a"),
        ("ppo", {"a": None}, "loss_fn_config.a"),
        ("ppo", {"a": [1.0]}, "loss_fn_config.a"),
        ("ppo", {"a": torch.tensor([1.0])}, "loss_fn_config.a"),
        ("ppo", {"a": math.nan}, "loss_fn_config.a"),
        ("ppo", {"a": math.inf}, "loss_fn_config.a"),
        ("ppo", {"a": "nan"}, "loss_fn_config.a"),
        ("ppo", {"a": "high"}, "loss_fn_config.a: expected a number, got 'high'"),
        ("cross_entropy", {"a": ""}, "loss_fn_config.a"),
    ],
)
def test_invalid_loss_is_refused_before_sending(server, trainer, loss, config, named):
    with pytest.raises(InvalidInputError, match=named):
        trainer.forward_backward([datum(1)], loss, config)
    assert server.asked(PASS) == []


# -- steps ---------------------------------------------------------------------------------------


def test_optim_step_sends_its_parameters(server, trainer):
    response = trainer.optim_step(types.AdamParams(learning_rate=0.5, grad_clip_norm=1.0)).result(
        10
    )
    assert response.success
    sent = server.asked(STEP)[0].json
    assert (sent["model_id"], sent["seq_id"], sent["type"]) == ("s-1:train:0", 1, "optim_step")
    assert sent["adam_params"]["learning_rate"] == 0.5
    assert sent["adam_params"]["grad_clip_norm"] == 1.0
    trainer.optim_step(adam_params=types.AdamParams(learning_rate=0.25)).result(10)
    assert server.asked(STEP)[1].json["adam_params"]["learning_rate"] == 0.25


def test_optim_step_sends_the_type_of_another_optimizer(server, trainer):
    trainer.optim_step(types.DimuonParams(learning_rate=0.5)).result(10)
    sent = server.asked(STEP)[0].json
    assert "adam_params" not in sent
    assert sent["optimizer_params"]["type"] == "dimuon"


def test_optim_params_and_adam_params_together_are_refused(server, trainer):
    with pytest.raises(InvalidInputError, match="not both"):
        trainer.optim_step(types.AdamParams(), adam_params=types.AdamParams())
    assert server.asked(STEP) == []


# -- weights -------------------------------------------------------------------------------------


def test_save_state_sends_name_ttl_and_metadata(server, trainer):
    saved = trainer.save_state("a", 3600, overwrite=True, user_metadata={"k": "v"}).result(10)
    assert saved.path == PATH
    assert server.asked(SAVE)[0].json == {
        "model_id": "s-1:train:0",
        "path": "a",
        "seq_id": 1,
        "ttl_seconds": 3600,
        "overwrite": True,
        "user_metadata": {"k": "v"},
        "type": "save_weights",
    }


def test_save_weights_for_sampler_sends_name_and_ttl(server, trainer):
    saved = trainer.save_weights_for_sampler("a", 3600, {"k": "v"}).result(10)
    assert saved == types.SaveWeightsForSamplerResponse(
        path="tinker://s-1:train:0/sampler_weights/a"
    )
    assert server.asked(SAVE_SAMPLER)[0].json == {
        "model_id": "s-1:train:0",
        "path": "a",
        "seq_id": 1,
        "ttl_seconds": 3600,
        "user_metadata": {"k": "v"},
        "type": "save_weights_for_sampler",
    }


def test_save_weights_external_sends_the_recipients(server, trainer):
    saved = trainer.save_weights_external("a", 3600, ["age1abc"]).result(10)
    assert saved.path == "tinker://r/external/a"
    sent = server.asked(EXTERNAL)[0].json
    assert (sent["path"], sent["ttl_seconds"], sent["age_encryption_recipients"]) == (
        "a",
        3600,
        ["age1abc"],
    )


@pytest.mark.parametrize(
    ("method", "optimizer"), [("load_state", False), ("load_state_with_optimizer", True)]
)
def test_load_sends_whether_to_load_the_optimizer(server, trainer, method, optimizer):
    getattr(trainer, method)(PATH, "token").result(10)
    assert server.asked(LOAD)[0].json == {
        "model_id": "s-1:train:0",
        "seq_id": 1,
        "path": PATH,
        "optimizer": optimizer,
        "weights_access_token": "token",
        "type": "load_weights",
    }


@pytest.mark.parametrize("name", ["", "  ", None, 7, "a/b", ".", ".."])
@pytest.mark.parametrize(
    "method", ["save_state", "save_weights_for_sampler", "save_weights_external"]
)
def test_invalid_name_is_refused_before_sending(server, trainer, method, name):
    with pytest.raises(InvalidInputError, match="name"):
        getattr(trainer, method)(name)
    trainer.optim_step().result(10)
    assert numbers(server) == [1]


@pytest.mark.parametrize("ttl", [0, -1, "soon"])
@pytest.mark.parametrize(
    "method", ["save_state", "save_weights_for_sampler", "save_weights_external"]
)
def test_invalid_ttl_is_refused_before_sending(server, trainer, method, ttl):
    with pytest.raises(InvalidInputError) as caught:
        getattr(trainer, method)("a", ttl)
    assert caught.value.field == "ttl_seconds"
    trainer.optim_step().result(10)
    assert numbers(server) == [1]


@pytest.mark.parametrize("path", ["a", "tinker://x", "tinker://a/b/c", None])
def test_invalid_load_path_is_refused_before_sending(server, trainer, path):
    with pytest.raises(InvalidPathError):
        trainer.load_state(path)
    assert operations(server) == []


@pytest.mark.parametrize("method", ["save_weights_for_sampler", "save_weights_external"])
def test_save_answered_without_a_path_is_an_error(server, trainer, method):
    server.on(SAVE_SAMPLER, Answer({}))
    server.on(EXTERNAL, Answer({}))
    with pytest.raises(APIResponseValidationError, match="returned no path"):
        getattr(trainer, method)("a").result(10)


# -- samplers of the current weights -------------------------------------------------------------


def test_sampler_without_a_name_uses_a_sampling_session(server, service):
    client = service()
    new_sampler(client)
    trainer = new_trainer(client)
    server.on(SAVE_SAMPLER, Answer({"sampling_session_id": "s-1:sample:1"}))
    sampler = trainer.save_weights_and_get_sampling_client()
    assert sampler._sampling_session_id == "s-1:sample:1"
    assert (
        server.asked(SAVE_SAMPLER)[0].json
        == {
            "model_id": "s-1:train:0",
            "seq_id": 1,
            "sampling_session_seq_id": 1,  # 0 belongs to the sampler created before: all share one counter
            "type": "save_weights_for_sampler",
        }
    )
    assert len(server.asked(CREATE_SAMPLER)) == 1


def test_reused_sampler_name_warns_and_is_not_sent(server, service, caplog):
    server.on(
        SAVE_SAMPLER,
        Answer({"path": "tinker://s-1:train:0/sampler_weights/eval"}),
        Answer({"sampling_session_id": "s-1:sample:7"}),
    )
    trainer = new_trainer(service())
    trainer.save_weights_and_get_sampling_client(name="eval")
    again = trainer.save_weights_and_get_sampling_client(name="eval")
    assert again._sampling_session_id == "s-1:sample:7"
    first, second = (each.json for each in server.asked(SAVE_SAMPLER))
    assert (first["path"], first.get("sampling_session_seq_id")) == ("eval", None)
    assert ("path" in second, second["sampling_session_seq_id"]) == (False, 1)
    assert any("already has a sampler checkpoint 'eval'" in message for message in caplog.messages)


def test_name_can_be_reused_after_a_server_error(server, service):
    path = "tinker://s-1:train:0/sampler_weights/eval"
    server.on(SAVE_SAMPLER, promise("first"), Answer({"path": path}))
    server.on_future("first", failed("engine died", "server"))
    trainer = new_trainer(service())
    with pytest.raises(RequestFailedError):
        trainer.save_weights_and_get_sampling_client(name="eval")
    trainer.save_weights_and_get_sampling_client(name="eval")
    assert [each.json["path"] for each in server.asked(SAVE_SAMPLER)] == ["eval", "eval"]


def test_sampler_with_a_name_is_saved_under_it(server, trainer):
    sampler = trainer.save_weights_and_get_sampling_client("best")
    assert sampler._sampling_session_id == "s-1:sample:0"
    sent = server.asked(SAVE_SAMPLER)[0].json
    assert sent["path"] == "best"
    assert "sampling_session_seq_id" not in sent
    assert server.asked(CREATE_SAMPLER)[0].json["model_path"] == (
        "tinker://s-1:train:0/sampler_weights/a"
    )


def test_sampler_sends_its_ttl(server, trainer):
    trainer.save_weights_and_get_sampling_client("best", ttl_seconds=60)
    assert server.asked(SAVE_SAMPLER)[0].json["ttl_seconds"] == 60
    with pytest.raises(InvalidInputError) as refused:
        trainer.save_weights_and_get_sampling_client("best", ttl_seconds=0)
    assert refused.value.field == "ttl_seconds"


def test_training_client_has_the_protocol_names_as_aliases(server, trainer):
    trainer.save_weights("a").result(10)
    trainer.load_weights("tinker://s-1:train:0/weights/a").result(10)
    trainer.load_weights_with_optimizer("tinker://s-1:train:0/weights/a").result(10)
    sampler = trainer.save_weights_and_get_sampling_client_sync("b")
    assert isinstance(sampler, tinkex.SamplingClient)
    assert server.asked(SAVE)[0].json["path"] == "a"
    assert [sent.json["optimizer"] for sent in server.asked(LOAD)] == [False, True]


def test_sampler_without_session_and_path_is_an_error(server, trainer):
    server.on(SAVE_SAMPLER, Answer({}))
    with pytest.raises(APIResponseValidationError):
        trainer.save_weights_and_get_sampling_client()


def test_save_weights_and_get_sampling_client_async_returns_the_sampler(server, trainer):
    server.on(SAVE_SAMPLER, Answer({"sampling_session_id": "x"}))
    sampler = asyncio.run(trainer.save_weights_and_get_sampling_client_async())
    assert sampler._sampling_session_id == "x"


def test_save_weights_and_get_sampling_client_submit_returns_a_future(server, trainer):
    server.on(SAVE_SAMPLER, Answer({"sampling_session_id": "x"}))
    sampler = trainer.save_weights_and_get_sampling_client_submit().result(10)
    assert sampler._sampling_session_id == "x"


def test_create_sampling_client_takes_no_seq_id(server, trainer):
    trainer.create_sampling_client("tinker://r/sampler_weights/a")
    assert server.asked(CREATE_SAMPLER)[0].json == {
        "session_id": "s-1",
        "sampling_session_seq_id": 0,
        "model_path": "tinker://r/sampler_weights/a",
        "type": "create_sampling_session",
    }
    trainer.optim_step().result(10)
    assert numbers(server) == [1]


# -- restoring -----------------------------------------------------------------------------------

Restore = Callable[..., tinkex.TrainingClient]


@pytest.fixture(params=[False, True], ids=["weights", "with optimizer"])
def optimizer(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def restore(client: tinkex.ServiceClient, optimizer: bool) -> Restore:
    if optimizer:
        return client.create_training_client_from_state_with_optimizer
    return client.create_training_client_from_state


def test_restore_uses_three_calls_without_the_flag(server, service, optimizer):
    answer_training(server)
    info = {"base_model": "b", "is_lora": True, "lora_rank": 8, "train_mlp": False}
    server.on(WEIGHTS_INFO, Answer(info))
    trainer = restore(service(), optimizer)(
        PATH, user_metadata={"a": "b"}, weights_access_token="t"
    )
    asked = server.asked(WEIGHTS_INFO)[0]
    assert asked.json == {"tinker_path": PATH}
    assert asked.headers["x-api-key"] == "t"  # the weights token is the key for weights_info
    created = server.asked(CREATE_MODEL)[0].json
    assert (created["base_model"], created["user_metadata"]) == ("b", {"a": "b"})
    assert created["lora_config"] == {
        "rank": 8,
        "train_mlp": False,
        "train_attn": True,
        "train_unembed": True,
    }
    loaded = server.asked(LOAD)[0].json
    assert (loaded["seq_id"], loaded["optimizer"]) == (1, optimizer)
    assert loaded["weights_access_token"] == "t"
    trainer.optim_step().result(10)
    assert numbers(server) == [1, 2]


def test_restore_uses_one_call_with_the_flag(server, service, optimizer):
    answer_training(server)
    flags(server, create_model_via_load_weights=True)
    trainer = restore(service(), optimizer)(PATH, "b", {"a": "b"}, "t")
    assert server.asked(LOAD)[0].json == {
        "session_id": "s-1",
        "model_seq_id": 0,
        "base_model": "b",
        "user_metadata": {"a": "b"},
        "path": PATH,
        "optimizer": optimizer,
        "weights_access_token": "t",
        "type": "load_weights",
    }
    assert trainer.model_id == "s-1:train:0"
    assert server.asked(CREATE_MODEL) == server.asked(WEIGHTS_INFO) == []
    trainer.optim_step().result(10)
    assert server.asked(STEP)[0].json["seq_id"] == 1


def test_restore_loads_the_optimizer_with_load_optimizer(server, service):
    answer_training(server)
    server.on(WEIGHTS_INFO, Answer({"base_model": "b", "is_lora": True}))
    service().create_training_client_from_state(PATH, load_optimizer=True)
    assert server.asked(WEIGHTS_INFO)[0].headers["x-api-key"] == "tml-test"
    assert server.asked(LOAD)[0].json["optimizer"] is True


def test_restored_model_uses_the_id_of_the_service(server, service):
    flags(server, create_model_via_load_weights=True)
    server.on(LOAD, promise("load"))
    server.on_future("load", Answer({"model_id": "named", "path": PATH}))
    assert service().create_training_client_from_state(PATH).model_id == "named"


@pytest.mark.parametrize("flag", [False, True])
def test_restore_accepts_metadata_as_second_argument(server, service, flag):
    answer_training(server)
    flags(server, create_model_via_load_weights=flag)
    server.on(WEIGHTS_INFO, Answer({"base_model": "b", "is_lora": True}))
    service().create_training_client_from_state(PATH, {"a": "b"})
    sent = server.asked(LOAD if flag else CREATE_MODEL)[0].json
    assert sent["user_metadata"] == {"a": "b"}
    assert sent.get("base_model") == (None if flag else "b")


@pytest.mark.parametrize("flag", [False, True])
def test_restored_model_without_metadata_gets_the_configured_metadata(server, service, flag):
    answer_training(server)
    flags(server, create_model_via_load_weights=flag)
    server.on(WEIGHTS_INFO, Answer({"base_model": "b", "is_lora": True}))
    config = tinkex.Config(base_url=server.url, api_key="tml-x", user_metadata={"a": "b"})
    service(config=config).create_training_client_from_state(PATH)
    assert server.asked(LOAD if flag else CREATE_MODEL)[0].json["user_metadata"] == {"a": "b"}


def test_restored_model_keeps_its_optimizer_type_by_default(server, service):
    answer_training(server)
    info = {"base_model": "b", "is_lora": True, "optimizer_config": {"type": "dimuon"}}
    server.on(WEIGHTS_INFO, Answer(info))
    client = service()
    client.create_training_client_from_state(PATH)
    client.create_training_client_from_state(PATH, optimizer=types.AdamOptimizerConfig())
    chosen = [each.json.get("optimizer_config") for each in server.asked(CREATE_MODEL)]
    assert chosen == [{"type": "dimuon", "version": 1}, None]  # AdamW is the default


@pytest.mark.parametrize(
    "info",
    [
        {"base_model": "b", "is_lora": False},
        {
            "base_model": "b",
            "is_lora": True,
            "train_mlp": False,
            "train_attn": False,
            "train_unembed": False,
        },
    ],
)
def test_checkpoint_without_a_lora_adapter_is_refused(server, service, info):
    server.on(WEIGHTS_INFO, Answer(info))
    with pytest.raises(InvalidInputError, match=r"LoRA|at least one"):
        service().create_training_client_from_state(PATH)
    assert server.asked(CREATE_MODEL) == []


def test_model_is_unloaded_if_restoring_its_weights_fails(server, service, optimizer):
    server.on(WEIGHTS_INFO, Answer({"base_model": "b", "is_lora": True, "lora_rank": 4}))
    server.on(LOAD, promise("loading"))
    server.on_future("loading", failed("torn"))
    server.on(UNLOAD, Answer({"model_id": "s-1:train:0"}))
    with pytest.raises(RequestFailedError, match="torn"):
        restore(service(), optimizer)(PATH)
    (sent,) = server.wait_for(UNLOAD)
    assert sent.json["model_id"] == "s-1:train:0"


def test_failing_step_observer_does_not_fail_the_step(server, trainer, caplog):
    answer_training(server)
    seen = []
    trainer.observe_steps(lambda: 1 / 0)
    trainer.observe_steps(lambda: seen.append(1))
    trainer.optim_step().result(10)
    assert seen == [1]
    assert "Step observer failed" in caplog.text


def test_invalid_checkpoint_path_is_refused_before_sending(server, service, optimizer):
    with pytest.raises(InvalidPathError):
        restore(service(), optimizer)("checkpoint")
    assert server.requests == []


# -- model information ---------------------------------------------------------------------------


def info(**data: Any) -> Answer:
    return Answer({"model_id": "m", "model_data": data, "is_lora": True, "lora_rank": 4})


def test_get_info_needs_no_polling(server, trainer):
    server.on(INFO, info(model_name="some/model"))
    assert trainer.get_info().model_data.model_name == "some/model"
    assert asyncio.run(trainer.get_info_async()).lora_rank == 4
    assert server.asked(INFO)[0].json == {"model_id": "s-1:train:0", "type": "get_info"}


@pytest.mark.parametrize("at_once", [True, False])
def test_unload_is_sent_in_order_and_waits_for_its_result(server, trainer, at_once):
    held = threading.Event()
    server.on(STEP, Answer({}, wait_for=held), Answer({}))
    server.on(UNLOAD, Answer({"model_id": "m"}) if at_once else promise("unload"))
    server.on_future("unload", Answer({"model_id": "m"}))
    step, unload = trainer.optim_step(), trainer.unload_model()
    server.wait_for(STEP)
    assert server.asked(UNLOAD) == []
    held.set()
    assert unload.result(10).model_id == "m"
    step.result(10)
    trainer.optim_step().result(10)
    assert numbers(server) == [1, 2]


def test_console_url_needs_no_request(server, service):
    client = service()
    assert client.get_console_url().endswith("/sessions")
    assert server.requests == []
    trainer = new_trainer(client)
    assert trainer._guaranteed_model_id() == trainer.model_id
    assert trainer.get_console_url().endswith("/training_runs/s-1:train:0")
    client.close().result(10)
    assert client.get_console_url().endswith("/sessions/s-1")


class Letters:
    """A tokenizer with one token per letter."""

    def __init__(self, name: str, revision: str | None) -> None:
        self.name, self.revision = name, revision

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture
def letters() -> Iterator[None]:
    set_tokenizer_loader(Letters)
    yield
    set_tokenizer_loader(None)


@pytest.mark.usefixtures("letters")
def test_tokenizer_is_the_one_stated_by_the_service(server, trainer):
    server.on(INFO, info(model_name="some/model", tokenizer_id="its/tokenizer:v2"))
    assert trainer.get_tokenizer().name == "its/tokenizer"
    assert trainer.encode("ab") == trainer.encode_text("ab") == [97, 98]
    assert trainer.decode([97, 98]) == "ab"


@pytest.mark.usefixtures("letters")
def test_tokenizer_is_derived_from_the_model_name(server, trainer):
    server.on(INFO, info(model_name="org/model/variant"))
    assert trainer.get_tokenizer().name == "org/model"


def test_model_without_a_name_has_no_tokenizer(server, trainer):
    server.on(INFO, info())
    with pytest.raises(InvalidInputError, match="neither"):
        trainer.get_tokenizer()


def test_encode_raises_errors_of_the_service(server, trainer):
    server.on(INFO, Answer({"detail": "gone"}, 410))
    with pytest.raises(GoneError):
        trainer.encode("a")


# -- queue states --------------------------------------------------------------------------------


def test_paused_model_is_logged_and_observers_are_called(server, trainer, caplog):
    paused = {"type": "try_again", "queue_state": "paused_rate_limit"}
    server.on(STEP, promise("step"))
    server.on_future("step", Answer(paused, 408), Answer({}))
    heard: list[Any] = []
    trainer.observe_queue_state(heard.append)
    trainer.optim_step().result(10)
    assert heard == [types.QueueState.PAUSED_RATE_LIMIT]
    assert (
        "Training is paused for s-1:train:0. Reason: concurrent training clients rate limit hit"
        in caplog.text
    )


# -- custom losses -------------------------------------------------------------------------------


def total(_: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    loss = torch.stack([each.sum() for each in logprobs]).sum()
    return loss, {"count": torch.tensor(2.0)}


def weights_of(request: Request) -> list[Any]:
    return [each.loss_fn_inputs["weights"].tolist() for each in input_of(request).data]


def test_custom_loss_sends_its_gradient_as_weights(server, trainer):
    result = trainer.forward_backward_custom([datum(5, 6)], total).result(10)
    first, second = server.asked(PASS)
    assert isinstance(pass_of(first), types.ForwardRequest)
    assert isinstance(pass_of(second), types.ForwardBackwardRequest)
    assert (seq_of(first), seq_of(second)) == (1, 2)
    assert weights_of(first) == [[0.0, 0.0]]
    assert weights_of(second) == [[-1.0, -1.0]]
    assert {input_of(each).loss_fn for each in (first, second)} == {"cross_entropy"}
    for request in (first, second):
        (sent,) = input_of(request).data
        assert sent.model_input == datum(5, 6).model_input
        assert sent.loss_fn_inputs["target_tokens"].tolist() == [5, 6]
    assert result.metrics == {"loss:sum": -2.0, "surrogate_loss:sum": 1.0, "count": 2.0}
    assert result.loss == -2.0
    assert result.loss_fn_outputs[0]["logprobs"].tolist() == [-1.0, -1.0]


def test_custom_loss_sends_only_targets_and_weights(server, trainer):
    extra = types.Datum(
        types.ModelInput.from_ints([1]),
        {"target_tokens": [1], "advantages": [2.0], "logprobs": [-1.0]},
    )
    seen: list[Any] = []

    def loss(data: Any, logprobs: Any) -> Any:
        seen.extend(data)
        return logprobs[0].sum() * 3, {}

    trainer.forward_backward_custom([extra], loss).result(10)
    assert seen == [extra]
    for request in server.asked(PASS):
        assert set(input_of(request).data[0].loss_fn_inputs) == {"target_tokens", "weights"}
    assert weights_of(server.asked(PASS)[1]) == [[-3.0]]


def test_metrics_of_the_custom_loss_override_those_of_the_service(server, trainer):
    def loss(_: Any, logprobs: Any) -> Any:
        return logprobs[0].sum(), {"loss:sum": 9, 1: np.float32(2.5)}

    result = trainer.forward_backward_custom([datum(1)], loss).result(10)
    assert result.metrics == {"loss:sum": 9.0, "surrogate_loss:sum": 1.0, "1": 2.5}


def test_metrics_of_the_custom_loss_may_have_any_type(server, trainer):
    own = {"kind": "mine", "each": [1, 2], "none": None}

    def loss(_: Any, logprobs: Any) -> Any:
        return logprobs[0].sum(), {**own, "rows": logprobs[0]}

    result = trainer.forward_backward_custom([datum(1, 2)], loss).result(10)
    assert own.items() <= result.metrics.items()
    assert result.metrics["rows"] == [-1.0, -1.0]


def test_later_operations_wait_for_both_passes_of_a_custom_loss(server, trainer):
    computing, go_on = threading.Event(), threading.Event()

    def slow(data: Any, logprobs: Any) -> Any:
        computing.set()
        assert go_on.wait(10)
        return total(data, logprobs)

    custom = trainer.forward_backward_custom([datum(1)], slow)
    step = trainer.optim_step()
    assert computing.wait(10)
    assert server.asked(STEP) == []
    go_on.set()
    custom.result(10)
    step.result(10)
    assert numbers(server) == [1, 2, 3]


def test_custom_loss_that_calls_its_own_client_is_refused(server, trainer):
    def impatient(data: Any, logprobs: Any) -> Any:
        trainer.optim_step().result(10)
        return total(data, logprobs)

    with pytest.raises(InvalidInputError, match="its own training client"):
        trainer.forward_backward_custom([datum(1)], impatient).result(10)
    assert trainer.optim_step().result(10).success


def test_custom_loss_over_many_chunks_gets_all_logprobs_in_order(server, service):
    answer_training(server)
    flags(server, fwdbwd_max_chunk_len=2)

    def weighted(data: Any, logprobs: Any) -> Any:
        return sum(each.sum() * len(each) for each in logprobs), {}

    data = [datum(*range(1, length + 1)) for length in range(1, 6)]
    new_trainer(service()).forward_backward_custom(data, weighted).result(10)
    requests = sorted(server.asked(PASS), key=seq_of)
    assert [seq_of(request) for request in requests] == [1, 2, 3, 4, 5, 6]
    sent = [row for request in requests[3:] for row in weights_of(request)]
    assert sent == [[-float(length)] * length for length in range(1, 6)]


def test_logprobs_of_soft_targets_keep_their_shape(server, trainer):
    soft = types.Datum(
        types.ModelInput.from_ints([1, 2]),
        {"target_tokens": np.array([[1, 2, 3], [4, 5, 6]]), "weights": np.ones((2, 3), np.float32)},
    )
    rows = {"logprobs": {"data": [-1.0] * 6, "dtype": "float32", "shape": [2, 3]}}
    server.on(PASS, Answer(output(rows, loss__sum=1.0)))
    trainer.forward_backward_custom([soft], total).result(10)
    assert weights_of(server.asked(PASS)[1]) == [[[-1.0] * 3] * 2]


def broken(loss: Callable[[list[torch.Tensor]], Any]) -> Callable[..., Any]:
    return lambda _, logprobs: (loss(logprobs), {})


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (lambda data, logprobs: logprobs[0].sum(), r"\(loss, metrics\)"),
        (broken(lambda logprobs: 1.0), "tensor"),
        (broken(lambda logprobs: logprobs[0]), "one number"),
        (broken(lambda logprobs: logprobs[0].sum().detach()), "detached"),
        (broken(lambda logprobs: logprobs[0].sum() * math.nan), "nan"),
        (broken(lambda logprobs: logprobs[0].sum() / 0), "inf"),
        (
            broken(lambda logprobs: sum(torch.sqrt(each + 1).sum() for each in logprobs)),
            "not finite",
        ),
        (broken(lambda logprobs: logprobs[0].sum()), "datum 1"),
    ],
)
def test_invalid_custom_loss_fails_and_later_calls_work(server, trainer, loss, named):
    with pytest.raises(InvalidInputError, match=named):
        trainer.forward_backward_custom([datum(1, 2), datum(3, 4)], loss).result(10)
    trainer.optim_step().result(10)
    assert numbers(server) == [1, 2]


def test_exception_in_a_custom_loss_is_the_cause_of_the_error(server, trainer):
    def loss(_: Any, __: Any) -> Any:
        raise ZeroDivisionError("mine")

    with pytest.raises(CustomLossError, match="ZeroDivisionError: mine") as caught:
        trainer.forward_backward_custom([datum(1)], loss).result(10)
    assert caught.value.field == "loss_fn"
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    trainer.optim_step().result(10)
    assert numbers(server) == [1, 2]


def test_datum_without_influence_on_the_loss_gets_zero_weights(server, trainer):
    loss = broken(lambda logprobs: logprobs[0].sum() + 0 * logprobs[1].sum())
    trainer.forward_backward_custom([datum(1), datum(2, 3)], loss).result(10)
    assert weights_of(server.asked(PASS)[1]) == [[-1.0], [0.0, 0.0]]


def test_regularizers_are_added_and_reported_separately(server, trainer):
    def squares(_: Any, logprobs: Any) -> Any:
        return sum(each.square().sum() for each in logprobs), {"size": 3}

    result = trainer.forward_backward_custom(
        [datum(5, 6)],
        total,
        regularizers=[
            types.RegularizerSpec(squares, 0.5, "squares"),
            {"fn": lambda _, logprobs: (logprobs[0][0], {}), "weight": 0, "name": "looked at"},
        ],
        track_grad_norms=True,
    ).result(10)
    # At logprobs of -1 the gradient of the total is 1 + 0.5 · 2 · -1 for both tokens.
    assert weights_of(server.asked(PASS)[1]) == [[0.0, 0.0]]
    assert result.metrics == {
        "loss:sum": -1.0,
        "surrogate_loss:sum": 1.0,
        "base_loss:sum": -2.0,
        "regularizers/squares:sum": 1.0,
        "regularizers/looked at:sum": 0.0,
        "count": 2.0,
    }
    parts = result.custom_loss
    assert (parts.loss_total, parts.base_loss.value, parts.regularizer_total) == (-1.0, -2.0, 1.0)
    assert parts.base_loss.custom == {"count": 2.0}
    assert parts.regularizers["squares"].custom == {"size": 3}
    assert parts.regularizers["squares"].grad_norm == pytest.approx(2 * math.sqrt(2))
    assert parts.total_grad_norm == 0.0
    assert parts.regularizers["looked at"].value == -1.0


def regularizer(fn: Callable[..., Any], name: str = "mine", **more: Any) -> dict[str, Any]:
    return {"fn": fn, "weight": 1.0, "name": name, **more}


@pytest.mark.parametrize(
    ("regularizers", "named"),
    [
        ([regularizer(total), regularizer(total)], "mine"),
        ([regularizer(total, weight=-1)], "mine"),
        ([regularizer(lambda data: (0, {}))], "mine"),
        ([regularizer(lambda data, logprobs, options, more: (0, {}))], "mine"),
        (["mine"], "regularizers.0"),
        (regularizer(total), "a list"),
    ],
)
def test_invalid_regularizers_are_refused_before_sending(server, trainer, regularizers, named):
    with pytest.raises(InvalidInputError, match=named):
        trainer.forward_backward_custom([datum(1)], total, regularizers=regularizers)
    assert server.asked(PASS) == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda data, logprobs: logprobs[0].sum(),
        broken(lambda logprobs: logprobs[0]),
        broken(lambda logprobs: logprobs[0].sum().detach()),
        broken(lambda logprobs: logprobs[0].sum() * math.nan),
        broken(lambda logprobs: torch.sqrt(logprobs[0] + 1).sum()),
        broken(lambda logprobs: logprobs[9]),
        broken(lambda logprobs: sys.exit(3)),
    ],
)
def test_failing_regularizer_is_named_and_no_gradient_is_sent(server, trainer, fn):
    good = regularizer(total, "good")
    with pytest.raises(CustomLossError) as caught:
        trainer.forward_backward_custom(
            [datum(1, 2)], total, regularizers=[good, regularizer(fn)]
        ).result(10)
    assert (caught.value.name, caught.value.field) == ("mine", "regularizers.mine")
    trainer.optim_step().result(10)
    assert numbers(server) == [1, 2]


@pytest.fixture
def never() -> Iterator[Callable[..., Any]]:
    """A loss that returns only when the test has ended."""
    over = threading.Event()
    yield lambda data, logprobs: (over.wait(), total(data, logprobs))[1]
    over.set()


def test_custom_loss_is_abandoned_after_loss_timeout(server, trainer, never, monkeypatch):
    # Late are the first loss, and of the second one with two regularizers the last.
    only_late(monkeypatch, 0, 3)
    stuck = trainer.forward_backward_custom([datum(1)], never, loss_timeout=0.05)
    step = trainer.optim_step()
    with pytest.raises(CustomLossTimeoutError, match=r"loss_fn: did not return within 0\.05 s"):
        stuck.result(10)
    step.result(10)
    slow = [regularizer(total, "good"), regularizer(never)]
    with pytest.raises(CustomLossTimeoutError, match=r"regularizers\.mine"):
        trainer.forward_backward_custom(
            [datum(1)], total, regularizers=slow, loss_timeout=0.05
        ).result(10)
    trainer.forward_backward_custom([datum(1)], total).result(10)
    assert numbers(server) == [1, 2, 3, 4, 5]


def test_timeout_of_the_operation_limits_its_custom_loss(server, trainer, never, clock):
    clock.timeout = lambda _: asyncio.timeout(None)  # exchanges may take longer than the loss
    stuck = trainer.forward_backward_custom([datum(1)], never, loss_timeout=None, timeout=0.05)
    step = trainer.optim_step()
    with pytest.raises(APITimeoutError):
        stuck.result(10)
    step.result(10)
    assert numbers(server) == [1, 2]


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "0 outputs for 1"),
        ([{}], "no logprobs"),
        ([logprobs_of(1)], "1 logprobs for the 2 targets"),
    ],
)
def test_logprobs_that_do_not_match_the_data_are_a_response_error(server, trainer, rows, named):
    server.on(PASS, Answer(output(*rows)))
    with pytest.raises(APIResponseValidationError, match=named):
        trainer.forward_backward_custom([datum(1, 2)], total).result(10)
    trainer.optim_step().result(10)


@pytest.mark.parametrize(
    "arguments",
    [
        ([types.Datum(types.ModelInput.from_ints([1]), {"weights": [1.0]})], total),
        ([], total),
        ([datum(1)], "cross_entropy"),
        ([datum(1)], lambda logprobs: (logprobs[0].sum(), {})),
    ],
)
def test_invalid_custom_call_is_refused_before_sending(server, trainer, arguments):
    with pytest.raises(InvalidInputError):
        trainer.forward_backward_custom(*arguments)
    with pytest.raises(InvalidInputError, match="loss_type_input"):
        trainer.forward_backward_custom([datum(1)], total, loss_type_input="logits")
    assert server.asked(PASS) == []
