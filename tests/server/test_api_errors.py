"""Invalid input of every kind: the error names the field, and the service keeps working."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest
import zstandard

from tinkex.testing import service
from tinkex.types import Datum, ModelInput, TensorData

from .api import PROTO, TINY, Api, datum, training_request

IMAGE = {"data": "aGVsbG8=", "format": "png", "expected_tokens": 2, "type": "image"}
POINTER = {"location": "x", "format": "png", "expected_tokens": 2}


@pytest.fixture(scope="module")
def api():
    limited = service("fake", max_body_bytes=1 << 20, max_decoded_bytes=4 << 20, max_samples=64)
    with limited as running, Api(running.url) as user:
        yield user


@pytest.fixture(scope="module")
def model(api):
    """One model for all tests: it must keep working after each."""
    return api.model()


@pytest.fixture(scope="module")
def sampler(api):
    return api.sampler()


@pytest.fixture(autouse=True)
def alive(model, sampler):
    """After every test the run still trains and the service still samples."""
    yield
    assert model.step() > 0
    assert sampler.tokens()


def complaint(api, answer):
    """The error message, from a status or a result; its category is always "user"."""
    if answer.status_code == 200:
        result = api.retrieve(answer.json())
        assert result["category"] == "user", result
        return result["error"]
    assert 400 <= answer.status_code < 500, answer.text
    assert answer.status_code not in {402, 408, 409, 429}  # clients would retry those
    assert answer.json()["category"] == "user"
    return answer.json()["detail"]


# -- limits of a sample request --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "field", "params", "fields"),
    [
        ("max_samples", "num_samples", {"num_samples": 65}, {}),
        ("max_stop_strings", "sampling_params.stop", {"stop": ["ab"] * 65}, {}),
        ("max_stop_bytes", "sampling_params.stop", {"stop": "ä" * 513}, {}),
        ("max_stop_tokens", "sampling_params.stop", {"stop": [5] * 4097}, {}),
        ("max_topk", "topk_sample_logprobs", {}, {"topk_sample_logprobs": 1025}),
        ("max_topk", "topk_prompt_logprobs", {}, {"topk_prompt_logprobs": 1025}),
        (
            "max_alternatives",
            "topk_sample_logprobs",
            {"num_samples": 64, "max_tokens": 256},
            {"topk_sample_logprobs": 257},
        ),
        (  # without max_tokens the limit is the rest of the context
            "max_alternatives",
            "topk_sample_logprobs",
            {"num_samples": 64, "max_tokens": None},
            {"topk_sample_logprobs": 33},
        ),
        (
            "max_alternatives",
            "target_prompt_logprobs",
            {},
            {
                "target_prompt_logprobs": {
                    "data": [],
                    "dtype": "int64",
                    "shape": [2, 1 << 22],
                    "sparse_crow_indices": [0, 0, 0],
                    "sparse_col_indices": [],
                }
            },
        ),
    ],
)
def test_sample_request_above_a_limit_names_field_and_setting(
    api, sampler, setting, field, params, fields
):
    answer = api.post("asample", sampler.request(fields=fields, **params))
    assert answer.status_code == 400
    assert field in answer.json()["detail"]
    assert f"setting {setting}" in answer.json()["detail"]


def test_a_sample_request_at_its_limits_is_accepted(sampler):
    stop = [f"zz{number:04}" for number in range(64)]
    assert sampler.tokens(stop=stop, num_samples=64)
    assert sampler.tokens(stop=list(range(1, 200)) * 20)


def test_stop_string_that_is_not_valid_unicode_is_refused(api, sampler):
    body = json.dumps(sampler.request(stop=["\ud800"])).encode()
    answer = api.post("asample", body, headers={"content-type": "application/json"})
    assert "surrogate" in complaint(api, answer)


# -- training ------------------------------------------------------------------------------------------


def long(length):
    return datum([5] * length, [6] * length)


PASSES = {
    "no data": ({"data": []}, "data"),
    "no list": ({"data": {}}, "data"),
    "an unknown loss": ({"loss_fn": "nonsense"}, "loss_fn"),
    "a loss that is a number": ({"loss_fn": 5}, "loss_fn"),
    "a loss that is offered elsewhere": ({"loss_fn": "stable_reinforce"}, "loss_fn"),
    "a loss of the client's own": (
        {"loss_fn": "custom", "loss_fn_config": {"loss_id": "x"}},
        "loss_fn",
    ),
    "an unknown setting": ({"loss_fn_config": {"nonsense": 1}}, "loss_fn_config"),
    "a setting that is text": (
        {"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": "low"}},
        "loss_fn_config",
    ),
    "a setting that is a list": ({"loss_fn_config": {"beta": [1]}}, "loss_fn_config"),
    "a token beyond the vocabulary": ({"data": [datum((5, 264, 6))]}, "data.0.model_input"),
    "a negative token": ({"data": [datum((5, -1, 6))]}, "data.0.model_input"),
    "a token beyond all numbers": ({"data": [datum((5, 2**40, 6))]}, "data.0.model_input"),
    "a token that is none": ({"data": [datum((5, "x", 6))]}, "data.0.model_input"),
    "a target beyond the vocabulary": (
        {"data": [datum(), datum(targets=(5, 6, 264))]},
        "data.1.target_tokens",
    ),
    "too few targets": ({"data": [datum(targets=(5, 6))]}, "data.0.target_tokens"),
    "too many weights": ({"data": [datum(weights=[1] * 4)]}, "data.0.weights"),
    "no tokens": ({"data": [datum((), ())]}, "data.0"),
    "no targets": (
        {"data": [{"model_input": {"chunks": [{"tokens": [5]}]}, "loss_fn_inputs": {}}]},
        "data.0.target_tokens",
    ),
    "no advantages": (
        {"loss_fn": "ppo", "data": [datum(logprobs=[-1, -1, -1])]},
        "data.0.advantages",
    ),
    "too long": ({"data": [long(2049)]}, "data.0"),
    "an image": (
        {"data": [{"model_input": {"chunks": [IMAGE]}, "loss_fn_inputs": {}}]},
        "data.0.model_input.chunks.0",
    ),
    "a chunk of an unknown kind": (
        {"data": [{"model_input": {"chunks": [{"type": "smell"}]}, "loss_fn_inputs": {}}]},
        "data.0.model_input",
    ),
    "an example that is none": ({"data": ["x"]}, "data.0"),
    "a tensor that is none": (
        {"data": [datum() | {"loss_fn_inputs": {"target_tokens": 5}}]},
        "target_tokens",
    ),
    "a shape that does not fit": (
        {
            "data": [
                datum()
                | {
                    "loss_fn_inputs": {
                        "target_tokens": {"data": [1, 2, 3], "dtype": "int64", "shape": [2]}
                    }
                }
            ]
        },
        "target_tokens",
    ),
    "a dtype that is none": (
        {"data": [datum() | {"loss_fn_inputs": {"target_tokens": {"data": [1], "dtype": "x"}}}]},
        "target_tokens",
    ),
}


@pytest.mark.parametrize("operation", ["forward_backward", "forward"])
@pytest.mark.parametrize(("inputs", "field"), PASSES.values(), ids=PASSES)
def test_an_invalid_pass_is_refused(api, model, operation, inputs, field):
    name = "forward_input" if operation == "forward" else "forward_backward_input"
    whole = {"data": [datum()], "loss_fn": "cross_entropy"} | inputs
    assert field in complaint(api, model.ask(operation, **{name: whole}))


@pytest.mark.parametrize(
    ("loss_fn", "config", "key"),
    [
        *(
            (name, {key: value}, key)
            for name in ("ppo", "cispo", "gspo")
            for key in ("clip_low_threshold", "clip_high_threshold")
            for value in (1e308, -1e308, 3.5e38)
        ),
        ("dro", {"beta": 1e308}, "beta"),
        ("ppo", {"clip_low_threshold": 2, "clip_high_threshold": 1}, "clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 1.3}, "clip_low_threshold"),
        ("ppo", {"clip_high_threshold": 0.5}, "clip_high_threshold"),
    ],
)
def test_loss_setting_that_cannot_be_computed_with_is_refused_at_once(
    api, model, loss_fn, config, key
):
    inputs = {"data": [datum()], "loss_fn": loss_fn, "loss_fn_config": config}
    answer = model.ask("forward_backward", forward_backward_input=inputs)
    assert answer.status_code == 400
    assert answer.json()["field"] == f"loss_fn_config.{key}"


def test_loss_setting_of_protobuf_beyond_float32_is_refused(api, model):
    config = {"clip_high_threshold": 1e39}
    body = training_request(model.model_id, model.seq(), loss_fn="ppo", config=config)
    answer = api.post("forward_backward", body, headers={"content-type": PROTO})
    assert answer.status_code == 400
    assert answer.json()["field"] == "loss_fn_config.clip_high_threshold"


def test_loss_settings_within_float32_are_accepted(api, model):
    data = [datum(logprobs=[-1] * 3, advantages=[1] * 3)]
    for config in (
        {"clip_low_threshold": -3.4e38, "clip_high_threshold": 3.4e38},
        {"clip_low_threshold": 1, "clip_high_threshold": 1},
        {"clip_low_threshold": -0.5},
    ):
        done = api.retrieve(model.forward_backward(data, "ppo", loss_fn_config=config))
        assert "error" not in done


@pytest.mark.parametrize(
    ("tensor", "field"),
    [
        (TensorData([1.5, 2.5], "float32"), "data.0.target_tokens"),
        (TensorData([5, 300], "int64"), "data.0.target_tokens"),
        (TensorData([5], "int64"), "data.0.target_tokens"),
        # A few bytes that would take terabytes as a dense tensor.
        (TensorData([], "int64", [2, 2**40], [0, 0, 0], []), "data.0.target_tokens"),
    ],
    ids=["not integers", "vocabulary", "length", "sparse"],
)
def test_an_invalid_protobuf_pass_is_refused(api, model, tensor, field):
    example = Datum(ModelInput.from_ints([5, 6]), {"target_tokens": tensor})
    body = training_request(model.model_id, model.seq(), [example])
    answer = api.post("forward_backward", body, headers={"content-type": PROTO})
    assert field in complaint(api, answer)


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"adam_params": {"learning_rate": -1}}, "learning_rate"),
        ({"adam_params": {"learning_rate": "fast"}}, "learning_rate"),
        ({"adam_params": {"beta1": 1}}, "beta1"),
        ({"adam_params": {"beta2": -0.1}}, "beta2"),
        ({"adam_params": {"eps": 0}}, "eps"),
        ({"adam_params": {"grad_clip_norm": -1}}, "grad_clip_norm"),
        ({"adam_params": 5}, ""),
        ({}, "optim_params"),
        ({"adam_params": {}, "optimizer_params": {"type": "dimuon"}}, "exclude"),
        ({"optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}, "optim_params"),
        ({"optimizer_params": {"type": "nonsense"}}, "optimizer"),
        ({"adam_params": {}, "seq_id": "one"}, "seq_id"),
        ({"adam_params": {}, "seq_id": 1.5}, "seq_id"),
        ({"adam_params": {}, "seq_id": -3}, "seq_id"),
    ],
)
def test_an_invalid_optim_step_is_refused(api, model, params, field):
    assert field in complaint(api, model.ask("optim_step", **params))


@pytest.mark.parametrize("name", [5, None, "", "nobody:train:0", "../x"])
def test_requests_for_an_unknown_model_are_refused(api, name):
    for operation, more in (
        ("optim_step", {"adam_params": {}}),
        ("forward", {"forward_input": {"data": [datum()], "loss_fn": "cross_entropy"}}),
        ("save_weights", {"path": "a"}),
        ("get_info", {}),
        ("unload_model", {}),
    ):
        answer = api.post(operation, {"model_id": name, "seq_id": 1, **more})
        assert answer.status_code in {404, 422}
        assert "model" in answer.json()["detail"]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_values_that_are_not_numbers_are_refused(api, model, number):
    body = (
        f'{{"model_id": "{model.model_id}", "seq_id": {model.next_seq},'
        f' "adam_params": {{"learning_rate": {number}}}}}'
    )
    refused = api.post("optim_step", body.encode())
    assert refused.status_code == 422
    assert "body" in refused.json()["detail"] or "learning_rate" in refused.json()["detail"]
    if "learning_rate" in refused.json()["detail"]:  # then its number was read and is used up
        model.seq()


def test_a_null_field_means_the_default(api, model):
    assert model.do("optim_step", adam_params={"learning_rate": None})["metrics"]


# -- models and samplers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"base_model": "no/such/model"}, "base_model"),
        ({"base_model": "../../etc/passwd"}, "base_model"),
        ({"base_model": None}, "base_model"),
        ({"lora_config": {"rank": 0}}, "lora_config.rank"),
        ({"lora_config": {"rank": -8}}, "lora_config.rank"),
        ({"lora_config": {"rank": 100_000}}, "lora_config.rank"),
        ({"lora_config": {"rank": 10**30}}, "lora_config.rank"),
        ({"lora_config": {"rank": 8, "seed": "x"}}, "lora_config.seed"),
        (
            {
                "lora_config": {
                    "rank": 8,
                    "train_mlp": False,
                    "train_attn": False,
                    "train_unembed": False,
                }
            },
            "lora_config",
        ),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "optimizer_config"),
        ({"optimizer_config": {"type": "nonsense", "x": 1}}, "optimizer_config"),
        ({"session_id": "nobody"}, "nobody"),
        ({"session_id": None}, "session_id"),
        ({"model_seq_id": -1}, "model_seq_id"),
        ({"model_seq_id": "x"}, "model_seq_id"),
        ({"user_metadata": [1]}, "user_metadata"),
    ],
)
def test_an_invalid_create_model_request_is_refused(api, model, fields, field):
    body = {"session_id": model.session_id, "model_seq_id": 50, "base_model": TINY}
    answer = api.post("create_model", body | fields)
    assert answer.status_code != 200
    assert field in complaint(api, answer)


SAMPLES = {
    "no prompt": ({"prompt": None}, "prompt"),
    "an empty prompt": ({"prompt": {"chunks": []}}, "prompt"),
    "a token beyond the vocabulary": ({"prompt": {"chunks": [{"tokens": [5, 264]}]}}, "prompt"),
    "too long": ({"prompt": {"chunks": [{"tokens": [5] * 2048}]}}, "prompt"),
    "an image": ({"prompt": {"chunks": [{"tokens": [5]}, IMAGE]}}, "prompt.chunks.1"),
    "a pointer to an image": ({"prompt": {"chunks": [POINTER]}}, "prompt.chunks.0"),
    "a sound": ({"prompt": {"chunks": [{"dmel": "aGVsbG8="}]}}, "prompt.chunks.0"),
    "no samples": ({"num_samples": 0}, "num_samples"),
    "too many samples": ({"num_samples": 65}, "num_samples"),
    "far too many samples": ({"num_samples": 10**30}, "num_samples"),
    "no sampler": ({"sampling_session_id": None}, "sampling_session_id"),
    "an unknown sampler": ({"sampling_session_id": "nobody:sample:0"}, "nobody"),
    "cold below zero": ({"sampling_params": {"temperature": -1}}, "temperature"),
    "a share above all": ({"sampling_params": {"top_p": 1.5}}, "top_p"),
    "fewer than none": ({"sampling_params": {"top_k": -2}}, "top_k"),
    "negative length": ({"sampling_params": {"max_tokens": -1}}, "max_tokens"),
    "a seed that is text": ({"sampling_params": {"seed": "x"}}, "seed"),
    "no params": ({"sampling_params": None}, "sampling_params"),
    "a bias beyond float32": (
        {"sampling_params": {"logit_bias": {"1": 1e308}}},
        "sampling_params.logit_bias",
    ),
    "no token that is not banned": (
        {"sampling_params": {"logit_bias": {str(token): -1e308 for token in range(264)}}},
        "sampling_params.logit_bias",
    ),
    "a penalty that is zero in float32": (
        {"sampling_params": {"repetition_penalty": 1e-320}},
        "sampling_params.repetition_penalty",
    ),
    "a penalty beyond float32": (
        {"sampling_params": {"repetition_penalty": 1e308}},
        "sampling_params.repetition_penalty",
    ),
    "more alternatives than tokens": ({"topk_prompt_logprobs": 265}, "topk_prompt_logprobs"),
    "more choices than tokens": ({"topk_sample_logprobs": 10**6}, "topk_sample_logprobs"),
    "targets of another length": (
        {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
        "target_prompt_logprobs",
    ),
    "targets without a shape": (
        {"target_prompt_logprobs": {"data": [1, 2], "dtype": "int64"}},
        "target_prompt_logprobs",
    ),
    "targets beyond the vocabulary": (
        {"target_prompt_logprobs": {"data": [1, 999], "dtype": "int64", "shape": [2, 1]}},
        "target_prompt_logprobs",
    ),
    "a number that is none": ({"seq_id": "x"}, "seq_id"),
}


@pytest.mark.parametrize(("fields", "field"), SAMPLES.values(), ids=SAMPLES)
def test_an_invalid_sample_request_is_refused(api, sampler, fields, field):
    answer = api.post("asample", sampler.request(fields=fields))
    if "image" in json.dumps(fields) or "location" in json.dumps(fields):
        assert answer.status_code == 400
    assert field in complaint(api, answer)


# -- names -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "operation", ["save_weights", "save_weights_for_sampler", "save_weights_external"]
)
@pytest.mark.parametrize(
    "name",
    ["../x", "a/b", ".hidden", "..", "x" * 300, "a\\b", "a b", "ä", "a\0b", "tinker://a", "%2e"],
)
def test_checkpoint_names_that_are_paths_are_refused(api, model, operation, name):
    assert "path" in complaint(api, model.ask(operation, path=name))


@pytest.mark.parametrize(
    "operation", ["save_weights", "save_weights_for_sampler", "save_weights_external"]
)
@pytest.mark.parametrize("seconds", [60, 0, -1, 10**12, 1.5, "x"])
def test_ttl_out_of_bounds_is_refused(api, model, operation, seconds):
    answer = model.ask(operation, path="a", ttl_seconds=seconds)
    assert answer.status_code in {200, 400}
    assert complaint(api, answer).startswith("ttl_seconds: ")


def test_valid_checkpoint_names_are_accepted(api, model):
    for name in ("A-b_c.9", "x" * 240, "000001", "con", "-rf"):
        assert model.save(name, "save_weights_for_sampler").endswith(f"/{name}")


# -- bodies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"nonsense",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":"\\ud800"}',
    ],
    ids=["cut", "words", "list", "null", "number", "text", "bytes", "deep", "surrogate"],
)
def test_bodies_that_are_not_json_are_refused(api, body):
    for operation in ("optim_step", "forward_backward", "asample", "create_session"):
        refused = api.post(operation, body)
        assert refused.status_code in {413, 422}
        assert refused.json()["detail"]


@pytest.mark.parametrize("body", [b"\xff" * 10, b"\x0a\xff\xff\xff\xff\x0f", b"{}"])
def test_bodies_that_are_not_protobuf_are_refused(api, body):
    refused = api.post("forward_backward", body, headers={"content-type": PROTO})
    assert refused.status_code == 422
    assert "body" in refused.json()["detail"]


def test_protobuf_is_refused_for_operations_without_it(api, model):
    refused = api.post("optim_step", b"\x0a\x01a", headers={"content-type": PROTO})
    assert refused.status_code == 415
    assert "application/json" in refused.json()["detail"]


def test_json_content_type_may_have_parameters(api, model):
    body = json.dumps({"model_id": model.model_id, "seq_id": model.seq(), "adam_params": {}})
    for content_type in ("application/json; charset=utf-8", "Application/JSON"):
        promise = api.told("optim_step", body.encode(), headers={"content-type": content_type})
        assert "metrics" in api.retrieve(promise)


@pytest.mark.parametrize(
    "content_type", ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_content_types_that_a_web_page_can_post_are_refused(api, content_type):
    body = json.dumps({"tags": [], "sdk_version": "1"}).encode()
    for operation in ("create_session", "forward_backward"):
        refused = api.post(operation, body, headers={"content-type": content_type})
        assert refused.status_code == 415
        assert operation in refused.json()["detail"]
        assert "application/json" in refused.json()["detail"]


def test_a_body_over_the_limit_is_refused(api, model):
    large = {"data": [long(2000)] * 200, "loss_fn": "cross_entropy"}
    body = {"model_id": model.model_id, "seq_id": model.next_seq, "forward_backward_input": large}
    refused = api.post("forward_backward", body)
    assert refused.status_code == 413
    for named in ("forward_backward", "1048576", "--set max_body_bytes"):
        assert named in refused.json()["detail"]

    def pieces():  # without a Content-Length
        for _ in range(40):
            yield b" " * 65536

    headers = {"content-type": "application/json"}
    chunked = api.http.post("/api/v1/forward_backward", content=pieces(), headers=headers)
    assert chunked.status_code == 413


@pytest.mark.parametrize("encoding", ["zstd", "gzip", "deflate"])
def test_a_body_that_exceeds_the_limit_after_decompression_is_refused(api, encoding):
    import zlib

    content = b" " * (8 << 20)
    packed = {
        "zstd": lambda: zstandard.ZstdCompressor().compress(content),
        "gzip": lambda: gzip.compress(content),
        "deflate": lambda: zlib.compress(content),
    }[encoding]()
    assert len(packed) < 1 << 20
    headers = {"content-type": PROTO, "content-encoding": encoding}
    refused = api.post("forward_backward", packed, headers=headers)
    assert refused.status_code == 413
    for named in ("forward_backward", str(4 << 20), "--set max_decoded_bytes"):
        assert named in refused.json()["detail"]


@pytest.mark.parametrize(
    ("encoding", "body"),
    [("zstd", b"nonsense"), ("gzip", b"nonsense"), ("br", b"x"), ("gzip" + ", gzip" * 9, b"x")],
)
def test_a_body_with_a_wrong_content_encoding_is_refused(api, encoding, body):
    headers = {"content-type": PROTO, "content-encoding": encoding}
    refused = api.post("forward_backward", body, headers=headers)
    assert refused.status_code in {415, 422}
    assert refused.json()["detail"]


def test_a_missing_body_is_refused(api):
    for operation, field in (
        ("create_session", "tags"),
        ("optim_step", "model_id"),
        ("asample", "prompt"),
        ("retrieve_future", "request_id"),
    ):
        refused = api.post(operation, b"")
        assert refused.status_code == 422
        assert field in refused.json()["detail"] or "optim_params" in refused.json()["detail"]


def test_times_and_counts_outside_database_range_are_refused(api):
    cursor = {"last_created_at": "9999-12-31T23:59:59-23:59", "last_session_id": "x"}
    answer = api.post("sessions/search", {"owner": {"type": "own"}, "limit": 1, "cursor": cursor})
    assert "last_created_at" in complaint(api, answer)
    page = api.http.get("/local/telemetry", params={"offset": 2**64})
    assert "offset" in complaint(api, page)


@pytest.mark.parametrize("events", [7, 1.5, "x", True, {"a": 1}, None])
def test_telemetry_events_that_are_not_a_list_are_ignored(api, events):
    body = {"events": events, "session_id": "s", "platform": "p", "sdk_version": "1"}
    assert api.told("telemetry", body) == {"status": "accepted"}


# -- everything at once --------------------------------------------------------------------------------------------


def test_bad_requests_do_not_disturb_good_ones(api):
    """Valid and invalid requests in one queue: the valid ones give the same results as alone."""
    lonely, crowded = api.model(), api.model()
    for _ in range(3):
        lonely.step()
    for _ in range(3):
        crowded.forward_backward([datum((5, 999))])
        crowded.ask("optim_step", adam_params={"beta1": 3})
        crowded.forward_backward()
        crowded.send("save_weights", path="../x")
        crowded.ask("save_weights", path=5)
        crowded.optim_step()
    assert crowded.logprobs() == lonely.logprobs()


def test_a_nan_weight_is_refused_and_changes_nothing(api, model):
    values = TensorData.from_numpy(np.array([np.nan, 1.0], np.float32))
    targets = TensorData.from_numpy(np.array([6, 7]))
    example = Datum(ModelInput.from_ints([5, 6]), {"target_tokens": targets, "weights": values})
    body = training_request(model.model_id, model.seq(), [example])
    answer = api.post("forward_backward", body, headers={"content-type": PROTO})
    failed = api.retrieve(answer.json())
    assert failed["category"] == "user"
    assert "data.0.weights" in failed["error"]
    api.retrieve(model.optim_step())
    assert all(np.isfinite(model.logprobs()[0]))
