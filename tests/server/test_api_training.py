"""Training over HTTP: request formats of all releases, order, retries, results."""

from __future__ import annotations

import gzip
import threading

import numpy as np
import pytest

from tinkex._wire import json_codec
from tinkex._wire.compression import compress
from tinkex._wire.proto_codec import decode_forward_backward_output
from tinkex.server.quotas import KeyLimits
from tinkex.testing import service
from tinkex.types import Datum, ForwardBackwardOutput, ModelInput, OptimStepResponse, TensorData

from .api import PROTO, TINY, Api, Model, datum, training_request


@pytest.fixture(scope="module")
def api():
    with service("fake") as running, Api(running.url) as user:
        yield user


@pytest.fixture(scope="module")
def impatient():
    """A service that answers polls at once, so that a test sees unfinished requests."""
    with service("fake", hold=0.05) as running, Api(running.url) as user:
        yield user


# -- creating models -------------------------------------------------------------------------------


def test_the_oldest_clients_can_create_and_train_a_model(api):
    session = api.told(
        "create_session", {"tags": ["a"], "user_metadata": None, "sdk_version": "0.7.0"}
    )["session_id"]
    promise = api.told(
        "create_model",
        {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": TINY,
            "user_metadata": None,
            "lora_config": {"rank": 4, "seed": None},
        },
    )
    model_id = f"{session}:train:0"
    assert promise["model_id"] == model_id
    assert api.retrieve(promise)["model_id"] == model_id
    inputs = {
        "data": [datum(bare=True, weights=[1, 0.5, 0])],
        "loss_fn": "cross_entropy",
        "loss_fn_config": None,
    }
    body = {"model_id": model_id, "forward_backward_input": inputs, "seq_id": 1}
    result = api.retrieve(api.told("forward_backward", body))
    assert result["loss_fn_output_type"] == "ArrayRecord"
    assert [len(output["logprobs"]["data"]) for output in result["loss_fn_outputs"]] == [3]
    assert result["metrics"]["loss:sum"] > 0
    step = api.told("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    assert api.retrieve(step)["metrics"]["learning_rate"] == 1e-4


def test_the_newest_clients_can_create_a_model(api):
    model = api.model(
        api.session(project_id="p", display_name="n", user_metadata={"a": "b"}),
        type="create_model",
        user_metadata={"run": "one"},
        lora_config={
            "rank": 8,
            "train_unembed": True,
            "train_mlp": True,
            "train_attn": False,
        },
        optimizer_config={"type": "adamw"},
    )
    info = api.told("get_info", {"model_id": model.model_id, "type": "get_info"})
    assert (info["is_lora"], info["lora_rank"], info["model_name"]) == (True, 8, TINY)
    assert info["optimizer_config"] == {"type": "adamw"}
    assert model.step() > 0


def test_unknown_fields_are_ignored(api):
    model = api.model(new_field={"a": 1})
    assert "metrics" in model.do("optim_step", adam_params={"new_moment": 2}, new_field=[])


def test_model_info_names_the_tokenizer_directory(api):
    from pathlib import Path

    info = api.told("get_info", {"model_id": api.model().model_id})
    tokenizer = info["model_data"]["tokenizer_id"]
    assert info["model_data"]["model_name"] == TINY
    assert ":" not in tokenizer
    assert (Path(tokenizer) / "tokenizer.json").is_file()


def test_a_retried_create_model_creates_one_model(api):
    body = {"session_id": api.session(), "model_seq_id": 3, "base_model": TINY}
    first, second = api.told("create_model", body), api.told("create_model", body)
    assert first == second
    other = api.told("create_model", body | {"model_seq_id": 4})
    assert other["request_id"] != first["request_id"]
    assert api.retrieve(other)["model_id"].endswith(":train:4")


def test_model_info_works_before_the_model_is_created(api):
    body = {"session_id": api.session(), "model_seq_id": 0, "base_model": TINY}
    promise = api.told("create_model", body)
    assert api.told("get_info", {"model_id": promise["model_id"]})["is_lora"]


def test_unloading_a_model_keeps_its_checkpoints(api):
    model = api.model()
    path = model.save("kept")
    promise = api.told("unload_model", {"model_id": model.model_id})
    assert api.retrieve(promise)["model_id"] == model.model_id
    refused = model.ask("optim_step", adam_params={})
    assert refused.status_code == 400
    assert "unloaded" in refused.json()["detail"]
    assert api.told("weights_info", {"tinker_path": path})["lora_rank"] == 8


# -- bodies and results ------------------------------------------------------------------------------


def logprobs(output: ForwardBackwardOutput):
    return [values["logprobs"].to_numpy() for values in output.loss_fn_outputs]


@pytest.mark.parametrize(
    ("encoding", "encode"),
    [(None, bytes), ("zstd", compress), ("gzip", gzip.compress), ("identity", bytes)],
)
def test_protobuf_and_json_passes_are_equal(api, encoding, encode):
    in_json, in_proto = api.model(), api.model()
    expected = api.retrieve(in_json.forward_backward())
    headers = {"content-type": PROTO} | ({"content-encoding": encoding} if encoding else {})
    body = encode(training_request(in_proto.model_id, in_proto.seq()))
    promise = api.told("forward_backward", body, headers=headers)
    payload = api.retrieve(promise, accept=PROTO)
    assert json_codec.parse(json_codec.encode(decode_forward_backward_output(payload))) == expected
    for model in (in_json, in_proto):
        api.retrieve(model.optim_step())
    assert in_json.logprobs() == in_proto.logprobs()


def test_json_may_be_compressed_too(api):
    model = api.model()
    body = json_codec.encode({"model_id": model.model_id, "seq_id": 1, "adam_params": {}})
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    assert "metrics" in api.retrieve(api.told("optim_step", gzip.compress(body), headers=headers))


def test_a_pass_without_backward_leaves_no_gradient(api):
    model = api.model()
    before = model.logprobs()
    for body in (
        training_request(model.model_id, model.seq(), forward_only=True),
        training_request(model.model_id, model.seq(), forward_only=True),
    ):
        api.retrieve(api.told("forward_backward", body, headers={"content-type": PROTO}), PROTO)
    assert api.retrieve(model.optim_step())["metrics"]["grad_norm"] == 0
    assert model.logprobs() == before


def test_the_result_format_follows_the_accept_header(api):
    model = api.model()
    promise = model.forward_backward()
    as_json = api.poll(promise)
    assert as_json.headers["content-type"] == "application/json"
    for accept in (PROTO, f"{PROTO}, application/json"):
        as_proto = api.poll(promise, accept)
        assert as_proto.headers["content-type"] == PROTO
        decoded = decode_forward_backward_output(as_proto.content)
        assert json_codec.parse(json_codec.encode(decoded)) == as_json.json()
    step = api.poll(model.optim_step(), PROTO)  # has no protobuf form
    assert step.headers["content-type"] == "application/json"


def test_a_sparse_tensor_equals_its_dense_form(api):
    tokens, targets = np.arange(5, 17), np.arange(6, 18)
    weights = np.zeros((12, 2), np.float32)
    weights[3, 0] = weights[7, 1] = 1
    both = np.stack([targets, targets[::-1]], axis=1)
    crow = [0] * 4 + [1] * 4 + [2] * 5
    sparse = TensorData([1.0, 1.0], "float32", [12, 2], crow, [0, 1])
    results = []
    for values in (TensorData.from_numpy(weights), sparse):
        model = api.model()
        example = Datum(
            ModelInput.from_ints(tokens.tolist()),
            {"target_tokens": TensorData.from_numpy(both), "weights": values},
        )
        body = training_request(model.model_id, model.seq(), [example])
        promise = api.told("forward_backward", body, headers={"content-type": PROTO})
        results.append(decode_forward_backward_output(api.retrieve(promise, PROTO)))
        assert api.retrieve(model.optim_step())["metrics"]["grad_norm"] > 0
    assert results[0].metrics == results[1].metrics
    assert results[0].metrics["loss:sum"] > 0
    np.testing.assert_array_equal(logprobs(results[0])[0], logprobs(results[1])[0])


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo", "dro"])
def test_reinforcement_losses_return_logprobs_and_learn(api, loss):
    model = api.model()
    (before,) = model.logprobs()
    example = datum(logprobs=before, advantages=[1, 1, 1])
    result = api.retrieve(model.forward_backward([example], loss))
    assert result["loss_fn_outputs"][0]["logprobs"]["data"] == before
    api.retrieve(model.optim_step())
    assert sum(model.logprobs()[0]) > sum(before)


@pytest.mark.parametrize("engine", ["fake", "torch"])
def test_non_finite_numbers_reach_the_client(engine):
    with service(engine) as running, Api(running.url) as api:
        model = api.model()
        far = datum(logprobs=[-1e4, -1e4, -1.0], advantages=[1.0, -1.0, 1.0])
        passed, stepped = (
            model.forward_backward([far], "importance_sampling"),
            model.optim_step(),
        )
        in_json = api.retrieve(passed)["metrics"]
        in_proto = decode_forward_backward_output(api.retrieve(passed, PROTO)).metrics
        assert (in_json["loss:sum"], in_json["tokens:sum"]) == ("NaN", 3)
        assert np.isnan(in_proto["loss:sum"])
        # As pydantic parses it: every client uses it for this result.
        step = json_codec.from_object(api.retrieve(stepped), OptimStepResponse)
        assert step.metrics is not None
        assert np.isnan(step.metrics["grad_norm"])
        assert step.metrics["learning_rate"] == 0.01
        assert "NaN" in map(str, model.logprobs()[0])
        if engine == "torch":  # all weights are NaN; in the fake engine only those of a few tokens
            refused = api.sampler(model_path=model.save("w")).sample()
            assert refused["category"] == "user"
            assert "finite" in refused["error"]


def test_a_large_result_is_announced_first(api):
    model = api.model()
    example = Datum(
        ModelInput.from_ints([5] * 2000),
        {"target_tokens": TensorData.from_numpy(np.full((2000, 64), 6))},
    )
    body = training_request(model.model_id, 1, [example] * 17, forward_only=True)
    promise = api.told("forward_backward", body, headers={"content-type": PROTO})
    announced = api.poll(promise, PROTO, allow_metadata_only=True).json()
    assert announced["status"] == "complete_metadata"
    payload = api.poll(promise, PROTO, allow_metadata_only=False).content
    assert len(payload) == announced["response_payload_size"] > 8 << 20


def test_a_small_result_is_not_announced_first(api):
    model = api.model()
    promise = model.forward_backward()
    assert "metrics" in api.poll(promise, allow_metadata_only=True).json()


# -- waiting ------------------------------------------------------------------------------------------


def test_a_poll_for_an_unfinished_result_says_try_again(impatient):
    model = impatient.model()
    promise = model.optim_step(seq_id=2)  # 1 is missing
    answer = impatient.poll(promise)
    assert answer.status_code == 408
    body = answer.json()
    assert body["type"] == "try_again"
    assert body["request_id"] == promise["request_id"]
    assert body["queue_state"] == "active"
    assert body["queue_state_reason"]
    impatient.retrieve(model.forward_backward(seq_id=1))
    assert "metrics" in impatient.retrieve(promise)


def test_a_result_wakes_all_polls_and_can_be_fetched_again(api):
    model = api.model()
    promise = model.optim_step(seq_id=2)
    answers = []
    waiting = [threading.Thread(target=lambda: answers.append(api.poll(promise))) for _ in range(5)]
    for thread in waiting:
        thread.start()
    assert api.got("healthz")  # open polls do not block other requests
    model.forward_backward(seq_id=1)
    for thread in waiting:
        thread.join()
    answers += [api.poll(promise) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1


def test_an_invalid_request_id_is_404_and_an_evicted_one_410(api):
    assert api.poll("nonsense").status_code == 404
    assert api.poll("0" * 32).status_code == 410


# -- order ---------------------------------------------------------------------------------------------


def chunks():
    return [[datum((number, number + 1), (number + 1, number + 2))] for number in range(10, 14)]


def in_order(api):
    model = api.model()
    for chunk in chunks():
        model.forward_backward(chunk)
    model.optim_step()
    return model.logprobs([datum((10, 11, 12, 13), (11, 12, 13, 14))])


def test_requests_run_in_the_order_of_their_numbers(api):
    model = api.model()
    data = chunks()
    promises = {
        number: model.forward_backward(data[number - 1], seq_id=number) for number in (2, 3, 4, 1)
    }
    promises[5] = model.optim_step(seq_id=5)
    assert len({promise["request_id"] for promise in promises.values()}) == 5
    for promise in promises.values():
        assert "metrics" in api.retrieve(promise)
    model.next_seq = 6
    assert model.logprobs([datum((10, 11, 12, 13), (11, 12, 13, 14))]) == in_order(api)


def test_a_step_that_arrives_before_its_pass_uses_its_gradients(api):
    model = api.model()
    step = model.optim_step(seq_id=2)
    model.forward_backward(seq_id=1)
    assert api.retrieve(step)["metrics"]["grad_norm"] > 0


def test_a_retried_training_request_runs_once(api):
    once, twice = api.model(), api.model()
    for model, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            passed = model.forward_backward(seq_id=1)
        for _ in range(times):
            stepped = model.optim_step(seq_id=2)
        api.retrieve(stepped)
        assert model.forward_backward(seq_id=1) == passed  # also after it has finished
        assert model.optim_step(seq_id=2) == stepped
        model.next_seq = 3
    assert once.logprobs() == twice.logprobs()


def test_requests_without_a_number_all_run(api):
    model = api.model()
    promises = [model.forward_backward(seq_id=None) for _ in range(2)]
    assert promises[0] != promises[1]
    twice = api.retrieve(model.optim_step(seq_id=None))["metrics"]["grad_norm"]
    other = api.model()
    other.forward_backward()
    once = api.retrieve(other.optim_step())["metrics"]["grad_norm"]
    assert twice == pytest.approx(2 * once)


def test_gradients_add_up_over_passes(api):
    norms = []
    for passes in (1, 3):
        model = api.model()
        for _ in range(passes):
            model.forward_backward()
        norms.append(api.retrieve(model.optim_step())["metrics"]["grad_norm"])
    assert norms[1] == pytest.approx(3 * norms[0])


def test_training_makes_the_loss_fall(api):
    model = api.model()
    losses = [model.step() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


def test_two_models_of_one_session_are_independent(api):
    session = api.session()
    first, second = api.model(session, 0), api.model(session, 1)
    untouched = second.logprobs()
    first.step()
    assert second.logprobs() == untouched
    assert first.logprobs() != untouched


def test_a_refused_number_does_not_delay_the_next(api):
    model = api.model()
    inputs = {"data": "none", "loss_fn": "cross_entropy"}
    refused = model.ask("forward_backward", forward_backward_input=inputs)
    assert refused.status_code == 422
    assert "forward_backward_input.data" in refused.json()["detail"]
    assert api.poll(model.optim_step()).status_code == 200


def test_a_number_refused_in_protobuf_does_not_delay_the_next(api):
    model = api.model()
    strange = Datum(
        ModelInput.from_ints([5, 6]), {"target_tokens": TensorData.from_numpy(np.array([6, 7]))}
    )
    body = training_request(model.model_id, model.seq(), [strange])
    # A dtype that the protocol does not have.
    body = body.replace(b"\x18\x02", b"\x18\x09", 1)
    refused = api.post("forward_backward", body, headers={"content-type": PROTO})
    assert refused.status_code == 422
    assert "target_tokens" in refused.json()["detail"]
    assert api.poll(model.optim_step()).status_code == 200


def test_a_refused_retry_leaves_the_first_request_queued(api):
    model = api.model()
    first = model.optim_step(seq_id=2)
    assert model.ask("optim_step", seq_id=2, adam_params={"beta1": 7}).status_code == 422
    model.forward_backward(seq_id=1)
    assert api.retrieve(first)["metrics"]["grad_norm"] > 0


def test_a_refused_number_cannot_be_used_later(api):
    model = api.model()
    assert model.ask("optim_step", seq_id=1, adam_params={"beta1": 7}).status_code == 422
    later = model.ask("optim_step", seq_id=1, adam_params={})
    assert later.status_code == 400
    assert later.json()["field"] == "seq_id"


def test_a_failed_request_has_an_error_result(api):
    model = api.model()
    failed = model.forward_backward(loss_fn="nonsense")
    answer = api.poll(failed, PROTO)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["category"] == "user"
    assert "loss_fn" in answer.json()["error"]
    # Requests queued after it still run.
    assert api.retrieve(model.optim_step())["metrics"]["grad_norm"] == 0


def test_one_invalid_example_fails_only_its_own_pass(api):
    model, clean = api.model(), api.model()
    model.forward_backward([datum()])
    failed = model.forward_backward([datum(), datum((5, 999_999), (6, 7))])
    clean.forward_backward([datum()])
    assert "data.1" in api.retrieve(failed)["error"]
    assert api.retrieve(model.optim_step()) == api.retrieve(clean.optim_step())


def test_requests_over_the_pending_limit_get_429_and_can_be_retried():
    with service("fake", limits=KeyLimits(pending=2)) as running, Api(running.url) as api:
        stuck, model = api.model(), api.model()
        waiting = [stuck.optim_step(seq_id=number) for number in (2, 3)]
        refused = model.ask("optim_step", seq_id=1, adam_params={})
        assert refused.status_code == 429
        assert float(refused.headers["retry-after-ms"]) > 0
        sampler = api.sampler()
        assert api.post("asample", sampler.request()).status_code == 429
        assert stuck.optim_step(seq_id=3) == waiting[1]  # a queued request may be retried
        api.told(f"sessions/{stuck.session_id}/finish", {"reason": {"type": "success"}})
        assert {api.retrieve(promise)["category"] for promise in waiting} == {"user"}
        assert model.step() > 0  # with the number that was refused before
        assert sampler.tokens()


# -- saving and loading ---------------------------------------------------------------------------------


def test_training_continues_from_a_checkpoint(api):
    model = api.model()
    model.step()
    path = model.save("first")
    assert path == f"tinker://{model.model_id}/weights/first"
    resumed = api.loaded(path, optimizer=True)
    fresh = api.loaded(path, optimizer=False)
    assert model.logprobs() == resumed.logprobs() == fresh.logprobs()
    for each in (model, resumed, fresh):
        each.step()
    assert model.logprobs() == resumed.logprobs() != fresh.logprobs()


def test_weights_load_into_an_existing_model(api):
    model = api.model()
    model.step()
    path = model.save("a")
    info = api.told("weights_info", {"tinker_path": path})
    assert info == {
        "base_model": TINY,
        "is_lora": True,
        "lora_rank": 8,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
        "optimizer_config": {"type": "adamw"},
    }
    other = api.model()
    loaded = other.do("load_weights", path=path, optimizer=True, type="load_weights")
    assert loaded["path"] == path
    assert other.logprobs() == model.logprobs()


def test_a_model_created_from_a_checkpoint_has_the_expected_id(api):
    path = api.model().save("a")
    session = api.session()
    body = {
        "session_id": session,
        "model_seq_id": 2,
        "path": path,
        "optimizer": False,
        "base_model": TINY,
        "user_metadata": {"a": "b"},
        "weights_access_token": "unused",
    }
    first, second = api.told("load_weights", body), api.told("load_weights", body)
    assert first == second
    assert api.retrieve(first)["model_id"] == f"{session}:train:2"
    run = api.got(f"training_runs/{session}:train:2")
    assert (run["lora_rank"], run["user_metadata"]) == (8, {"a": "b"})


def test_a_save_without_a_name_gets_one(api):
    model = api.model()
    path = model.do("save_weights", path=None)["path"]
    assert path.startswith(f"tinker://{model.model_id}/weights/")
    assert api.told("weights_info", {"tinker_path": path})


def test_an_existing_checkpoint_name_needs_overwrite(api):
    model = api.model()
    path = model.save("same", user_metadata={"step": "1"})
    model.step()
    taken = model.do("save_weights", path="same")
    assert taken["category"] == "user"
    assert "path" in taken["error"]
    assert model.save("same", overwrite=True) == path
    assert api.loaded(path).logprobs() == model.logprobs()
    (listed,) = api.got(f"training_runs/{model.model_id}/checkpoints")["checkpoints"]
    assert "user_metadata" not in listed


def test_a_retried_save_is_not_a_conflict(api):
    model = api.model()
    first = model.send("save_weights", path="x", seq_id=1)
    assert model.send("save_weights", path="x", seq_id=1) == first
    assert api.retrieve(first)["path"].endswith("/weights/x")


@pytest.mark.parametrize("form", ["into a model", "as a model"])
def test_invalid_checkpoint_paths_are_refused_on_load(api, form):
    model = api.model()
    paths = {
        "tinker://nobody:train:0/weights/x": "no checkpoint",
        model.save("s", "save_weights_for_sampler"): "training checkpoint",
        model.save("e", "save_weights_external"): "training checkpoint",
        "nonsense": "tinker://",
        "tinker://a/b": "tinker://",
    }
    for path, complaint in paths.items():
        if form == "as a model":
            body = {"session_id": model.session_id, "model_seq_id": 9, "path": path}
            refused = api.post("load_weights", body)
            assert refused.status_code in {400, 404}, refused.text
            assert complaint in refused.json()["detail"]
        else:
            failed = model.do("load_weights", path=path, optimizer=False)
            assert failed["category"] == "user"
            assert complaint in failed["error"]
    assert model.step() > 0


def test_a_load_without_a_model_is_refused(api):
    refused = api.post("load_weights", {"path": "tinker://a:train:0/weights/x"})
    assert refused.status_code == 400
    assert refused.json()["field"] == "model_id"


def test_a_damaged_checkpoint_is_reported_and_creates_no_model(tmp_path):
    with service("fake", data_dir=tmp_path) as running, Api(running.url) as api:
        model = api.model()
        path = model.save("a")
        (weights,) = tmp_path.glob("checkpoints/*/training/a/adapter_model.safetensors")
        weights.write_bytes(b"nonsense")
        session = api.session()
        promise = api.told("load_weights", {"session_id": session, "model_seq_id": 0, "path": path})
        failed = api.retrieve(promise)
        assert failed["category"] == "user"
        assert "damaged" in failed["error"]
        never_made = Model(api, f"{session}:train:0")
        assert "never made" in never_made.do("optim_step", adam_params={})["error"]
        assert api.post("get_info", {"model_id": never_made.model_id}).status_code == 404
        assert model.step() > 0


# -- for samplers ------------------------------------------------------------------------------------------


def test_named_weights_for_sampling_have_a_path_and_no_session(api):
    result = api.model().do(
        "save_weights_for_sampler", path="s", type="save_weights_for_sampler", ttl_seconds=3600
    )
    assert result["path"].endswith("/sampler_weights/s")
    assert result.get("sampling_session_id") is None


def test_unnamed_weights_for_sampling_have_a_session_and_no_path(api):
    model = api.model()
    result = model.do("save_weights_for_sampler", sampling_session_seq_id=0, path=None)
    assert result["sampling_session_id"] == f"{model.session_id}:sample:0"
    assert result.get("path") is None
    assert api.got(f"training_runs/{model.model_id}/checkpoints")["checkpoints"] == []


def test_a_retry_with_another_sampler_number_returns_the_first_sampler(api):
    model = api.model()
    first = model.send("save_weights_for_sampler", sampling_session_seq_id=0, seq_id=1)
    again = model.send("save_weights_for_sampler", sampling_session_seq_id=1, seq_id=1)
    assert again == first
    assert api.retrieve(again)["sampling_session_id"].endswith(":sample:0")
    assert api.get(f"samplers/{model.session_id}:sample:1").status_code == 404


def test_weights_for_sampling_need_a_name_or_a_number(api):
    failed = api.model().do("save_weights_for_sampler")
    assert failed["category"] == "user"
    assert "path" in failed["error"]


def test_external_weights_report_their_size(api):
    result = api.model().do("save_weights_external", path="out", type="save_weights_external")
    assert result["path"].endswith("/external_weights/out")
    assert result["size_bytes"] > 0
